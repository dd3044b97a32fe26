"""threads in inference: those of one operator, of torch or of ONNX Runtime."""

import dataclasses

from fulltilt.levers import threads
from fulltilt.levers._spec import Facts, Setup


def _candidates(facts: Facts) -> tuple[int | None, ...]:
    """Offer one a core, half of them, and one. Small batches lose by sharing the work."""
    cores = facts.n_cores_usable
    return (None, *sorted({n for n in (1, cores // 2) if 1 <= n < cores}))


def _apply(setup: Setup, value: int | None) -> None:
    setup.state["threads"] = value
    if setup.state.get("engine") != "onnx":  # its sessions have their own
        threads.LEVER.apply(setup, value)


def _observe(setup: Setup) -> int | None:
    return setup.state["threads"] if setup.state.get("engine") == "onnx" else threads.LEVER.observe(setup)


LEVER = dataclasses.replace(threads.LEVER, candidates=_candidates, apply=_apply, observe=_observe)
