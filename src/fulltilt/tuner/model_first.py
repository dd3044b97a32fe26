"""Model-first search: measure device and loader apart, predict every plan, run the few that may be the best.

    memory on fake tensors  →  device probes  →  loader probes  →  whole runs, each where the model hopes most

Only whole runs are picked from; the model says which are worth the time, and learns from each (``tuner.model``).
"""

from __future__ import annotations

import math
from collections.abc import Generator

from fulltilt.levers import load_catalogue
from fulltilt.records import Plan, Trial
from fulltilt.tuner.coordinate_descent import coordinate_descent, project
from fulltilt.tuner.model.arms import device_arm
from fulltilt.tuner.model.candidates import Candidates, spread, strip_loader
from fulltilt.tuner.model.knowledge import Knowledge
from fulltilt.tuner.session import Ask, Skip, Strategy
from fulltilt.tuner.space import COUPLED, Space

N_WHOLE = 4  # whole runs that the model chooses, at most
MIN_WHOLE = 3
N_POLISH = 6  # plans next to the best, at most; one for each lever where there are more
MIN_POLISH = 3
POLISH_REACH = 0.06  # of the logarithm: neighbours that may at best be as much slower are left
N_CURVE = 5  # batch sizes at which the fast arm is probed, at most
N_FEED = 3  # numbers of workers next to the best, where loading is the slower side
N_FAKE = 4  # batch sizes of the memory pre-pass
N_DOUBT = 3  # further ones of an arm at a time, where they decide what fits
MAX_FAKE_S = 30.0  # of the memory pre-pass together: a large model's takes seconds a point
WORTH = 0.005  # of the logarithm of samples/s: a plan that hopes for less is not run
NEGLIGIBLE_LOADING = 0.004  # of the step: then workers and pinning cannot matter
GAIN = 0.99  # of the seconds: a lever that takes less than this joins the fast arm

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
    if search.known.can_predict:
        yield from search.probe_loader()
        yield from (search.probe_feed() if search.known.is_loader_bound else search.probe_batches())
        yield from search.run_whole()
        yield from search.polish()
    if not search.known.can_predict or search.known.is_off:
        yield from coordinate_descent(space)


class _Search:
    """The stages, each a part of the strategy's generator, over what is ``known`` so far."""

    def __init__(self, space: Space):
        self._space = space
        self._base = project(space)
        self._plans = Candidates(space, self._base)
        self.known = Knowledge(space, self._base, self._plans.batches)
        self._fast = self._base
        self._middle = self._base[COUPLED]
        self._fake_s = 0.0  # spent on estimates of memory

    def estimate_memory(self) -> Strategy:
        """Peaks on fake tensors: a curve for the user's arm, two points for each lever that changes memory.

        The largest batch first: where even that takes little, memory decides nothing and no more is asked.
        """
        batches = self._plans.batches
        levers = [n for n in self._plans.list_levers(of_loader=False) if "memory" in load_catalogue()[n].trades]
        for batch in reversed(spread(batches, N_FAKE)):
            trial = yield from self._ask_fake(self._base, batch)
            if trial.status != "ok" or self.known.memory.is_ample:
                return
        yield from self._settle_doubts(self._base)
        for lever in levers:
            for plan in self._plans.flip(self._base, lever):
                for batch in (batches[0], batches[-1]):
                    if self._fake_s > MAX_FAKE_S:
                        return
                    yield from self._ask_fake(plan, batch)

    def _settle_doubts(self, plan: Plan) -> Strategy:
        """Further fake points of an arm where those it has leave open what fits."""
        for _ in range(N_DOUBT):
            batch = self.known.memory.find_doubtful_batch(plan)
            if batch is None or self._fake_s > MAX_FAKE_S:
                return
            if (yield from self._ask_fake(plan, batch)).status != "ok":
                return

    def probe_levers(self) -> Strategy:
        """The user's arm on the device, then lever by lever at a batch in the middle, keeping what gains."""
        first = self.known.choose_first(self._base, self._plans.find_nearest_batch(self._base[COUPLED]))
        yield from self._ask_device(self._base, first, "the user's settings on data that lies on the device")
        smallest = self._plans.batches[0]
        if not self.known.can_predict and smallest < first:
            yield from self._ask_device(self._base, smallest, f"batch {first} failed")
        if not self.known.can_predict:
            return
        self._middle = self.known.choose_middle(self._base)
        best = yield from self._ask_device(self._fast, self._middle, "a batch at which levers are compared")
        for lever in self._plans.list_levers(of_loader=False):
            for plan in self._plans.flip(self._fast, lever):
                why = f"{lever} {plan[lever]}, the rest as gained so far"
                row = yield from self._ask_device(plan, self._middle, why)
                if row.status == "ok" and (best.samples_per_s or 0.0) < GAIN * (row.samples_per_s or 0.0):
                    self._fast, best = plan, row

    def probe_loader(self) -> Strategy:
        """Workers none, half as many as cores and as many; then what else changes loading, where it can matter."""
        fewest, *further = self._plans.choose_counts()
        row = yield from self._ask_count(fewest)
        if row.status != "ok" or self.known.compute_loading_share(row) < NEGLIGIBLE_LOADING:
            return
        for count in further:
            yield from self._ask_count(count)
        best = self.known.find_fastest_feed()
        for lever in self._plans.list_levers(of_loader=True):
            for plan in self._plans.flip(best.plan, lever):
                yield from self._ask_loader(plan, self._middle, f"the loader alone, {lever} {plan[lever]}")

    def probe_feed(self) -> Strategy:
        """Where loading is the slower side: numbers of workers next to the best, then other batch sizes with it."""
        counts = self._plans.counts
        for _ in range(N_FEED):
            probed = {row.plan["num_workers"] for row in self.known.loader}
            at = counts.index(self.known.find_fastest_feed().plan["num_workers"])
            beside = [n for n in (*counts[at + 1 : at + 2], *counts[max(at - 1, 0) : at]) if n not in probed]
            if not beside:
                break
            yield from self._ask_count(beside[0])
        for factor in (1 / 8, 1 / 64, 4):
            best = self.known.find_fastest_feed()
            batch = self._plans.find_nearest_batch(self._middle * factor)
            is_beyond = (best.plan[COUPLED] == self._middle) if factor < 1 / 8 else (best.plan[COUPLED] < self._middle)
            if factor != 1 / 8 and is_beyond:  # the other way was the better one
                continue
            if self.known.memory.fits(self._space.with_value(self._fast, COUPLED, batch)):
                yield from self._ask_loader(best.plan, batch, "the loader alone, at another batch size")

    def probe_batches(self) -> Strategy:
        """Where the device is the slower side: the fast arm over batch sizes, and the loader at one more."""
        yield from self._probe_curve()
        if len(self.known.loader) > 1:
            other = self._plans.find_nearest_batch(self._middle / 4)
            feed = self.known.find_fastest_feed().plan
            yield from self._ask_loader(feed, other, "the loader alone, at another batch size")

    def run_whole(self) -> Strategy:
        """The plan that may be the fastest, again and again, until no other hopes for more than was measured."""
        yield from self._settle_doubts(self._fast)
        plans = self._plans.list_plans(self._fast, self.known.find_fastest_feed().plan if self.known.loader else None)
        for number in range(N_WHOLE):
            chosen = self.known.choose_whole(plans)
            if chosen is None:
                return
            plan, expected, hope = chosen
            if number >= MIN_WHOLE and hope < WORTH:
                return
            why = f"predicted {expected:,.0f} samples/s" + (f", {math.expm1(hope):+.1%} at best" if number else "")
            yield from self._ask("end_to_end", plan, why)

    def polish(self) -> Strategy:
        """Plans one step away from the best: where loading is the slower side more and fewer workers, then by hope.

        Some run whatever the model hopes: it knows nothing of what it does not see.
        """
        for number in range(max(N_POLISH, len(self._space.axes))):
            best = self.known.find_best()
            if best is None:
                return
            beside = self._plans.list_neighbours(best.plan, ["num_workers"]) if self.known.is_loader_bound else []
            chosen = self.known.choose_whole(beside)
            if chosen is None:
                chosen = self.known.choose_whole(self._plans.list_neighbours(best.plan, self._space.axes))
                if chosen is None or (number >= MIN_POLISH and chosen[2] < -POLISH_REACH):
                    return
            plan, expected, _ = chosen
            yield from self._ask("end_to_end", plan, f"next to the best so far, predicted {expected:,.0f} samples/s")

    def _probe_curve(self) -> Strategy:
        """The fast arm at further batch sizes: upward as long as memory surely allows, the ends, then the gaps."""
        arm = device_arm(self._fast)
        failed: set[int] = set()
        for _ in range(N_CURVE):
            probed = [row.plan[COUPLED] for row in self.known.device if device_arm(row.plan) == arm]
            if len(probed) >= N_CURVE:
                return
            yield from self._settle_doubts(self._fast)
            batch = self.known.choose_gap(self._fast, self._middle, {*probed, *failed})
            if batch is None:
                return
            row = yield from self._ask_device(self._fast, batch, "the fastest settings so far, at another batch size")
            if row.status != "ok":
                failed.add(batch)

    def _ask_fake(self, plan: Plan, batch: int) -> Answer:
        plan = strip_loader(self._space.with_value(plan, COUPLED, batch))
        trial = yield from self._ask("memory", plan, "memory of a step, estimated on fake tensors")
        self._fake_s += trial.seconds
        return trial

    def _ask_device(self, plan: Plan, batch: int, why: str) -> Answer:
        return (yield from self._ask("device", strip_loader(self._space.with_value(plan, COUPLED, batch)), why))

    def _ask_count(self, count: int) -> Answer:
        plan = self.known.loader[0].plan if self.known.loader else self._base
        plan = self._space.with_value(plan, "num_workers", count)
        return (yield from self._ask_loader(plan, self._middle, f"the loader alone, {count} workers"))

    def _ask_loader(self, plan: Plan, batch: int, why: str) -> Answer:
        return (yield from self._ask("loader", self._space.with_value(plan, COUPLED, batch), why))

    def _ask(self, kind: str, plan: Plan, why: str) -> Answer:
        trial = yield Ask(plan=plan, why=why, kind=kind)
        self.known.learn(trial)
        return trial
