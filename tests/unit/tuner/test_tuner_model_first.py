"""The model-first search on machines written here by hand: what it asks, what it avoids, where it gives way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from tests.unit.tuner.tuner_cases import build_bare_row

from fulltilt.levers import Facts, default_plan
from fulltilt.records import Plan
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.model_first import FULL, QUICK, model_first
from fulltilt.tuner.search.session import Session

BATCHES = tuple(2**i for i in range(14))
WORKERS = (0, 2, 4, 8, 12, 16)
BASE = default_plan({"batch_size": 32})
SPACE = Space(
    axes={"batch_size": BATCHES, "num_workers": WORKERS, "precision": ("fp32", "bf16"), "pin_memory": (False, True)},
    base=BASE, user_plan=BASE, facts=Facts(device_type="cuda", compute_capability=(9, 0), n_cores_usable=16),
    memory_gib=10.0,
)  # fmt: skip


@dataclasses.dataclass
class Machine:
    """Answers by hand-written rules."""

    device_s: float = 1e-4  # per sample in fp32, with 2 ms a step on top
    load_s: float = 1e-3  # per sample and worker
    gain: float = 3.0  # of bf16
    gib_per_sample: float = 0.004
    failing: tuple[str, ...] = ()  # kinds of probes that end with an error
    slows: Callable[[Plan, str], float] = lambda plan, kind: 1.0  # times the step's time
    most_workers: float = math.inf  # the loader of more than these fails
    gib_per_worker: float = 0.0
    half_width: float = 0.01  # of the interval of a run, as a share of its rate

    def __call__(self, plan, *, id, why, kind="end_to_end"):
        batch, n_workers = plan["batch_size"], plan["num_workers"]
        peak = self.compute_peak_gib(batch) + (self.gib_per_worker * n_workers if kind == "end_to_end" else 0.0)
        status = "ok"
        if kind != "device" and n_workers > self.most_workers:
            status = "out_of_memory"
        elif kind in self.failing:
            status = "error"
        elif kind not in ("loader", "memory") and peak > 12.0:
            status = "out_of_memory"
        rate, is_fake = batch / self.compute_step_s(plan, kind) / self.slows(plan, kind), kind == "memory"
        return build_bare_row(
            plan, kind, id=id, why=why, status=status, samples_per_s=rate, block_samples_per_s=(rate,),
            samples_per_s_ci95=(rate * (1 - self.half_width), rate * (1 + self.half_width)),
            memory_allocated_peak_gib=peak - 0.4 * is_fake, memory_reserved_peak_gib=None if is_fake else peak,
        )  # fmt: skip

    def compute_peak_gib(self, batch):
        return 0.5 + self.gib_per_sample * batch

    def compute_step_s(self, plan, kind="end_to_end"):
        batch, n_workers = plan["batch_size"], plan["num_workers"]
        device_s = 0.002 + batch * self.device_s / (self.gain if plan["precision"] == "bf16" else 1.0)
        load_s = batch * self.load_s / max(1, min(n_workers, 14)) + 0.0005
        if kind in ("device", "loader"):
            return device_s if kind == "device" else load_s
        return device_s + load_s if n_workers == 0 else max(device_s, load_s) * 1.02


def be_a_hill(plan, kind):
    """Whole runs alone show that batches in the middle are the fastest."""
    return 1 + 0.12 * abs(math.log2(plan["batch_size"] / 64)) if kind == "end_to_end" else 1.0


def search(machine, space=SPACE, effort=FULL):
    session = Session(machine, Journal())
    assert session.run(model_first(space, effort))
    return session


def find_fastest_rate(session):
    return max(row.samples_per_s or 0.0 for row in session.rows)


def find_best_rate(machine):
    fits = [plan for plan in SPACE.grid() if machine.compute_peak_gib(plan["batch_size"]) <= SPACE.memory_gib]
    return max(plan["batch_size"] / machine.compute_step_s(plan) for plan in fits)


@pytest.mark.parametrize(
    "machine",
    [Machine(load_s=1e-4), Machine(load_s=3e-3), Machine(load_s=5e-4), Machine(gain=0.7)],
    ids=["device-bound", "loader-bound", "balanced", "bf16 is slower"],
)
def test_it_ends_next_to_the_best_of_the_grid_in_few_runs(machine):
    session = search(machine)
    assert find_fastest_rate(session) >= 0.97 * find_best_rate(machine)
    assert len(session.rows) <= 10
    assert len(session.rows) + sum(row.kind != "memory" for row in session.probes) <= 24
    assert ({row.kind for row in session.probes}, {row.kind for row in session.rows}) == (
        {"device", "loader", "memory"},
        {"end_to_end"},
    )
    assert all(row.why for row in session.probes)
    device = [row.plan for row in session.probes if row.kind == "device"]
    assert {(plan["num_workers"], plan["pin_memory"]) for plan in device} == {(0, False)}


def test_on_a_noisy_machine_all_runs_are_made_that_the_search_may_make():
    """Where bf16 gains nothing the model is soon sure; blocks that differ by 12 % take that away."""
    quiet, noisy = (search(Machine(gain=0.7, half_width=half_width)) for half_width in (0.01, 0.12))
    assert len(quiet.rows) < len(noisy.rows) <= FULL.max_whole


def test_a_noisy_machine_is_looked_at_beyond_the_neighbours_of_the_best():
    def be_dented(plan, kind):
        """Batches of the third size are slow, by themselves and whole: the best lies behind them."""
        return {256: 1.5, 512: 0.9 if kind == "end_to_end" else 1.4}.get(plan["batch_size"], 1.0)

    space = dataclasses.replace(SPACE, axes={"batch_size": (64, 128, 256, 512), "num_workers": (0, 2)})
    noisy, quiet = (search(Machine(load_s=1e-7, half_width=width, slows=be_dented), space) for width in (0.12, 0.01))
    assert "the machine is noisy" in noisy.rows[-1].why
    assert {row.plan["batch_size"] for row in noisy.rows} == {64, 128, 256, 512}
    assert not any("noisy" in row.why for row in quiet.rows)


def test_a_noisy_machine_is_looked_at_for_as_long_as_runs_gain():
    class Ladder(Machine):
        """Probes call large batches faster, whole runs small ones."""

        def compute_step_s(self, plan, kind="end_to_end"):
            n_doublings = math.log2(plan["batch_size"] / 32)
            return plan["batch_size"] * 1e-4 * math.exp((0.05 if kind == "end_to_end" else -0.01) * n_doublings)

    axes = {"batch_size": tuple(32 * 2**i for i in range(12)), "num_workers": (0,)}
    space = dataclasses.replace(SPACE, axes=axes, memory_gib=math.inf)
    effort = dataclasses.replace(FULL, n_whole=1, n_polish=1, n_noisy=2, max_whole=7)
    rows = search(Ladder(half_width=0.12, gib_per_sample=0.0), space, effort).rows
    assert sum(row.why.startswith("the machine is noisy:") for row in rows) == 4
    assert rows == sorted(rows, key=lambda row: -row.plan["batch_size"])


def test_a_first_run_far_below_its_prediction_is_tried_from_page_locked_memory():
    """Copies that block the process are in no probe; the pinned plan looked slower by its loader and was never run."""

    def block(plan, kind):
        if plan["pin_memory"]:
            return 1.3 if kind == "loader" else 1.0
        return 2.5 if kind == "end_to_end" else 1.0

    first, second, *_ = rows = search(Machine(load_s=1e-4, slows=block)).rows
    assert not first.plan["pin_memory"]
    assert second.plan == first.plan.replace(pin_memory=True)
    assert "page-locked" in second.why
    assert max(rows, key=lambda row: row.samples_per_s).plan["pin_memory"]
    assert not any("page-locked" in row.why for row in search(Machine(load_s=1e-4)).rows), "it ran as predicted"


class Overlapping(Machine):
    """A process that launched a step makes the next batch meanwhile; handing batches over costs a third."""

    def compute_step_s(self, plan, kind="end_to_end"):
        if kind != "end_to_end":
            return super().compute_step_s(plan, kind)
        parts = [super(Overlapping, self).compute_step_s(plan, kind) for kind in ("device", "loader")]
        return max(parts) * (1.0 if plan["num_workers"] == 0 else 1.35)


def test_no_workers_are_tried_once_where_loading_may_overlap():
    rows = search(Overlapping(load_s=3e-5)).rows
    assert [row.plan["num_workers"] for row in rows if "if loading overlaps" in row.why] == [0]
    assert max(rows, key=lambda row: row.samples_per_s).plan["num_workers"] == 0
    on_cpu = dataclasses.replace(SPACE, facts=Facts(device_type="cpu", n_cores_usable=16))
    assert not any("overlaps" in row.why for row in search(Overlapping(load_s=3e-5), on_cpu).rows)


def test_the_way_that_gained_is_followed_before_other_neighbours():
    rows = search(Machine(load_s=1e-4, slows=be_a_hill)).rows
    first = next(number for number, row in enumerate(rows) if "next to the best" in row.why)
    followed = []
    for number in range(first, len(rows) - 1):
        best, row = max(rows[:number], key=lambda row: row.samples_per_s), rows[number]
        before, after = (BATCHES.index(found.plan["batch_size"]) for found in (best, row))
        if row.samples_per_s > 1.02 * best.samples_per_s and after != before:
            onward = BATCHES[after + (1 if after > before else -1)]
            assert rows[number + 1].plan == SPACE.with_value(row.plan, "batch_size", onward)
            followed.append(onward)
    assert followed


def test_after_a_gain_as_many_neighbours_run_again_but_other_workers_once_at_most():
    """Twelve are a sixth slower than sixteen at every batch, as the loader alone shows; each new best asked again."""
    rows = search(Machine(load_s=3e-3, slows=be_a_hill)).rows
    assert sum(row.plan["num_workers"] != 16 for row in rows) <= 1
    rates = [row.samples_per_s for row in rows if "next to the best" in row.why]
    assert 0 < rates.index(max(rates)) < len(rates) - FULL.min_polish + 1


@pytest.mark.parametrize(
    "compute_peak_gib",
    [
        pytest.param(lambda batch: 0.5 + 0.004 * batch, id="a line: 4096 would need 16.9 GiB"),
        pytest.param(lambda batch: 0.5 + 0.004 * batch + 0.05 * max(0, batch - 2048), id="far estimates refuse it"),
        pytest.param(lambda batch: max(4.0, 0.5 + 0.004 * batch), id="flat to 875: the chord says 10.9 GiB"),
    ],
)
def test_what_fits_is_run_up_to_the_largest_and_nothing_that_memory_is_predicted_not_to_hold(compute_peak_gib):
    """Peaks bend: a large batch that does not fit by far drew a line above many that do, and these were never run."""
    machine = Machine(load_s=1e-4)
    machine.compute_peak_gib = compute_peak_gib
    session = search(machine)
    rows = (*session.rows, *session.probes)
    assert not [row for row in rows if row.status == "out_of_memory"]
    assert max(row.plan["batch_size"] for row in rows if row.kind not in ("memory", "loader")) == 2048, "8.7 GiB"
    assert sum(row.kind == "memory" for row in session.probes) <= 12


def test_a_quick_search_stops_probing_when_its_time_is_over():
    full, quick = search(Machine()), search(Machine(), effort=dataclasses.replace(QUICK, probe_s=8.0))
    assert sum(row.seconds for row in quick.probes) <= 8.0 + 2.0, "the probe under way, and the first of the loader"
    assert {row.kind for row in quick.probes} == {"memory", "device", "loader"}
    assert len(quick.probes) < len(full.probes)
    assert len(quick.rows) <= QUICK.n_whole + QUICK.n_polish


@pytest.mark.parametrize(
    ("machine", "share"),
    [(Machine(load_s=1e-4, gib_per_sample=1e-6), 0.97), (Machine(load_s=1e-4, failing=("memory",)), 0.95)],
    ids=["memory decides nothing", "it climbs by real probes, without fake tensors"],
)
def test_one_estimate_of_memory_is_enough_where_it_decides_nothing_or_fails(machine, share):
    session = search(machine)
    assert sum(row.kind == "memory" for row in session.probes) == 1
    assert find_fastest_rate(session) >= share * find_best_rate(machine)


def test_a_loader_that_costs_nothing_is_probed_once():
    machine = Machine()
    machine.compute_step_s = lambda plan, kind="end_to_end": (
        1e-6 * plan["batch_size"] if kind == "loader" else 0.002 + 1e-3 * plan["batch_size"]
    )
    assert sum(row.kind == "loader" for row in search(machine).probes) == 1


def test_workers_whose_loader_failed_alone_are_not_run_whole_and_their_memory_is_not_held_against_the_batch():
    machine = Machine(load_s=3e-3, most_workers=8)
    session = search(machine)
    assert not [row for row in session.rows if row.status == "out_of_memory"]
    assert find_fastest_rate(session) >= 0.55 * find_best_rate(machine), "8 of 14 useful workers"
    rows = search(Machine(load_s=1e-4, gib_per_worker=0.6)).rows
    assert max(row.plan["batch_size"] for row in rows if row.status == "ok") >= 1024


class Deceiving(Machine):
    """Whole runs have nothing to do with the probes."""

    def compute_step_s(self, plan, kind="end_to_end"):
        if kind in ("device", "loader"):
            return super().compute_step_s(plan, kind)
        return plan["batch_size"] * (1.0 + 30.0 * (plan["num_workers"] != 4) + 20.0 * (plan["precision"] == "bf16"))


def err_by_turns(plan, kind):
    """Errors of either sign are no shared one, which would not disturb the ranking."""
    errs = 4.0 if (plan["batch_size"].bit_length() + plan["num_workers"]) % 3 else 0.2
    return errs if kind == "end_to_end" else 1.0


@pytest.mark.parametrize(
    ("machine", "share"),
    [(Machine(failing=("device",)), 0.9), (Deceiving(), 1 - 1e-6), (Machine(slows=err_by_turns), 0.0)],
)
def test_where_no_probe_runs_or_the_model_errs_throughout_coordinate_descent_takes_over(machine, share):
    session = search(machine)
    assert find_fastest_rate(session) >= share * find_best_rate(machine)
    assert any("round 1: " in row.why for row in session.rows)


def test_a_search_that_is_started_again_asks_nothing_twice(tmp_path):
    def run(target):
        with RunFolder(tmp_path, fingerprint_parts={}, command="tune", results=["trials.jsonl"]) as folder:
            session = Session(target, Journal(folder))
            session.run(model_first(SPACE))
        return [row.id for row in (*session.probes, *session.rows)]

    def refuse(plan, *, kind="end_to_end", **_):
        raise AssertionError(f"asked again for {kind}: {plan}")

    assert run(Machine()) == run(refuse) != []
