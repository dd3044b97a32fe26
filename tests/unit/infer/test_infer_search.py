"""The search itself on a machine that is made up, and the arms and the builder as real processes."""

import dataclasses
import json
import math
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.infer.test_infer_search_pure import CATALOGUE, FACTS

from fulltilt.errors import FulltiltError, StorageError, UsageError
from fulltilt.hardware import is_process_stopped
from fulltilt.infer.manifest import InputSpec, Manifest, Policy
from fulltilt.infer.search import arm, bench
from fulltilt.infer.search.bench import Built, Group, ProcessBench
from fulltilt.infer.search.candidates import build_baseline
from fulltilt.infer.search.journal import Journal, OverError
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.result import Live, choose
from fulltilt.infer.search.search import Search
from fulltilt.records import decode, encode
from fulltilt.stats import Turns

GOAL = Goal()
SPEED = {"eager fp32": 1.0, "onnx fp32": 1.3, "onnx int8": 2.5, "eager int8": 0.8}


class MadeUpBench:
    """Measures by a formula with noise, in virtual time, with the journal of a real search.

    A candidate named in ``faults`` fails where it is built ("build") or measured ("arm"), or is refused. Each step
    takes ``slowing`` times as long as the last one of its kind.
    """

    def __init__(
        self,
        folder,
        *,
        lengths=(1,) * 32,
        build_s=5.0,
        noise=0.01,
        faults=(),
        slowing=1.0,
        accept_s=25.0,
        open_s=1.0,
        opens_s=(),
    ):
        self.lengths, self.build_s, self.noise, self.faults = lengths, build_s, noise, dict(faults)
        self.slowing, self.accept_s, self.open_s, self.now_s = slowing, accept_s, open_s, 0.0
        self.opens_s = dict(opens_s)
        self.asked, self.rng = [], random.Random(3)
        self.journal = Journal(folder, clock=lambda: self.now_s)

    @property
    def spent_s(self):
        return self.journal.spent_s

    def _take(self, seconds, answer, question, time_s):
        self.asked.append(question)
        factor = self.slowing ** len(self.asked)

        def find(limit_s):
            self.now_s += min(limit_s, seconds * factor)
            if seconds * factor > limit_s:
                raise OverError
            return encode(answer)

        return decode(type(answer), self.journal.ask(question, find, **time_s))

    def build(self, name, plan, **time_s):
        fault, seconds = self.faults.get(name), self.build_s
        built = Built(manifest=build_manifest(), facts=FACTS, seconds=seconds)
        if fault in ("build", "refuse"):
            built = Built(status="failed" if fault == "build" else "refused", reason="it cannot", seconds=seconds)
        return self._take(seconds, built, f"build {name}", time_s)

    def measure(self, question, stages, seconds, **time_s):
        arms = [*stages[0]]
        open_s = sum(self._find_open_s(arm) for arm in arms)
        took_s = open_s + sum(self._find_stage_s(*each, seconds) for stage in stages for each in stage.items())
        group = Group(open_s=open_s, seconds=took_s, **self._describe(arms, stages))
        for name in arms:
            if self.faults.get(name) == "arm":
                group = Group(failed=(name, "failed", "it crashed"))
        return self._take(took_s, group, f"{question}: {', '.join(arms)}", time_s)

    def accept(self, row, goal, **time_s):
        load = {"requests_per_s": goal.requests_per_s, "quantile": goal.quantile, "limit_s": goal.limit_s}
        return self._take(self.accept_s, Live(verdict="met", measured_s=0.01, **load), f"accept {row.name}", time_s)

    def _describe(self, arms, stages):
        drift = math.exp(self.rng.gauss(0, 0.2))
        turns = [
            {a: Turns(samples_per_s=drift * self._rate(a, o), stalled_pct=0.0) for a, o in s.items()} for s in stages
        ]
        said = {"memory_gib": 0.3, "lengths": list(self.lengths)}
        return {"stages": tuple(turns), "arms": {a: said | {"cold_start_s": self._find_open_s(a)} for a in arms}}

    def _find_stage_s(self, name, order, seconds):
        pass_s = order["n_samples"] / self._rate(name, order) if "policy" in order else 0.0
        return max(2 * seconds, 5 * pass_s)

    def _find_open_s(self, name):
        return self.opens_s.get(name, self.open_s)

    def _rate(self, name, order):
        speed = SPEED[name.partition(",")[0]] * (1.2 if "1 thread" in name else 1.0)
        noise = math.exp(self.rng.gauss(0, self.noise))
        if "policy" in order:
            policy = decode(Policy, order["policy"])
            return noise * speed * 1000 / np.mean(self.lengths) * (1 - 0.5 / policy.max_batch)
        batch, length = order["batch"], order["length"] or max(self.lengths)
        return noise * speed * 1000 / length * (1 - 0.5 / batch)


def build_manifest():
    nothing = {"plan": {}, "device": "cpu", "inputs": (), "max_length": None, "built_with": {}}
    return Manifest(name="", n_parameters=1, files={}, config={}, **nothing)


def search(made_up, *, budget_s=600.0, goal=GOAL):
    found = Search(bench=made_up, catalogue=CATALOGUE, own={"threads": None}, goal=goal, budget_s=budget_s)
    found.run()
    return found


def test_the_response_of_a_model_that_writes_is_not_searched(tmp_path, monkeypatch):
    manifest = dataclasses.replace(build_manifest(), writes_text=True)
    monkeypatch.setattr(sys.modules[__name__], "build_manifest", lambda: manifest)
    with pytest.raises(UsageError, match=r"until the last word .* targets\.response_s=null"):
        search(MadeUpBench(tmp_path / "a"), goal=Goal(limit_s=1.0, requests_per_s=2.0))
    assert search(MadeUpBench(tmp_path / "b")).offered, "how many samples a second it answers is"


def test_the_fastest_is_found_proven_and_the_slower_ones_say_why(tmp_path):
    found = search(MadeUpBench(tmp_path))
    best = max(found.offered, key=lambda row: row.samples_per_s)
    assert best.name == "onnx int8, 1 thread"
    low_pct, high_pct = best.gain.ci_pct
    assert low_pct < 100 * (SPEED["onnx int8"] * 1.2 - 1) < high_pct
    assert best.gain.verdict == "faster"
    assert found.candidates["eager int8"].status in ("behind", "slower")
    assert found.candidates["eager fp32"].status == "baseline"
    assert best.policy.max_batch > 1


def test_the_levers_beside_the_engine_are_tried_on_the_best_alone(tmp_path):
    made_up = MadeUpBench(tmp_path)
    search(made_up)
    built = [asked for asked in made_up.asked if asked.startswith("build") and "thread" in asked]
    assert built == ["build onnx int8, 1 thread", "build onnx fp32, 1 thread", "build eager fp32, 1 thread"]


@pytest.mark.parametrize(("fault", "status"), [("build", "failed"), ("arm", "failed"), ("refuse", "refused")])
def test_a_candidate_that_fails_is_an_outcome_and_the_others_go_on(tmp_path, fault, status):
    found = search(MadeUpBench(tmp_path, faults={"onnx int8": fault, "onnx int8, 1 thread": fault}))
    row = found.candidates["onnx int8"]
    assert row.status == status
    assert row.reason in ("it cannot", "it crashed")
    assert max(found.offered, key=lambda row: row.samples_per_s).name == "onnx fp32, 1 thread"


@pytest.mark.parametrize("fault", ["build", "arm"])
def test_without_eager_there_is_no_search(tmp_path, fault):
    with pytest.raises(FulltiltError, match=r"eager fp32 cannot be measured.*it c"):
        search(MadeUpBench(tmp_path, faults={"eager fp32": fault}))


def test_what_is_no_faster_than_eager_is_not_offered(tmp_path, monkeypatch):
    for name in SPEED:
        monkeypatch.setitem(SPEED, name, 1.0)
    made_up = MadeUpBench(tmp_path)
    monkeypatch.setattr(made_up, "_rate", lambda name, order: 1000 * math.exp(made_up.rng.gauss(0, 0.01)))
    found = search(made_up)
    assert [row.name for row in found.offered] == ["eager fp32"]
    reasons = [row.reason for row in found.candidates.values() if row.status == "slower"]
    assert reasons
    assert all(reason.startswith("not proven faster than eager fp32 (") for reason in reasons)


def test_a_small_budget_leaves_candidates_untried_and_still_ends_with_an_answer(tmp_path):
    found = search(MadeUpBench(tmp_path, build_s=20.0), budget_s=100.0)
    assert found.candidates["eager int8"].status == "untried"
    assert found.candidates["eager int8"].reason == "the budget left no time before it was built"
    assert max(found.offered, key=lambda row: row.samples_per_s).name.startswith("onnx int8")


@pytest.mark.parametrize(("open_s", "budget_s"), [(1.0, 120.0), (1.0, 150.0), (8.0, 120.0)])
def test_time_for_one_proof_is_kept_where_the_budget_is_small(tmp_path, open_s, budget_s):
    """On a GPU a process needs 8 s before it answers."""
    found = search(MadeUpBench(tmp_path, build_s=12.0, open_s=open_s), budget_s=budget_s)
    assert max(found.offered, key=lambda row: row.samples_per_s).name.startswith("onnx int8")


@pytest.mark.parametrize(("open_s", "budget_s"), [(4.0, 70.0), (4.0, 80.0), (6.0, 100.0), (8.0, 120.0)])
def test_where_there_is_no_time_for_a_whole_group_fewer_are_measured(tmp_path, open_s, budget_s):
    found = search(MadeUpBench(tmp_path, open_s=open_s), budget_s=budget_s)
    assert "onnx int8" in [row.name for row in found.offered]


@pytest.mark.parametrize("budget_s", [60.0, 240.0, 600.0])
@pytest.mark.parametrize("slowing", [1.0, 1.1, 1.5])
def test_a_budget_is_kept_whatever_the_steps_take(tmp_path, budget_s, slowing):
    made_up = MadeUpBench(tmp_path, build_s=15.0, slowing=slowing)
    found = search(made_up, budget_s=budget_s, goal=Goal(requests_per_s=200.0, limit_s=1.0))
    assert made_up.spent_s <= max(1.1 * budget_s, budget_s + 20.0)
    assert all(row.reason for row in found.candidates.values() if row.status == "untried")
    assert found.offered[0].policy is not None


def test_loads_have_their_part_of_the_budget(tmp_path):
    goal = Goal(requests_per_s=200.0, limit_s=1.0)
    found = search(MadeUpBench(tmp_path, build_s=15.0, accept_s=20.0), budget_s=150.0, goal=goal)
    assert max(found.offered, key=lambda row: row.score(goal)).live is not None


def accept_by(found, monkeypatch, **verdicts):
    """Have loads end as ``verdicts`` say, of eager and of the others."""

    def accept(row, goal, **time_s):
        load = {"requests_per_s": goal.requests_per_s, "quantile": goal.quantile, "limit_s": goal.limit_s}
        return Live(**load, **verdicts["eager" if row.name == "eager fp32" else "others"])

    monkeypatch.setattr(found, "accept", accept)
    return found


MET, MISSED = ({"verdict": verdict, "measured_s": 0.5, "n_responses": 900} for verdict in ("met", "missed"))


@pytest.mark.parametrize(
    ("others", "status", "reason"),
    [
        (MISSED, "refused", "missed under load: too many responses were late"),
        ({"verdict": "not proven", "why": "the server is not ready"}, "failed", "could not be loaded: the server is"),
    ],
)
def test_where_no_candidate_can_be_served_within_the_limit_eager_is_loaded_too(
    tmp_path, monkeypatch, others, status, reason
):
    goal = Goal(requests_per_s=200.0, limit_s=1.0)
    found = search(accept_by(MadeUpBench(tmp_path), monkeypatch, eager=MET, others=others), goal=goal)
    rows = [row for row in found.candidates.values() if (row.reason or "").startswith(reason)]
    assert [row.status for row in rows] == [status] * 3
    assert [row.name for row in found.offered] == ["eager fp32"]
    assert choose(found.offered, goal).live.verdict == "met"


def test_a_load_that_decides_nothing_leaves_a_candidate_offered(tmp_path, monkeypatch):
    open_end = {"verdict": "not proven", "measured_s": 0.5, "n_responses": 90, "why": "the load generator was late"}
    found = accept_by(MadeUpBench(tmp_path), monkeypatch, eager=MISSED, others=open_end)
    found = search(found, goal=Goal(requests_per_s=200.0, limit_s=1.0))
    assert len(found.offered) == 4


@pytest.mark.parametrize(
    ("slow", "budget_s", "n_proven"),
    [
        (("onnx fp32", "onnx fp32, 1 thread"), 180.0, 1),
        (("onnx fp32", "onnx fp32, 1 thread"), 360.0, 2),
        (("onnx int8", "onnx int8, 1 thread"), 420.0, 1),
        ((), 180.0, 3),
    ],
    ids=["others are fast", "others are fast, more time", "the best are slow", "none"],
)
def test_candidates_that_open_slowly_do_not_keep_the_others_from_being_proven(tmp_path, slow, budget_s, n_proven):
    """The time that a proof takes was that of the arms before, so that none was proven beside a compiled model."""
    made_up = MadeUpBench(tmp_path, lengths=(4, 8, 16, 128) * 32, build_s=3.0, opens_s=dict.fromkeys(slow, 40.0))
    found = search(made_up, budget_s=budget_s)
    assert sum(row.status == "offered" for row in found.candidates.values()) >= n_proven
    assert choose(found.offered, GOAL).name.startswith("onnx int8")
    assert made_up.spent_s <= budget_s + 1


@pytest.mark.parametrize(("slow", "open_s", "budget_s"), [("onnx fp32", 60, 180), ("eager int8", 120, 240)])
def test_one_for_which_there_is_no_time_does_not_end_the_look_at_those_behind_it(tmp_path, slow, open_s, budget_s):
    found = search(MadeUpBench(tmp_path, build_s=3.0, opens_s={slow: open_s}), budget_s=budget_s)
    assert "onnx int8, 1 thread" in [row.name for row in found.offered]
    assert "untried" not in [row.status for row in found.candidates.values()]


# Arms and builder as processes


FAKE = """
import dataclasses, json, os, signal, time
from pathlib import Path
import numpy as np
from fulltilt.infer.manifest import InputSpec, Manifest, Policy

@dataclasses.dataclass
class Artefact:
    manifest: object
    samples: tuple
    notes: tuple
    fault: str
    seconds: float

    def answer(self, samples):
        if self.fault == "dies" and len(samples) > 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(self.seconds * len(samples))
        if self.fault == "takes memory":
            np.ones(2**26, np.float32)
        return list(samples)

def open_artefact(folder):
    said = json.loads((Path(folder) / "fake.json").read_text())
    inputs = (InputSpec(name="x", dtype="float32", shape=(None,)),)
    manifest = Manifest(name="", plan={}, device="cpu", inputs=inputs, max_length=8, built_with={},
        n_parameters=1, files={}, config={})
    samples = tuple((np.zeros(n, np.float32),) for n in (2, 4, 8))
    return Artefact(manifest, samples, tuple(said.get("notes", ())), said.get("fault", ""), said["seconds"])
"""


def make_artefact(folder: Path, seconds: float, **said) -> Path:
    folder.mkdir(parents=True)
    (folder / "fake.json").write_text(json.dumps({"seconds": seconds, **said}))
    return folder


@pytest.fixture
def fake_artefacts(tmp_path, monkeypatch):
    """Processes that are started find an artefact module without any engine, before the real one."""
    package = tmp_path / "path"
    package.mkdir()
    (package / "sitecustomize.py").write_text(
        "import sys, types\n"
        "module = types.ModuleType('fulltilt.infer.artefact')\n"
        "def load(name):\n"
        "    if name.startswith('__'):\n"
        "        raise AttributeError(name)\n"
        f"    exec({FAKE!r}, module.__dict__)\n"
        "    return module.__dict__[name]\n"
        "module.__getattr__ = load\n"
        "sys.modules['fulltilt.infer.artefact'] = module\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{package}:{':'.join(p for p in sys.path if p)}")
    return tmp_path


ORDER = {"batch": 2, "length": None}


def test_arms_take_turns_and_stand_still_in_between(fake_artefacts):
    folders = {name: make_artefact(fake_artefacts / name, s) for name, s in (("fast", 0.002), ("slow", 0.004))}
    with bench.open_artefacts(folders, fake_artefacts) as arms:
        for each in arms.values():
            each.order = json.dumps(ORDER)
        blocks = {name: each.run_block() for name, each in arms.items()}
        pids = [each._watch.pid for each in arms.values()]
        while not all(is_process_stopped(pid) for pid in pids):  # the signal arrives a moment later
            time.sleep(0.01)
        assert arms["fast"].reply["lengths"] == [2, 4, 8]
        assert 0 < arms["fast"].reply["memory_gib"] < 0.3, "no torch in there"
    assert blocks["fast"].n_samples > blocks["slow"].n_samples > 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_memory_is_the_most_while_it_answers_and_not_what_is_left_behind_a_block(fake_artefacts):
    group = measure_one(fake_artefacts, make_artefact(fake_artefacts / "one", 0.001, fault="takes memory"))
    assert 0.25 < group.arms["one"]["memory_gib"] < 0.45


def measure_one(tmp_path, folder, limit_s=60.0):
    process_bench = ProcessBench(tmp_path, {}, Journal(tmp_path))
    process_bench.find_artefact = lambda name: folder
    return process_bench.measure("one", [{"one": ORDER}], 0.1, limit_s=limit_s)


@pytest.mark.parametrize(
    ("said", "reason"),
    [({"fault": "dies"}, "SIGSEGV"), ({"notes": ["another torch"]}, "another torch")],
    ids=["crash", "fallback"],
)
def test_an_arm_that_ends_says_why(fake_artefacts, said, reason):
    group = measure_one(fake_artefacts, make_artefact(fake_artefacts / "one", 0.0, **said))
    assert group.failed[:2] == ("one", "error")
    assert reason in group.failed[2]


def test_an_arm_is_ended_when_the_time_is_over(fake_artefacts):
    folder = make_artefact(fake_artefacts / "one", 60.0)
    with pytest.raises(OverError):
        measure_one(fake_artefacts, folder, limit_s=2.0)


INPUTS = (InputSpec(name="ids", dtype="int64", shape=(None,)), InputSpec(name="x", dtype="float32", shape=(3,)))
SAMPLES = [(np.arange(n), np.zeros(3)) for n in (5, 2, 9, 3)]


def test_batches_of_an_order_are_of_one_shape_or_by_policy():
    manifest = dataclasses.replace(build_manifest(), inputs=INPUTS, policy=Policy(max_batch=2))
    shaped = arm.build_batches(SAMPLES, manifest, {"batch": 6, "length": 4})
    assert [[sample[0].shape for sample in batch] for batch in shaped] == [[(4,)] * 6]
    assert all(sample[1].shape == (3,) for sample in shaped[0])
    by_length = arm.build_batches(SAMPLES, manifest, {"policy": {}, "n_samples": 4})
    assert sorted(sorted(len(s[0]) for s in batch) for batch in by_length) == [[2, 9], [3, 5]]


def test_a_block_has_whole_passes_of_a_tenth_of_a_second_after_some_untimed_calls():
    now, answered = [0.0], []

    def answer(batch):
        answered.append(len(batch))
        now[0] += 0.01

    block = arm.take_block(answer, [[1], [1, 2], [1, 2, 3]], clock=lambda: now[0])
    assert (block.n_samples, block.seconds) == (4 * 6, pytest.approx(0.12))
    assert answered == [1, 1] + [1, 2, 3] * 4


def test_what_becomes_of_a_build_is_an_answer_that_is_kept(tmp_path, monkeypatch):
    from fulltilt.errors import DeviceMemoryError

    def run_out(request, **_):
        raise DeviceMemoryError("no room")

    monkeypatch.setattr(bench, "run_measuring", run_out)
    plan = build_baseline(CATALOGUE, {})
    built = ProcessBench(tmp_path, {}, Journal(tmp_path)).build("eager fp32", plan)
    assert (built.status, built.reason) == ("out_of_memory", "no room")
    monkeypatch.setattr(bench, "run_measuring", lambda request, **_: pytest.fail("it is known"))
    assert ProcessBench(tmp_path, {}, Journal(tmp_path)).build("eager fp32", plan) == built


def test_eager_is_built_however_long_that_takes_and_others_within_the_time_that_is_left(tmp_path, monkeypatch):
    def build(request, *, deadline_s, **_):
        deadlines_s.append(deadline_s)
        return encode(Built(manifest=build_manifest(), facts=FACTS, seconds=1.0)) | {"failures": []}

    deadlines_s, plan = [], build_baseline(CATALOGUE, {})
    monkeypatch.setattr(bench, "run_measuring", build)
    for name, limit_s in (("eager fp32", math.inf), ("a", 7200.0), ("b", 90.0)):
        assert ProcessBench(tmp_path, {}, Journal(tmp_path)).build(name, plan, limit_s=limit_s).manifest is not None
    assert deadlines_s == [math.inf, bench.BUILD_LIMIT_S, 90.0]


def test_a_build_that_fails_on_a_full_disk_is_no_answer(tmp_path, monkeypatch):
    def fail(request, **_):
        raise FulltiltError("file write failed")

    monkeypatch.setattr(bench, "run_measuring", fail)
    monkeypatch.setattr(bench.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    with pytest.raises(StorageError, match=r"has no space left \(file write failed\); make room"):
        ProcessBench(tmp_path, {}, Journal(tmp_path)).build("eager fp32", build_baseline(CATALOGUE, {}))
    monkeypatch.undo()
    monkeypatch.setattr(bench, "run_measuring", fail)
    built = ProcessBench(tmp_path, {}, Journal(tmp_path)).build("eager fp32", build_baseline(CATALOGUE, {}))
    assert (built.status, built.reason) == ("failed", "file write failed")
