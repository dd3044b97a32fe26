"""How far from the best plan search strategies end, at what cost, on simulated machines whose truth is known.

The machines are described in ``benchmarks/_machines.py``. Regret is the share of true speed that the recommended plan
loses to the fastest plan of the grid that a search may recommend: one whose memory stays below the safety limit.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from benchmarks._machines import SimulatedMachine, draw_machines
from benchmarks._machines_recorded import GridRecording, read_recordings
from benchmarks._machines_score import Score, find_recorded_truths, find_truths, is_known, run_search
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, compute_bounds, judge, judge_median
from fulltilt.stats import compute_interval, compute_proportion_interval

CLAIM = "The default search ends within 0.5 % of the grid's best plan in the median, after ten whole runs."
NEEDS_PEERS = True
DEVICES = ("cpu",)

OURS = "model_first"
STRATEGIES = (
    OURS, "coordinate_descent_2", "coordinate_descent_1", "largest_that_fits", "tpe_24", "tpe_60", "random_24",
    "exhaustive",
)  # fmt: skip
POINTS = (336, 2688)
FIRST_SEED = 1000  # the constants of the search were chosen on smaller ones
N_MACHINES = 400
N_QUICK = 20
N_EXHAUSTIVE = 20  # of the small grid: it is there to show what noise and the rule for ties cost by themselves
N_ORDERS = 20  # searches of a recorded grid, each with the recorded runs in another order
CLOSE_PCT = 2.0
RECORDED_PCT = 2.0  # that a search may lose on a recorded grid
METRICS = (
    "regret_pct", "regret_by_error_pct", "regret_before_restraint_pct", "kept_own", "trials", "end_to_end_trials",
    "turns", "groups", "seconds", "out_of_memory",
)  # fmt: skip
"""Figures of a score."""


class Goal(NamedTuple):
    """A limit on one figure of the searches of ``OURS`` in one space."""

    n_points: int
    figure: str
    limit: float
    metric: str
    quantile: float | None = None  # None: the mean; 1: the largest


GOALS = (
    Goal(336, "regret, median, %", 0.3, "regret_pct", 0.5),
    Goal(336, "regret, p90, %", 2.0, "regret_pct", 0.9),
    Goal(336, "regret, p99, %", 4.0, "regret_pct", 0.99),
    Goal(336, "whole runs, largest", 16, "end_to_end_trials", 1.0),
    Goal(336, "whole runs, mean", 10, "end_to_end_trials"),
    Goal(336, "out of memory, mean", 0.1, "out_of_memory"),
    Goal(2688, "regret, mean, %", 1.5, "regret_pct"),
    Goal(2688, "regret, p90, %", 4.0, "regret_pct", 0.9),
    Goal(2688, "whole runs, largest", 16, "end_to_end_trials", 1.0),
)


def run(context: Context) -> Findings:
    drawn = draw_machines(range(FIRST_SEED, FIRST_SEED + (N_QUICK if context.quick else N_MACHINES)))
    seeds = [machine.seed for machine in drawn]
    known = list(filter(is_known, STRATEGIES))
    arms: list[Arm] = []
    targets: list[Target] = []
    recordings = read_recordings()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for n_points in POINTS:
            scores = score_machines(seeds, n_points, known, pool)
            for name in filter(scores.__getitem__, known):
                arms += describe_scores(f"{n_points} points", name, scores[name])
            if OURS in known:
                targets += judge_goals(n_points, scores[OURS])
        for recording in recordings:
            for name in known:
                scores_of_one = score_recording(recording, name, n_orders=2 if context.quick else N_ORDERS, pool=pool)
                arms += describe_scores(f"recorded: {recording.name}", name, scores_of_one)
                if name == OURS:
                    regrets = _read(scores_of_one, "regret_pct")
                    targets.append(judge_median(f"{recording.name}: regret, median, %", regrets, at_most=RECORDED_PCT))
    notes = _list_notes(len(seeds), known, recordings)
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=tuple(notes))


def score_machines(
    seeds: Iterable[int], n_points: int, strategies: Sequence[str], pool: Executor
) -> dict[str, list[Score]]:
    """Run every strategy on the machine of every seed, a machine in one process."""
    scores: dict[str, list[Score]] = {name: [] for name in strategies}
    score = functools.partial(_score_machine, n_points=n_points, strategies=strategies)
    for number, found in enumerate(pool.map(score, itertools.count(), seeds), start=1):
        for name, one in found.items():
            scores[name].append(one)
        print(f"\r{n_points} points: {number} workloads", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return scores


def _score_machine(number: int, seed: int, *, n_points: int, strategies: Sequence[str]) -> dict[str, Score]:
    truths, few = find_truths(SimulatedMachine(seed), n_points), number < N_EXHAUSTIVE and n_points == POINTS[0]
    return {name: run_search(truths, name) for name in strategies if few or name != "exhaustive"}


def score_recording(recording: GridRecording, strategy: str, *, n_orders: int, pool: Executor) -> list[Score]:
    """Run one strategy on one recorded grid, with the runs of each plan in another order each time."""
    return list(pool.map(functools.partial(_score_order, recording, strategy), range(n_orders)))


def _score_order(recording: GridRecording, strategy: str, seed: int) -> Score:
    return run_search(find_recorded_truths(recording, seed), strategy)


def describe_scores(case: str, name: str, scores: Sequence[Score]) -> list[Arm]:
    """Build an arm a figure; its samples, one a search, hold the quantiles that the targets speak of."""
    common = {"case": case, "arm": name, "unit_of_replication": "search of one workload", "note": summarize(scores)}
    return [build_arm(_read(scores, metric), metric=metric, **common) for metric in METRICS]


def _read(scores: Sequence[Score], metric: str) -> list[float]:
    return [float(getattr(score, metric)) for score in scores]


def summarize(scores: Sequence[Score]) -> str:
    """Write the figures that a median does not show, in one line."""
    mean = {metric: statistics.fmean(_read(scores, metric)) for metric in METRICS}
    regret = np.array(_read(scores, "regret_pct"))
    close = int((regret <= CLOSE_PCT).sum())
    low, high = compute_proportion_interval(close, len(scores))
    return (
        f"regret mean {regret.mean():.2f}, median {np.median(regret):.2f}, p90 {_find_quantile(regret, 0.9):.2f}, "
        f"p99 {_find_quantile(regret, 0.99):.2f} %; within {CLOSE_PCT:g} %: {100 * close / len(scores):.0f} % "
        f"({100 * low:.0f} to {100 * high:.0f}); trials {mean['trials']:.1f}, of them end to end "
        f"{mean['end_to_end_trials']:.1f} and in turns {mean['turns']:.1f}; out of memory "
        f"{mean['out_of_memory']:.2f} a search"
    )


def judge_goals(n_points: int, scores: Sequence[Score]) -> list[Target]:
    found = []
    for goal in GOALS:
        if goal.n_points != n_points:
            continue
        values = _read(scores, goal.metric)
        if goal.quantile is None:
            measured, ci95 = statistics.fmean(values), compute_interval(values) if len(values) > 1 else None
        elif goal.quantile == 1:
            measured, ci95 = max(values), None
        else:
            is_median = goal.quantile == 0.5
            measured = statistics.median(values) if is_median else _find_quantile(values, goal.quantile)
            ci95 = compute_bounds(values, goal.quantile)
        found.append(judge(f"{n_points} points: {goal.figure}", measured, ci95, at_most=goal.limit))
    return found


def _find_quantile(values: Sequence[float] | np.ndarray, quantile: float) -> float:
    """Return one of the values, the higher of two: few lie in a tail, and a line between two is no figure of any."""
    return float(np.quantile(values, quantile, method="higher"))


def _list_notes(n_machines: int, known: Sequence[str], recordings: Sequence[GridRecording]) -> list[str]:
    notes = [
        f"{n_machines} workloads, seeds from {FIRST_SEED}: machines, models and data as benchmarks/_machines.py says",
        "regret: true speed of the recommended plan against the fastest plan below the memory safety limit",
        "regret_by_error: 0 where that is at most 1 %, which a simpler plan or the user's own may cost by design",
        "regret_before_restraint: the plan that won the race instead, before changes are taken back",
        "kept_own: searches that keep the user's own plan though another one is faster by more than 1 %",
        "trials count every process that ran a step or a loader, those that took turns included",
        "largest_that_fits ends at its own result; all others go through the same last stage as the product",
        f"exhaustive: the first {N_EXHAUSTIVE} workloads of the small grid only",
        "TPE: Optuna's TPESampler at its defaults; a plan it asks twice is run once",
    ]
    for found in recordings:
        notes.append(
            f"recorded: {found.name} is {len(found.build_space().grid())} plans on {found.machine.cpu_model}, "
            f"{found.device}, {found.date}, {found.n_repeats} runs a plan; its truth is their median, and a search is "
            "answered with the same runs, which flatters all strategies alike"
        )
    missing = [name for name in STRATEGIES if name not in known]
    return [*notes, f"not run here: {', '.join(missing)}"] if missing else notes
