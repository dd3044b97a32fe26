"""docs/config.md says what the code says."""

from pathlib import Path

from fulltilt.config import load_config
from fulltilt.config.aliases import list_bare_names
from fulltilt.config.document import build_document
from fulltilt.config.leaves import LEAVES

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def test_the_page_is_current():
    assert PAGE.read_text() == build_document(), "run python -m fulltilt.config.document > docs/config.md"


def test_the_page_names_every_key_and_spelling():
    text = build_document()
    assert not [key for key in LEAVES if f"| `{key}` |" not in text]
    aliases = {name for name, s in list_bare_names().items() if not any(k.endswith(f".{name}") for k in s.keys)}
    assert {"use_amp", "learning_rate", "gradient_accumulation_steps"} <= aliases
    assert not [name for name in aliases if f"| `{name}` |" not in text]


def test_the_example_of_the_page_loads(write):
    config = load_config(write(build_document().split("```yaml\n")[1].split("```")[0]))
    assert config.optim.optimizer == "sgd(momentum=0.9)"
    assert config.run.checkpoint_every == "1 epoch"
