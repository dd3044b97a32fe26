"""Measure how often a test of late responses errs, and how soon it decides, on synthetic responses.

No clock and no server: a trial is a row of responses that are late with a known probability, looked at after every one.
Beside our test stands LoadGen's early stopping as its users apply it: the run is repeated, longer, until it passes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr

from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, build_arm, judge
from fulltilt.stats import compute_proportion_interval
from fulltilt.stats.sequential import ALPHA, BETTER, WORSE, compute_factors, compute_threshold, mix_bets

CLAIM = (
    "With a look after every response a service exactly at its limit passes in at most 1 % of the trials; one with "
    "0.3 % of late responses where 1 % are allowed passes in at least 95 % of them within 4,000 responses."
)
NEEDS_PEERS = False
DEVICES = ("cpu",)

LIMIT = 0.01
N_TRIALS, N_BATCH = 50_000, 2_000
HORIZON, PATIENCE = 20_000, 4_000
N_PARTS = 20  # samples of an arm, each the share of so many trials
CASES = {  # name → share of late responses, responses at most
    "1 % late": (LIMIT, HORIZON),
    "1.5 % late": (0.015, HORIZON),
    "0.3 % late": (0.003, PATIENCE),
    "0.5 % late": (0.005, HORIZON),
    "0.1 % late": (0.001, PATIENCE),
}
OURS, LOADGEN = "betting, a look after every response", "LoadGen's early stopping, repeated until it passes"
REFUSED = "refused by betting"
Ints, Floats = NDArray[np.int64], NDArray[np.float64]


def run(context: Context) -> Findings:
    n_trials = context.n_repeats or (500 if context.quick else N_TRIALS)
    arms: list[Arm] = []
    shares: dict[tuple[str, str], tuple[float, tuple[float, float]]] = {}
    for case, (late_share, horizon) in CASES.items():
        for name, ends in measure_case(late_share, horizon, n_trials).items():
            n_decided = int(np.isfinite(ends).sum())
            shares[case, name] = share, interval = (
                n_decided / n_trials,
                compute_proportion_interval(n_decided, n_trials),
            )
            low, high = (100 * bound for bound in interval)
            said = f"{n_decided:,} of {n_trials:,}, {100 * share:.2f} % ({low:.2f} to {high:.2f})"
            arms += describe_ends(ends, said, case=f"{case}, {horizon:,} responses", arm=name)
    within = f"passes at 0.3 % late within {PATIENCE:,} responses, share"
    targets = (
        judge("passes at the limit, share", *shares["1 % late", OURS], at_most=ALPHA),
        judge("refusals at the limit, share", *shares["1 % late", REFUSED], at_most=ALPHA),
        judge(within, *shares["0.3 % late", OURS], at_least=0.95),
    )
    note = f"{n_trials:,} synthetic trials a case; late responses are independent, with the probability of the case"
    return Findings(arms=tuple(arms), targets=targets, notes=(note,))


def measure_case(share: float, horizon: int, n_trials: int) -> dict[str, Floats]:
    """Return, by test, at which response each trial was decided; infinite where it was not."""
    found: dict[str, list[Floats]] = {OURS: [], LOADGEN: [], REFUSED: []}
    for number, begin in enumerate(range(0, n_trials, N_BATCH)):
        late_at = draw_late(share, horizon, min(N_BATCH, n_trials - begin), seed=number)
        found[OURS].append(find_crossing(late_at, horizon, BETTER, is_before=True))
        found[LOADGEN].append(find_early_stop(late_at, horizon))
        found[REFUSED].append(find_crossing(late_at, horizon, WORSE, is_before=False))
    return {name: np.concatenate(ends) for name, ends in found.items()}


def draw_late(share: float, horizon: int, n_trials: int, *, seed: int) -> Ints:
    """Draw the numbers of the late responses, counted from 1, far enough to reach beyond the horizon."""
    most = horizon * share
    gaps = np.random.default_rng(seed).geometric(share, (n_trials, math.ceil(most + 8 * math.sqrt(most) + 10)))
    return np.cumsum(gaps, axis=1)


def find_crossing(late_at: Ints, horizon: int, odds: tuple[float, ...], *, is_before: bool) -> Floats:
    """Return the first response after which a mixture of bets decides; infinite where none does.

    Between late responses a bet only grows or only falls: it is highest just before the next one, or right at one.
    """
    late, in_time = (np.log(factor) for factor in compute_factors(LIMIT, odds))
    n_late = np.arange(late_at.shape[1]) + (0 if is_before else 1)
    n = np.minimum(late_at - 1, horizon) if is_before else late_at
    value = mix_bets(n_late[:, None] * late + (n - n_late)[..., None] * in_time)
    begins = np.concatenate([np.zeros((len(late_at), 1), dtype=np.int64), late_at[:, :-1]], axis=1)
    is_seen = (begins if is_before else late_at) <= horizon
    is_over = is_seen & (value >= compute_threshold())
    first = is_over.argmax(axis=1)
    if is_before:
        found = np.maximum([_find_first_n(int(k), horizon) for k in first], begins[np.arange(len(first)), first])
    else:
        found = late_at[np.arange(len(first)), first].astype(float)
    return np.where(is_over.any(axis=1), found, math.inf)


@functools.cache
def _find_first_n(n_late: int, horizon: int) -> float:
    """Return after how many responses so many late ones are few enough to pass; the horizon where they never are."""
    late, in_time = (np.log(factor) for factor in compute_factors(LIMIT, BETTER))
    n = np.arange(n_late, horizon + 1)
    is_over = mix_bets(n_late * late + (n - n_late)[:, None] * in_time) >= compute_threshold()
    return float(n[is_over.argmax()] if is_over.any() else horizon)


def find_early_stop(late_at: Ints, horizon: int) -> Floats:
    """Return at which response LoadGen's rule passes: where no more are late than its table allows there."""
    table = np.array(list(itertools.takewhile(lambda n: n <= horizon, list_early_stops(1 - LIMIT))))
    table = table[: late_at.shape[1]]
    passed = late_at[:, : len(table)] > table
    return np.where(passed.any(axis=1), table[passed.argmax(axis=1)], math.inf)


def list_early_stops(quantile: float, confidence: float = 0.99) -> Iterator[int]:
    """Yield the queries that 0, 1, 2, … late ones need.

    It is the least n with P(Binomial(n, 1 - quantile) ≤ t) ≤ 1 - c.

    Source: MLCommons, LoadGen, early_stopping.cc.
    """
    share, n = 1 - quantile, 1
    for t in itertools.count():
        while bdtr(t, n, share) > 1 - confidence:
            n += 1
        yield n


def describe_ends(ends: Floats, said: str, **common: str) -> list[Arm]:
    """Build the arms of a test in a case: the share that it decided, and after how many responses."""
    parts = [float(np.isfinite(part).mean()) for part in np.array_split(ends, N_PARTS)]
    unit = "twentieth of the trials"
    share = build_arm(parts, metric="decided_share", unit_of_replication=unit, note=said, **common)
    found = ends[np.isfinite(ends)].tolist()
    some = found[:: max(1, len(found) // 1000)]
    return [share, *([build_arm(some, metric="responses", unit_of_replication="trial", **common)] if some else [])]
