"""Binding a call to a signature, finding the target, building it."""

import functools
import re
import sys
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Lt

from fulltilt.config import ComponentCall, bind_call, build_component, import_object, parse_call
from fulltilt.errors import ConfigError


def wideresnet(depth: int = 28, width: int = 10, *, dropout: float = 0.0, n_classes: int, in_channels: int = 3):
    return ("wideresnet", depth, width, dropout, n_classes, in_channels)


class Sgd:
    def __init__(self, lr: float, nesterov: bool = False, betas: tuple[float, float] = (0.9, 0.99)): ...


def untyped(size, scale=1.0, flag=False, **more):
    return size, scale, flag, more


def mode(kind: Literal["a", "b"] = "a", count: Annotated[int, Ge(1)] = 1, name: str | None = None):
    return kind, count, name


def bounded(width: Annotated[int, Ge(1)] | None = None, share: Annotated[float, Ge(0.0), Lt(1.0)] = 0.5):
    return width, share


REGISTRY = {
    "wideresnet": wideresnet,
    "net": functools.partial(wideresnet, 40),
    "untyped": untyped,
    "mode": mode,
    "timm:": lambda name: functools.partial(untyped, name),
}


def bind(text: str, target, **options):
    return bind_call(parse_call(text), target, where="model", **options)


def build(text: str, **given):
    return build_component(text, REGISTRY, kind="model", where="model", **given)


def test_arguments_take_the_type_of_the_annotation():
    bound = bind('sgd("0.1", nesterov="false", betas=[0, "0.5"])', Sgd)
    assert bound == {"lr": 0.1, "nesterov": False, "betas": (0.0, 0.5)}
    assert isinstance(bound["betas"][0], float)
    assert bind("mode(name=3, count=2.0)", mode) == {"name": "3", "count": 2}


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        ("wideresnet(depht=1)", wideresnet, "no argument 'depht' (value 1); did you mean depth"),
        ("wideresnet(depth=abc)", wideresnet, "depth=abc: expected a whole number"),
        ("wideresnet(depth=2.5)", wideresnet, "depth=2.5: expected a whole number"),
        ("wideresnet(depth=true)", wideresnet, "depth=true: expected a whole number"),
        ("wideresnet(depth=[1])", wideresnet, "depth=[1]: expected a whole number"),
        ("wideresnet(1, 2, 3)", wideresnet, "takes 2 arguments by position (depth, width), 3 are given"),
        ("wideresnet(1, depth=2)", wideresnet, "depth is given by position and by name"),
        ("wideresnet()", wideresnet, "wideresnet needs n_classes"),
        ("sgd()", Sgd, "sgd needs lr"),
        ("sgd(0.1, nesterov=maybe)", Sgd, "nesterov=maybe: expected true or false"),
        ("sgd(0.1, betas=[1, 2, 3])", Sgd, "expected a list of (a number, a number)"),
        ("mode(kind=c)", mode, "kind=c: expected a or b"),
        ("mode(count=0)", mode, "count=0: expected a whole number of at least 1"),
        ("bounded(width=0)", bounded, "width=0: expected a whole number of at least 1 or null"),
        ("bounded(share=1)", bounded, "share=1: expected a number of at least 0.0 and below 1.0"),
        ("untyped(1, scale=big)", untyped, "scale=big: expected a number"),
        ("f(1)", lambda: None, "takes 0 arguments"),
        ("f(a=1)", lambda: None, "it takes no arguments"),
    ],
)
def test_bad_arguments(text, target, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        bind(text, target)
    assert error.value.key == "model"


@pytest.mark.parametrize(
    ("text", "given", "built"),
    [
        ("untyped(3, other=x)", {}, (3, 1.0, False, {"other": "x"})),  # takes keywords of any name
        # What is given fills only what the target has and the user left out, also through a partial.
        ("wideresnet(16)", {"n_classes": 9, "in_channels": 1, "no": 3}, ("wideresnet", 16, 10, 0.0, 9, 1)),
        ("wideresnet(in_channels=4)", {"n_classes": 9, "in_channels": 1}, ("wideresnet", 28, 10, 0.0, 9, 4)),
        ("untyped(1)", {"flag": True, "surprise": 1}, (1, 1.0, True, {})),
        ("net(width=2)", {"n_classes": 5}, ("wideresnet", 40, 2, 0.0, 5, 3)),
        ("untyped(size=[mode(b), mode()])", {}, ([("b", 1, None), ("a", 1, None)], 1.0, False, {})),
        ("timm:convnext(scale=2)", {}, ("convnext", 2, False, {})),
    ],
)
def test_what_is_built(text, given, built):
    assert build(text, **given) == built


def test_without_a_registry_a_call_inside_stays_one():
    assert bind("untyped(size=mode(b))", untyped)["size"] == ComponentCall("mode", ("b",))


@pytest.mark.parametrize(
    ("text", "said"),
    [("wideresnett(1)", r"model: unknown model 'wideresnett'; did you mean wideresnet\?"), ("timmm", "timm:NAME")],
)
def test_an_unknown_name_lists_the_nearest(text, said):
    with pytest.raises(ConfigError, match=said):
        build(text)


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "user_code_of_config_test.py").write_text(
        "import math\nfrom collections.abc import Sequence\nfrom pathlib import Path\nfrom shutil import copy\n"
        "from typing import Any, Callable as Function\nstrip = str.strip\n"
        "class Callable:\n    def __call__(self):\n        raise AssertionError('called')\n"
        "class Space:\n    def build(width: int = 1):\n        return width\n"
        "ready = Callable()\n"
        "def build(width: int = 1):\n    return width * 2\n"
    )
    for name, text in {"__init__": "from .nets import build_net\n", "nets": "def build_net(): ...\n"}.items():
        (folder / "user_code_package").mkdir(exist_ok=True)
        (folder / "user_code_package" / f"{name}.py").write_text(text)
    (folder / "random.py").write_text("build = 1\n")  # of the standard library, and loaded
    (folder / "user_code_of_others.py").write_text("from shutil import copy\n")
    (folder / "user_code_that_needs_more.py").write_text("import a_module_that_is_not_there\n")
    (folder / "user_code_that_is_broken.py").write_text("def f(:\n")
    (folder / "user_code_that_leaves.py").write_text("raise SystemExit(3)\n")
    wrong = "workload = Workload(model=1, dataset=2, loss=3)"
    (folder / "user_code_with_a_wrong_one.py").write_text(f"from fulltilt import Workload\n\n{wrong}\n")
    (folder / "user_code_misspelled.py").write_text("from fulltilt import Workload\n\nworkload = Workload(train=1)\n")
    yield folder
    for name in [n for n in sys.modules if n.startswith("user_code_")]:
        del sys.modules[name]


def test_own_code_is_found_beside_the_configuration(user_code):
    assert build("user_code_of_config_test:build(width=4)", base_dir=str(user_code)) == 8
    assert build("user_code_of_config_test:Space.build(3)", base_dir=str(user_code)) == 3


def test_an_object_of_the_users_is_the_component_itself(user_code):
    assert type(build("user_code_of_config_test:ready", base_dir=str(user_code))).__name__ == "Callable"
    with pytest.raises(ConfigError, match="takes no arguments"):
        build("user_code_of_config_test:ready(a=1)", base_dir=str(user_code))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("user_code_not_there:build", "no module 'user_code_not_there' in"),
        ("user_code_of_config_test:bild", "did you mean build? valid: Callable, Space, build, ready"),  # no imports
        ("user_code_package:build_nett", "did you mean build_net? valid: build_net"),
        ("user_code_of_others:copyy", "did you mean copy? valid: copy"),
        ("user_code_of_others.py:copy", "and a module is named without .py; write user_code_of_others:copy"),
        ("random:build", "random.py; give that file another name"),
        ("torch.optim:NAdm", "torch.optim has no 'NAdm'; did you mean NAdam"),
        ("user_code_of_config_test:Space.nothing", "Space has no 'nothing'"),
        ("user_code_that_needs_more:build", "No module named 'a_module_that_is_not_there'; install"),
        ("user_code_that_is_broken:f", "importing user_code_that_is_broken failed"),
        ("user_code_that_leaves:f", "importing user_code_that_leaves called sys.exit(3); put that under if __name"),
        (
            "user_code_with_a_wrong_one:f",
            "user_code_with_a_wrong_one.py:3 as it was imported: Workload model is 1 (int)",
        ),
        ("user_code_misspelled:workload", "argument 'train'; a Workload takes model, dataset, loss, optimizer, valid"),
    ],
)
def test_own_code_that_cannot_be_imported(user_code, path, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        import_object(path, base_dir=str(user_code), where="model")


def test_a_module_is_looked_up_beside_the_configuration_before_the_current_folder(tmp_path, monkeypatch):
    for name in ("beside", "current"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "twin_module.py").write_text(f"where = {name!r}\n")
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "beside")])  # it is there already, and far behind
    assert import_object("twin_module:where", base_dir=str(tmp_path / "beside")) == "beside"
    del sys.modules["twin_module"]
