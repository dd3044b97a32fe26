"""The installed package: what the wheel holds, and the way in with nothing but the wheel, in an empty environment."""

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "your-own-code.md"
ONE_PLAN = shlex.split(
    "--quick --budget 5m --batch-sizes 64 --num-workers 0 benchmark.levers={} benchmark.test_mixed_precision=false"
)
"""For ``tune``: there is nothing to compare, so it ends before the budget does."""


def build(source, out, *targets):
    words = [word for target in targets for word in ("-t", target)]
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *words, "-d", out], cwd=source, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def list_files(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("RECORD")}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(ROOT, folder, "sdist", "wheel")
    return folder


@pytest.fixture(scope="module")
def fulltilt(built, tmp_path_factory):
    """Install the wheel where its dependencies are and the sources are not; return what runs a command line there."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python, (packages,) = folder / "bin" / "python", folder.glob("lib/python3*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *built.glob("*.whl")], check=True, capture_output=True)
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"

    def run(words, cwd):
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    code = "import fulltilt, sys; print(fulltilt.__file__); print(*sys.path)"
    file, paths = run(["python", "-c", code], folder).splitlines()
    assert Path(file).is_relative_to(packages)
    assert str(ROOT / "src") not in paths.split()
    return run


@pytest.mark.slow
def test_the_wheel_and_the_one_of_the_source_archive_hold_the_examples_and_the_licence(built, tmp_path):
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    files = list_files(wheel)
    configs = ROOT / "configs"
    assert {f"fulltilt/examples/{path.relative_to(configs)}" for path in configs.rglob("*.yaml")} <= files
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in files)
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    build(source, tmp_path / "again", "wheel")
    assert list_files(*(tmp_path / "again").iterdir()) == files


@pytest.mark.slow
def test_an_example_is_written_checked_tuned_and_trained(fulltilt, tmp_path):
    fulltilt(["fulltilt", "init", "digits"], tmp_path)
    assert fulltilt(["fulltilt", "check", "digits.yaml"], tmp_path).startswith("Ready")
    fulltilt(["fulltilt", "tune", "digits.yaml", *ONE_PLAN], tmp_path)
    assert json.loads((tmp_path / "runs/tune/digits/tune.json").read_text())["trials"]
    assert fulltilt(["fulltilt", "train", "digits.yaml", "--epochs", "1", "--quiet"], tmp_path).startswith("Finished: ")


@pytest.mark.slow
def test_the_page_your_own_code_is_followed_from_the_users_module_to_a_comparison(fulltilt, tmp_path):
    text = PAGE.read_text()
    for block in re.findall(r"```python\n# (my_module|search)\.py\n(.*?)```", text, re.S):
        code = block[1].replace("quick=True", "quick=True, batch_sizes=[64], num_workers=[0]").replace("90s", "5m")
        code = code.replace("settings={", "settings={'benchmark.levers': {}, 'benchmark.test_mixed_precision': False, ")
        (tmp_path / f"{block[0]}.py").write_text(code)
    (commands,) = (block for block in re.findall(r"```sh\n(.*?)```", text, re.S) if "compare" in block)
    more = {"tune": ONE_PLAN, "compare": ["--budget", "8s"]}
    said = {}
    for line in commands.splitlines():
        words = shlex.split(line)
        said[words[1]] = fulltilt([*words, *more.get(words[1], [])], tmp_path)
    assert [*said] == ["init", "check", "tune", "train", "compare"]
    assert said["check"].startswith("Ready")
    assert "your settings" in said["tune"]
    assert "Finished: " in said["train"]
    screen = " ".join(said["compare"].split())
    assert re.search(r"groups? of fresh processes that took turns, \d+ s\.", screen)
    assert "runs/tune/" in fulltilt(["python", "search.py"], tmp_path)
