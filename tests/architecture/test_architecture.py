"""The arrows between rooms, and the half of the package that must start without torch."""

import contextlib
import importlib
import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fulltilt.errors import UsageError

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fulltilt"
TORCH_FREE = [
    *("errors", "records", "stats", "levers", "config", "hardware", "listeners", "report", "tuner", "cli"),
    *("attach", "doctor", "infer", "lab", "web"),
]


def read_imported_modules(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_what_needs_no_torch_imports_none():
    statements = [*(f"import fulltilt.{room}" for room in TORCH_FREE), "import fulltilt.config as c; c.schema()"]
    statements += ["import fulltilt.cli.infer", "import fulltilt.infer.check"]
    code = f"import sys\nfor line in {statements!r}:\n    exec(line)\n    assert 'torch' not in sys.modules, line"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("room", ["config", "engine", "integrations", "measure", "tuner"])
def test_a_room_whose_names_load_on_first_use_offers_what_it_says_and_nothing_else(room):
    module = importlib.import_module(f"fulltilt.{room}")
    for name in dir(module):
        with contextlib.suppress(UsageError):  # the other library of an integration may be missing
            assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"'fulltilt.{room}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_asking_loads_and_importing_the_room_does_not():
    assert "fulltilt.config.model" not in read_imported_modules("import fulltilt.config")
    asked = read_imported_modules("import fulltilt.config as room; room.Config; vars(room)['Config']")
    assert "fulltilt.config.model" in asked


def test_help_loads_no_other_room():
    modules = read_imported_modules("from fulltilt.cli import build_parser\nbuild_parser().format_help()")
    rooms = {name for name in modules if name.startswith("fulltilt.")}
    assert rooms == {"fulltilt._version", "fulltilt.cli", "fulltilt.cli._signals", "fulltilt.errors"}


def test_every_room_stands_in_the_layers_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {room.strip() for layer in contracts[0]["layers"] for room in layer.split("|")}
    code = (path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
    rooms = {path.stem for path in code if path.stem not in ("__init__", "__main__")}
    assert rooms == layers


def test_no_file_outgrows_600_lines():
    sizes = {path.name: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name: n for name, n in sizes.items() if n > 600} == {}


def test_inference_stays_below_6000_lines():
    assert sum(len(path.read_text().splitlines()) for path in (SOURCE / "infer").rglob("*.py")) < 6000


def test_every_contract_suite_names_its_real_thing():
    """The closing lines of a run say which suites met the real thing; a suite they do not know would go unseen."""
    known = runpy.run_path(str(ROOT / "tests" / "conftest.py"))["REAL"]
    suites = {path.stem.removeprefix("test_contract_") for path in (ROOT / "tests" / "contract").glob("test_*.py")}
    assert suites == set(known)
