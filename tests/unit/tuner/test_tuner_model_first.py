"""The model-first search on machines written here by hand: what it asks, what it avoids, where it gives way."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fulltilt.levers import Facts, default_plan
from fulltilt.records import PROBES, Measurement, Plan
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.model_first import FULL, QUICK, model_first
from fulltilt.tuner.search.session import Session
from fulltilt.tuner.search.strategies import count_finalists
from fulltilt.tuner.trials.rows import build_row

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
    """Answers by hand-written rules; ``asked`` keeps (kind, plan)."""

    device_s: float = 1e-4  # per sample in fp32, with 2 ms a step on top
    load_s: float = 1e-3  # per sample and worker
    gain: float = 3.0  # of bf16
    gib_per_sample: float = 0.004
    fake_fails: bool = False
    device_fails: bool = False
    deceives: bool = False  # whole runs have nothing to do with the probes
    most_workers: int | None = None  # the loader of more than these fails
    gib_per_worker: float = 0.0
    half_width: float = 0.01  # of the interval of a run, as a share of its rate

    def __post_init__(self):
        self.asked: list[tuple[str, Plan]] = []

    def __call__(self, plan, *, id, why, kind="end_to_end"):
        self.asked.append((kind, plan))
        batch, n_workers = plan["batch_size"], plan["num_workers"]
        peak = self.compute_peak_gib(batch) + (self.gib_per_worker * n_workers if kind == "end_to_end" else 0.0)
        failure = None
        if kind != "device" and self.most_workers is not None and n_workers > self.most_workers:
            failure = ("out_of_memory", "no space left in /dev/shm")
        elif (kind == "memory" and self.fake_fails) or (kind == "device" and self.device_fails):
            failure = ("error", "refused")
        elif kind not in ("loader", "memory") and peak > 12.0:
            failure = ("out_of_memory", "too large")
        if failure is not None:
            return build_row(plan, id=id, why=why, kind=kind, status=failure[0], reason=failure[1], seconds=1.0)
        rate = batch / self.compute_step_s(plan, kind)
        measured = Measurement(
            phases_ms=None, samples_per_s=rate,
            samples_per_s_ci95=(rate * (1 - self.half_width), rate * (1 + self.half_width)),
            block_samples_per_s=(rate,), n_steps=8, n_warmup_steps=2,
            memory_allocated_peak_gib=peak - 0.4 if kind == "memory" else peak,
            memory_reserved_peak_gib=None if kind == "memory" else peak,
            observed={"batch_size": batch},
        )  # fmt: skip
        return build_row(plan, id=id, why=why, kind=kind, status="ok", reason=None, measurement=measured, seconds=1.0)

    def compute_peak_gib(self, batch):
        return 0.5 + self.gib_per_sample * batch

    def compute_step_s(self, plan, kind="end_to_end"):
        batch, n_workers = plan["batch_size"], plan["num_workers"]
        device_s = 0.002 + batch * self.device_s / (self.gain if plan["precision"] == "bf16" else 1.0)
        load_s = batch * self.load_s / max(1, min(n_workers, 14)) + 0.0005
        if kind == "device":
            return device_s
        if kind == "loader":
            return load_s
        if self.deceives:
            return batch * (1.0 + 30.0 * (n_workers != 4) + (20.0 if plan["precision"] == "bf16" else 0.0))
        return device_s + load_s if n_workers == 0 else max(device_s, load_s) * 1.02


class Hill(Machine):
    """Whole runs alone show that batches in the middle are the fastest."""

    def compute_step_s(self, plan, kind="end_to_end"):
        far = abs(math.log2(plan["batch_size"] / 64)) if kind == "end_to_end" else 0.0
        return super().compute_step_s(plan, kind) * (1 + 0.12 * far)


def search(machine, space=SPACE):
    session = Session(machine, Journal())
    assert session.run(model_first(space))
    return session


def find_fastest_rate(session):
    return max(row.samples_per_s or 0.0 for row in session.rows)


def find_best_rate(machine, space=SPACE):
    fits = [p for p in space.grid() if 0.5 + machine.gib_per_sample * p["batch_size"] <= space.memory_gib]
    return max(p["batch_size"] / machine.compute_step_s(p) for p in fits)


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


def test_on_a_noisy_machine_all_runs_are_made_that_the_search_may_make():
    """Where bf16 gains nothing the model is soon sure; blocks that differ by 12 % take that away."""
    quiet, noisy = (search(Machine(gain=0.7, half_width=half_width)) for half_width in (0.01, 0.12))
    assert len(quiet.rows) < len(noisy.rows) <= FULL.n_whole + FULL.n_polish + 2 * FULL.n_noisy


def test_a_noisy_machine_is_looked_at_beyond_the_neighbours_of_the_best():
    """Of 80 plans searches that were repeated ended at batch 128, where every neighbour had run, and 512 never did."""

    class Dented(Machine):
        """Batches of the third size are slow, by themselves and whole: the best lies behind them."""

        def compute_step_s(self, plan, kind="end_to_end"):
            slows = {256: 1.5, 512: 0.9 if kind == "end_to_end" else 1.4}.get(plan["batch_size"], 1.0)
            return slows * super().compute_step_s(plan, kind)

    axes = {"batch_size": (64, 128, 256, 512), "num_workers": (0, 2)}
    space = dataclasses.replace(SPACE, axes=axes)
    noisy, quiet = (search(Dented(load_s=1e-7, half_width=width), space) for width in (0.12, 0.01))
    assert "the machine is noisy" in noisy.rows[-1].why
    assert {row.plan["batch_size"] for row in noisy.rows} == {64, 128, 256, 512}
    assert not any("noisy" in row.why for row in quiet.rows)


def test_a_noisy_machine_is_looked_at_for_as_long_as_runs_gain():
    """A search stopped after a fixed number of further runs while each still gained, one step short of the others."""

    class Ladder(Machine):
        """Probes call large batches faster, whole runs small ones."""

        def compute_step_s(self, plan, kind="end_to_end"):
            n_doublings = math.log2(plan["batch_size"] / 32)
            return plan["batch_size"] * 1e-4 * math.exp((0.05 if kind == "end_to_end" else -0.01) * n_doublings)

    axes = {"batch_size": tuple(32 * 2**i for i in range(12)), "num_workers": (0,)}
    space = dataclasses.replace(SPACE, axes=axes, memory_gib=math.inf)
    session = Session(Ladder(half_width=0.12, gib_per_sample=0.0), Journal())
    assert session.run(model_first(space, dataclasses.replace(FULL, n_whole=1, n_polish=1, n_noisy=2)))
    whys = [row.why.partition(":")[0] for row in session.rows]
    assert whys.count("the machine is noisy") == 4
    batches = [row.plan["batch_size"] for row in session.rows]
    assert batches == sorted(batches, reverse=True)


@pytest.mark.parametrize(("half_width", "n"), [(0.01, 2), (0.12, 4)])
def test_more_plans_are_measured_again_where_single_runs_are_lucky_ones(half_width, n):
    assert count_finalists("model_first", search(Machine(half_width=half_width)).rows) == n


def test_a_first_run_far_below_its_prediction_is_tried_from_page_locked_memory():
    """Copies that block the process are in no probe; the pinned plan looked slower by its loader and was never run."""

    class Copying(Machine):
        def compute_step_s(self, plan, kind="end_to_end"):
            blocks_s = 1e-4 * plan["batch_size"] if kind == "end_to_end" and not plan["pin_memory"] else 0.0
            slows = 1.3 if kind == "loader" and plan["pin_memory"] else 1.0
            return slows * super().compute_step_s(plan, kind) + blocks_s

    session = search(Copying(load_s=1e-4))
    assert [row.plan["pin_memory"] for row in session.rows[:2]] == [False, True]
    assert session.rows[1].plan == session.rows[0].plan.replace(pin_memory=True)
    assert "page-locked" in session.rows[1].why
    assert max(session.rows, key=lambda row: row.samples_per_s).plan["pin_memory"]
    as_predicted = search(Machine(load_s=1e-4))
    assert not any("page-locked" in row.why for row in as_predicted.rows)


class Overlapping(Machine):
    """A process that launched a step makes the next batch meanwhile; handing batches over costs a third."""

    def compute_step_s(self, plan, kind="end_to_end"):
        if kind != "end_to_end":
            return super().compute_step_s(plan, kind)
        parts = [super(Overlapping, self).compute_step_s(plan, kind) for kind in ("device", "loader")]
        return max(parts) * (1.0 if plan["num_workers"] == 0 else 1.35)


def test_no_workers_are_tried_once_where_loading_may_overlap():
    """Counted as taking turns they looked half as fast, and were never run: some searches lost 30 % of speed by it."""
    rows = search(Overlapping(load_s=3e-5)).rows
    assert [row.plan["num_workers"] for row in rows if "if loading overlaps" in row.why] == [0]
    assert max(rows, key=lambda row: row.samples_per_s).plan["num_workers"] == 0
    on_cpu = dataclasses.replace(SPACE, facts=dataclasses.replace(SPACE.facts, device_type="cpu"))
    assert not any("overlaps" in row.why for row in search(Overlapping(load_s=3e-5), on_cpu).rows)


def test_the_way_that_gained_is_followed_before_other_neighbours():
    """One more step of the batch the way that gained runs next, whatever the model hopes of others."""
    rows = search(Hill(load_s=1e-4)).rows
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


def test_after_a_gain_as_many_neighbours_run_again_whatever_the_model_hopes():
    """Searches that climbed to a new best ended there without a look around it."""
    rows = [row for row in search(Hill(load_s=3e-3)).rows if "next to the best" in row.why]
    rates = [row.samples_per_s for row in rows]
    assert rates.index(max(rates)) > 0
    assert len(rates) - 1 - rates.index(max(rates)) >= FULL.min_polish


def test_numbers_of_workers_run_only_where_they_may_come_near_the_best():
    """Twelve are a sixth slower than sixteen at every batch, as the loader alone shows; each new best asked again."""
    rows = search(Hill(load_s=3e-3)).rows
    assert {row.plan["num_workers"] for row in rows} == {16}


def list_whole_batches(session):
    return [row.plan["batch_size"] for row in (*session.rows, *session.probes) if row.kind not in ("memory", "loader")]


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
    assert not [row for row in (*session.rows, *session.probes) if row.status == "out_of_memory"]
    assert max(list_whole_batches(session)) == 2048  # 8.7 of 10 GiB
    assert sum(row.kind == "memory" for row in session.probes) <= 12


def test_a_quick_search_stops_probing_when_its_time_is_over():
    full, quick = search(Machine()), Session(Machine(), Journal())
    effort = dataclasses.replace(QUICK, probe_s=8.0)
    assert quick.run(model_first(SPACE, effort))
    assert sum(row.seconds for row in quick.probes) <= 8.0 + 2.0, "the probe under way, and the first of the loader"
    assert {row.kind for row in quick.probes} == {"memory", "device", "loader"}
    assert len(quick.probes) < len(full.probes)
    assert len(quick.rows) <= QUICK.n_whole + QUICK.n_polish


@pytest.mark.parametrize(
    ("machine", "share"),
    [(Machine(load_s=1e-4, gib_per_sample=1e-6), 0.97), (Machine(load_s=1e-4, fake_fails=True), 0.95)],
    ids=["memory decides nothing", "it climbs by real probes, without fake tensors"],
)
def test_one_estimate_of_memory_is_enough_where_it_decides_nothing_or_fails(machine, share):
    session = search(machine)
    assert sum(row.kind == "memory" for row in session.probes) == 1
    assert find_fastest_rate(session) >= share * find_best_rate(machine)


def test_a_loader_that_costs_nothing_is_probed_once():
    machine = Machine(load_s=1e-8)
    machine.compute_step_s = lambda plan, kind="end_to_end": (
        1e-6 * plan["batch_size"] if kind == "loader" else 0.002 + 1e-3 * plan["batch_size"]
    )
    session = search(machine)
    assert sum(row.kind == "loader" for row in session.probes) == 1


def test_workers_whose_loader_failed_alone_are_not_run_whole():
    """Loader probes with 16 and 12 workers once taught nothing, and every whole run was one of them."""
    machine = Machine(load_s=3e-3, most_workers=8)
    session = search(machine)
    assert not [row for row in session.rows if row.status == "out_of_memory"]
    assert find_fastest_rate(session) >= 0.55 * find_best_rate(machine), "8 of 14 useful workers"


def test_memory_of_workers_is_not_held_against_the_batch():
    machine = Machine(load_s=1e-4, gib_per_worker=0.6)
    session = search(machine)
    tried = {(row.plan["batch_size"], row.plan["num_workers"]) for row in session.rows if row.status == "ok"}
    assert max(batch for batch, _ in tried) >= 1024


def test_errors_of_either_sign_are_no_shared_one():
    """A model that is wrong by turns ranks nothing: coordinate descent has to take over."""

    class Deceiving(Machine):
        def compute_step_s(self, plan, kind="end_to_end"):
            errs = 4.0 if (plan["batch_size"].bit_length() + plan["num_workers"]) % 3 else 0.2
            return super().compute_step_s(plan, kind) * (errs if kind == "end_to_end" else 1.0)

    assert len(search(Deceiving(load_s=1e-3)).rows) > 12


@pytest.mark.parametrize(("machine", "share"), [(Machine(device_fails=True), 0.9), (Machine(deceives=True), 1.0)])
def test_where_no_probe_runs_or_the_model_errs_throughout_coordinate_descent_takes_over(machine, share):
    assert find_fastest_rate(search(machine)) >= share * find_best_rate(machine) * (1 - 1e-6)


def test_probes_are_kept_apart_from_rows_and_say_why():
    session = search(Machine())
    assert {row.kind for row in session.probes} == set(PROBES)
    assert {row.kind for row in session.rows} == {"end_to_end"}
    assert all(row.why for row in session.probes)
    device = [row.plan for row in session.probes if row.kind == "device"]
    assert {(plan["num_workers"], plan["pin_memory"]) for plan in device} == {(0, False)}


def test_a_search_that_is_started_again_asks_nothing_twice(tmp_path):
    def run():
        machine = Machine()
        with RunFolder(tmp_path, fingerprint_parts={}, command="tune", results=["trials.jsonl"]) as folder:
            session = Session(machine, Journal(folder))
            session.run(model_first(SPACE))
        return machine, session

    first, whole = run()
    second, again = run()
    assert first.asked
    assert second.asked == []
    assert [row.id for row in again.probes] == [row.id for row in whole.probes]
