"""The user's own code, told from that of the search before."""

from __future__ import annotations

import importlib
import linecache
import sys
import types

import pytest

from fulltilt.config import config_from_values
from fulltilt.tuner.question.code_digest import MAX_SOURCE_FILES, digest_modules, digest_workload


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


@pytest.mark.parametrize(
    ("changed", "is_seen"),
    [
        ("train_setup.py", True), ("net.py", True), ("blocks/__init__.py", True), ("blocks/conv.py", True),
        ("plain/norm.py", True), ("late.py", True), ("pack/aside.py", True), ("pack/deep/__init__.py", True),
        ("other.py", False), ("plain/other.py", False), ("logging/other.py", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("module", ["train_setup", "pack.train_setup"])
def test_what_the_named_module_imports_is_digested_too(tmp_path, monkeypatch, module, changed, is_seen):
    """A change of net.py went unseen: the rows of another network answered."""
    code = {
        "train_setup.py": "import logging, torch\nfrom net import Net\ndef build():\n    import late\n",
        "net.py": "import blocks.conv as conv, net\nfrom plain import norm\nWORD = '\\d'\n",
        "blocks/__init__.py": "",
        "blocks/conv.py": "import this is broken\n",
        "plain/norm.py": "",  # of a package without an __init__.py
        "late.py": "import pack.deep\n",
        "pack/__init__.py": "raise RuntimeError('imported')\n",
        "pack/train_setup.py": "from train_setup import build\nfrom . import deep\n",
        "pack/deep/__init__.py": "from .. import aside\n",
        "pack/aside.py": "",
        "other.py": "",
        "plain/other.py": "",
        "logging/other.py": "",
    }
    for name, text in code.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    config = config_from_values({"task": f"{module}:build"}, base_dir=str(tmp_path))
    before = digest_modules(config, (str(tmp_path),))
    (tmp_path / changed).write_text("changed = True\n")
    assert (digest_modules(config, (str(tmp_path),)) != before) == is_seen
    assert [*before] == [module]


def test_of_a_large_package_what_the_named_module_imports_comes_first(tmp_path):
    (tmp_path / "pack").mkdir()
    for name in ("__init__", *(f"a{n}" for n in range(MAX_SOURCE_FILES)), "net"):
        (tmp_path / "pack" / f"{name}.py").write_text("")
    (tmp_path / "pack" / "train_setup.py").write_text("from pack.net import Net\n")
    config = config_from_values({"task": "pack.train_setup:build"}, base_dir=str(tmp_path))
    before = digest_modules(config, (str(tmp_path),))
    (tmp_path / "pack" / "net.py").write_text("changed = True\n")
    assert digest_modules(config, (str(tmp_path),)) != before


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


USED = """\
import argparse, logging, os, types
import numpy as np
from os import environ
from os.path import join as act

LOG = logging.getLogger("x")
{value}
def unused(): return VALUE

def build():
    LOG.info("%s %s", VALUE, environ)
    return act
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("VALUE = {'hidden': 512}", "VALUE = {'hidden': 64}"),
        ("VALUE = {'net': {'sizes': (512, 3)}}", "VALUE = {'net': {'sizes': (64, 3)}}"),
        ("VALUE = [512, 512]", "VALUE = [512]"),
        ("VALUE = {os.getcwd: 512}", "VALUE = {os.getcwd: 64}"),
        ("VALUE = list(range(9999))", "VALUE = list(range(9998))"),
        ("VALUE = np.zeros((2, 3))", "VALUE = np.zeros((2, 4))"),
        ("VALUE = [np.zeros(2, np.int64)]", "VALUE = [np.zeros(2, np.int32)]"),
        ("VALUE = argparse.Namespace(hidden=512)", "VALUE = argparse.Namespace(hidden=64)"),
        ("VALUE = types.SimpleNamespace(hidden=[512])", "VALUE = types.SimpleNamespace(hidden=[64])"),
        ("VALUE = os.path.join", "VALUE = os.path.split"),
        ("VALUE = max", "VALUE = min"),
        ("VALUE = str.lower", "VALUE = str.upper"),
        ("VALUE = os", "VALUE = types"),
    ],
)
def test_a_changed_global_of_whatever_kind_is_seen(tmp_path, monkeypatch, old, new):
    """A model built from a dictionary of the notebook kept the rows of the one before."""
    digests = []
    for value in (old, old, new):
        digests.append(digest_text(tmp_path, monkeypatch, USED.format(value=value), model="build"))
        monkeypatch.setenv("OF_THIS_SESSION", str(len(digests)))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("code", ["from other_code import Net", "import other_code", "from other_code import NET"])
def test_a_global_from_another_module_of_the_users_is_followed(tmp_path, monkeypatch, code):
    digests = []
    for width in (512, 512, 64):
        (tmp_path / "sizes.py").write_text(f"WIDTH = {width}\n" if "NET" not in code else "WIDTH = 0\n")
        text = f"from sizes import WIDTH\nclass Net:\n    width = {width if 'NET' in code else 'WIDTH'}\nNET = Net()\n"
        (tmp_path / "other_code.py").write_text(text)
        for name in ("other_code", "sizes"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        text = f"{code} as used\ndef build(): return used\n"
        digests.append(digest_text(tmp_path, monkeypatch, text, model="build"))
    assert digests[0] == digests[1] != digests[2]
