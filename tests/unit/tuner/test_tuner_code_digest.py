"""The user's own code, told from that of the search before."""

from __future__ import annotations

import importlib
import linecache
import sys
import types

import pytest

from fulltilt.config import config_from_values
from fulltilt.tuner.question.code_digest import digest_modules, digest_workload


@pytest.mark.parametrize(
    "values",
    [
        {"optim": {"optimizer": "my_code:build(lr=0.1)"}},
        {"data": {"transform": {"train": "random_flip | my_code:Build(3)"}}},
        {"data": {"transform": {"val": "normalize | my_code:build"}}},
        {"data": {"val_dataset": "my_code:build"}},
        {"model": "sequential(my_code:build(2), head=[my_code:build])"},
        {"loss": "my_code:build"},
        {"task": "my_code:build"},
    ],
)
def test_code_is_seen_wherever_the_configuration_names_it(tmp_path, values):
    config = config_from_values(values, base_dir=str(tmp_path))
    digests = []
    for version in (1, 1, 2):
        (tmp_path / "my_code.py").write_text(f"def build(): return {version}\n")
        digests.append(digest_modules(config, (str(tmp_path),)))
    assert set(digests[0]) == {"my_code"}
    assert digests[0] == digests[1] != digests[2]
    assert digest_modules(config_from_values({"model": "small_cnn"}, base_dir="."), (str(tmp_path),)) == {}


CODE = """\
import functools

DEPTH = 3

def helper():
    return 1

class Base:
    def forward(self): return helper()

class Net(Base):
    pass

def build(width=2):
    return [Net() for _ in range(DEPTH)]

class Loss:
    def __init__(self, weight): self.weight = weight
    def __call__(self, a, b): return 0

def make(rate):
    return lambda parameters: rate

def unrelated(): return 1
"""


def digest_text(tmp_path, monkeypatch, text, **parts):
    """Digests of a workload whose functions come from a module with this text."""
    (tmp_path / "own_code.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    importlib.invalidate_caches()
    linecache.checkcache()
    module = importlib.import_module("own_code")
    made = {name: eval(source, vars(module)) for name, source in parts.items()}
    return digest_workload(types.SimpleNamespace(**made))


PARTS = {
    "model": "functools.partial(build, width=2)",
    "dataset": "helper",
    "loss": "Loss(1.0)",
    "optimizer": "make(0.1)",
    "metrics": "{'right': functools.cache(helper)}",
}


@pytest.mark.parametrize(
    ("old", "new", "part", "changed"),
    [
        ("", "", {}, set()),
        ("DEPTH = 3", "DEPTH = 4", {}, {"model"}),
        ("return helper()", "return 2 * helper()", {}, {"model"}),
        ("    return 1\n\nclass Base", "    return 2\n\nclass Base", {}, {"model", "dataset", "metrics"}),
        ("def __call__(self, a, b): return 0", "def __call__(self, a, b): return 1", {}, {"loss"}),
        ("def unrelated(): return 1", "def unrelated(): return 2", {}, set()),
        # the same code, which carries another value
        ("", "", {"model": "functools.partial(build, width=3)"}, {"model"}),
        ("", "", {"loss": "Loss(2.0)"}, {"loss"}),
        ("", "", {"optimizer": "make(0.2)"}, {"optimizer"}),
        ("", "", {"metrics": "{'wrong': functools.cache(helper)}"}, {"metrics"}),
    ],
)
def test_a_change_is_seen_where_it_matters_and_only_there(tmp_path, monkeypatch, old, new, part, changed):
    before = digest_text(tmp_path, monkeypatch, CODE, **PARTS)
    assert old in CODE
    after = digest_text(tmp_path, monkeypatch, CODE.replace(old, new), **{**PARTS, **part})
    assert {name.removeprefix("workload ") for name in before if before[name] != after[name]} == changed
