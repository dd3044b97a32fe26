"""Say what a load found: percentiles with intervals, what was not answered, and the verdict."""

import dataclasses
import math
from collections import Counter
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fulltilt.infer.load.arrivals import Scenario
from fulltilt.records import VERSION
from fulltilt.report.latency import count_histogram
from fulltilt.stats.intervals import compute_proportion_interval, compute_quantile_interval, count_needed, thin
from fulltilt.stats.sequential import ShareTest, estimate_dependence, judge_share

Verdict = Literal["met", "missed", "not proven"]
Floats = NDArray[np.float64]
NEVER_S = 1e9  # stands for an answer that never came, where a figure has to be finite
OK, TIMED_OUT, BROKEN, OPEN, CUT_OFF = 200, 0, -1, -2, -3
NAMES = {TIMED_OUT: "timed out", BROKEN: "connection broken", OPEN: "no answer yet", CUT_OFF: "ended with an error"}
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
MIN_S = 5.0  # of a load that a test ends
BLAME = 0.5  # of a percentile, counted from the sending on: if that is less, the generator made it
NEAR = 0.25  # of the limit
GROWTH = 1.5  # the last third of the responses takes so many times as long as the first: the queue grows
N_COLUMNS = 7  # of a row: due, handled, ended (seconds of the load); status; cached samples; words, first of them


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    measured: float
    ci95: tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """What is sent, and what the responses are held to.

    Attributes:
        requests_per_s: None where the scenario sends the next request after an answer.
        seconds: The longest time; a test that decides ends it earlier, but not before ``min_s``.
        quantile: Share of the responses that has to be within the limit; None of it without a limit.
        new_tokens: Words that each request asks for, of a model that writes text; 0: requests hold samples.
        promised_s: That quantile when the served artefact was accepted at this load; None: another load, or no promise.
    """

    url: str
    scenario: Scenario = "server"
    requests_per_s: float | None = None
    seconds: float = 60.0
    min_s: float = MIN_S
    samples_per_request: int = 1
    quantile: float = 0.99
    limit_s: float | None = None
    seed: int = 0
    timeout_s: float = 30.0
    new_tokens: int = 0
    promised_s: float | None = None

    @property
    def target(self) -> str:
        """Where requests go: the URL itself where it has a path, else where our servers take them."""
        ours = f"{self.url.rstrip('/')}/v1/{'generate' if self.new_tokens else 'predict'}"
        return self.url if self.url.partition("://")[2].partition("/")[2] else ours


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
        first_token_ms: From the scheduled arrival to the first word, of a model that writes text; else empty.
        tokens_per_s: Words that were written, over the seconds of the load; None: no text was asked for.
        histogram: Lower and upper bound in milliseconds, responses between them.
        null_reasons: What is null → why.
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
    first_token_ms: dict[str, Estimate]
    tokens_per_s: float | None
    histogram: tuple[tuple[float, float, int], ...]
    null_reasons: dict[str, str]


class Responses:
    """Keeps requests as they were due, up to the first that may still be in time.

    Attributes:
        response_s, first_s: Seconds from the scheduled arrival to the end and to the first word; infinite without it.
    """

    def __init__(self, rows: ArrayLike, limit_s: float | None = None):
        table = np.asarray(rows, dtype=np.float64).reshape(-1, N_COLUMNS)
        table = table[np.argsort(table[:, 0], kind="stable")]
        is_unknown = (table[:, 3] == OPEN) & (table[:, 2] - table[:, 0] <= (limit_s or math.inf))
        table = table[: is_unknown.argmax()] if is_unknown.any() else table  # what follows is a selection
        self.due_s, handled_s, self.ended_s, self.status, self.n_cached, self.n_words, first_s = table.T
        self.generator_late_s = handled_s - self.due_s
        self.is_answered = self.status == OK
        self.response_s = np.where(self.is_answered, self.ended_s - self.due_s, math.inf)
        self.first_s = np.where(self.is_answered, first_s - self.due_s, math.inf)

    def __len__(self) -> int:
        return len(self.due_s)

    def count_unanswered(self) -> dict[str, int]:
        counts = Counter(int(status) for status in self.status[~self.is_answered])
        return {NAMES.get(status, str(status)): n for status, n in sorted(counts.items())}

    def compute_dependence(self, limit_s: float | None) -> float:
        """Compute how many neighbours say as much as one independent response: waiting together makes them alike.

        What is far below the limit counts as equal: a machine that drifts by some per cent makes nothing late. Blocks
        of one relaxation time are still alike at their ends, so they are of about two; a test holds what follows
        against simulated queues.
        """
        floor_s = 1e-6 if limit_s is None else NEAR * limit_s
        return 2 * estimate_dependence(np.log(np.clip(self.response_s, floor_s, 1e3))) - 1


def estimate_quantile(ordered: Floats, quantile: float, dependence: float = 1.0) -> Estimate:
    """Estimate a quantile of ordered values with its 95 % interval; infinite values count as the largest.

    The upper bound is infinite where there are too few independent values for one.
    """
    independent = thin(np.minimum(ordered, NEVER_S), dependence)
    low, high = compute_quantile_interval(independent, quantile)
    high = high if len(independent) >= count_needed(quantile) else math.inf
    measured = float(np.quantile(ordered, quantile, method="inverted_cdf"))
    low, high = (math.inf if bound >= NEVER_S else bound for bound in (low, high))
    return Estimate(measured=measured, ci95=(low, high))


def judge_responses(responses: Responses, plan: LoadPlan) -> tuple[Verdict, str | None, ShareTest]:
    """Judge whether the stated share of responses is within the limit, and say what kept that from being told."""
    assert plan.limit_s is not None
    response_s, dependence = responses.response_s, responses.compute_dependence(plan.limit_s)
    test = judge_share(response_s > plan.limit_s, 1 - plan.quantile, dependence=dependence)
    if test.decision == "accepted":
        third = len(response_s) // 3
        first_s, last_s = (float(np.median(part)) for part in (response_s[:third], response_s[-third:]))
        grows = last_s > GROWTH * first_s and last_s - first_s > 0.1 * plan.limit_s
        return ("not proven", "responses grow for as long as the load lasts", test) if grows else ("met", None, test)
    why = _blame_generator(responses, plan)
    return ("missed" if test.decision == "refused" and not why else "not proven"), why, test


def _blame_generator(responses: Responses, plan: LoadPlan) -> str | None:
    """Say so where requests sent when due would have met the limit, or been much faster."""
    own_s = responses.response_s - responses.generator_late_s
    said_s, own_s = (np.quantile(s, plan.quantile, method="inverted_cdf") for s in (responses.response_s, own_s))
    is_own = own_s <= (plan.limit_s or BLAME * said_s) < said_s
    return "the load generator was late itself, and the percentile is its own" if is_own else None


def build_outcome(responses: Responses, plan: LoadPlan, ended: str) -> LoadOutcome:
    """Put together what was measured; needs one response at least."""
    verdict, why, test, late_share = None, _blame_generator(responses, plan), None, None
    ordered, dependence = np.sort(responses.response_s), responses.compute_dependence(plan.limit_s)
    if plan.limit_s is not None:
        verdict, why, test = judge_responses(responses, plan)
        share, n = float((ordered > plan.limit_s).mean()), max(1, int(len(ordered) / dependence))
        late_share = Estimate(measured=share, ci95=compute_proportion_interval(round(share * n), n))
    n_answered, seconds = int(responses.is_answered.sum()), float(responses.ended_s.max())
    quantiles = QUANTILES | {"p999": 0.999, f"p{100 * plan.quantile:g}".replace(".", ""): plan.quantile}
    response_ms = {name: estimate_quantile(1000 * ordered, q, dependence) for name, q in quantiles.items()}
    slowest_ms, first_ms = 1000 * float(ordered[-1]), 1000 * np.sort(responses.first_s)
    late_ms = 1000 * responses.generator_late_s
    n_samples, writes = n_answered * plan.samples_per_request, plan.new_tokens > 0
    null_reasons = {} if writes else {"tokens_per_s": "no text was asked for"}
    if plan.limit_s is None:
        null_reasons |= dict.fromkeys(("verdict", "late_share", "test"), "no limit was stated")
    if not all(math.isfinite(each.ci95[1]) for each in response_ms.values()):
        null_reasons["response_ms"] = "one that is never answered is infinite, and so is a bound of too few"
    return LoadOutcome(
        version=VERSION,
        verdict=verdict,
        why=why,
        plan=plan,
        ended=ended,
        seconds=seconds,
        n_requests=len(responses),
        answered_per_s=n_answered / seconds,
        samples_per_s=n_samples / seconds,
        response_ms=response_ms | {"max": Estimate(measured=slowest_ms, ci95=(slowest_ms, slowest_ms))},
        late_share=late_share,
        unanswered=responses.count_unanswered(),
        cached_share=int(responses.n_cached[responses.is_answered].sum()) / max(1, n_samples),
        dependence=dependence,
        test=test,
        generator_late_ms={name: float(np.quantile(late_ms, QUANTILES[name])) for name in ("p50", "p99")},
        first_token_ms={name: estimate_quantile(first_ms, q, dependence) for name, q in quantiles.items() if writes},
        tokens_per_s=int(responses.n_words[responses.is_answered].sum()) / seconds if writes else None,
        histogram=tuple(count_histogram(ordered[: np.isfinite(ordered).sum()])),
        null_reasons=null_reasons,
    )
