"""Collect what rows say so far: what fits, what bounds the step, which plan hopes for most."""

import math
from collections.abc import Collection, Sequence

from fulltilt.records import Plan, Trial
from fulltilt.tuner.picks.speed import is_noisy, measure_noise
from fulltilt.tuner.question.space import COUPLED, Space
from fulltilt.tuner.search.model.arms import device_arm
from fulltilt.tuner.search.model.plan_memory import PlanMemory
from fulltilt.tuner.search.model.step_time import StepTime

KAPPA = 0.5  # standard deviations of hope: how much an uncertain plan is preferred
BALANCED = 0.8  # of the device's seconds: from here on loading is looked at more closely than the device
OFF_BY = 0.35  # of the logarithm: a model that errs by as much, always, is not used


class Knowledge:
    """Holds rows by what ran, in the order they came, and answers from them; batch sizes ascend."""

    def __init__(self, space: Space, base: Plan, batches: Sequence[int]):
        self._space, self._batches = space, tuple(batches)
        limit_gib = math.inf if space.memory_gib is None else space.memory_gib
        self.memory = PlanMemory(device_arm(base), self._batches, limit_gib)
        self.device: list[Trial] = []
        self.loader: list[Trial] = []
        self.whole: list[Trial] = []
        self.failed: list[Trial] = []  # of any kind but "memory"

    def learn(self, trial: Trial) -> None:
        """Take in a row; one that was asked twice comes back as the same row and counts once."""
        self.memory.learn(trial)
        rows = {"device": self.device, "loader": self.loader, "end_to_end": self.whole}.get(trial.kind)
        if rows is not None:
            found = rows if trial.status == "ok" else self.failed
            if trial not in found:
                found.append(trial)

    @property
    def is_off(self) -> bool:
        """Whether predictions are useless: every whole run came out far from its own, or none ran well."""
        if not self.whole:
            return True
        means, _ = self._build_model(learn=False).predict_log_rate([row.plan for row in self.whole])
        errors = [math.log(_read_rate(row)) - mean for row, mean in zip(self.whole, means, strict=True)]
        spread = max(errors) - min(errors)  # an error that all share does not disturb the ranking
        return min(map(abs, errors)) > OFF_BY and spread > OFF_BY

    @property
    def noise(self) -> float | None:
        """Standard error of a whole run by its blocks, where it is unusually large; else None."""
        return measure_noise(self.whole) if is_noisy(self.whole) else None

    @property
    def is_loader_bound(self) -> bool:
        """Whether the fastest feed seen is about as slow as the fastest arm, or slower."""
        return bool(self.loader) and self.compute_loading_share(self.find_fastest_feed()) > BALANCED

    def compute_loading_share(self, row: Trial) -> float:
        """Divide the seconds of loading a sample by those of computing on it with the fastest settings."""
        fastest = max(r.samples_per_s or 0.0 for r in self.device)
        return fastest / (row.samples_per_s or math.inf)

    def find_fastest_feed(self) -> Trial:
        return max(self.loader, key=_read_rate)

    def find_best(self) -> Trial | None:
        """Return the fastest whole run; None before the first."""
        return max(self.whole, key=_read_rate, default=None)

    def choose_whole(self, plans: Sequence[Plan]) -> tuple[Plan, float, float] | None:
        """Return the most hopeful plan, its predicted samples/s, and how far ln(rate) may lie above the best."""
        tried = {row.plan for row in (*self.whole, *self.failed)}
        # Workers whose loader failed by itself: a whole run with as many would too.
        failed = [row.plan["num_workers"] for row in self.failed if row.kind == "loader" and row.plan["num_workers"]]
        refused = min(failed, default=math.inf)
        left = [p for p in plans if p not in tried and p["num_workers"] < refused and self.memory.fits(p)]
        if not left:
            return None
        means, sds = self._build_model().predict_log_rate(left)
        hopes = means + KAPPA * sds
        at, best = int(hopes.argmax()), self.find_best()
        hope = float(hopes[at] - math.log(_read_rate(best))) if best else math.inf
        return left[at], math.exp(means[at]), hope

    def choose_without_workers(self, plans: Sequence[Plan]) -> tuple[Plan, float] | None:
        """Return the best plan without workers if loading and computing overlapped, and its gain in ln(rate) then.

        None where one was run already, or on a CPU, where they share cores.
        """
        best = self.find_best()
        left = [p for p in plans if p["num_workers"] == 0 and self.memory.fits(p)]
        is_seen = any(row.plan["num_workers"] == 0 for row in (*self.whole, *self.failed))
        if best is None or is_seen or not left or not self.loader or self._space.facts.device_type == "cpu":
            return None
        model = self._build_model(learn=False)
        rates = [model.predict_overlap_log_rate(plan) for plan in left]
        at = max(range(len(left)), key=rates.__getitem__)
        return left[at], rates[at] - math.log(_read_rate(best))

    def choose_first(self, base: Plan, wanted: int) -> int:
        """Choose the batch of the first device probe; known memory allows ``choose_middle``'s, which saves a probe."""
        return self.choose_middle(base, wanted, otherwise=self._batches[0]) if self.memory.is_known else wanted

    def choose_middle(self, base: Plan, known: int, *, otherwise: int) -> int:
        """Choose a batch, ``known`` at least, that is large enough to show what levers do, and fits with each of them.

        Args:
            otherwise: What to choose where nothing fits.
        """
        fitting = self.list_fitting_batches(base)
        if not fitting:
            return otherwise
        roomy = [b for b in fitting if b <= fitting[-1] / 3] or fitting[:1]
        return max(known, roomy[-1]) if known in fitting else roomy[-1]

    def choose_gap(self, fast: Plan, middle: int, known: Collection[int]) -> int | None:
        """Choose the largest batch that surely fits, then the smallest useful, then the middle of the widest gap."""
        left = [b for b in self.list_fitting_batches(fast) if b not in known]
        if left and left[-1] > max(known, default=0):
            return left[-1]
        edge = self.memory.find_edge(fast, known)
        if edge is not None or not left:
            return edge
        useful = [b for b in left if b >= middle / 32]

        def compute_distance(batch: int) -> float:
            return min(abs(math.log(batch / other)) for other in known)

        best = max(useful, key=compute_distance, default=None)
        return best if best is not None and compute_distance(best) >= math.log(1.9) else None

    def list_fitting_batches(self, plan: Plan) -> list[int]:
        return [b for b in self._batches if self.memory.fits(self._space.with_value(plan, COUPLED, b))]

    def _build_model(self, *, learn: bool = True) -> StepTime:
        return StepTime(
            device=self.device,
            loader=self.loader,
            whole=self.whole if learn else [],
            noise=self.noise,
            n_cores=self._space.facts.n_cores_usable,
            on_cpu=self._space.facts.device_type == "cpu",
        )


def _read_rate(row: Trial) -> float:
    return row.samples_per_s or 0.0
