"""Estimate plan speeds with standard errors, choose a row, and find rows not measurably slower than the fastest.

A plan's speed is the geometric mean of its runs side by side, or of the one run it had. Two plans are told apart when
their means differ by more than ``CLEAR`` standard errors of that difference. The error of a run is what processes of
one plan differ by on this machine, learnt from every plan that ran several times; intervals inside a run do not hold
it. Few runs say little of it: Student's t widens it, else equal plans are called different in 20 to 30 of 100 searches.
Runs from before the rounds count for the error and not for the means: luck made their plans finalists. Where no plan
ran twice side by side, the spread of a plan's runs over the whole search stands in. Ties are with the best row only, so
they do not chain down a slope.

The rounds of the finalists (``confirm``) end by the narrower ``compute_run_error``: another round costs a process of
every plan, and what it could still win is small. What they leave open is named as a tie here.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fulltilt.levers import load_catalogue
from fulltilt.records import Plan, Trial
from fulltilt.stats import compute_t_quantile

INDIFFERENCE_PCT = 1.0  # of speed: closer than that a smaller batch or a simpler plan is worth more
CLEAR = 2.0  # standard errors
POWERFUL = 0.84  # standard errors above which 80 of 100 estimates lie
PRIOR_SPREAD = 0.01  # of the logarithm: what processes of one plan differ by; 0.6 % on a quiet machine, drift on top
NOISY = 0.025  # of the logarithm: runs whose own blocks leave as much open; a quiet machine has less than half of it
PRIOR_DF = 4  # degrees of freedom that the prior counts for: as much as three rounds of two plans tell


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Holds the logarithm of a plan's samples/s, and its standard error."""

    log_rate: float
    error: float

    def compute_reach(self, other: "Speed") -> float:
        """Compute how far two logarithms may lie apart by chance."""
        return CLEAR * math.hypot(self.error, other.error)

    def may_equal(self, other: "Speed") -> bool:
        """Return whether the two cannot be told apart, or differ by too little to matter."""
        gap = abs(self.log_rate - other.log_rate)
        return gap <= max(self.compute_reach(other), -math.log1p(-INDIFFERENCE_PCT / 100))


def choose(
    rows: Sequence[Trial],
    runs: Sequence[Trial] = (),
    *,
    history: Sequence[Trial] = (),
    per: Sequence[float] | None = None,
    prefers: Callable[[Plan], bool] | None = None,
    for_up_to_pct: float = math.inf,
) -> tuple[Trial, list[Trial]]:
    """Return the simplest row within 1 % of the fastest candidate, and the others that may equal the overall fastest.

    Within ``INDIFFERENCE_PCT`` of the fastest the smaller batch wins, then the simpler plan. A wider gap that the runs
    cannot tell from none is still the best guess: taking the simpler plan across up to 3 % of it more than doubled the
    median regret (simulation, 75 workloads: 0.39 instead of 0.18 %). It is named as a tie, however wide.

    Args:
        rows: With status ok, one a plan; at least one.
        runs: Those made side by side; a plan that is among them is judged by the mean of its own.
        history: Every whole run of the search with status ok.
        per: By row, what samples/s are divided by before they are compared.
        prefers: Whether a plan is taken before others that it ties with; those then compete alone, below the fastest of
            all, and where none of them is within ``INDIFFERENCE_PCT`` of it, below the fastest of their own.
        for_up_to_pct: Of speed: what that may cost, by the means.
    """
    speeds = estimate_speeds(rows, runs, history)
    if per is not None:
        pairs = zip(speeds, per, strict=True)
        speeds = [dataclasses.replace(speed, log_rate=speed.log_rate - math.log(unit)) for speed, unit in pairs]
    best = max(range(len(rows)), key=lambda i: speeds[i].log_rate)
    tied = [i for i in range(len(rows)) if speeds[i].may_equal(speeds[best])]
    near = [i for i in tied if math.expm1(speeds[best].log_rate - speeds[i].log_rate) <= for_up_to_pct / 100]
    field = [i for i in near if prefers is not None and prefers(rows[i].plan)] or tied
    reach = -math.log1p(-INDIFFERENCE_PCT / 100)
    fastest = max(speeds[i].log_rate for i in field)
    first = speeds[best].log_rate if speeds[best].log_rate - fastest <= reach else fastest
    close = [i for i in field if first - speeds[i].log_rate <= reach]
    chosen = min(close, key=lambda i: (*compute_simplicity(rows[i].plan), -speeds[i].log_rate, rows[i].id))
    return rows[chosen], [rows[i] for i in sorted(tied, key=lambda i: -speeds[i].log_rate) if i != chosen]


def find_ties(
    best: Trial, runs: Sequence[Trial], others: Sequence[Sequence[Trial]], history: Sequence[Trial] = ()
) -> list[int]:
    """Find which of ``others`` cannot be told from ``best``, or look faster than it; fastest first.

    They ran before the finalists ran side by side: too little to be recommended, and no proof that they are slower.
    Drift since then counts: the rounds may agree to 1 % while the plan ran 12 % faster a minute before.

    Args:
        runs: Those side by side; they say how much runs differ here.
        others: By plan, its earlier runs with status ok.
        history: Every whole run of the search with status ok.
    """
    shared = max(_compute_shared(_group(runs), history), compute_spread(_group(history)))
    (first,) = estimate_speeds([best], runs, history)
    found = []
    for position, group in enumerate(others):
        error = max(shared, *map(estimate_error, group)) / math.sqrt(len(group))
        speed = Speed(log_rate=compute_mean_log(group), error=error)
        if speed.log_rate >= first.log_rate or speed.may_equal(first):
            found.append((-speed.log_rate, position))
    return [position for _, position in sorted(found)]


def estimate_speeds(rows: Sequence[Trial], runs: Sequence[Trial] = (), history: Sequence[Trial] = ()) -> list[Speed]:
    """Estimate each plan's log speed and error from its alternating finalist runs, else from all its runs.

    A plan that ran once has the error of its own run where that is the larger one.
    """
    beside = {group[0].plan: group for group in _group(runs)}
    shared = _compute_shared(list(beside.values()), history)
    by_plan = {group[0].plan: group for group in _group(history)} | beside
    speeds = []
    for row in rows:
        group = by_plan.get(row.plan, [row])
        error = shared if len(group) > 1 else max(shared, estimate_error(group[0]))
        speeds.append(Speed(log_rate=compute_mean_log(group), error=error / math.sqrt(len(group))))
    return speeds


def compute_detectable_pct(runs: Sequence[Trial], history: Sequence[Trial] = ()) -> float | None:
    """Compute the smallest speed difference, in percent, that such runs detect in 80 of 100 cases.

    None where nothing ran side by side.

    Args:
        runs: Those made side by side.
        history: Every whole run of the search with status ok.
    """
    beside = _group(runs)
    if not beside:
        return None
    n_runs = min(map(len, beside))
    error = _compute_shared(beside, history) * math.sqrt(2 / n_runs)
    return 100 * math.expm1((CLEAR + POWERFUL) * error)


def compute_run_error(runs: Sequence[Sequence[Trial]], earlier: Sequence[Trial] = ()) -> float:
    """Compute the standard error of the logarithm of one run's samples/s on this machine.

    It is the spread of one plan's runs or that of a run's blocks, whichever is larger; the prior without runs.

    Args:
        runs: By plan, its runs side by side with status ok.
        earlier: Runs of these plans from before.
    """
    if not runs:
        return PRIOR_SPREAD
    squares, df = _sum_squares(runs, earlier)
    between = (PRIOR_DF * PRIOR_SPREAD**2 + squares) / (PRIOR_DF + df)
    within = float(np.mean([estimate_error(run) ** 2 for found in runs for run in found]))
    return math.sqrt(max(between, within))


def compute_doubt(runs: Sequence[Sequence[Trial]], earlier: Sequence[Trial] = ()) -> float:
    """Return the larger of ``compute_run_error`` and ``compute_spread``, as the error of one run."""
    return max(compute_run_error(runs, earlier), compute_spread(runs, earlier))


def compute_spread(runs: Sequence[Sequence[Trial]], earlier: Sequence[Trial] = ()) -> float:
    """Compute the pooled standard deviation of log speed within plans, widened by Student's t; 0 without repeats."""
    squares, df = _sum_squares(runs, earlier)
    return compute_t_quantile(0.975, df) / CLEAR * math.sqrt(squares / df) if df else 0.0


def _compute_shared(beside: Sequence[Sequence[Trial]], history: Sequence[Trial]) -> float:
    """Compute the error of any run. Drift since the search counts only where the rounds say nothing."""
    if not any(len(found) > 1 for found in beside):
        return max(compute_doubt(beside), compute_spread(_group(history)))
    ids = {run.id for found in beside for run in found}
    plans = {found[0].plan for found in beside}
    return compute_doubt(beside, [run for run in history if run.plan in plans and run.id not in ids])


def estimate_error(run: Trial) -> float:
    """Estimate the standard error of one run's log samples/s from its 95 % interval, or use a prior."""
    if run.samples_per_s_ci95 is None or not run.samples_per_s:
        return PRIOR_SPREAD
    low, high = run.samples_per_s_ci95
    width = math.log(high / low) if low > 0 else (high - low) / run.samples_per_s
    return width / (2 * 1.96)


def measure_noise(runs: Sequence[Trial]) -> float:
    """Take the median ``estimate_error``: how much this machine disturbs a run while it is timed. 0 without runs."""
    return float(np.median([estimate_error(run) for run in runs])) if runs else 0.0


def is_noisy(runs: Sequence[Trial]) -> bool:
    """Return whether the median error within runs exceeds what an idle machine shows."""
    return measure_noise(runs) > NOISY


def compute_mean_log(runs: Sequence[Trial]) -> float:
    """Compute the logarithm of the geometric mean of samples/s."""
    return float(_read_logs(runs).mean())


def compute_simplicity(plan: Plan) -> tuple[int, int, float]:
    """Compute a key that is smaller for simpler plans: effective batch, batch, sum of the levers' complexities."""
    catalogue = load_catalogue()
    complexity = sum(catalogue[n].complexity(v) for n, v in plan.items() if n in catalogue and n != "batch_size")
    return plan.effective_batch_size, plan["batch_size"], complexity


def _group(runs: Sequence[Trial]) -> list[list[Trial]]:
    by_plan: dict[Plan, list[Trial]] = {}
    for run in runs:
        by_plan.setdefault(run.plan, []).append(run)
    return list(by_plan.values())


def _sum_squares(runs: Sequence[Sequence[Trial]], earlier: Sequence[Trial] = ()) -> tuple[float, int]:
    """Sum the squares of the logarithms about the mean of each plan → them, and their degrees of freedom.

    With ``earlier`` ones also about the mean of each stretch of time (the rounds, the search before them, any earlier
    comparison): drift that all plans share is no error of a difference.
    """
    if not earlier:
        logs = [_read_logs(found) for found in runs]
        return sum(float(((x - x.mean()) ** 2).sum()) for x in logs), sum(x.size - 1 for x in logs)
    cells = [(run, "beside") for found in runs for run in found] + [(run, run.comparison) for run in earlier]
    plans, stretches = (dict.fromkeys(names) for names in zip(*((run.plan, of) for run, of in cells), strict=True))
    marks = [[run.plan == p for p in plans] + [of == stretch for stretch in stretches] for run, of in cells]
    design = np.array(marks, dtype=np.float64)
    logs = _read_logs([run for run, _ in cells])
    rest = logs - design @ np.linalg.pinv(design) @ logs
    return float(rest @ rest), logs.size - int(np.linalg.matrix_rank(design))


def _read_logs(runs: Sequence[Trial]) -> NDArray[np.float64]:
    return np.log([run.samples_per_s or math.nan for run in runs])
