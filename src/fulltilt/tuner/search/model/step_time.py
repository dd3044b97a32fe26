"""Predict samples per second: join device and loader by a smooth maximum, correct by whole runs."""

import math
import zlib
from collections.abc import Sequence

import numpy as np

from fulltilt.records import Plan, Trial
from fulltilt.tuner.search.model.arms import Arm, ArmTimes, LoaderTime, Point, device_arm, feed_arm

SMOOTHNESS = 6.0  # exponent of the maximum: 6 to 8 fitted real loaders best, a plain one has no doubt at equality
PRIOR_SD = 0.12  # of the logarithm of measured over predicted, before any whole run
NOISE_SD = 0.015  # of a whole run
OFFSET_SD = 0.1  # of the part of the error that all plans share
BATCH_SCALE = 4.0  # doublings of the batch size over which errors change
WORKERS_SCALE = 1.5  # doublings of workers
WORKER_COST = 0.005  # of the logarithm of samples/s, for each doubling: workers that are not needed take cores
CROWDED_COST = 0.25  # the same, on a CPU, where workers take cores from the threads of a step


class StepTime:
    """Predicts the step time of any plan from the rows so far.

    Args:
        device: Rows of kind "device" with status ok.
        loader: Rows of kind "loader" with status ok; none: loading costs nothing.
        whole: Whole runs with status ok, to learn from.
        n_cores: Usable cores.
        on_cpu: The device is the CPU, so that the step and the loader share cores.
        noise: Of a whole run, standard deviation of the logarithm; that of a quiet machine when None.
    """

    def __init__(
        self,
        *,
        device: Sequence[Trial],
        loader: Sequence[Trial],
        whole: Sequence[Trial],
        n_cores: int,
        on_cpu: bool,
        noise: float | None = None,
    ):
        micro = [_to_point(row, _compute_micro_s(row)) for row in device]
        self._micro = ArmTimes(micro)
        self._update = ArmTimes(_to_point(row, max(_read_update_s(row), 1e-9)) for row in device)
        self._loader = LoaderTime(_group_by_workers(loader), n_cores=n_cores) if loader else None
        self._receive = {pinned: _fit_receive(rows) for pinned, rows in _group_by_pinning(loader).items()}
        self._n_cores, self._on_cpu = n_cores, on_cpu
        self._launch_s = min(point.seconds for point in micro)  # at most: of a step that computes little
        self._cache: dict[tuple[Arm, Arm, int, int, int], float] = {}
        errors = [(self.describe(row.plan), self._compute_log_error(row)) for row in whole]
        self._errors = _Errors(errors, NOISE_SD if noise is None else noise)

    def predict_log_rate(self, plans: Sequence[Plan]) -> tuple[np.ndarray, np.ndarray]:
        """Predict mean and standard deviation of ln(samples/s), shape (P,) each."""
        raw = [self._predict_log_rate(plan) for plan in plans]
        shift, sd = self._errors.predict(np.array([self.describe(plan) for plan in plans]))
        return np.array(raw) + shift, sd

    def predict_step_s(self, plan: Plan) -> float:
        """Predict the seconds of an optimizer step, uncorrected."""
        batch, n_workers, accumulate = plan["batch_size"], plan["num_workers"], plan["accumulate"]
        key = (device_arm(plan), feed_arm(plan), batch, n_workers, accumulate)
        if key not in self._cache:
            self._cache[key] = self._predict(plan)
        return self._cache[key]

    def predict_overlap_log_rate(self, plan: Plan) -> float:
        """Predict ln(samples/s) without workers if loading and computing overlap, at best.

        A process that launched a step on a GPU is free until something waits for it; whether that is so no probe says.
        """
        device_s, load_s = self._split(plan)
        launch_s = min(device_s, plan["accumulate"] * self._launch_s)
        return math.log(plan.effective_batch_size / max(device_s, load_s + launch_s))

    def describe(self, plan: Plan) -> np.ndarray:
        """Return features on which errors may depend, scaled so that a distance of 1 is far."""
        device_s, load_s = self._split(plan)
        n_workers = plan["num_workers"]
        # Where the device waits for data anyway, what it computes faster or slower says little of the whole.
        device_share = 1.0 if n_workers == 0 else min(1.0, device_s / max(load_s, 1e-9))
        return np.array(
            [
                math.log2(plan["batch_size"]) / BATCH_SCALE,
                0.8 * (n_workers > 0),
                math.log2(1 + n_workers) / WORKERS_SCALE,
                0.8 * math.tanh(math.log(max(load_s, 1e-9) / device_s)),
                *(0.6 * device_share * _to_number(value) for _, value in sorted(device_arm(plan))),
                *(0.6 * _to_number(value) for _, value in sorted(feed_arm(plan))),
            ]
        )

    def _split(self, plan: Plan) -> tuple[float, float]:
        """Return the seconds of the device and of the loader for one step, each alone."""
        batch, accumulate, arm = plan["batch_size"], plan["accumulate"], device_arm(plan)
        device_s = accumulate * self._micro(arm, batch) + self._update(arm, batch)
        if self._loader is None:
            return device_s, 0.0
        return device_s, accumulate * self._loader(feed_arm(plan), plan["num_workers"], batch)

    def _predict(self, plan: Plan) -> float:
        device_s, load_s = self._split(plan)
        if self._loader is None or plan["num_workers"] == 0:
            return device_s + load_s
        batch, accumulate = plan["batch_size"], plan["accumulate"]
        fixed_s, sample_s = self._receive[bool(plan["pin_memory"])]
        receive_s = accumulate * (fixed_s + sample_s * batch)
        if not self._on_cpu:
            return _join(device_s, load_s, receive_s)
        alone_s = accumulate * self._loader(feed_arm(plan), 0, batch)  # all that has to be computed, on all cores
        busy_s = device_s * self._count_busy_cores(plan) + alone_s  # threads that wait for each other are busy, too
        return _join(device_s + receive_s, load_s, busy_s / self._n_cores)

    def _count_busy_cores(self, plan: Plan) -> int:
        """Count the cores that an operator's threads keep busy on a CPU."""
        return min(plan["threads"] or self._n_cores, self._n_cores)

    def _is_crowded(self, plan: Plan) -> bool:
        """Whether there are too few cores for an operator's threads and the workers."""
        n_workers = plan["num_workers"]
        return self._on_cpu and n_workers > 0 and self._count_busy_cores(plan) + n_workers > self._n_cores

    def _predict_log_rate(self, plan: Plan) -> float:
        """Predict ln(samples/s), uncorrected, less what workers cost the rest."""
        cost = WORKER_COST * math.log2(1 + plan["num_workers"]) + CROWDED_COST * self._is_crowded(plan)
        return math.log(plan.effective_batch_size / self.predict_step_s(plan)) - cost

    def _compute_log_error(self, row: Trial) -> float:
        return math.log(row.samples_per_s or math.nan) - self._predict_log_rate(row.plan)


class _Errors:
    """Models ln(measured/predicted) over plans: a Gaussian process with a part that all plans share.

    Source: Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), algorithm 2.1.
    """

    def __init__(self, points: Sequence[tuple[np.ndarray, float]], noise_sd: float):
        self._x = np.array([x for x, _ in points])
        self._weights = np.zeros(0)
        if len(points):
            y = np.array([error for _, error in points])
            covariance = _compute_kernel(self._x, self._x) + noise_sd**2 * np.eye(len(points))
            self._inverse = np.linalg.inv(covariance)
            self._weights = self._inverse @ y

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not len(self._weights):
            return np.zeros(len(x)), np.full(len(x), math.hypot(PRIOR_SD, OFFSET_SD))
        cross = _compute_kernel(x, self._x)
        variance = PRIOR_SD**2 + OFFSET_SD**2 - np.einsum("ij,jk,ik->i", cross, self._inverse, cross)
        return cross @ self._weights, np.sqrt(np.maximum(variance, 0.0))


def _compute_kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    squared = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=-1)
    return OFFSET_SD**2 + PRIOR_SD**2 * np.exp(-squared / 2)


def _join(*seconds: float) -> float:
    largest = max(seconds)
    return largest * sum((s / largest) ** SMOOTHNESS for s in seconds) ** (1 / SMOOTHNESS)


def _to_number(value: object) -> float:
    """Map a lever's value to a coordinate: switches and names apart, counts by their logarithm."""
    if value is None:
        return -1.0
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        return math.log2(1 + abs(value))
    return 2.0 * zlib.crc32(str(value).encode()) / 2**32


def _read_update_s(row: Trial) -> float:
    """Return the seconds of the optimizer in a step; 0 where phases are void, so that it counts with the rest."""
    phases = row.phases_ms
    return 0.0 if phases is None or phases.optimizer is None else phases.optimizer / 1e3


def _compute_micro_s(row: Trial) -> float:
    """Return the seconds of one micro-batch without the optimizer's."""
    step_s = row.plan.effective_batch_size / (row.samples_per_s or math.nan)
    return max(step_s - _read_update_s(row), 0.02 * step_s) / row.plan["accumulate"]


def _to_point(row: Trial, seconds: float) -> Point:
    return Point(arm=device_arm(row.plan), batch=row.plan["batch_size"], seconds=seconds)


def _group_by_workers(loader: Sequence[Trial]) -> dict[int, list[Point]]:
    groups: dict[int, list[Point]] = {}
    for row in loader:
        batch = row.plan["batch_size"]
        point = Point(arm=feed_arm(row.plan), batch=batch, seconds=batch / (row.samples_per_s or math.nan))
        groups.setdefault(row.plan["num_workers"], []).append(point)
    return groups


def _fit_receive(loader: Sequence[Trial]) -> tuple[float, float]:
    """Fit the seconds that taking a ready batch costs the training process: a fixed part, and one per sample.

    The steepest line from the smallest batch to the largest that lies on or above all that was seen. Where that would
    begin below 0, and of one batch size, everything is counted by the sample: nothing is received in less than no time.
    """
    seen = sorted((row.plan["batch_size"], row.receive_ms / 1e3) for row in loader if row.receive_ms is not None)
    if not seen:
        return 0.0, 0.0
    by_batch = dict(seen)  # of equal batches the largest: it comes last
    (smallest, first_s), (largest, last_s) = min(by_batch.items()), max(by_batch.items())
    per_sample_s = max(0.0, last_s - first_s) / (largest - smallest) if largest > smallest else math.inf
    fixed_s = max(seconds - per_sample_s * batch for batch, seconds in seen)
    return (fixed_s, per_sample_s) if fixed_s >= 0 else (0.0, max(seconds / batch for batch, seconds in seen))


def _group_by_pinning(loader: Sequence[Trial]) -> dict[bool, Sequence[Trial]]:
    """Split loader rows by pinning: a thread that pins leaves other work to the training process."""
    groups = {pinned: [row for row in loader if bool(row.plan["pin_memory"]) is pinned] for pinned in (False, True)}
    return {pinned: rows or loader for pinned, rows in groups.items()}
