"""Tell which plans fit: one memory curve an arm, from the rows of all arms together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from fulltilt.records import Plan, Trial
from fulltilt.tuner.search.model.arms import Arm, device_arm
from fulltilt.tuner.search.model.memory import MemoryCurve

AMPLE = 0.25  # of the limit: levers and libraries together do not make four times the memory of the user's arm
CONTEXT_GIB = 1.0  # of a process beside its tensors: libraries, the driver's own
EDGE = 1.15  # of the safety limit: up to here a probe surely runs, since the device has 1.25 of it


class PlanMemory:
    """Tells from the rows so far how much memory any plan takes.

    Args:
        base_arm: The user's; its fake curve is the one that others are compared with.
        batches: Batch sizes that may be asked for, ascending.
        limit_gib: What a recommended plan may use; infinite where it is not known.
    """

    def __init__(self, base_arm: Arm, batches: Sequence[int], limit_gib: float):
        self._base_arm, self._batches, self._limit_gib = base_arm, tuple(batches), limit_gib
        self._fakes: dict[Arm, dict[int, float]] = {}
        self._peaks: dict[Arm, dict[int, float]] = {}
        self._refused: dict[Arm, set[int]] = {}
        self._largest = 0  # batch that ran
        self._safe: dict[Arm, frozenset[int] | None] = {}  # emptied by everything learnt

    def learn(self, row: Trial) -> None:
        """Take in a row of any kind."""
        arm, batch = device_arm(row.plan), row.plan["batch_size"]
        self._safe.clear()
        if row.kind == "memory":
            if row.status == "ok" and row.memory_allocated_peak_gib:
                self._fakes.setdefault(arm, {})[batch] = row.memory_allocated_peak_gib
        elif row.kind == "loader":
            return
        elif row.status == "out_of_memory":
            # What ran in the arm by itself is not too large for it: then loading took the memory.
            if not any(known >= batch for known in self._peaks.get(arm, ())):
                self._refused.setdefault(arm, set()).add(batch)
        elif row.status == "ok":
            self._largest = max(self._largest, batch)
            if (gib := row.device_memory_peak_gib) and _is_of_the_step(row):
                peaks = self._peaks.setdefault(arm, {})
                peaks[batch] = max(gib, peaks.get(batch, 0.0))

    def fits(self, plan: Plan) -> bool:
        """Whether memory is predicted to stay below the limit; without knowledge, at most twice what ran."""
        arm = device_arm(plan)
        if arm not in self._safe:
            curve, limit_gib = self._build_curve(arm), self._limit_gib
            fitting = (b for b in self._batches if curve and curve.largest_safe_batch([b], limit_gib) is not None)
            self._safe[arm] = None if curve is None else frozenset(fitting)
        safe = self._safe[arm]
        if safe is not None and not self.is_ample:
            return plan["batch_size"] in safe
        is_near = self.is_ample or self._largest == 0 or plan["batch_size"] <= 2 * self._largest
        return is_near and plan["batch_size"] < min(self._refused.get(arm, ()), default=math.inf)

    @property
    def is_ample(self) -> bool:
        """Whether memory decides nothing: the largest batch takes little by its fake point."""
        largest_gib = self._fakes.get(self._base_arm, {}).get(self._batches[-1])
        return largest_gib is not None and largest_gib + CONTEXT_GIB <= AMPLE * self._limit_gib

    @property
    def is_known(self) -> bool:
        """Whether something says which batches of the user's arm fit."""
        return self.is_ample or self._build_curve(self._base_arm) is not None

    def find_doubtful_batch(self, plan: Plan) -> int | None:
        """Find the batch at which a fake point of the plan's arm would tell whether refused batches fit."""
        curve = None if self.is_ample else self._build_curve(device_arm(plan))
        return None if curve is None else curve.find_doubtful_batch(self._batches, self._limit_gib)

    def find_edge(self, plan: Plan, known: Collection[int]) -> int | None:
        """Return the first batch above the known ones that surely runs, and may just stay below the limit.

        The limit keeps a part of the memory back, so a probe there is no risk, and its peak says whether it counts.
        """
        arm = device_arm(plan)
        curve = self._build_curve(arm)
        above = [b for b in self._batches if b > max(known, default=0)]
        if curve is None or self.is_ample or not above or above[0] >= min(self._refused.get(arm, ()), default=math.inf):
            return None
        estimate = curve.predict_gib(above[0])
        return above[0] if estimate.low <= self._limit_gib and estimate.high <= EDGE * self._limit_gib else None

    def _build_curve(self, arm: Arm) -> MemoryCurve | None:
        """Build the arm's curve from its own points and what the user's arm taught; None where nothing is known."""
        real, refused, fake = self._peaks.get(arm, {}), self._refused.get(arm, set()), self._estimate_fake(arm)
        base_fake = self._fakes.get(self._base_arm, {})
        if arm != self._base_arm and fake and len(base_fake) > 1:
            base = MemoryCurve(real=self._peaks.get(self._base_arm, {}), fake=base_fake)
            inferred = fake.keys() - self._fakes.get(arm, {}).keys()
            return dataclasses.replace(base.transfer(fake), real=real, refused=refused, inferred=inferred)
        if not real and len(fake) < 2:
            base = self._build_curve(self._base_arm) if arm != self._base_arm else None
            return None if base is None else dataclasses.replace(base, refused={*base.refused, *refused})
        return MemoryCurve(real=real, fake=fake, refused=refused)

    def _estimate_fake(self, arm: Arm) -> Mapping[int, float]:
        """Return the arm's fake points; without any the user's arm's, times the ratio of each lever that differs."""
        own, base = self._fakes.get(arm, {}), self._fakes.get(self._base_arm, {})
        if arm == self._base_arm or len(own) >= len(base) > 0:
            return own
        base_values, wanted = set(self._base_arm), set(arm)
        singles = [
            points
            for other, points in self._fakes.items()
            if len(changed := set(other) - base_values) == 1 and changed <= wanted
        ]
        scaled = {batch: gib * math.prod(_read_share(s, base, batch) for s in singles) for batch, gib in base.items()}
        return scaled | own


def _is_of_the_step(row: Trial) -> bool:
    """Whether the peak is that of the step alone.

    Rows placed on the device count there. What lies in host memory (rows held or mapped, windows of blocks, workers)
    counts only where the peak is that of the process tree: on a CPU.
    """
    placement = row.plan.get("placement", "stream")
    is_process_tree = row.memory_reserved_peak_gib is None
    in_host_memory = placement in ("ram", "memory_map", "block_shuffled") or row.plan["num_workers"] > 0
    return placement != "device" and not (is_process_tree and in_host_memory)


def _read_share(points: Mapping[int, float], base: Mapping[int, float], batch: int) -> float:
    """Divide the memory of a lever's arm by that of the user's arm at one of its batches.

    Both have a part that stays and one that grows with the batch, and a lever may change either: between the smallest
    and the largest batch where both are known, the lever's arm is the straight function of the user's that holds there.
    """
    shared = sorted(points.keys() & base.keys())
    if not shared:
        return 1.0
    first, last = shared[0], shared[-1]
    if base[last] <= base[first]:
        return points[first] / base[first]
    growth = max(0.0, points[last] - points[first]) / (base[last] - base[first])
    return (points[first] + growth * (base[batch] - base[first])) / base[batch]
