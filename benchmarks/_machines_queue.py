"""The loader, the host and the device as processes in time: events, not formulas.

Workers build whole batches and keep a bounded number of them ahead; batches are handed over in order. A pinning thread,
where there is one, copies them; the main process receives, copies to the device and launches the step, and may run
ahead of the device a little. Whoever is busy shares the cores with everybody else who is, so speeds change with every
event. Many plans are stepped side by side, each on its own clock.
"""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np

from benchmarks._machines_hardware import Host

FETCH, RECEIVE, DRAIN, COPY, LAUNCH, AHEAD = range(6)
"""What the main process is doing: waiting for a batch or making it, receiving it, waiting for the device before a
blocking copy, copying, launching the step, waiting because it is too far ahead."""

WARM_TURNS, MEASURED_TURNS = 2, 3  # of all workers; whole turns, because the batches of one turn come in a bunch
MIN_WARM, MIN_MEASURED = 12, 32  # batches
STRATUM = 16  # batches over which the drawn batch times have their true mean
PREFETCH = 2  # batches a worker keeps ahead, unless the plan says otherwise
EPS_S = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """One entry a plan, all with as many workers; seconds are of one core at full speed, or of the device.

    Attributes:
        make_s: To read, decode and collate one batch.
        make_variation: Coefficient of variation between batches.
        pin_s: Of the pinning thread for one batch; 0 without one.
        lag_s: The device's time for an asynchronous copy, on its own stream of kernels.
        copy_s: Of the main process for a copy that blocks; 0 when it does not.
        n_ahead: Steps that the host may be ahead; 0: it waits for each step.
    """

    n_workers: np.ndarray
    prefetch: np.ndarray
    make_s: np.ndarray
    make_variation: np.ndarray
    receive_s: np.ndarray
    pin_s: np.ndarray
    lag_s: np.ndarray
    copy_s: np.ndarray
    launch_s: np.ndarray
    device_s: np.ndarray
    n_ahead: np.ndarray
    storage_share: float
    n_streams: float


def simulate_step_s(lanes: Lanes, host: Host, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean seconds between batches once running, and the mean number of processes that wanted a core.

    Cost: a few hundred rounds of array operations, however many plans there are.
    """
    state = _Clockwork(lanes, host, seed)
    while state.advance():
        pass
    return state.measure_step_s(), state.measure_wanted()


def draw_spread(seed: int, n: int = 1024) -> np.ndarray:
    """Draw standard normal figures in random order whose every run of ``STRATUM`` holds the same quantiles.

    The mean over a window is then that of the distribution, so a window of some dozens of batches gives a long run's.
    """
    rng = np.random.default_rng(seed)
    normal = statistics.NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / STRATUM) for i in range(STRATUM)])
    return np.concatenate([rng.permutation(quantiles) for _ in range(n // STRATUM)])


class _Clockwork:
    """All plans of one worker count at their own moment. Columns: workers, then main, then the pinning thread."""

    def __init__(self, lanes: Lanes, host: Host, seed: int):
        self._lanes, self._host = lanes, host
        n_plans, n_columns = len(lanes.n_workers), int(lanes.n_workers[0])
        self._n, self._main, self._pin = n_plans, n_columns, n_columns + 1
        self._rows = np.arange(n_plans)
        self._columns = np.arange(n_columns)[None, :]
        self._has_pin = (lanes.pin_s > 0) & bool(n_columns)
        self._spread = draw_spread(seed)
        self.left = np.zeros((n_plans, n_columns + 2))
        self.busy = np.zeros((n_plans, n_columns + 2), dtype=bool)
        self.now, self.device_end = np.zeros(n_plans), np.zeros(n_plans)
        self.ends = np.zeros((n_plans, 8))  # of the last steps, a ring
        self.made = np.zeros((n_plans, n_columns), dtype=int)
        self.taken, self.pinned, self.steps = (np.zeros(n_plans, dtype=int) for _ in range(3))
        self.doing = np.full(n_plans, FETCH)
        self.until = np.zeros(n_plans)  # of a wait for the device
        self._begin, self._end = np.full(n_plans, np.nan), np.full(n_plans, np.nan)
        self._wanted, self._spent = np.zeros(n_plans), np.zeros(n_plans)
        self._first = max(MIN_WARM, WARM_TURNS * n_columns)
        self._last = self._first + max(MIN_MEASURED, MEASURED_TURNS * n_columns)
        self._start_workers()
        self._start_main()

    def advance(self) -> bool:
        """Go to each plan's next event; return False when all plans have seen enough."""
        running = self.steps < self._last
        if not running.any():
            return False
        waiting = (self.doing == DRAIN) | (self.doing == AHEAD)
        rates = self._compute_rates(waiting)
        need = np.where(self.busy, self.left / rates, np.inf)
        timer = np.where(waiting, np.maximum(self.until - self.now, 0.0), np.inf)
        step = np.minimum(need.min(axis=1), timer)
        step = np.where(running & np.isfinite(step), step, 0.0)
        self.now += step
        self._wanted += step * (self.busy.sum(axis=1) + waiting)
        self._spent += step
        self.left = np.where(self.busy, self.left - step[:, None] * rates, self.left)
        done = self.busy & (self.left <= EPS_S) & running[:, None]
        self._finish_helpers(done)
        self._move_main(done[:, self._main], waiting & (self.until <= self.now + EPS_S) & running)
        return True

    def _compute_rates(self, waiting: np.ndarray) -> np.ndarray:
        """Return the speed of every process: shared cores, shared storage, one interpreter lock."""
        host = self._host
        n_workers = self.busy[:, : self._main].sum(axis=1)
        wanted = self.busy.sum(axis=1) + waiting  # waiting for the device spins
        cores = host.n_cores / 2 if host.has_siblings else host.n_cores
        extra = np.clip(wanted - cores, 0, cores) * host.sibling_gain if host.has_siblings else 0.0
        room = np.minimum(wanted, cores) + extra
        rate = np.minimum(1.0, room / np.maximum(wanted, 1)) / (1 + host.crowding * np.maximum(wanted - 1, 0))
        rates = np.repeat(rate[:, None], self._main + 2, axis=1)
        share = self._lanes.storage_share
        if share:
            slowed = share * np.maximum(1.0, n_workers / self._lanes.n_streams)
            rates[:, : self._main] = (1 / ((1 - share) / rate + slowed))[:, None]
        rates[:, self._main] *= 1 - host.pin_gil * self.busy[:, self._pin]
        return rates

    def _finish_helpers(self, done: np.ndarray) -> None:
        self.made += done[:, : self._main]
        self.busy &= ~done
        self.pinned += done[:, self._pin]
        self._start_workers()
        self._start_pinning()

    def _start_workers(self) -> None:
        lanes = self._lanes
        number = self._columns + self.made * self._main
        may = number < (self.taken + lanes.prefetch * self._main)[:, None]
        idle = may & ~self.busy[:, : self._main]
        if idle.any():
            rows, columns = np.nonzero(idle)
            self.left[rows, columns] = self._draw_make_s(rows, number[rows, columns])
            self.busy[rows, columns] = True

    def _draw_make_s(self, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        spread = self._spread[numbers % len(self._spread)] * self._lanes.make_variation[rows]
        return self._lanes.make_s[rows] * np.maximum(0.2, 1 + spread)

    def _is_made(self, number: np.ndarray) -> np.ndarray:
        """Tell whether the worker whose turn ``number`` is has built that batch."""
        if not self._main:
            return np.zeros(self._n, dtype=bool)
        return self.made[self._rows, number % self._main] > number // self._main

    def _start_pinning(self) -> None:
        start = self._has_pin & ~self.busy[:, self._pin] & self._is_made(self.pinned)
        self.left[start, self._pin] = self._lanes.pin_s[start]
        self.busy[start, self._pin] = True

    def _start_main(self) -> None:
        """Main processes that look for a batch: make it, or take it where one is ready."""
        looking = (self.doing == FETCH) & ~self.busy[:, self._main]
        if not self._main:
            rows = np.nonzero(looking)[0]
            self.left[rows, self._main] = self._draw_make_s(rows, self.steps[rows]) + self._lanes.pin_s[rows]
            self.busy[rows, self._main] = True
            return
        ready = np.where(self._has_pin, self.pinned > self.taken, self._is_made(self.taken))
        self._work(looking & ready, RECEIVE, self._lanes.receive_s)

    def _work(self, rows: np.ndarray, doing: int, seconds: np.ndarray) -> None:
        self.doing[rows] = doing
        self.left[rows, self._main] = seconds[rows]
        self.busy[rows, self._main] = True

    def _move_main(self, done: np.ndarray, waited: np.ndarray) -> None:
        lanes, doing = self._lanes, self.doing.copy()
        received = done & ((doing == RECEIVE) | (doing == FETCH))
        self.taken += done & (doing == RECEIVE)
        blocks = received & (lanes.copy_s > 0)
        drain = blocks & (self.device_end > self.now)
        self.doing[drain] = DRAIN
        self.until[drain] = self.device_end[drain]
        self._work((blocks & ~drain) | (waited & (doing == DRAIN)), COPY, lanes.copy_s)
        launch = (received & ~blocks) | (done & (doing == COPY))
        begin = np.maximum(self.device_end, self.now) + lanes.lag_s
        self.device_end = np.where(launch, begin + lanes.device_s, self.device_end)
        self._work(launch, LAUNCH, lanes.launch_s)
        self._end_steps(done & (doing == LAUNCH))
        self.doing[waited & (doing == AHEAD)] = FETCH
        self._start_workers()
        self._start_main()

    def _end_steps(self, launched: np.ndarray) -> None:
        """End steps that were launched, none before its last kernel."""
        self.device_end = np.where(launched, np.maximum(self.device_end, self.now), self.device_end)
        rows = np.nonzero(launched)[0]
        self.ends[rows, self.steps[rows] % 8] = self.device_end[rows]
        back = self.ends[rows, (self.steps[rows] - self._lanes.n_ahead[rows]) % 8]
        self.until[rows] = np.where(self.steps[rows] >= self._lanes.n_ahead[rows], back, 0.0)
        self.doing[rows] = np.where(self.until[rows] > self.now[rows], AHEAD, FETCH)
        self.steps[rows] += 1
        for edge, target in ((self._first, self._begin), (self._last, self._end)):
            hit = rows[self.steps[rows] == edge]
            target[hit] = self.device_end[hit]

    def measure_step_s(self) -> np.ndarray:
        return (self._end - self._begin) / (self._last - self._first)

    def measure_wanted(self) -> np.ndarray:
        return self._wanted / np.maximum(self._spent, EPS_S)
