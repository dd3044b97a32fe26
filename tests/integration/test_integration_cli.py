"""The command line as a user runs it: real processes, real data, on the CPU."""

import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

from fulltilt.cli import run_command
from fulltilt.config import load_config, plan_of
from fulltilt.errors import RunFolderError
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner import read_schema

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs" / "digits.yaml"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # two tests at once must not fight for cores
LEVERS = "benchmark.levers={fused_optimizer: [false, true]}"
SHORT_PROOF = """
import runpy, sys
from fulltilt.tuner.search.proof import Proof
from fulltilt.tuner.trials import target
Proof._compute_n_limit, target.ROOFS_MEASURE_S = lambda proof, share, least: least, 0.1
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program in which plans that are as good as equal take turns no longer than others."""
MAIN = [str(ROOT / "src" / "fulltilt" / "__main__.py")]
SMALL_SEARCH = [LEVERS, "--batch-sizes", "32", "64", "--num-workers", "0", "--steps", "2", "--device", "cpu"]


def run_fulltilt(*words, cwd, program=("-m", "fulltilt")):
    """In a process of its own, as a user has it."""
    done = subprocess.run(
        [sys.executable, *program, *map(str, words)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """The same command line in this process, which has loaded torch already."""
    monkeypatch.chdir(tmp_path)

    def run(*words, expect=0):
        code = run_command([*map(str, words)])
        said = capsys.readouterr()
        assert code == expect, said.out + said.err
        return said

    return run


@pytest.fixture
def run_script(monkeypatch, capsys):
    """A script of the guides in this process; returns its output."""

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
        said = capsys.readouterr()
        assert ended.value.code == 0, said.out + said.err
        return said

    return run


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """One exhaustive search with everything it can write."""
    folder = tmp_path_factory.mktemp("search")
    shutil.copy(DIGITS, folder / "mine.yaml")
    words = ["tune", DIGITS, "--exhaustive", *SMALL_SEARCH, "--apply", "mine.yaml", "--json", "-", "--out", "run"]
    done = run_fulltilt(*words, cwd=folder, program=["-c", SHORT_PROOF, *MAIN])
    return folder, done, json.loads(done.stdout)


def test_json_to_stdout_is_the_contract_and_nothing_else_and_the_report_shows_every_row(searched):
    folder, done, document = searched
    jsonschema.validate(document, read_schema())
    assert "samples/s" in done.stderr
    assert (folder / "run" / "report.html").read_text().count("<tr") == len(document["trials"]) + 1


def test_the_grid_is_whole_and_rows_have_their_levers_read_back_their_phases_and_reasons_for_nulls(searched):
    _, _, document = searched
    plans = [(row["plan"]["batch_size"], row["plan"]["fused_optimizer"]) for row in document["trials"]]
    assert sorted(plans) == sorted(itertools.product((32, 64), (False, True)))
    for row in document["trials"]:
        nulls = {name for name in ("gpu_utilization_pct", "memory_allocated_peak_gib") if row[name] is None}
        assert nulls <= set(row["null_reasons"])
        wanted = {name: value for name, value in row["plan"].items() if value is not None}
        assert {name: row["observed"][name] for name in wanted} == wanted
        phases = row["phases_ms"]
        if phases["forward"] is None:
            assert "phases_ms" in row["null_reasons"]
            continue
        parts = [phases[name] or 0 for name in ("data_wait", "h2d", "forward", "backward", "optimizer", "other")]
        assert sum(parts) == pytest.approx(phases["step"], rel=0.02)


def test_the_pick_is_in_the_yaml_and_the_comments_too(searched):
    folder, _, document = searched
    assert dict(plan_of(load_config(folder / "mine.yaml"))) == document["picks"]["recommended"]["plan"]
    comments = [line for line in DIGITS.read_text().splitlines() if line.lstrip().startswith("#")]
    written = (folder / "mine.yaml").read_text()
    assert all(line in written for line in comments)


@pytest.mark.slow
@pytest.mark.usefixtures("lent_server")
def test_the_guides_door_is_the_same_search(searched, run_script, monkeypatch):
    """The same search again, under the guide's name and flags, finds its rows and runs nothing."""
    folder, _, document = searched
    monkeypatch.chdir(folder)
    words = ["--config", DIGITS, "--exhaustive", *SMALL_SEARCH, "--json", "-", "--out", "run"]
    again = json.loads(run_script("analysis/benchmark_gpu.py", *words).out)
    assert again["trials"] == document["trials"]
    assert again["search"]["n_resumed"] >= len(document["trials"])


@pytest.mark.usefixtures("lent_server")
def test_another_search_in_the_same_folder_is_refused_with_the_remedy(searched, call):
    words = ["tune", DIGITS, "--exhaustive", "--batch-sizes", "16", "--device", "cpu", "--out", searched[0] / "run"]
    assert "--out" in call(*words, expect=2).err


def test_training_resumes_and_ends_where_one_run_ends(tmp_path, call, run_script):
    words = ["--epochs", "2", "--device", "cpu", "--out", "whole"]
    run_script("train.py", "--config", DIGITS, *words, "--json", "w.json")
    once = json.loads((tmp_path / "w.json").read_text())
    assert "--resume" in call("train", DIGITS, *words, expect=2).err
    assert json.loads(call("train", DIGITS, *words, "--resume", "--json", "-").out)["metrics"] == once["metrics"]
    assert once["metrics"]["accuracy"] > 0.8
    assert len(once["evaluations"]) == 2


def test_check_passes_what_works_and_fails_what_does_not(tmp_path, call):
    said = call("check", DIGITS, "data.batch_size=16", "--device", "cpu", "--json", "-")
    assert "16 samples forward" in said.out
    document = json.loads(said.out)
    assert document["n_problems"] == 0
    assert {"build", "one step", "memory", "validation"} <= {item["name"] for item in document["items"]}
    (tmp_path / "bad.yaml").write_text("model: small_cnn\ndata: {dataset: digits, batch_size: 5000}\n")
    assert "batch_size 5000 is larger than" in call("check", "bad.yaml", "--device", "cpu", expect=3).out


@pytest.mark.usefixtures("lent_server")
@pytest.mark.parametrize("command", ["tune", "train", "check"])
def test_what_is_wrong_in_a_configuration_is_named_with_its_place(tmp_path, call, command):
    (tmp_path / "key.yaml").write_text("model: small_cnn\ndata:\n  dataset: digits\n  batchsize: 8\n")
    assert re.search(r"key\.yaml:4.*batch_size", call(command, "key.yaml", expect=2).err)
    (tmp_path / "argument.yaml").write_text("data:\n  dataset: digits\n\nmodel: small_cnn(widht=3)\n")
    said = " ".join("".join(call(command, "argument.yaml", expect=3 if command == "check" else 2)).split())
    assert re.search(r"argument\.yaml:4: model: .*did you mean width", said)
    if torch.cuda.device_count() < 8:
        assert "cuda:7" in call(command, DIGITS, "--device", "cuda:7", "--out", "absent", expect=2).err
        assert not (tmp_path / "absent").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("lent_server")
def test_data_make_writes_what_tune_reads(call, run_script):
    call("data", "make", "events.h5", "--n-samples", "64", "--n-sensors", "24")
    config = ROOT / "configs" / "checking_gpu_optimization.yaml"
    words = ["--config", config, "--data-path", "events.h5", "--batch-sizes", "8", "--num-workers", "0", "--steps", "2"]
    words += ["benchmark.test_mixed_precision=false", "--device", "cpu"]
    done = run_script("analysis/benchmark_gpu.py", *words, "--json", "-")
    document = json.loads(done.out)
    assert document["picks"]["recommended"]["plan"]["batch_size"] == 8
    ran = [row["plan"] for row in document["trials"] if row["status"] != "skipped"]
    assert [(plan["batch_size"], plan["num_workers"]) for plan in ran] == [(8, 0)], "what was named"
    assert "`fulltilt tune` with the same flags tries" in done.err
    assert "--force" in call("data", "make", "events.h5", expect=2).err


@pytest.mark.slow
def test_a_workload_of_the_users_own_is_tuned_by_its_import_path(tmp_path, call):
    (tmp_path / "my_module.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\nimport fulltilt\n\n"
        "def build_data():\n    return TensorDataset(torch.randn(256, 8), torch.randint(2, (256,)))\n\n"
        "workload = fulltilt.Workload(\n    model=lambda: nn.Linear(8, 2),\n    dataset=build_data,\n"
        "    loss=nn.CrossEntropyLoss(),\n)\n"
    )
    levers = ["benchmark.levers={}", "benchmark.test_mixed_precision=false"]
    words = ["--batch-sizes", "32", "--num-workers", "0", *levers, "--steps", "2", "--device", "cpu", "--json", "-"]
    done = run_fulltilt("tune", "my_module:workload", *words, cwd=tmp_path)
    assert json.loads(done.stdout)["picks"]["recommended"]["plan"]["batch_size"] == 32
    assert "taken as yours: batch_size 32, AdamW, learning rate 0.001 (fulltilt's defaults)" in done.stderr
    call("train", "my_module:workload", "epochs=1", "--device", "cpu")
    call("check", "my_module:workload", "--device", "cpu")


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no thread waits for another")
def test_a_wait_policy_is_in_force_where_the_command_has_a_process_of_its_own_and_otherwise_it_is_said(tmp_path, call):
    words = ["train", DIGITS, "run.epochs=1", "speed.threads=2", "speed.wait_policy=passive", "--json", "-"]
    own = json.loads(run_fulltilt(*words, "--out", "own", cwd=tmp_path).stdout)
    late = json.loads(call(*words, "--out", "late").out)
    ranks = json.loads(call(*words, "run.n_ranks=2", "run.device=cpu", "--out", "ranks").out)
    said = ["wait_policy=passive is not in force" in " ".join(each["notes"]) for each in (own, late, ranks)]
    assert said == [False, True, False]


@pytest.mark.slow
@pytest.mark.usefixtures("lent_server")
def test_data_that_are_not_there_are_told_before_the_folder_of_another_search(tmp_path, call):
    claim = {"command": "tune", "results": ["trials.jsonl"]}
    with RunFolder(tmp_path / "run", fingerprint_parts={"workload": "another"}, **claim):
        (tmp_path / "run" / "trials.jsonl").touch()
    with pytest.raises(RunFolderError, match="workload"):
        RunFolder(tmp_path / "run", fingerprint_parts={"workload": "this one"}, **claim)
    config = ROOT / "configs" / "checking_gpu_optimization.yaml"
    said = call("tune", config, "--data-path", "none.h5", "--device", "cpu", "--out", "run", expect=2).err
    assert "none.h5 does not exist" in said
