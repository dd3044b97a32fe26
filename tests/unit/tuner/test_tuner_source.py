"""From what a user hands over to what a trial can build."""

import base64
import pickle
import subprocess
import sys
import threading
import types

import pytest

from fulltilt.errors import ConfigError, UsageError
from fulltilt.tuner.question.code_digest import find_module_files
from fulltilt.tuner.question.source import find_import_paths, resolve_target


def make_workload(**changes):
    parts = {"model": lambda: "model", "dataset": lambda: "data", "loss": lambda a, b: 0, "name": "mine"}
    return types.SimpleNamespace(**(parts | changes))


def test_a_file_is_named_after_itself_and_its_folder_is_importable(tmp_path):
    (tmp_path / "digits.yaml").write_text("data: {batch_size: 16}\n")
    aim = resolve_target(tmp_path / "digits.yaml")
    assert (aim.name, aim.config.data.batch_size) == ("digits", 16)
    assert aim.source.base_dir == aim.source.import_paths[0] == str(tmp_path)
    other = resolve_target(tmp_path / "digits.yaml", {"data.batch_size": 8, "data.path": "/there"})
    assert (other.config.data.batch_size, other.config.data.path) == (8, "/there")
    with pytest.raises(ConfigError):
        resolve_target(tmp_path / "digits.yaml", {"data.bach_size": 8})


def test_a_workload_of_a_module_travels_by_import_path_and_one_without_a_name_by_value(tmp_path, monkeypatch):
    aim = resolve_target("my_module:workload")
    assert (aim.config.task, aim.name) == ("my_module:workload", "my_module_workload"), "as train names its folder"
    module = types.ModuleType("room_of_workloads")
    module.__file__ = str(tmp_path / "room_of_workloads.py")
    module.mine = make_workload()
    monkeypatch.setitem(sys.modules, "room_of_workloads", module)
    aim = resolve_target(module.mine)
    assert aim.config.task == "room_of_workloads:mine"
    assert aim.source.pickled is None
    aim = resolve_target(make_workload())
    assert aim.name == "mine"
    assert pickle.loads(base64.b64decode(aim.source.pickled)).model() == "model"


def test_what_cannot_be_tuned_says_what_to_do():
    lock = threading.Lock()
    with pytest.raises(UsageError, match="put it into a module"):
        resolve_target(make_workload(loss=lambda a, b: lock))
    with pytest.raises(UsageError, match="not int"):
        resolve_target(3)
    with pytest.raises(UsageError, match="'/there' would not be read: mine is a Workload that is built already; leave"):
        resolve_target(make_workload(), {"data.path": "/there"})


def test_the_digest_of_a_package_covers_its_files_without_importing_it(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "net.py").write_text("x = 1\n")
    files = find_module_files("pack.net", (str(tmp_path),))
    assert [file.name for file in files] == ["__init__.py", "net.py"]
    assert find_module_files("nowhere", (str(tmp_path),)) == []


def test_a_workload_in_main_keeps_its_digest_from_process_to_process(tmp_path):
    script = tmp_path / "script.py"
    code = """
import types
from fulltilt.tuner.question.source import resolve_target
def build(): return 1
w = types.SimpleNamespace(model=build, dataset=build, loss=build, name="w")
print(resolve_target(w).code)
"""
    found = []
    for version in (1, 1, 2):
        script.write_text(code.replace("return 1", f"return {version}"))
        found.append(subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout)
    assert found[0] == found[1] != found[2]


def test_import_paths_leave_the_interpreters_own_folders_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    paths = find_import_paths("/base")
    assert paths[0] == "/base"
    assert str(tmp_path) in paths
    assert not any("site-packages" in path for path in paths)
