"""Say what a load found: percentiles with intervals, what was not answered, and the verdict."""

import dataclasses
import math
from collections import Counter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fulltilt.infer.load.arrivals import Scenario
from fulltilt.infer.load.estimates import Estimate, Floats, Verdict, estimate_quantile
from fulltilt.records import VERSION
from fulltilt.stats import ShareTest, compute_proportion_interval, estimate_dependence, judge_share
from fulltilt.stats.sequential import ALPHA

OK = 200
TIMED_OUT, BROKEN, OPEN = 0, -1, -2
NAMES = {TIMED_OUT: "timed out", BROKEN: "connection broken", OPEN: "no answer yet"}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
MIN_S = 5.0  # of a load that a test ends
BLAME = 0.5  # share of the late responses that were in time from their sending on: then the generator was late
NEAR = 0.25  # of the limit
GROWTH = 1.5  # the last third of the responses takes so many times as long as the first: the queue grows
N_COLUMNS = 5
"""Of a row: due, handled by the generator and ended, in seconds since the load began; status; samples from a cache."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """What is sent, and what the responses are held to.

    Attributes:
        requests_per_s: None where the scenario sends the next request after an answer.
        seconds: The longest time; a test that decides ends it earlier, but not before ``min_s``.
        quantile: Share of the responses that has to be within the limit; None of it without a limit.
        alpha: Probability of a wrong verdict of either kind, over all looks.
    """

    url: str
    scenario: Scenario = "server"
    requests_per_s: float | None = None
    seconds: float = 60.0
    min_s: float = MIN_S
    samples_per_request: int = 1
    quantile: float = 0.99
    limit_s: float | None = None
    alpha: float = ALPHA
    seed: int = 0
    timeout_s: float = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadOutcome:
    """The result of a load; ``--json`` writes its fields in this order.

    Attributes:
        verdict: None: there was no limit to hold.
        why: What kept it from being met, beside the responses themselves.
        ended: How the load ended: by its schedule, decided, interrupted, or because the server was gone.
        response_ms: From the scheduled arrival; a request that was never answered counts as infinite (null).
        unanswered: Status or event → requests; each is late.
        test: The sequential test of the share of late responses.
        generator_late_ms: How late the generator itself handled requests that were due: median and p99.
        histogram: Lower and upper bound in milliseconds, responses between them.
    """

    version: int
    verdict: Verdict | None
    why: str | None
    plan: LoadPlan
    ended: str
    seconds: float
    n_requests: int
    answered_per_s: float
    samples_per_s: float
    response_ms: dict[str, Estimate]
    late_share: Estimate | None
    unanswered: dict[str, int]
    cached_share: float
    dependence: float
    test: ShareTest | None
    generator_late_ms: dict[str, float]
    histogram: tuple[tuple[float, float, int], ...]


class Responses:
    """Keeps the rows of requests in the order they were due."""

    def __init__(self, rows: ArrayLike):
        unordered = np.asarray(rows, dtype=np.float64).reshape(-1, N_COLUMNS)
        self._rows = unordered[np.argsort(unordered[:, 0], kind="stable")]

    @classmethod
    def cut(cls, rows: ArrayLike, plan: LoadPlan, known_until_s: float) -> "Responses":
        """Keep the rows up to the first request that may still be in time. What follows is a selection.

        Args:
            known_until_s: When the first request was due that is open and has no row.
        """
        table = np.asarray(rows, dtype=np.float64).reshape(-1, N_COLUMNS)
        is_open = table[:, 3] == OPEN
        is_unknown = is_open & (table[:, 2] - table[:, 0] <= (plan.limit_s or math.inf))
        end_s = table[is_unknown, 0].min(initial=math.inf if is_open.any() else known_until_s)
        return cls(table[table[:, 0] < end_s])

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def due_s(self) -> Floats:
        return self._rows[:, 0]

    @property
    def generator_late_s(self) -> Floats:
        return self._rows[:, 1] - self._rows[:, 0]

    @property
    def response_s(self) -> Floats:
        """Seconds from the scheduled arrival; infinite where there was no proper answer."""
        return np.where(self.is_answered, self._rows[:, 2] - self._rows[:, 0], math.inf)

    @property
    def is_answered(self) -> NDArray[np.bool_]:
        return self._rows[:, 3] == OK

    @property
    def n_cached(self) -> int:
        return int(self._rows[self.is_answered, 4].sum())

    @property
    def seconds(self) -> float:
        """From the beginning to the last answer."""
        return float(self._rows[:, 2].max(initial=0.0))

    def count_unanswered(self) -> dict[str, int]:
        counts = Counter(int(status) for status in self._rows[~self.is_answered, 3])
        return {NAMES.get(status, str(status)): n for status, n in sorted(counts.items())}

    def compute_dependence(self, limit_s: float | None) -> float:
        """Compute how many neighbours say as much as one independent response: waiting together makes them alike.

        What is far below the limit counts as equal: a machine that drifts by some per cent makes nothing late. Blocks
        of one relaxation time are still alike at their ends, so they are of about two; a test holds what follows
        against simulated queues.
        """
        floor_s = 1e-6 if limit_s is None else NEAR * limit_s
        return 2 * estimate_dependence(np.log(np.clip(self.response_s, floor_s, 1e3))) - 1


def judge_responses(responses: Responses, plan: LoadPlan) -> tuple[Verdict, str | None, ShareTest]:
    """Judge whether the stated share of responses is within the limit, and say what kept that from being told."""
    assert plan.limit_s is not None
    response_s, share = responses.response_s, 1 - plan.quantile
    is_late = response_s > plan.limit_s
    test = judge_share(is_late, share, alpha=plan.alpha, dependence=responses.compute_dependence(plan.limit_s))
    if test.decision == "accepted":
        grows = _grows(response_s, plan.limit_s)
        return ("not proven", "responses grow for as long as the load lasts", test) if grows else ("met", None, test)
    is_late_itself = response_s - responses.generator_late_s > plan.limit_s
    if is_late.any() and is_late_itself.sum() < BLAME * is_late.sum():
        return "not proven", "the load generator was late itself, and most late responses are its doing", test
    return ("missed" if test.decision == "refused" else "not proven"), None, test


def build_outcome(responses: Responses, plan: LoadPlan, ended: str) -> LoadOutcome:
    """Put together what was measured; needs one response at least."""
    verdict, why, test = (None, None, None) if plan.limit_s is None else judge_responses(responses, plan)
    ordered, dependence = np.sort(responses.response_s), responses.compute_dependence(plan.limit_s)
    n_answered, seconds = int(responses.is_answered.sum()), responses.seconds
    late_s = responses.generator_late_s
    quantiles = QUANTILES | {f"p{100 * plan.quantile:g}".replace(".", ""): plan.quantile}
    if plan.limit_s is None:
        why = _blame_quantile(responses, plan.quantile)
    slowest_ms = 1000 * float(ordered[-1])
    return LoadOutcome(
        version=VERSION,
        verdict=verdict,
        why=why,
        plan=plan,
        ended=ended,
        seconds=seconds,
        n_requests=len(responses),
        answered_per_s=n_answered / seconds,
        samples_per_s=n_answered * plan.samples_per_request / seconds,
        response_ms={name: _in_ms(estimate_quantile(ordered, q, dependence)) for name, q in quantiles.items()}
        | {"max": Estimate(measured=slowest_ms, ci95=(slowest_ms, slowest_ms))},
        late_share=None if plan.limit_s is None else _estimate_late_share(ordered > plan.limit_s, dependence),
        unanswered=responses.count_unanswered(),
        cached_share=responses.n_cached / max(1, n_answered * plan.samples_per_request),
        dependence=dependence,
        test=test,
        generator_late_ms={name: 1000 * float(np.quantile(late_s, QUANTILES[name])) for name in ("p50", "p99")},
        histogram=tuple(count_histogram(ordered[: np.isfinite(ordered).sum()])),
    )


def count_histogram(ordered_s: Floats, n_bins: int = 8) -> list[tuple[float, float, int]]:
    """Count responses between bounds that grow by a constant factor; in milliseconds."""
    if not len(ordered_s) or ordered_s[-1] <= 0:
        return []
    low, high = max(ordered_s[0], 1e-3 * ordered_s[-1]), ordered_s[-1]
    edges = np.geomspace(low, max(high, 1.01 * low), n_bins + 1)
    counts = np.histogram(np.clip(ordered_s, edges[0], edges[-1]), edges)[0]
    return [(1000 * float(a), 1000 * float(b), int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def _estimate_late_share(is_late: NDArray[np.bool_], dependence: float) -> Estimate:
    share, n = float(is_late.mean()), max(1, int(len(is_late) / dependence))
    return Estimate(measured=share, ci95=compute_proportion_interval(round(share * n), n))


def _blame_quantile(responses: Responses, quantile: float) -> str | None:
    whole, own = responses.response_s, responses.response_s - responses.generator_late_s
    limit_s, own_s = (float(np.quantile(each, quantile, method="inverted_cdf")) for each in (whole, own))
    return "the load generator was late itself, and the percentile is its own" if own_s < BLAME * limit_s else None


def _grows(response_s: Floats, limit_s: float) -> bool:
    third = len(response_s) // 3
    first, last = (float(np.median(part)) for part in (response_s[:third], response_s[-third:]))
    return last > GROWTH * first and last - first > 0.1 * limit_s


def _in_ms(estimate: Estimate) -> Estimate:
    low, high = estimate.ci95
    return Estimate(measured=1000 * estimate.measured, ci95=(1000 * low, 1000 * high))
