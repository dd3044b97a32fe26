"""Measure how often a test of late responses errs, and how soon it decides, on synthetic responses.

No clock and no server: a trial is a row of responses that are late with a known probability, looked at after every one.
Beside our test stands LoadGen's early stopping as its users apply it: the run is repeated, longer, until it passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge
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
OURS, LOADGEN = "betting, a look after every response", "LoadGen's early stopping, repeated until it passes"
UNIT = "trial"
Ints, Floats = NDArray[np.int64], NDArray[np.float64]


def run(context: Context) -> Findings:
    n_trials = context.n_repeats or (500 if context.quick else N_TRIALS)
    arms: list[Arm] = []
    targets: list[Target] = []
    cases = {"1 % late": (LIMIT, HORIZON), "1.5 % late": (0.015, HORIZON), "0.3 % late": (0.003, PATIENCE)}
    for case, (share, horizon) in {**cases, "0.5 % late": (0.005, HORIZON), "0.1 % late": (0.001, PATIENCE)}.items():
        passes, refusals = measure_case(share, horizon, n_trials)
        for name, ends in {**passes, "refused by betting": refusals}.items():
            arms += describe_ends(ends, f"{case}, {horizon:,} responses", name)
        n_passed = int(np.isfinite(passes[OURS]).sum())
        interval = compute_proportion_interval(n_passed, n_trials)
        if case == "1 % late":
            targets.append(judge("passes at the limit, share", n_passed / n_trials, interval, at_most=ALPHA))
            n_refused = int(np.isfinite(refusals).sum())
            refused = compute_proportion_interval(n_refused, n_trials)
            targets.append(judge("refusals at the limit, share", n_refused / n_trials, refused, at_most=ALPHA))
        if case == "0.3 % late":
            name = f"passes at 0.3 % late within {PATIENCE:,} responses, share"
            targets.append(judge(name, n_passed / n_trials, interval, at_least=0.95))
    note = f"{n_trials:,} synthetic trials a case; late responses are independent, with the probability of the case"
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=(note,))


def measure_case(share: float, horizon: int, n_trials: int) -> tuple[dict[str, Floats], Floats]:
    """Return, by test, at which response each trial passed or was refused; infinite where it was not."""
    passes: dict[str, list[Floats]] = {OURS: [], LOADGEN: []}
    refusals = []
    for number in range(math.ceil(n_trials / N_BATCH)):
        late_at = draw_late(share, horizon, min(N_BATCH, n_trials), seed=number)
        passes[OURS].append(find_crossing(late_at, horizon, BETTER, is_before=True))
        passes[LOADGEN].append(find_early_stop(late_at, horizon))
        refusals.append(find_crossing(late_at, horizon, WORSE, is_before=False))
    return {name: np.concatenate(found)[:n_trials] for name, found in passes.items()}, np.concatenate(refusals)[
        :n_trials
    ]


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
        found = _find_first_n(first, late, in_time, horizon)
        found = np.maximum(found, begins[np.arange(len(first)), first])
    else:
        found = late_at[np.arange(len(first)), first].astype(float)
    return np.where(is_over.any(axis=1), found, math.inf)


def _find_first_n(n_late: Ints, late: Floats, in_time: Floats, horizon: int) -> Floats:
    """Return after how many responses so many late ones are few enough to pass."""
    needed = {}
    for k in np.unique(n_late):
        low, high = int(k), horizon
        while low < high:
            middle = (low + high) // 2
            is_over = mix_bets(k * late + (middle - k) * in_time) >= compute_threshold()
            low, high = (low, middle) if is_over else (middle + 1, high)
        needed[int(k)] = float(low)
    return np.array([needed[int(k)] for k in n_late])


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
        while _compute_tail(n, t, share) > 1 - confidence:
            n += 1
        yield n


def _compute_tail(n: int, t: int, share: float) -> float:
    """Compute P(Binomial(n, share) ≤ t)."""
    if t >= n:
        return 1.0
    logs = [
        math.lgamma(n + 1)
        - math.lgamma(k + 1)
        - math.lgamma(n - k + 1)
        + k * math.log(share)
        + (n - k) * math.log1p(-share)
        for k in range(t + 1)
    ]
    return math.fsum(map(math.exp, logs))


def describe_ends(ends: Floats, case: str, name: str) -> list[Arm]:
    """Build the arms of a case: the share that was decided, and after how many responses."""
    found = [float(end) for end in ends if math.isfinite(end)]
    n, (low, high) = len(ends), compute_proportion_interval(len(found), len(ends))
    said = f"{len(found):,} of {n:,}, {100 * len(found) / n:.2f} % ({100 * low:.2f} to {100 * high:.2f})"
    share = Arm(
        case=case,
        arm=name,
        metric="decided_share",
        median=len(found) / n,
        ci95=(low, high),
        n=n,
        unit_of_replication=UNIT,
        note=said,
    )
    if not found:
        return [share]
    some = found[:: max(1, len(found) // 1000)]
    return [share, build_arm(some, metric="responses", case=case, arm=name, unit_of_replication=UNIT)]
