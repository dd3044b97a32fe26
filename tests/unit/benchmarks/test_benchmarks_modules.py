"""Every benchmark can be found without the peers, and every result file belongs to one that is still there."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks import _runner
from benchmarks.__main__ import main
from benchmarks._runner import (
    RESULTS,
    ROOT,
    Code,
    Context,
    Findings,
    find_benchmarks,
    read_code,
    run_benchmark,
)
from benchmarks._schema import BenchmarkResult, build_arm, compute_bounds, judge

from fulltilt.records import loads

DELIVERED = {
    "batch_finders", "bilm", "checkpoint_stall", "cifar10_recipe", "cli_start", "data_path", "ddp_efficiency",
    "lever_memory", "loop_overhead", "memory_prediction", "mode_cost", "plan_quality",
    "retain_memory", "search_repeat", "search_replay", "simclr", "trial_startup", "tuner_peers",
}  # fmt: skip
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
CHAOS = ROOT / "tests" / "chaos" / "test_chaos_lab.py"
PEERS = ("lightning", "accelerate", "pytorch_autotune", "optuna", "timm")

FIND_WITHOUT_PEERS = f"""
import importlib.abc, json, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {PEERS!r}:
            raise ImportError(name + " is not installed here")

sys.meta_path.insert(0, Refuse())
from benchmarks._runner import find_benchmarks
print(json.dumps(list(find_benchmarks())))
"""


def test_all_benchmarks_are_found_where_no_peer_can_be_imported():
    done = subprocess.run([sys.executable, "-c", FIND_WITHOUT_PEERS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) >= DELIVERED


def test_every_benchmark_says_what_it_claims_and_stands_in_the_documentation():
    for name, module in find_benchmarks().items():
        assert module.CLAIM.endswith("."), name
        assert isinstance(module.NEEDS_PEERS, bool)
        assert module.DEVICES
        assert set(module.DEVICES) <= {"cpu", "cuda"}
        assert module.__doc__
        assert f"| `{name}` |" in PAGE


def test_every_result_file_holds_a_result_of_a_benchmark_that_exists():
    for path in sorted(RESULTS.glob("*")):
        result = loads(BenchmarkResult, path.read_text(encoding="utf-8"))
        assert path.name == f"{result.name}-{result.device}.json"
        assert result.arms
        check_figures(result)
        if module := find_benchmarks().get(result.name):
            assert result.claim == module.CLAIM
            assert result.device in module.DEVICES
        elif result.name == "chaos_lab":
            assert result.claim in CHAOS.read_text("utf-8"), "a test of that claim writes it"
        else:
            assert f"| `{result.name}` | `{result.commit}` |" in PAGE, "a benchmark that is gone names its revision"


def check_figures(result: BenchmarkResult) -> None:
    """Every figure follows from its samples, every judgement from its interval."""
    for arm in result.arms:
        assert len(set(arm.clusters) or arm.samples) == arm.n
        assert arm.median == pytest.approx(statistics.median(arm.samples))
        for stated, computed in zip(arm.ci95, compute_bounds(arm.samples, clusters=arm.clusters), strict=True):
            assert stated == (computed if computed is None else pytest.approx(computed))
    for target in result.targets:
        limits = {target.comparison.replace(" ", "_"): target.limit}
        assert judge(target.name, target.measured, target.ci95, **limits).met == target.met


ARM = build_arm([1.0, 2.0, 3.0], case="c", arm="a", metric="seconds", unit_of_replication="run")
FINDINGS = Findings(arms=(ARM,), targets=(judge("t", 2.0, ARM.ci95, at_most=2.5),), notes=("n",))


def test_figures_that_do_not_follow_from_their_samples_are_seen():
    wrong = dataclasses.replace(FINDINGS, arms=(dataclasses.replace(ARM, median=1.5),))
    result = run_benchmark("made_up", build_benchmark(lambda context: wrong), Context(device="cpu", quick=True))
    with pytest.raises(AssertionError):
        check_figures(result)


def build_benchmark(run) -> SimpleNamespace:
    return SimpleNamespace(CLAIM="It runs.", NEEDS_PEERS=False, DEVICES=("cpu",), run=run)


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
def test_a_result_names_the_commit_of_its_code_and_whether_that_was_changed(tmp_path):
    root = tmp_path / "checkout"

    def git(*words):
        who = ("-c", "user.name=n", "-c", "user.email=n@example.com", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, text=True).stdout

    (root / "benchmarks" / "results").mkdir(parents=True)
    code = root / "code.py"
    code.write_text("x = 1\n")
    assert read_code(root, code) == read_code(root / "benchmarks", code) == Code(), (
        "no checkout, or code from elsewhere"
    )
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "one"]):
        git(*words)
    found = read_code(root, code)
    assert git("rev-parse", "HEAD").startswith(found.commit)
    assert (len(found.commit) >= 10, found.is_dirty) == (True, False)
    (root / "benchmarks" / "results" / "made_up-cpu.json").write_text("{}")
    assert read_code(root, code) == found, "a result that another benchmark wrote is no code"
    (root / "more.py").write_text("x = 2\n")
    assert read_code(root, code) == Code(commit=found.commit, is_dirty=True)
    (root / "more.py").unlink()
    code.write_text("x = 2\n")
    assert read_code(root, code).is_dirty is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cli_strat"], "cli_start"),
        ([], "give names"),
        (["trial_startup", "--device", "cuda"], "runs on cpu"),
        (["cli_start", "--all"], "not both"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_gpu_that_is_not_there_is_told_once_and_before_anything_runs(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--all", "--device", "cuda"])
    assert stopped.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(("n_gpus", "is_skipped"), [(0, True), (1, True), (2, False)])
def test_a_benchmark_of_two_gpus_is_skipped_by_name_with_fewer(monkeypatch, capsys, n_gpus, is_skipped):
    ran = []
    module = find_benchmarks()["ddp_efficiency"]
    monkeypatch.setattr(module, "run", lambda context: ran.append(context.device) or FINDINGS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr("fulltilt.engine.build.builder.check_device", lambda device: None)
    assert main(["ddp_efficiency", "--device", "cuda", "--quick"]) == 0
    said = (
        f"ddp_efficiency: skipped on cuda: its 2 ranks join over NCCL and need a GPU each; this machine shows {n_gpus}"
    )
    assert (said in capsys.readouterr().out) == is_skipped
    assert ran == ([] if is_skipped else ["cuda"])
    assert module.find_obstacle(Context(device="cpu", quick=True)) is None
    assert module.list_devices("cuda") == ("cuda:0", "cuda:1")
    assert module.list_devices("cpu") == ("cpu", "cpu")


def test_a_quick_run_writes_no_result(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(_runner, "RESULTS", tmp_path)
    asked = []
    made_up = build_benchmark(lambda context: asked.append(context) or FINDINGS)
    monkeypatch.setattr("benchmarks.__main__.find_benchmarks", lambda: {"made_up": made_up})
    assert main(["made_up", "--quick"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "nothing was written" in capsys.readouterr().out
    assert main(["made_up"]) == 0
    assert asked == [Context(device="cpu", quick=True), Context(device="cpu", quick=False)]
    result = loads(BenchmarkResult, (tmp_path / "made_up-cpu.json").read_text(encoding="utf-8"))
    assert (result.arms, result.targets, result.notes) == (FINDINGS.arms, FINDINGS.targets, FINDINGS.notes)
    assert result.command == "python -m benchmarks made_up --device cpu"
    assert result.versions.keys() >= {"fulltilt", "torch", "numpy", "python"}
    assert result.seconds > 0
