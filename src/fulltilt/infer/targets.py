"""Define targets, the load they need, and how measured figures decide them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from fulltilt.config import Config
from fulltilt.errors import ConfigError
from fulltilt.infer.load.arrivals import MIN_REQUESTS, SAMPLES_PER_REQUEST, Scenario
from fulltilt.infer.load.outcome import QUANTILES, Estimate, Floats, Verdict, estimate_quantile
from fulltilt.stats import compute_interval, compute_rate_interval, judge_share
from fulltilt.stats.intervals import count_needed, thin
from fulltilt.stats.sequential import Decision, compute_queue_dependence

Figure = Literal["batch_latency_ms", "memory_gib", "samples_per_hour", "response_s", "first_token_s", "tokens_per_s"]
FLOORS = ("samples_per_hour", "tokens_per_s")  # have to be at least their limit; all others at most
WAITING = ("response_s", "first_token_s")  # a request's wait for others counts

VERDICTS: tuple[Verdict, ...] = ("met", "not proven", "missed")
STATISTICS = (*QUANTILES, "mean", "max")
MAX_LOAD_S = 120.0  # of a load that goes on, where the planned requests leave a percentile open
MAX_LONGER = 4  # times the planned requests, where no rate tells how long they take


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One target: a figure and its limit.

    Attributes:
        statistic: p50, p90, p95, p99, mean or max of a time under the load; None for memory and throughput.
    """

    figure: Figure
    statistic: str | None
    limit: float

    @property
    def name(self) -> str:
        return self.figure if self.statistic is None else f"{self.figure}_{self.statistic}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load that the model is measured under.

    Attributes:
        requests_per_s: Rate of arrivals; None where no target needs a load, and where no rate belongs to the scenario.
        n_requests: Requests that the strictest percentile needs if they do not wait for each other; 0: none is sent.
        new_tokens: Words that a request asks a model for that writes text.
    """

    requests_per_s: float | None
    samples_per_request: int
    n_requests: int
    seed: int
    scenario: Scenario = "server"
    new_tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Raw figures of the measuring process.

    Attributes:
        block_samples: Samples of each block of batches sent back to back.
        call_s: Seconds of the model's call, for each request under the load.
        response_s: Seconds from scheduled arrival to answer, for the same requests.
        memory_peak_gib: Peak of the device used, from the built model to the last answer; the mean is over that time.
        first_token_s: Seconds from scheduled arrival to the first new word, of models that write text.
    """

    block_samples: tuple[int, ...]
    block_s: tuple[float, ...]
    call_s: tuple[float, ...] = ()
    response_s: tuple[float, ...] = ()
    memory_peak_gib: float = 0.0
    memory_mean_gib: float = 0.0
    first_token_s: tuple[float, ...] = ()

    def read_s(self, figure: Figure) -> Floats:
        """Return the seconds of a time under the load."""
        return np.array(self.call_s if figure == "batch_latency_ms" else getattr(self, figure))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A target with what was measured for it; the names are those of the JSON contract, where infinity is null."""

    name: str
    limit: float
    measured: float
    ci95: tuple[float, float]
    met: bool
    verdict: Verdict
    null_reasons: dict[str, str]


def plan_targets(config: Config, *, needs_any: bool = True) -> list[Target]:
    """List the targets of a configuration; each percentile is one target.

    Raises:
        ConfigError: the configuration states no target, and ``needs_any``.
    """
    targets = []
    for figure in get_args(Figure):
        stated = getattr(config.targets, figure)
        limits = stated if isinstance(stated, Mapping) else {None: stated}
        targets += [Target(figure=figure, statistic=which, limit=x) for which, x in limits.items() if x is not None]
    if not targets and needs_any:
        raise ConfigError(
            "no target is stated; write some, such as targets: {response_s: {p95: 2}, requests_per_s: 20}",
            key="targets",
        )
    return targets


def plan_load(config: Config, targets: Sequence[Target]) -> Load:
    """Plan the load for ``targets``.

    Raises:
        ConfigError: a target needs a load, and no rate of arrivals is stated; a response that the scenario has not.
    """
    timed = [target for target in targets if target.statistic is not None]
    scenario = config.targets.scenario
    requests_per_s = config.targets.requests_per_s if scenario == "server" else None
    if scenario == "offline" and any(target.figure in WAITING for target in timed):
        raise ConfigError(
            "has no response times, everything arrives at once; state samples_per_hour, or scenario: server",
            key="targets.scenario",
        )
    if timed and requests_per_s is None and scenario == "server":
        raise ConfigError(
            f"{timed[0].name} needs a load; say how many requests arrive a second, such as targets.requests_per_s=20",
            key="targets.requests_per_s",
        )
    needed = [count_needed(QUANTILES[t.statistic]) for t in timed if t.statistic in QUANTILES]
    samples = config.targets.samples_per_request or SAMPLES_PER_REQUEST.get(scenario) or config.data.batch_size
    return Load(
        requests_per_s=requests_per_s if timed else None,
        samples_per_request=samples,
        n_requests=max([MIN_REQUESTS, *needed]) if timed else 0,
        seed=config.run.seed,
        scenario=scenario,
        new_tokens=config.targets.new_tokens,
    )


def judge(target: Target, figures: Figures, load: Load) -> Judged:
    """Judge a target: met if its whole interval is within the limit, missed if all is outside.

    A response time is only met if the model keeps up with the load; otherwise the queue grows for as long as the load
    lasts, and the figure depends on when the measurement stops.
    """
    estimate = estimate_figure(target.figure, target.statistic, figures, load)
    verdicts = [decide(estimate.ci95, target.limit, is_floor=target.figure in FLOORS)]
    if target.figure in WAITING and load.scenario == "server":
        verdicts.append(judge_load(figures, load))
    verdict = max(verdicts, key=VERDICTS.index)
    return Judged(
        name=target.name,
        limit=target.limit,
        measured=estimate.measured,
        ci95=estimate.ci95,
        met=verdict == "met",
        verdict=verdict,
        null_reasons={} if np.isfinite(estimate.ci95).all() else {"ci95": "too few requests for a bound"},
    )


def examine_target(target: Target, figures: Figures, load: Load) -> Decision:
    """Test the share of values beyond the limit of a percentile, which may be done after every request."""
    values, dependence = _read_values(target.figure, figures, load)
    return judge_share(values > target.limit, 1 - QUANTILES[target.statistic or ""], dependence=dependence).decision


def judge_load(figures: Figures, load: Load) -> Verdict:
    """Judge whether the model answers requests faster than they arrive."""
    arriving_per_hour = (load.requests_per_s or 0.0) * load.samples_per_request * 3600
    return decide(estimate_figure("samples_per_hour", None, figures, load).ci95, arriving_per_hour, is_floor=True)


def compute_dependence(load: Load, figures: Figures) -> float:
    """Compute how many successive responses say as much as one: requests wait for each other."""
    samples_per_s = sum(figures.block_samples) / sum(figures.block_s)
    return compute_queue_dependence((load.requests_per_s or 0.0) * load.samples_per_request / samples_per_s)


def count_at_most(load: Load) -> int:
    """Count the requests that may be sent where the planned ones leave a percentile open."""
    n = MAX_LOAD_S * load.requests_per_s if load.requests_per_s else MAX_LONGER * load.n_requests
    return max(load.n_requests, round(min(n, 1e6)))  # all are drawn beforehand


def decide(interval: tuple[float, float], limit: float, *, is_floor: bool) -> Verdict:
    low, high = interval
    if is_floor:
        return "met" if low >= limit else "missed" if high < limit else "not proven"
    return "met" if high <= limit else "missed" if low > limit else "not proven"


def estimate_figure(figure: Figure, statistic: str | None, figures: Figures, load: Load) -> Estimate:
    """Estimate a figure with its 95 % interval. Of a peak or maximum both bounds are the largest seen.

    The interval of a percentile has an infinite upper bound where there are too few values for one.
    """
    if figure == "memory_gib":
        peak_gib = figures.memory_peak_gib
        return Estimate(measured=peak_gib, ci95=(peak_gib, peak_gib))
    if figure in FLOORS:
        low, high = compute_rate_interval(figures.block_samples, figures.block_s)
        rate_per_s = sum(figures.block_samples) / sum(figures.block_s)
        factor = 3600 if figure == "samples_per_hour" else load.new_tokens
        return Estimate(measured=rate_per_s * factor, ci95=(low * factor, high * factor))
    assert statistic is not None
    values, dependence = _read_values(figure, figures, load)
    values = np.sort(values)
    if statistic == "max":
        return Estimate(measured=float(values[-1]), ci95=(float(values[-1]), float(values[-1])))
    if statistic == "mean":
        return Estimate(measured=float(np.mean(values)), ci95=compute_interval(thin(values, dependence)))
    return estimate_quantile(values, QUANTILES[statistic], dependence)


def _read_values(figure: Figure, figures: Figures, load: Load) -> tuple[Floats, float]:
    """Return the values of a time in its target's unit, and how many say as much as one."""
    if figure in WAITING:
        return figures.read_s(figure), compute_dependence(load, figures)
    return 1000 * figures.read_s(figure), 1.0
