"""Model-first search: measure device and loader apart, predict every plan, run the few that may be the best.

    memory on fake tensors  →  device probes  →  loader probes  →  whole runs, each where the model hopes most

Only whole runs are picked from; the model (``search.model``) says which are worth the time, and learns from each.
"""

import dataclasses
import itertools
import math
from collections.abc import Generator

from fulltilt.levers import load_catalogue
from fulltilt.records import PROBES, Plan, Trial, format_rate
from fulltilt.tuner.question.grid_size import count_grid
from fulltilt.tuner.question.space import COUPLED, Space
from fulltilt.tuner.search.coordinate_descent import coordinate_descent, project
from fulltilt.tuner.search.model.arms import device_arm
from fulltilt.tuner.search.model.candidates import Candidates, spread, strip_loader
from fulltilt.tuner.search.model.knowledge import Knowledge
from fulltilt.tuner.search.session import Ask, Skip, Strategy

POLISH_REACH = 0.06  # of the logarithm: neighbours that may at best be as much slower are left
NOISY_REACH = 0.5  # the same on a noisy machine, where single runs are off by as much
N_FAKE = 4  # batch sizes of the memory pre-pass
LEVER_SHARE = 0.5  # of the time for probes: after it the loader's turn has come
N_DOUBT = 3  # further estimates of an arm at a time, where they decide what fits
WORTH = 0.005  # of the logarithm of samples/s: a plan that hopes for less is not run
NEGLIGIBLE_LOADING = 0.004  # of the step: then workers and pinning cannot matter
OVERLAP = 0.04  # of the logarithm: what a plan without workers must promise, at best, to be run once
SHORT = 0.92  # of the predicted samples/s: a first whole run below it met what no probe saw
GAIN = 0.99  # of the seconds: a lever that takes less than this joins the fast arm


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Limits of a search: ``FULL`` unless it is to be quick."""

    n_whole: int = 4  # whole runs that the model chooses,
    min_whole: int = 3  # and of these, whatever it hopes
    n_polish: int = 9  # plans next to the best, from the last gain on; one for each lever where there are more levers
    min_polish: int = 5  # of these, whatever the model hopes
    n_noisy: int = 4  # further plans on a noisy machine, from the last gain on
    max_whole: int = 14  # whole runs together
    n_curve: int = 5  # batch sizes at which the fast arm is probed
    n_feed: int = 3  # numbers of workers next to the best, where loading is the slower side
    fake_s: float = 30.0  # of the memory pre-pass together: a large model's takes seconds a point
    probe_s: float = math.inf  # of all probes; past it only what a prediction cannot do without is probed

    def count_polish(self, space: Space) -> int:
        return max(self.n_polish, len(space.axes)) if math.isinf(self.probe_s) else self.n_polish


FULL = Effort()
QUICK = Effort(
    n_whole=3, min_whole=2, n_polish=4, min_polish=2, n_noisy=0, n_curve=4, n_feed=2, fake_s=2.5, probe_s=32.0
)

Answer = Generator[Ask | Skip, Trial, Trial]


def count_trials(space: Space, effort: Effort = FULL) -> dict[str, int]:
    """Count the rows that a search on a quiet machine adds at most, by kind, where its models can be built."""
    if not space.axes:
        return {"end_to_end": 0}
    plans = Candidates(space, project(space))
    device, loader = (plans.list_levers(of_loader=of_loader) for of_loader in (False, True))
    n_values = {name: len(values) for name, values in space.axes.items()}
    n_batches, n_counts = len(plans.batches), len(plans.counts)
    n_arms, n_feeds = (math.prod(n_values[name] + 1 for name in levers) for levers in (device, loader))
    n_fake = sum(n_values[name] for name in device if _shows_on_fake_tensors(name))
    return {
        "memory": min(n_batches, N_FAKE + N_DOUBT) + 2 * n_fake,
        "device": min(n_batches * n_arms, 2 + sum(n_values[name] for name in device) + effort.n_curve),
        "loader": min(n_batches * n_feeds * n_counts, n_counts + sum(n_values[name] for name in loader) + 3),
        "end_to_end": min(count_grid(space), effort.n_whole + 1 + effort.count_polish(space)),
    }


def model_first(space: Space, effort: Effort = FULL) -> Strategy:
    """Run the search; where its models cannot be built or err throughout, coordinate descent takes over."""
    if not space.axes:
        return
    search = _Search(space, effort)
    yield from search.estimate_memory()
    yield from search.probe_levers()
    if search.known.device:
        yield from search.probe_loader()
        yield from (search.probe_feed() if search.known.is_loader_bound else search.probe_batches())
        yield from search.run_whole()
        yield from search.polish()
        yield from search.look_again()
    if not search.known.device or search.known.is_off:
        yield from coordinate_descent(space) if effort is FULL else coordinate_descent(space, max_rounds=1)


def _shows_on_fake_tensors(name: str) -> bool:
    """Whether a pre-pass can tell what the lever does to memory: what an allocator keeps it cannot."""
    lever = load_catalogue()[name]
    return "memory" in lever.trades and lever.stage != "environment"


def _has_gained(before: Trial, after: Trial) -> bool:
    """Whether a row is faster than another by more than a lever may gain by chance."""
    return (before.samples_per_s or 0.0) < GAIN * (after.samples_per_s or 0.0)


def _describe_hope(expected: float, hope: float) -> str:
    """Describe a prediction; a plan that hopes for less than the best so far promises no gain."""
    gain = f", {math.expm1(hope):+.1%} at best" if 0 < hope < math.inf else ""
    return f"predicted {format_rate(expected)} samples/s{gain}"


class _Search:
    """The stages of the strategy, over what is ``known`` so far."""

    def __init__(self, space: Space, effort: Effort):
        self._space, self._effort = space, effort
        self._probed_s = 0.0
        self._base = project(space)
        self._plans = Candidates(space, self._base)
        self.known = Knowledge(space, self._base, self._plans.batches)
        self._fast = self._base
        self._middle = self._base[COUPLED]
        self._fake_s = 0.0  # spent on estimates of memory

    def estimate_memory(self) -> Strategy:
        """Estimate peaks on fake tensors: a curve for the user's arm, two points for each lever that changes memory.

        The largest batch first: where even that takes little, memory decides nothing and no more is asked.
        """
        batches = self._plans.batches
        for number, batch in enumerate(reversed(spread(batches, N_FAKE))):
            trial = yield from self._ask_fake(self._base, batch)
            is_late = number > 0 and self._fake_s > self._effort.fake_s  # one point is no curve
            if trial.status != "ok" or self.known.memory.is_ample or is_late:
                return
        yield from self._settle_doubts(self._base)
        levers = [name for name in self._plans.list_levers(of_loader=False) if _shows_on_fake_tensors(name)]
        flipped = [plan for lever in levers for plan in self._plans.flip(self._base, lever)]
        for plan, batch in itertools.product(flipped, (batches[0], batches[-1])):
            if self._fake_s > self._effort.fake_s:
                return
            yield from self._ask_fake(plan, batch)

    def _settle_doubts(self, plan: Plan) -> Strategy:
        """Estimate further fake points of an arm where its own leave open what fits."""
        for _ in range(N_DOUBT):
            batch = self.known.memory.find_doubtful_batch(plan)
            if batch is None or self._is_spent or self._fake_s > self._effort.fake_s:
                return
            if (yield from self._ask_fake(plan, batch)).status != "ok":
                return

    def probe_levers(self) -> Strategy:
        """Probe the user's settings on the device, then lever by lever at a middle batch, keeping what gains."""
        first = self.known.choose_first(self._base, self._plans.find_nearest_batch(self._base[COUPLED]))
        why = "settings as near the user's as a probe can be, on data that lies on the device"
        yield from self._ask_device(self._base, first, why)
        smallest = self._plans.batches[0]
        if not self.known.device and smallest < first:
            yield from self._ask_device(self._base, smallest, f"batch {first} failed")
        if not self.known.device:
            return
        ran = self.known.device[0].plan[COUPLED]
        self._middle = self.known.choose_middle(self._base, ran, otherwise=ran)
        best = yield from self._ask_device(self._fast, self._middle, "a batch at which levers are compared")
        for lever in self._plans.list_levers(of_loader=False):
            for plan in self._plans.flip(self._fast, lever):
                if self._probed_s >= LEVER_SHARE * self._effort.probe_s:
                    return
                why = f"{lever} {plan[lever]}, the rest as gained so far"
                row = yield from self._ask_device(plan, self._middle, why)
                if row.status == "ok" and _has_gained(best, row):
                    self._fast, best = plan, row

    def probe_loader(self) -> Strategy:
        """Probe no workers, half as many as cores and as many; then other levers of loading, where it can matter."""
        fewest, *further = self._plans.choose_counts()
        row = yield from self._ask_count(fewest)
        if row.status != "ok" or self.known.compute_loading_share(row) < NEGLIGIBLE_LOADING:
            return
        for count in further:
            if not self._is_spent:
                yield from self._ask_count(count)
        best = self.known.find_fastest_feed()
        for lever in self._plans.list_levers(of_loader=True):
            for plan in self._plans.flip(best.plan, lever):
                if self._is_spent:
                    return
                yield from self._ask_loader(plan, self._middle, f"the loader alone, {lever} {plan[lever]}")

    def probe_feed(self) -> Strategy:
        """Probe further workers next to the best, then other batch sizes with it, where loading is the slower side."""
        counts = self._plans.counts
        for _ in range(self._effort.n_feed):
            probed = {row.plan["num_workers"] for row in self.known.loader}
            at = counts.index(self.known.find_fastest_feed().plan["num_workers"])
            beside = [n for n in (*counts[at + 1 : at + 2], *counts[max(at - 1, 0) : at]) if n not in probed]
            if not beside or self._is_spent:
                break
            yield from self._ask_count(beside[0])
        for factor in (1 / 8, 1 / 64, 4):
            best = self.known.find_fastest_feed()
            batch = self._plans.find_nearest_batch(self._middle * factor)
            is_beyond = (best.plan[COUPLED] == self._middle) if factor < 1 / 8 else (best.plan[COUPLED] < self._middle)
            if self._is_spent or (factor != 1 / 8 and is_beyond):  # the other way was the better one
                continue
            if self.known.memory.fits(self._space.with_value(self._fast, COUPLED, batch)):
                yield from self._ask_loader(best.plan, batch, "the loader alone, at another batch size")

    def probe_batches(self) -> Strategy:
        """Probe the fastest settings over batch sizes, and the loader at one more, where the device is slower."""
        yield from self._probe_curve()
        if len(self.known.loader) > 1 and not self._is_spent:
            other = self._plans.find_nearest_batch(self._middle / 4)
            feed = self.known.find_fastest_feed().plan
            yield from self._ask_loader(feed, other, "the loader alone, at another batch size")

    def run_whole(self) -> Strategy:
        """Run the plan that may be the fastest until no other hopes for more than was measured.

        On a noisy machine as many as there may be: what was measured is fast or slow by chance.
        """
        yield from self._settle_doubts(self._fast)
        plans = self._list_plans()
        for number in range(self._effort.n_whole):
            chosen = self.known.choose_whole(plans)
            if chosen is None:
                break
            plan, expected, hope = chosen
            if number >= self._effort.min_whole and self.known.noise is None and hope < WORTH:
                break
            row = yield from self._ask("end_to_end", plan, _describe_hope(expected, hope), expected)
            is_short = number == 0 and row.status == "ok" and (row.samples_per_s or 0.0) < SHORT * expected
            if is_short and "pin_memory" in self._space.axes and not plan["pin_memory"]:
                for pinned in self._plans.flip(plan, "pin_memory"):  # copies, and what they hold up, are in no probe
                    yield from self._ask("end_to_end", pinned, "slower than predicted: batches from page-locked memory")
        free = self.known.choose_without_workers(plans)
        if free is not None and free[1] > OVERLAP:
            yield from self._ask("end_to_end", free[0], f"no workers, {math.expm1(free[1]):+.1%} if loading overlaps")

    def polish(self) -> Strategy:
        """Run plans one step from the best: onward where that gained, other workers if loading is slow, then by hope.

        Some run after each gain whatever the model hopes: it knows nothing of what it does not see. On a noisy machine
        all of them do.
        """
        before, n_in_vain = self.known.find_best(), 0
        for _ in range(self._effort.count_polish(self._space)):
            best = self.known.find_best()
            if before is None or best is None:
                return
            onward = self._plans.list_onward(before.plan, best.plan) if _has_gained(before, best) else []
            n_in_vain = 0 if _has_gained(before, best) else n_in_vain
            before = best
            beside = self._plans.list_neighbours(best.plan, ["num_workers"]) if self.known.is_loader_bound else []
            chosen = self.known.choose_whole(onward) or self.known.choose_whole(beside)
            if chosen is None or (not onward and chosen[2] < -POLISH_REACH):
                chosen = self.known.choose_whole(self._plans.list_neighbours(best.plan, self._space.axes))
                may_stop = n_in_vain >= self._effort.min_polish and self.known.noise is None
                if chosen is None or (may_stop and chosen[2] < -POLISH_REACH):
                    return
            why = f"next to the best so far, predicted {format_rate(chosen[1])} samples/s"
            yield from self._ask("end_to_end", chosen[0], why, chosen[1])
            n_in_vain += 1

    def look_again(self) -> Strategy:
        """Run further plans on a noisy machine: one step away from the best, then by hope wherever they lie.

        One run that was slow by chance speaks against a lever for all plans that the model knows of. Of 20 searches
        that were repeated, one stopped while each run still gained, one step short of where the others ended.
        """
        plans, n_in_vain = self._list_plans(), 0
        while len(self.known.whole) < self._effort.max_whole:
            best = self.known.find_best()
            if best is None or self.known.noise is None or n_in_vain >= self._effort.n_noisy:
                return
            chosen = self.known.choose_whole(self._plans.list_neighbours(best.plan, self._space.axes))
            if chosen is None or chosen[2] < -NOISY_REACH:
                chosen = self.known.choose_whole(plans)
            if chosen is None or chosen[2] < -NOISY_REACH:
                return
            plan, expected, hope = chosen
            why = f"the machine is noisy: one more, {_describe_hope(expected, hope)}"
            row = yield from self._ask("end_to_end", plan, why, expected)
            n_in_vain = 0 if row.status == "ok" and _has_gained(best, row) else n_in_vain + 1

    def _list_plans(self) -> list[Plan]:
        return self._plans.list_plans(self._fast, self.known.find_fastest_feed().plan if self.known.loader else None)

    def _probe_curve(self) -> Strategy:
        """Probe the fastest settings at further batch sizes: upward as memory allows, the ends, then the gaps."""
        arm = device_arm(self._fast)
        failed: set[int] = set()
        for _ in range(self._effort.n_curve):
            probed = [row.plan[COUPLED] for row in self.known.device if device_arm(row.plan) == arm]
            if len(probed) >= self._effort.n_curve or self._is_spent:
                return
            yield from self._settle_doubts(self._fast)
            batch = self.known.choose_gap(self._fast, self._middle, {*probed, *failed})
            if batch is None:
                return
            row = yield from self._ask_device(self._fast, batch, "the fastest settings so far, at another batch size")
            if row.status != "ok":
                failed.add(batch)

    @property
    def _is_spent(self) -> bool:
        """Whether the time for probes is over."""
        return self._probed_s >= self._effort.probe_s

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

    def _ask(self, kind: str, plan: Plan, why: str, predicted: float | None = None) -> Answer:
        trial = yield Ask(plan=plan, why=why, kind=kind, predicted_samples_per_s=predicted)
        self._probed_s += trial.seconds if kind in PROBES else 0.0
        self.known.learn(trial)
        return trial
