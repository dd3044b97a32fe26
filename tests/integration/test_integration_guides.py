"""The commands of guides 000, 001, 002 and 004, one after another as docs/guides.md has them."""

import csv
import itertools
import json
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.lab_cases import wait_for

from fulltilt.cli import run_command
from fulltilt.data.images.cifar10_formats import CLASSES
from fulltilt.lab.serving import find_server
from fulltilt.tuner.search.proof import Proof

ROOT = Path(__file__).parents[2]
CONFIG = "configs/checking_gpu_optimization.yaml"
SEARCH = f"python scripts/analysis/benchmark_gpu.py --config {CONFIG} --data-path data/events.h5"
SECTIONS = {
    "001 ·": [
        SEARCH,
        f"{SEARCH} --batch-sizes 128 256 512 1024 2048 4096",
        f"{SEARCH} --batch-sizes 1024 2048 4096 8192 --num-workers 4 8 12 16 --steps 20",
        "python scripts/train.py --config configs/default.yaml --data-path data/events.h5",
    ],
    "000 · Training": [],
    "002 ·": [],
    "004 ·": ["cat results/metrics/efficiency_summary.csv", "cat results/metrics/training_summary.csv"],
}
"""Section of docs/guides.md → what the guide itself has besides."""
LAB = "000 · The lab"
SMALL = {
    "fulltilt data make ": "--n-samples 256 --n-sensors 16",
    "scripts/analysis/benchmark_gpu.py": "--budget 25s --batch-sizes 64 --num-workers 0 batch_size=64 num_workers=0 "
    "'benchmark.levers={}' benchmark.test_mixed_precision=false benchmark.test_pin_memory=false",
    "--batch-sizes 128": "--batch-sizes 32 64",
    "--batch-sizes 1024": "--batch-sizes 64 --num-workers 0 1 --steps 5",
    "scripts/train.py": "num_workers=0 epochs=2",
    "make-stl10": "--limit 40 --labelled 20",
    "python train.py --data-path data/small": "'model=small_cnn(width=4)' num_workers=0 batch_size=8 warmup=0 "
    "--epochs 1 --probe-epochs 1 --cluster-epochs 1",
    "python train.py 'model": "'model=small_cnn(width=4)' batch_size=8",
    "stl10_config.yaml 'model": "'model=small_cnn(width=4)' batch_size=8",
    "check configs/stl10_config.yaml": "'model=small_cnn(width=4)' batch_size=8",
    "--memory-limit 512MiB": "--memory-limit 12MiB",
    "--profile-data": "num_workers=0 batch_size=16",
    "check configs/cifar10.yaml": "num_workers=0 batch_size=16",
    "--profile-steps": "num_workers=0 batch_size=16 'model=small_cnn(width=4)'",
    "model=resnet18": "'model=small_cnn(width=4)' 'dataset=cifar10(limit=40)' batch_size=16",
    "--config configs/elmo_depth-2_seed-42.yaml --data-path data/wikitext2": "num_workers=0 batch_size=4 --epochs 1 "
    "'model=bilm(depth=1, embedding=16, hidden=16, projection=4)' 'dataset=text(seq_len=16, vocab_size=500)'",
    "elmo_depth-2_seed-42.yaml 'model": "--metrics runs/bilm/metrics "
    "'model=bilm(depth=1, embedding=8, hidden=8, projection=4)'",
}
"""Part of a command → words that are put behind it: the later ones win, and make it small."""


def read_commands(wanted):
    page = (ROOT / "docs" / "guides.md").read_text()
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    for start, own in wanted.items():
        (text,) = (text for title, text in sections.items() if title.startswith(start))
        for block in re.findall(r"```\n(.*?)```", text, re.S):
            lines = [line.partition("   #")[0] for line in block.replace("\\\n", " ").splitlines()]
            yield from (line for line in lines if not line.startswith("python -m benchmarks"))
        yield from own


def make_small(line):
    words = shlex.split(line)
    text = shlex.join(words)
    added = [shlex.split(extra) for part, extra in SMALL.items() if part in text]
    return [*words, *(word for extra in added for word in extra)]


def run(line, monkeypatch):
    """Run a line in the current folder and return its exit code: ours in this process, which has loaded torch."""
    program, *words = make_small(line)
    if program not in ("fulltilt", "python"):
        return subprocess.run(["bash", "-ec", line]).returncode
    if program == "fulltilt":
        return run_command(words)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(words[0], run_name="__main__")
    return ended.value.code


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """What the guides' commands name, as a clone has it, and small data of their kinds."""
    for name in ("configs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("train.py", "app.py"):
        shutil.copy(ROOT / name, tmp_path)
    rng = np.random.default_rng(0)
    for split, n in (("train", 8), ("test", 4)):
        for at, name in enumerate(CLASSES):
            (folder := tmp_path / "cifar10_jpeg" / split / name).mkdir(parents=True)
            for number in range(n):
                pixels = rng.integers(0, 60, (32, 32, 3)) + 15 * at
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.jpg")
    shutil.make_archive(str(tmp_path / "cifar10_jpeg"), "xztar", tmp_path / "cifar10_jpeg", ".")
    words = [f"word{number}" for number in range(400)]
    for name, n in (("train", 600), ("valid", 120)):
        lines = [" ".join(rng.choice(words, 12)) for _ in range(n)]
        (tmp_path / f"wiki.{name}.tokens").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("fulltilt.tuner.trials.target.ROOFS_MEASURE_S", 0.1)
    monkeypatch.setattr(Proof, "_compute_n_limit", lambda proof, share, least: least)  # turns are taken no longer
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("lent_server")
def test_the_guides_commands_run_one_after_another(clone, monkeypatch, capfd):
    commands = [*read_commands(SECTIONS)]
    assert all(any(part in shlex.join(shlex.split(line)) for line in commands) for part in SMALL)
    ends = {}
    for line in commands:
        code, said = run(line, monkeypatch), capfd.readouterr()
        does_not_fit = "--memory-limit 512MiB" in line
        assert code == (3 if does_not_fit else 0), f"{line}\n{said.out}{said.err}"
        ends[line] = said.out
    metrics = clone / "results" / "metrics"
    assert {"efficiency_summary.csv", "training_summary.csv"} <= {path.name for path in metrics.iterdir()}
    assert "# samples per micro-step; " in (clone / "configs" / "default.yaml").read_text(), "its comments stay"
    kept = [path.parent.name for path in (clone / "runs").rglob("checkpoint.pt")]
    assert {"resnet18", "two", "parts", "before", "after", "pretrain", "probe", "cluster"} <= {*kept}
    assert (clone / "weights.safetensors").stat().st_size > 0
    searches = [json.loads(path.read_text()) for path in (clone / "runs" / "tune").rglob("tune.json")]
    assert len(searches) == 4, "each question has a folder of its own"
    assert all(search["trials"] for search in searches)
    (compared,) = (said for line, said in ends.items() if line.startswith("fulltilt compare"))
    assert any(line.startswith("training seconds") for line in compared.splitlines()), "long names break where they may"


@pytest.mark.slow
def test_the_labs_commands_run_as_they_stand(clone, monkeypatch, capfd):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (serve, *commands), said = read_commands({LAB: []}), {}
    server = subprocess.Popen([sys.executable, *shlex.split(serve)[1:]])
    try:
        wait_for(lambda: find_server(clone / "runs" / "lab"), server)
        for line in commands:
            code = run_command(shlex.split(line)[1:])
            said[line] = (printed := capfd.readouterr()).out
            assert code == 0, f"{line}\n{said[line]}{printed.err}"
        server.send_signal(signal.SIGINT)
        assert server.wait() == 0
    finally:
        server.kill()
        server.wait()
    assert said["fulltilt lab cancel e6"].endswith(" is cancelled\n")
    for id in ("e1", "e6"):
        assert "epoch 8/8" in said[f"fulltilt lab logs -f {id}"]
    rows = [*csv.DictReader((clone / "results.csv").read_text().splitlines())]
    assert [(row["id"], row["optim.lr"], row["data.batch_size"]) for row in rows] == [
        (f"e{n}", lr, size)
        for n, (lr, size) in enumerate(itertools.product(("0.0001", "0.001", "0.01"), ("64", "128")), 1)
    ]
    assert {row["id"] for row in rows if row["state"] == "succeeded"} >= {"e1", "e6"}
    assert "6 experiments and " in said["fulltilt lab restore lab.tar --lab runs/copy"]
