"""empty_cache_every: the CUDA allocator gives unused blocks back to the driver every so many steps or epochs."""

import time
from collections.abc import Callable
from typing import Any

from fulltilt.levers._interval import Interval, read_interval
from fulltilt.levers._spec import Lever, Setup

_NO_CACHE = "only the CUDA allocator keeps such a cache; use empty_cache_every null"
NO_CURE = (
    "it does not prevent running out of memory: before giving up the allocator gives unused blocks back by itself; "
    "against fragmentation there is speed.expandable_segments"
)


class CacheRelease:
    """Calls ``release`` every ``count`` steps or epochs, and times the calls.

    Device: a call waits for all that is queued, so its time holds work that was going on anyway.
    """

    def __init__(self, every: str, release: Callable[[], None]):
        self._count, self._unit = read_interval(every)
        self.every, self._release = every, release
        self._n_steps = self.n_calls = 0
        self.seconds = 0.0

    def count_step(self, *_: Any) -> None:
        """Count an optimizer step, as its step hook. One that an fp16 scaler leaves out counts if it is fused."""
        self._n_steps += 1
        if self._unit == "step" and self._n_steps % self._count == 0:
            self._call()

    def start_epoch(self, epoch: int) -> None:
        """Count an epoch as it starts."""
        if self._unit == "epoch" and epoch > 0 and epoch % self._count == 0:
            self._call()

    def _call(self) -> None:
        began_s = time.perf_counter()
        self._release()
        self.seconds += time.perf_counter() - began_s
        self.n_calls += 1


def _apply(setup: Setup, value: str | None) -> None:
    if value is None:
        return
    import torch

    release = CacheRelease(value, torch.cuda.empty_cache)
    setup.state["cache_release"] = release
    setup.optimizer.register_step_post_hook(release.count_step)
    setup.epoch_hooks.append(release.start_epoch)


def _observe(setup: Setup) -> str | None:
    """Read the interval in force: its counter is among the run's hooks."""
    release = setup.state.get("cache_release")
    return release.every if release is not None and release.start_epoch in setup.epoch_hooks else None


def _report(setup: Setup) -> str | None:
    release: CacheRelease | None = setup.state.get("cache_release")
    if release is None:
        return None
    if release.n_calls == 0:
        return "the run was too short for a single call"
    total_ms = 1e3 * release.seconds
    return (
        f"{release.n_calls} calls took {total_ms:.1f} ms, {total_ms / release.n_calls:.2f} ms each, with the wait for "
        f"queued work; asking the driver for the memory again comes on top, inside the next step. And {NO_CURE}"
    )


def _parse_alias(alias: str, value: Any) -> Any:
    """Read a plain number as epochs; 0 and false are off."""
    if value is True or isinstance(value, str):
        return value
    return f"{value} epochs" if value else None


LEVER = Lever(
    name="empty_cache_every",
    key="speed.empty_cache_every",
    aliases=("empty_cache_freq",),
    type=Interval | None,
    default=None,
    summary="Give unused blocks of the CUDA allocator back to the driver every so often; null: never.",
    doc=(
        "Honoured because it is asked for, and timed in the run: it makes other processes on the GPU see free memory "
        "and does nothing for this one. It does not increase the memory available to PyTorch (torch.cuda.empty_cache's "
        "own documentation), waits for the device, and the next step pays for asking the driver again. Worth it "
        "between phases of different shapes, not in a loop."
    ),
    trades=("speed", "memory"),
    stage="loop",
    candidates=lambda facts: (None,),
    obstacle=lambda value, plan, facts: None if facts.device_type == "cuda" else _NO_CACHE,
    remark=lambda value, plan, facts: f"{NO_CURE}; what the calls cost is told at the end of the run",
    report=_report,
    apply=_apply,
    observe=_observe,
    complexity=lambda value: 0.0 if value is None else 1.0,
    parse_alias=_parse_alias,
    is_offered=False,
)
