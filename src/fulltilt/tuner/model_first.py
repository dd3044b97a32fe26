"""Model-first search: measure device and loader apart, predict every plan, run the few that may be the best.

    memory on fake tensors  →  device probes  →  loader probes  →  whole runs, each where the model hopes most

Only whole runs are picked from; the model says which are worth the time, and learns from each (``tuner.model``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Sequence
from typing import Any

from fulltilt.levers import load_catalogue
from fulltilt.records import Plan, Trial
from fulltilt.tuner.coordinate_descent import coordinate_descent, project
from fulltilt.tuner.model.arms import device_arm
from fulltilt.tuner.model.plan_memory import PlanMemory
from fulltilt.tuner.model.step_time import StepTime
from fulltilt.tuner.session import Ask, Skip, Strategy
from fulltilt.tuner.space import COUNTABLE, COUPLED, Space

N_WHOLE = 4  # whole runs that the model chooses, at most
MIN_WHOLE = 3
N_POLISH = 6  # plans next to the best, at most; one for each lever where there are more
MIN_POLISH = 3
POLISH_REACH = 0.06  # of the logarithm: neighbours that may at best be as much slower are left
N_CURVE = 5  # batch sizes at which the fast arm is probed, at most
N_FEED = 3  # numbers of workers next to the best, where loading is the slower side
BALANCED = 0.8  # of the device's seconds: from here on loading is looked at more closely than the device
N_FAKE = 4  # batch sizes of the memory pre-pass
MAX_FAKE_S = 30.0  # of the memory pre-pass together: a large model's takes seconds a point
KAPPA = 0.5  # standard deviations of hope: how much an uncertain plan is preferred
WORTH = 0.005  # of the logarithm of samples/s: a plan that hopes for less is not run
NEGLIGIBLE_LOADING = 0.004  # of the step: then workers and pinning cannot matter
GAIN = 0.99  # of the seconds: a lever that takes less than this joins the fast arm
OFF_BY = 0.35  # of the logarithm: a model that errs by as much, always, is not used

Answer = Generator[Ask | Skip, Trial, Trial]


def estimate_trials(space: Space) -> int:
    """About how many rows a search adds: probes on fake tensors, of device and loader, and whole runs."""
    n_values = sum(len(values) - 1 for name, values in space.axes.items() if name not in (COUPLED, "num_workers"))
    n_parts = N_FAKE + n_values + N_CURVE + N_FEED + 3
    return n_parts + N_WHOLE + max(N_POLISH, len(space.axes)) // 2


def model_first(space: Space) -> Strategy:
    """Run the search; where its models cannot be built or err throughout, coordinate descent takes over."""
    if not space.axes:
        return
    search = _Search(space)
    yield from search.estimate_memory()
    yield from search.probe_levers()
    yield from search.probe_loader()
    yield from (search.probe_feed() if search.is_loader_bound else search.probe_batches())
    if search.can_predict:
        yield from search.run_whole()
        yield from search.polish()
    if not search.can_predict or search.is_off:
        yield from coordinate_descent(space)


class _Search:
    """What is known so far. Each public method is one stage, a part of the strategy's generator."""

    def __init__(self, space: Space):
        self._space = space
        self._base = project(space)
        self._batches: tuple[int, ...] = tuple(space.axes.get(COUPLED, (self._base[COUPLED],)))
        limit_gib = math.inf if space.memory_gib is None else space.memory_gib
        self._memory = PlanMemory(device_arm(self._base), self._batches, limit_gib)
        self._rows: dict[str, list[Trial]] = {"device": [], "loader": [], "end_to_end": [], "failed": []}
        self._fast = self._base
        self._middle = self._base[COUPLED]

    @property
    def can_predict(self) -> bool:
        return bool(self._rows["device"])

    @property
    def is_off(self) -> bool:
        """Whether every whole run came out far from what was predicted before any of them, or none ran well."""
        rows = self._rows["end_to_end"]
        if not rows:
            return True
        plain = self._build_model(learn=False)
        means, _ = plain.predict_log_rate([row.plan for row in rows])
        errors = [math.log(row.samples_per_s or math.nan) - mean for row, mean in zip(rows, means, strict=True)]
        spread = max(errors) - min(errors)  # an error that all share does not disturb the ranking
        return min(map(abs, errors)) > OFF_BY and spread > OFF_BY

    def estimate_memory(self) -> Strategy:
        """Peaks on fake tensors: a curve for the user's arm, two points for each lever that changes memory.

        The largest batch first: where even that takes little, memory decides nothing and no more is asked.
        """
        spent_s = 0.0
        levers = [n for n in self._list_levers(of_loader=False) if "memory" in load_catalogue()[n].trades]
        for batch in reversed(_spread(self._batches, N_FAKE)):
            trial = yield from self._ask_fake(self._base, batch)
            spent_s += trial.seconds
            if trial.status != "ok" or self._memory.is_ample:
                return
        for lever in levers:
            for plan in self._flip(self._base, lever):
                for batch in (self._batches[0], self._batches[-1]):
                    if spent_s > MAX_FAKE_S:
                        return
                    spent_s += (yield from self._ask_fake(plan, batch)).seconds

    def probe_levers(self) -> Strategy:
        """The user's arm on the device, then lever by lever at a batch in the middle, keeping what gains."""
        first = self._memory.find_first(self._find_nearest_batch(self._base[COUPLED]))
        yield from self._ask_device(self._base, first, "the user's settings on data that lies on the device")
        if not self.can_predict:
            smaller = [b for b in self._batches if b < first]
            if not smaller:
                return
            yield from self._ask_device(self._base, smaller[0], f"batch {first} failed")
            if not self.can_predict:
                return
        self._middle = self._choose_middle()
        self._fast = self._base
        best = yield from self._ask_device(self._fast, self._middle, "a batch at which levers are compared")
        for lever in self._list_levers(of_loader=False):
            for plan in self._flip(self._fast, lever):
                row = yield from self._ask_device(
                    plan, self._middle, f"{lever} {plan[lever]}, the rest as gained so far"
                )
                if row.status == "ok" and (best.samples_per_s or 0.0) < GAIN * (row.samples_per_s or 0.0):
                    self._fast, best = plan, row

    def probe_loader(self) -> Strategy:
        """Workers none, half as many as cores and as many; then what else changes loading, where it can matter."""
        if not self.can_predict:
            return
        counts = self._list_counts()
        plain = self._space.with_value(self._base, "num_workers", counts[0])
        row = yield from self._ask_loader(plain, self._middle, f"the loader alone, {counts[0]} workers")
        if row.status != "ok" or self._compute_loading_share(row) < NEGLIGIBLE_LOADING:
            return
        for count in _choose_counts(counts, self._space.facts.n_cores_usable):
            yield from self._ask_count(count, self._middle)
        best = self._find_fastest_feed()
        for lever in self._list_levers(of_loader=True):
            for plan in self._flip(best.plan, lever):
                yield from self._ask_loader(plan, self._middle, f"the loader alone, {lever} {plan[lever]}")

    def probe_feed(self) -> Strategy:
        """Where loading is the slower side: numbers of workers next to the best, then other batch sizes with it."""
        counts = self._list_counts()
        for _ in range(N_FEED):
            probed = {row.plan["num_workers"] for row in self._rows["loader"]}
            at = counts.index(self._find_fastest_feed().plan["num_workers"])
            beside = [n for n in (*counts[at + 1 : at + 2], *counts[max(at - 1, 0) : at]) if n not in probed]
            if not beside:
                break
            yield from self._ask_count(beside[0], self._middle)
        for factor in (1 / 8, 1 / 64, 4):
            best = self._find_fastest_feed()
            batch = self._find_nearest_batch(self._middle * factor)
            is_beyond = (best.plan[COUPLED] == self._middle) if factor < 1 / 8 else (best.plan[COUPLED] < self._middle)
            if factor != 1 / 8 and is_beyond:  # the other way was the better one
                continue
            if self._memory.fits(self._space.with_value(self._fast, COUPLED, batch)):
                yield from self._ask_loader(best.plan, batch, "the loader alone, at another batch size")

    def probe_batches(self) -> Strategy:
        """Where the device is the slower side: the fast arm over batch sizes, and the loader at one more."""
        yield from self._probe_curve()
        if len(self._rows["loader"]) > 1:
            other = self._find_nearest_batch(self._middle / 4)
            yield from self._ask_loader(
                self._find_fastest_feed().plan, other, "the loader alone, at another batch size"
            )

    @property
    def is_loader_bound(self) -> bool:
        """Whether the fastest feed seen is no faster than the fastest arm."""
        rows = self._rows["loader"]
        return bool(rows) and self._compute_loading_share(self._find_fastest_feed()) > BALANCED

    def _list_counts(self) -> list[int]:
        return sorted(self._space.axes.get("num_workers", (self._base["num_workers"],)))

    def _ask_count(self, count: int, batch: int) -> Answer:
        plan = self._space.with_value(self._rows["loader"][0].plan, "num_workers", count)
        return (yield from self._ask_loader(plan, batch, f"the loader alone, {count} workers"))

    def _find_fastest_feed(self) -> Trial:
        return max(self._rows["loader"], key=lambda row: row.samples_per_s or 0.0)

    def _find_nearest_batch(self, wanted: float) -> int:
        return min(self._batches, key=lambda b: abs(math.log(b / wanted)))

    def run_whole(self) -> Strategy:
        """The plan that may be the fastest, again and again, until no other hopes for more than was measured."""
        plans = self._list_candidates()
        for number in range(N_WHOLE):
            chosen = self._choose_whole(plans)
            if chosen is None:
                return
            plan, expected, hope = chosen
            if number >= MIN_WHOLE and hope < WORTH:
                return
            why = f"predicted {expected:,.0f} samples/s" + (f", {math.expm1(hope):+.1%} at best" if number else "")
            yield from self._ask("end_to_end", plan, why)

    def _list_candidates(self) -> list[Plan]:
        """The grid; of a large one the fastest settings so far, each lever moved from them, over batches and workers.

        What is left out differs in two levers at least from what probes found to be fastest.
        """
        if self._space.n_combinations <= COUNTABLE:
            return self._space.grid()
        fast = self._fast
        if self._rows["loader"]:
            feed = self._find_fastest_feed().plan
            for lever in self._list_levers(of_loader=True):
                fast = self._space.with_value(fast, lever, feed[lever])
        levers = [*self._list_levers(of_loader=False), *self._list_levers(of_loader=True)]
        moved = [fast, *(plan for lever in levers for plan in self._flip(fast, lever))]
        plans: dict[Plan, None] = {}
        for plan in moved:
            for count in self._list_counts():
                for batch in self._batches:
                    placed = self._space.with_value(plan, "num_workers", count)
                    plans[self._space.with_value(placed, COUPLED, batch)] = None
        return list(plans)

    def polish(self) -> Strategy:
        """Plans one step away from the best: where loading is the slower side more and fewer workers, then by hope.

        Some run whatever the model hopes: it knows nothing of what it does not see.
        """
        for number in range(max(N_POLISH, len(self._space.axes))):
            beside = self._list_neighbours(["num_workers"]) if self.is_loader_bound else []
            chosen = self._choose_whole(beside)
            if chosen is None:
                chosen = self._choose_whole(self._list_neighbours(self._space.axes))
                if chosen is None or (number >= MIN_POLISH and chosen[2] < -POLISH_REACH):
                    return
            plan, expected, _ = chosen
            yield from self._ask("end_to_end", plan, f"next to the best so far, predicted {expected:,.0f} samples/s")

    def _list_neighbours(self, levers: Collection[str]) -> list[Plan]:
        """The best plan with one of the levers moved: to the next value on an ordered axis, to any on the others."""
        best = max(self._rows["end_to_end"], key=lambda row: row.samples_per_s or 0.0, default=None)
        if best is None:
            return []
        plans: dict[Plan, None] = {}
        for lever, values in self._space.axes.items():
            if lever not in levers:
                continue
            if lever in (COUPLED, "num_workers") and best.plan[lever] in values:
                at = values.index(best.plan[lever])
                values = (*values[max(at - 1, 0) : at], *values[at + 1 : at + 2])
            for value in values:
                plans[self._space.with_value(best.plan, lever, value)] = None
        return list(plans)

    def _choose_whole(self, plans: Sequence[Plan]) -> tuple[Plan, float, float] | None:
        """Plan, predicted samples/s, and how far above the best measured its logarithm may lie."""
        tried = {row.plan for row in (*self._rows["end_to_end"], *self._rows["failed"])}
        refused = self._find_refused_count()
        left = [p for p in plans if p not in tried and p["num_workers"] < refused and self._memory.fits(p)]
        if not left:
            return None
        means, sds = self._build_model().predict_log_rate(left)
        hopes = means + KAPPA * sds
        at = int(hopes.argmax())
        best = max((row.samples_per_s or 0.0 for row in self._rows["end_to_end"]), default=0.0)
        return left[at], math.exp(means[at]), float(hopes[at] - math.log(best)) if best else math.inf

    def _find_refused_count(self) -> float:
        """The smallest number of workers above 0 whose loader failed by itself: a whole run with as many would too."""
        counts = [row.plan["num_workers"] for row in self._rows["failed"] if row.kind == "loader"]
        return min((count for count in counts if count), default=math.inf)

    def _probe_curve(self) -> Strategy:
        """The fast arm at further batch sizes: upward as long as memory surely allows, the ends, then the gaps."""
        arm = device_arm(self._fast)
        failed: set[int] = set()
        for _ in range(N_CURVE):
            known = [row.plan[COUPLED] for row in self._rows["device"] if device_arm(row.plan) == arm]
            if len(known) >= N_CURVE:
                return
            batch = self._choose_gap(set(known) | failed)
            if batch is None:
                return
            row = yield from self._ask_device(self._fast, batch, "the fastest settings so far, at another batch size")
            if row.status != "ok":
                failed.add(batch)

    def _choose_gap(self, known: set[int]) -> int | None:
        """The largest batch that surely fits, then the smallest of use, then the middle of the widest gap."""
        fitting = [b for b in self._batches if self._memory.fits(self._space.with_value(self._fast, COUPLED, b))]
        left = [b for b in fitting if b not in known]
        if left and left[-1] > max(known, default=0):
            return left[-1]
        edge = self._memory.find_edge(self._fast, known)
        if edge is not None or not left:
            return edge
        useful = [b for b in left if b >= self._middle / 32]

        def compute_distance(batch: int) -> float:
            return min(abs(math.log(batch / other)) for other in known)

        best = max(useful, key=compute_distance, default=None)
        return best if best is not None and compute_distance(best) >= math.log(1.9) else None

    def _choose_middle(self) -> int:
        """A batch large enough to show what levers do, and small enough to fit with every one of them."""
        fitting = [b for b in self._batches if self._memory.fits(self._space.with_value(self._base, COUPLED, b))]
        known = self._rows["device"][0].plan[COUPLED]
        if not fitting:
            return known
        roomy = [b for b in fitting if b <= fitting[-1] / 3] or fitting[:1]
        return max(known, roomy[-1]) if known in fitting else roomy[-1]

    def _build_model(self, *, learn: bool = True) -> StepTime:
        return StepTime(
            device=self._rows["device"],
            loader=self._rows["loader"],
            whole=self._rows["end_to_end"] if learn else [],
            n_cores=self._space.facts.n_cores_usable,
            on_cpu=self._space.facts.device_type == "cpu",
        )

    def _compute_loading_share(self, row: Trial) -> float:
        """Seconds of loading a sample over the seconds of computing on it, at the fast arm."""
        fastest = max(r.samples_per_s or 0.0 for r in self._rows["device"])
        return fastest / (row.samples_per_s or math.inf)

    def _list_levers(self, *, of_loader: bool) -> list[str]:
        """Precision first: what the others gain depends on it more than it on them."""
        catalogue = load_catalogue()
        names = [
            name
            for name in self._space.axes
            if name not in (COUPLED, "num_workers") and (catalogue[name].stage == "loader") == of_loader
        ]
        return sorted(names, key=lambda name: name != "precision")

    def _flip(self, plan: Plan, lever: str) -> list[Plan]:
        """The plan with each other value of one lever; values that cannot apply beside the rest are left out."""
        flipped = [self._space.with_value(plan, lever, v) for v in self._space.axes[lever] if v != plan[lever]]
        guard = load_catalogue()[lever].guard
        return [p for p in flipped if not guard(p[lever], p, self._space.facts)]

    def _ask_fake(self, plan: Plan, batch: int) -> Answer:
        plan = _without_loader(self._space.with_value(plan, COUPLED, batch))
        trial = yield Ask(plan=plan, why="memory of a step, estimated on fake tensors", kind="memory")
        self._memory.learn(trial)
        return trial

    def _ask_device(self, plan: Plan, batch: int, why: str) -> Answer:
        return (yield from self._ask("device", _without_loader(self._space.with_value(plan, COUPLED, batch)), why))

    def _ask_loader(self, plan: Plan, batch: int, why: str) -> Answer:
        return (yield from self._ask("loader", self._space.with_value(plan, COUPLED, batch), why))

    def _ask(self, kind: str, plan: Plan, why: str) -> Answer:
        trial = yield Ask(plan=plan, why=why, kind=kind)
        self._memory.learn(trial)
        if trial.status != "ok":
            self._rows["failed"].append(trial)
        elif trial not in self._rows[kind]:  # asked twice, the same row comes back
            self._rows[kind].append(trial)
        return trial


def _without_loader(plan: Plan) -> Plan:
    """With every lever of the loader at its default: a probe of the device uses none of them."""
    catalogue = load_catalogue()
    names = [name for name in plan if catalogue[name].stage == "loader" and name != COUPLED]
    return plan.replace(**{name: catalogue[name].default for name in names})


def _spread(values: Sequence[int], n: int) -> list[int]:
    """``n`` of the values or fewer, both ends among them, evenly by position."""
    if len(values) <= n:
        return list(values)
    return [values[round(i * (len(values) - 1) / (n - 1))] for i in range(n)]


def _choose_counts(counts: Sequence[Any], n_cores: int) -> list[int]:
    """Of the numbers of workers above the smallest: the one next to half the cores, and the one next to all of them."""
    above = list(counts[1:])
    wanted = [min(above, key=lambda n: abs(n - target)) for target in (n_cores / 2, n_cores)] if above else []
    return list(dict.fromkeys(wanted))
