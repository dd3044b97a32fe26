"""How often a comparison of two settings is right, on noise whose truth is known.

One machine gives step times; arm b's are multiplied by a known factor. On simulated noise every comparison has a
machine of its own. On recorded noise (``recordings/noise-*.json``) each comparison starts where the one before stopped,
so that no step counts twice. Records of a busy machine, by the pressure on its cores, are reported apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks._deciders import DECIDERS, OURS, PROCESS_STEPS, Outcome, decide_between_processes
from benchmarks._noise import NoiseModel, Recording, Stream, Stretch, read_recordings
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge
from fulltilt.records import BUSY_PCT, is_busy_pressure
from fulltilt.stats import compute_proportion_interval

NAME = "decisions"
CLAIM = (
    "Equal settings are called different in at most 6 % of comparisons; a true gap of 5 % is found in 98 %, one of 2 % "
    "in 88 %."
)
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

MAX_FALSE_PCT = 6.0
MIN_FOUND_PCT = {2.0: 88.0, 5.0: 98.0}
GAPS_PCT = (0.0, *MIN_FOUND_PCT)
MAX_BATCHES = 20

CALIBRATED = NoiseModel(jitter_pct=2.0, correlation=0.85, drift_pct=0.05, slow_share=0.03, slow_factor=1.25)
"""Jitter, drift and slow steps for which Welch's test on 40 + 40 steps errs as it did in the survey this rests on."""

SIMULATED: Mapping[str, NoiseModel] = {
    "simulated": CALIBRATED,
    "simulated, warm-up ramp": dataclasses.replace(CALIBRATED, ramp_pct=3.0),
}
FINALISTS: Mapping[str, NoiseModel] = {
    f"a search's finalists, processes {pct:g} % apart": dataclasses.replace(CALIBRATED, ramp_pct=3.0, process_pct=pct)
    for pct in (0.6, 2.0)
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One decision and the truth."""

    factor: float  # b's true time over a's
    outcome: Outcome

    @property
    def is_right(self) -> bool:
        return self.outcome.verdict == ("tie" if self.factor == 1 else "faster" if self.factor < 1 else "slower")

    @property
    def calls_difference(self) -> bool:
        return self.outcome.verdict in ("faster", "slower")


def run(context: Context) -> Findings:
    n = 40 if context.quick else 2000
    arms: list[Arm] = []
    targets: list[Target] = []
    for case, noise in SIMULATED.items():
        for name in DECIDERS:
            for gap_pct in GAPS_PCT:
                report_comparisons(case, name, gap_pct, list(simulate(noise, name, gap_pct, n)), arms, targets)
    for case, noise in FINALISTS.items():
        for gap_pct in GAPS_PCT:
            report_comparisons(case, OURS, gap_pct, list(simulate_finalists(noise, gap_pct, n)), arms, targets)
    recordings = read_recordings(context.device)
    for case, stretches in group_stretches(recordings).items():
        for name in DECIDERS:
            for gap_pct in GAPS_PCT:
                report_comparisons(case, name, gap_pct, list(replay(stretches, name, gap_pct)), arms, targets)
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=(*list_notes(), *map(describe, recordings)))


def group_stretches(recordings: Sequence[Recording]) -> dict[str, list[Stretch]]:
    """Part all recorded processes by the pressure on the machine's cores, never by the speed of the steps.

    The limit is the one above which a trial's row says that its figures are of a busy machine.
    """
    groups: dict[str, list[Stretch]] = {}
    for stretch in (stretch for recording in recordings for stretch in recording.stretches):
        case = "recorded, busy machine" if is_busy_pressure(stretch.cpu_pressure_pct) else "recorded"
        groups.setdefault(case, []).append(stretch)
    return groups


def simulate(noise: NoiseModel, decider: str, gap_pct: float, n: int) -> Iterator[Comparison]:
    """Compare on machines drawn from seeds, the same ones for every decider and every gap."""
    method = DECIDERS[decider]
    for seed in range(n):
        stream = Stream(noise.simulate(method.max_steps, np.random.default_rng(seed)))
        factor = choose_factor(gap_pct, seed)
        yield Comparison(factor=factor, outcome=method.run(stream, factor))


def simulate_finalists(noise: NoiseModel, gap_pct: float, n: int) -> Iterator[Comparison]:
    for seed in range(n):
        factor = choose_factor(gap_pct, seed)
        outcome = decide_between_processes(noise, factor, np.random.default_rng(seed))
        yield Comparison(factor=factor, outcome=outcome)


def replay(stretches: Sequence[Stretch], decider: str, gap_pct: float) -> Iterator[Comparison]:
    """Compare on recorded steps, one comparison behind the other, as many as each process' steps hold."""
    method, number = DECIDERS[decider], 0
    for stretch in stretches:
        stream = Stream(np.asarray(stretch.step_us, dtype=np.float64))
        while stream.n_left >= method.max_steps:
            factor = choose_factor(gap_pct, number)
            yield Comparison(factor=factor, outcome=method.run(stream, factor))
            number += 1


def choose_factor(gap_pct: float, number: int) -> float:
    """Make arm b slower by the gap and faster by it in turn, as a ramp would favour one of the two."""
    return 1 + gap_pct / 100 if number % 2 == 0 else 1 / (1 + gap_pct / 100)


def report_comparisons(
    case: str, decider: str, gap_pct: float, found: Sequence[Comparison], arms: list[Arm], targets: list[Target]
) -> None:
    """Add the arms of one cell, and its target where the decider is fulltilt's."""
    if not found:
        return
    title = f"{case}, gap {gap_pct:g} %"
    flags = list_flags(decider, gap_pct, found)
    for metric, hits in flags.items():
        arms.append(build_batched(title, decider, metric, [100.0 * hit for hit in hits]))
    if decider != OURS:
        return
    arms.append(build_batched(title, decider, "steps_per_comparison", [float(c.outcome.n_steps) for c in found]))
    detectable = [c.outcome.detectable_pct for c in found if c.outcome.detectable_pct is not None]
    if detectable:
        arms.append(build_batched(title, decider, "detectable_pct", detectable, statistics.median))
    targets.append(judge_share(title, gap_pct, flags["false_difference_pct" if gap_pct == 0 else "found_pct"]))


def list_flags(decider: str, gap_pct: float, found: Sequence[Comparison]) -> dict[str, list[bool]]:
    """Return one flag a comparison, by metric; only fulltilt's method can answer that it does not know."""
    flags: dict[str, list[bool]] = {}
    if gap_pct == 0:
        flags["false_difference_pct"] = [c.calls_difference for c in found]
    else:
        flags["found_pct"] = [c.is_right for c in found]
        flags["wrong_way_pct"] = [c.calls_difference and not c.is_right for c in found]
        if all(c.outcome.takes_b is not None for c in found):
            flags["takes_faster_pct"] = [c.outcome.takes_b == (c.factor < 1) for c in found]
    if decider == OURS:
        flags["tie_pct"] = [c.outcome.verdict == "tie" for c in found]
        flags["too_noisy_pct"] = [c.outcome.verdict == "too_noisy" for c in found]
    return flags


def judge_share(title: str, gap_pct: float, hits: Sequence[bool]) -> Target:
    """Hold the share of hits against its target, by the binomial interval."""
    low, high = compute_proportion_interval(sum(hits), len(hits))
    share, interval = 100 * sum(hits) / len(hits), (100 * low, 100 * high)
    note = f"{sum(hits)} of {len(hits)} comparisons"
    if gap_pct == 0:
        return judge(f"{title}: called different, %", share, interval, at_most=MAX_FALSE_PCT, note=note)
    return judge(f"{title}: found, %", share, interval, at_least=MIN_FOUND_PCT[gap_pct], note=note)


def build_batched(title: str, decider: str, metric: str, values: Sequence[float], summarize=statistics.fmean) -> Arm:
    """Build an arm whose samples sum up batches of comparisons: a share has no median over single ones."""
    batches = split_batches(values)
    return build_arm(
        [float(summarize(batch)) for batch in batches],
        case=title,
        arm=decider,
        metric=metric,
        unit_of_replication=f"batch of about {len(values) // len(batches)} comparisons, {len(values)} in all",
        note=DECIDERS[decider].note,
    )


def split_batches(values: Sequence[float]) -> list[Sequence[float]]:
    """Split into at most 20 runs of neighbours, of 10 comparisons at least where there are as many."""
    n_batches = min(MAX_BATCHES, max(1, len(values) // 10))
    edges = [round(len(values) * k / n_batches) for k in range(n_batches + 1)]
    return [values[begin:end] for begin, end in itertools.pairwise(edges)]


def list_notes() -> list[str]:
    return [
        "a gap of 2 % makes arm b take 1.02 times as long, or 1/1.02, in turn; the margin inside which a difference "
        "is a tie is 2 % for every verdict of fulltilt's",
        f"simulated: {CALIBRATED}",
        "a search's finalists: its own two or three rounds of a process of each and of the settings as they were, "
        f"{PROCESS_STEPS} steps each, after one run of each finalist in the search; it goes on with the faster mean "
        "whether or not it can tell (takes_faster_pct)",
        f"recorded: processes in which some task waited for a core {BUSY_PCT:g} % of the time or less; the others are "
        "the busy machine, on which the right answer is mostly that nobody can tell",
        "detectable_pct is what the comparison itself says it could have found in 80 % of the cases",
    ]


def describe(recording: Recording) -> str:
    n_steps = sum(len(s.step_us) for s in recording.stretches)
    pressures = [s.cpu_pressure_pct for s in recording.stretches]
    readings = ", ".join("not read" if pct is None else f"{pct:.0f}" for pct in pressures)
    return (
        f"recorded, {recording.name}, {recording.conditions}: {n_steps} steps in {len(pressures)} processes, "
        f"{recording.date}, {recording.machine['cpu_model']}, {recording.machine['n_cores_usable']} cores; some task "
        f"waited for a core in {readings} % of each process' time; {recording.how}; by {recording.command}"
    )
