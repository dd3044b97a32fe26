"""threads: one operator on the CPU uses at most so many threads (intra-op)."""

import functools

from fulltilt.levers._spec import Count, Facts, Lever, PlanValues, Setup

NAME = "threads"
MAX_THREADS = 4096
_TOO_MANY = f"at most {MAX_THREADS:,} threads: OpenMP ends the process where it cannot start as many"


@functools.cache
def read_initial_threads() -> int:
    """Read the thread count before any plan changes it: what ``null`` goes back to."""
    import torch

    return torch.get_num_threads()


def count_threads(plan: PlanValues, facts: Facts) -> int:
    """Count the threads of one operator: the plan's, else torch's own, at most one a core."""
    return plan.get(NAME) or min(facts.n_threads or facts.n_cores_usable, facts.n_cores_usable)


def _candidates(facts: Facts) -> tuple[int | None, ...]:
    """Offer the default, half the cores (the rest is for data workers), and all but one core."""
    cores = facts.n_cores_usable
    return (None, *sorted({n for n in (cores // 2, cores - 1) if 1 <= n < cores}))


def _remark(value: int, plan: PlanValues, facts: Facts) -> str | None:
    if value > facts.n_cores_usable:
        return f"more threads than the {facts.n_cores_usable} usable cores: they take turns"
    return None


def _apply(setup: Setup, value: int | None) -> None:
    import torch

    initial = read_initial_threads()
    torch.set_num_threads(initial if value is None else value)


def _observe(setup: Setup) -> int:
    import torch

    return torch.get_num_threads()


LEVER = Lever(
    name=NAME,
    key=f"speed.{NAME}",
    type=Count,
    default=None,
    unit="threads",
    summary="Threads that one operator on the CPU may use; null leaves torch's default (one per core).",
    doc=(
        "On the CPU the step and the data workers share the cores: with workers, fewer threads for the step can be "
        "faster as a whole. On a GPU it matters little beyond the CPU parts of the step. Sums are split differently "
        "with another thread count, so results may differ in the last bits."
    ),
    trades=("speed", "numerics"),
    stage="environment",
    candidates=_candidates,
    obstacle=lambda value, plan, facts: _TOO_MANY if value > MAX_THREADS else None,
    remark=_remark,
    apply=_apply,
    observe=_observe,
    complexity=lambda value: 0.0 if value is None else 1.0,
)
