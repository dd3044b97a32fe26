"""Measure how often a comparison finds a known difference, or claims one that is none.

Two workloads differ by work that was added to one of them (``benchmarks/_burning.py``). They are compared as
``fulltilt compare`` does it, in turns of live processes, on a machine as it is and with other work on every core
(``benchmarks/_other_work.py``); and in the former way: whole processes in turn, for the seconds that the turns took.
What is added to a step costs more than its own time: how much more is measured first (``benchmarks/_planted.py``).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import _schema
from benchmarks._duel import open_target
from benchmarks._other_work import disturb_cores
from benchmarks._planted import SETTINGS, measure_planted
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, build_arm, judge
from fulltilt.config import Config, config_for_object, plan_of
from fulltilt.records import Plan
from fulltilt.stats import Comparison, compute_proportion_interval, decide
from fulltilt.tuner.comparing import compare_configs
from fulltilt.tuner.question.source import resolve_target
from fulltilt.tuner.trials.target import Target

CLAIM = (
    "A difference of 10 % is found in 97 of 100 comparisons within 20 s, and under other work in 90 within 30 s; of "
    "100 equal pairs at most 5 are called different."
)
NEEDS_PEERS = False
DEVICES = ("cpu",)

N_REPEATS = 20
RARE = 8  # of so many repeats, one measures the former way, too, and what has no goal
TURNS, WHOLE = "turns of live processes", "whole processes in turn"
QUIET, BUSY = "quiet", "other work"
STEP, LOADER = "bound by the step", "bound by the loader"
SAMPLE_S = 2e-3
MAX_MEASURE_S = 8.0  # of a whole process, as the default search has it
MIN_ROUNDS = 2
PLANTED_S = 60.0  # for which a difference is measured
UNIT = "comparison"
MEANINGS = {"faster": "faster", "slower": "slower", "tie": "equal", "too_noisy": "undecided"}
"""Verdict over whole processes → the same of turns."""


class Cell(NamedTuple):
    """What is compared, and the seconds that a comparison has."""

    bound: str
    load: str
    difference_pct: int
    limit_s: float
    has_former: bool = False  # whether the former way is measured, too
    is_rare: bool = False  # whether it is compared as seldom as in the former way

    @property
    def name(self) -> str:
        return f"{self.difference_pct} %, {self.bound}, {self.load}"


CELLS = (
    Cell(STEP, QUIET, 0, 60, True), Cell(STEP, QUIET, 2, 120, is_rare=True), Cell(STEP, QUIET, 5, 20, True),
    Cell(STEP, QUIET, 10, 20, True), Cell(STEP, QUIET, 25, 20), Cell(LOADER, QUIET, 0, 60), Cell(LOADER, QUIET, 10, 20),
    Cell(STEP, BUSY, 0, 60, True), Cell(STEP, BUSY, 2, 120, is_rare=True), Cell(STEP, BUSY, 5, 60, True),
    Cell(STEP, BUSY, 10, 30, True), Cell(STEP, BUSY, 25, 30), Cell(LOADER, BUSY, 0, 60), Cell(LOADER, BUSY, 10, 30),
)  # fmt: skip
QUICK_CELLS = (Cell(STEP, QUIET, 25, 1, True), Cell(LOADER, BUSY, 25, 1))
GOALS = {(QUIET, 5): 0.8, (QUIET, 10): 0.97, (BUSY, 5): 0.8, (BUSY, 10): 0.9}
"""Load and difference → share of the comparisons that are to find it in their time."""
COVERAGE, WRONG = 0.93, 0.05


class Outcome(NamedTuple):
    """What one comparison said of the faster workload: its gain over the other one."""

    verdict: str
    gain_pct: float
    ci_pct: tuple[float, float]
    n: int  # groups or rounds
    seconds: float

    def finds(self, cell: Cell) -> bool:
        """Whether it says the truth in time."""
        return self.verdict == ("faster" if cell.difference_pct else "equal") and self.seconds <= cell.limit_s

    def is_wrong(self, cell: Cell) -> bool:
        """Whether it claims what is not so; up to 2 % two workloads are equal."""
        right = {0: ("equal",), 2: ("equal", "faster")}.get(cell.difference_pct, ("faster",))
        return self.verdict not in (*right, "undecided")

    def covers(self, planted_pct: float) -> bool:
        return self.ci_pct[0] <= planted_pct <= self.ci_pct[1]


Planted = Mapping[Cell, Sequence[float]]
"""Cell → the difference in percent, round by round, where it was measured; elsewhere it is what was added."""
Outcomes = Mapping[tuple[Cell, str], Sequence[Outcome]]
"""Cell and way → the outcomes of all repeats."""


def run(context: Context) -> Findings:
    cells = QUICK_CELLS if context.quick else CELLS
    n_repeats = context.n_repeats or (1 if context.quick else N_REPEATS)
    planted = measure_differences(cells, seconds=1.0 if context.quick else PLANTED_S)
    outcomes: dict[tuple[Cell, str], list[Outcome]] = {}
    for number, cell in itertools.product(range(n_repeats), cells):
        is_rare = number % RARE == 0
        if cell.is_rare and not is_rare:
            continue
        with disturb_cores(number) if cell.load == BUSY else contextlib.nullcontext():
            for way, outcome in compare_cell(cell, has_former=cell.has_former and is_rare):
                outcomes.setdefault((cell, way), []).append(outcome)
                said = f"{number + 1} of {n_repeats}: {cell.name}, {way}: {outcome.verdict} {outcome.gain_pct:+.1f} %"
                print(f"{said} in {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
    notes = (
        "bound by the loader: one worker, and one thread for the model: with two, three threads share two cores",
        "difference: work added to each step, or to each sample of the loader, for a share of the time that it took",
        "other work: a process a core, busy and idle in turn for random 0.2 to 2 s each",
        "planted: in one process that takes blocks with and without the work in turn, beside other work as plans take "
        "turns there (threads that sleep while they wait, on a core each); errors and coverage are against its median",
        f"pairs of 2 % and the former way: in the first of every {RARE} repeats alone",
        "found: called faster (equal, where nothing differs) within the seconds of the case; seconds begin with the "
        "start of the server that processes are forked from",
        f"{WHOLE}: rounds of both in alternating order for as long as the turns took, two at least, judged once by "
        "stats.decide at 95 %; intervals of turns are at 98 %, as a comparison may end at several looks",
    )
    limits = "; ".join(f"{cell.name}: {cell.limit_s:g} s" for cell in cells)
    return Findings(
        arms=(*describe_planted(planted), *describe_outcomes(outcomes, planted)),
        targets=tuple(judge_outcomes(outcomes, planted)),
        notes=(*notes, limits),
    )


def measure_differences(cells: Sequence[Cell], *, seconds: float) -> Planted:
    """Measure what the work that is added to a step costs, quiet and beside other work."""
    planted = {}
    for cell in cells:
        if cell.bound == STEP and cell.difference_pct:
            is_busy = cell.load == BUSY
            with disturb_cores(cell.difference_pct) if is_busy else contextlib.nullcontext():
                speedups = measure_planted(cell.difference_pct / 100, seconds, is_busy=is_busy)
            planted[cell] = [100 * (speedup - 1) for speedup in speedups]
            said = f"{cell.name}: {statistics.median(planted[cell]):.1f} % planted, {len(speedups)} rounds"
            print(said, file=sys.stderr, flush=True)
    return planted


def read_planted_pct(cell: Cell, planted: Planted) -> float:
    return statistics.median(planted[cell]) if cell in planted else cell.difference_pct


def compare_cell(cell: Cell, *, has_former: bool) -> Iterator[tuple[str, Outcome]]:
    """Compare two workloads in turns, then in the former way where that is asked for."""
    slow, fast = build_configs(cell)
    found = compare_configs(slow, fast, limit_s=cell.limit_s)
    yield TURNS, describe_comparison(found.comparison, found.seconds)
    if has_former:
        yield WHOLE, compare_whole(slow, fast, seconds=found.seconds)


def build_configs(cell: Cell) -> tuple[Config, Config]:
    """Build the workload with the work added, and the one without."""
    extra = cell.difference_pct / 100
    if cell.bound == STEP:
        calls = [f"extra={extra}", "extra=0.0"]
        settings = SETTINGS
    else:
        calls = [f"extra={extra}, sample_s={SAMPLE_S}", f"extra=0.0, sample_s={SAMPLE_S}"]
        settings = ["run.device=cpu", "data.batch_size=8", "data.num_workers=1", "speed.threads=1"]
    slow, fast = (config_for_object(f"benchmarks._burning:build({call})", settings) for call in calls)
    return slow, fast


def describe_comparison(found: Comparison, seconds: float) -> Outcome:
    return Outcome(found.verdict, found.gain_pct, found.ci_pct, found.n_groups, seconds)


def compare_whole(slow: Config, fast: Config, *, seconds: float) -> Outcome:
    """Run whole processes in turn for so many seconds, and decide once."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder, contextlib.ExitStack() as stack:
        told = {"device": "cpu", "max_measure_s": MAX_MEASURE_S}
        targets = [
            stack.enter_context(open_target(resolve_target(config), Path(folder) / name, **told))
            for name, config in (("slow", slow), ("fast", fast))
        ]
        runs = [
            functools.partial(measure_whole, *pair) for pair in zip(targets, map(plan_of, (slow, fast)), strict=True)
        ]
        rates = run_rounds(*runs, is_over=lambda: time.monotonic() - begin_s > seconds)
    found = decide(*zip(*rates, strict=True), higher_is_better=True)
    return Outcome(MEANINGS[found.verdict], found.effect_pct, found.ci_pct, found.n, time.monotonic() - begin_s)


def measure_whole(target: Target, plan: Plan, id: str) -> float | None:
    return target(plan, id=id, why="in turn with the other").samples_per_s


def run_rounds(
    run_slow: Callable[[str], float | None], run_fast: Callable[[str], float | None], *, is_over: Callable[[], bool]
) -> list[tuple[float, float]]:
    """Run both in rounds of alternating order, two at least; return samples per second, a pair a round.

    Raises:
        RuntimeError: a process measured no speed.
    """
    rates: list[tuple[float, float]] = []
    while len(rates) < MIN_ROUNDS or not is_over():
        ways = {"slow": run_slow, "fast": run_fast}
        order = list(ways) if len(rates) % 2 == 0 else list(ways)[::-1]
        found = {name: ways[name](f"r{len(rates)}") for name in order}
        if not all(found.values()):
            raise RuntimeError(f"a process measured no speed: {found}")
        rates.append((found["slow"] or 0.0, found["fast"] or 0.0))
    return rates


def describe_planted(planted: Planted) -> Iterator[Arm]:
    for cell, differences_pct in planted.items():
        yield build_arm(
            differences_pct, case=cell.name, arm="planted", metric="difference_pct", unit_of_replication="round"
        )


def describe_outcomes(outcomes: Outcomes, planted: Planted) -> Iterator[Arm]:
    """Build the arms of each cell and way: what was said, whether it was so, and what it took."""
    for (cell, way), found in outcomes.items():
        planted_pct = read_planted_pct(cell, planted)
        marks = {
            "decided": [outcome.verdict != "undecided" for outcome in found],
            "found": [outcome.finds(cell) for outcome in found],
            "wrong": [outcome.is_wrong(cell) for outcome in found],
            "covers": [outcome.covers(planted_pct) for outcome in found],
        }
        figures = {
            "gain_error_pct": [outcome.gain_pct - planted_pct for outcome in found],
            "groups": [float(outcome.n) for outcome in found],
            "seconds": [outcome.seconds for outcome in found],
        }
        common = {"case": cell.name, "arm": way, "unit_of_replication": UNIT}
        for metric, hits in marks.items():
            yield build_arm(list(map(float, hits)), metric=metric, note=describe_share(sum(hits), len(hits)), **common)
        for metric, values in figures.items():
            yield build_arm(values, metric=metric, **common)


def describe_share(n_hits: int, n: int) -> str:
    low, high = compute_proportion_interval(n_hits, n)
    return f"{n_hits} of {n}, {100 * n_hits / n:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def judge_outcomes(outcomes: Outcomes, planted: Planted) -> Iterator[_schema.Target]:
    """Hold what the turns said against the targets: a share is met or missed where its binomial interval says so."""
    of_turns = [(cell, outcome) for (cell, way), found in outcomes.items() if way == TURNS for outcome in found]
    for load in (QUIET, BUSY):
        those = [(cell, outcome) for cell, outcome in of_turns if cell.load == load]
        if those:
            name = f"{load}: intervals that cover the truth, share"
            hits = [outcome.covers(read_planted_pct(cell, planted)) for cell, outcome in those]
            yield judge_share(name, hits, at_least=COVERAGE)
        wrong = [outcome.is_wrong(cell) for cell, outcome in those if cell.difference_pct == 0]
        if wrong:
            yield judge_share(f"{load}: equal ones called different, share", wrong, at_most=WRONG)
    for cell in dict.fromkeys(cell for cell, _ in of_turns):
        if least := GOALS.get((cell.load, cell.difference_pct)):
            hits = [outcome.finds(cell) for of, outcome in of_turns if of == cell]
            yield judge_share(f"{cell.name}: found within {cell.limit_s:g} s, share", hits, at_least=least)


def judge_share(name: str, hits: Sequence[bool], **limit: float) -> _schema.Target:
    return judge(name, sum(hits) / len(hits), compute_proportion_interval(sum(hits), len(hits)), **limit)
