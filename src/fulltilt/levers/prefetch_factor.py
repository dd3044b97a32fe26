"""prefetch_factor: batches that each data worker prepares ahead."""

from typing import Annotated, TypeAlias

from annotated_types import Ge

from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup

Count: TypeAlias = Annotated[int, Ge(1)] | None


def _guard(value: int | None, plan: PlanValues, facts: Facts) -> str | None:
    if value is not None and not plan.get("num_workers", 0):
        return "there are no data workers to prefetch; set num_workers to 1 or more"
    return None


def _apply(setup: Setup, value: int | None) -> None:
    if value is not None:
        setup.loader_options["prefetch_factor"] = value


LEVER = Lever(
    name="prefetch_factor",
    key="data.prefetch_factor",
    type=Count,
    default=None,
    unit="batches per worker",
    summary="Batches that each data worker prepares ahead; null leaves PyTorch's default (2 with workers).",
    doc=(
        "More batches ahead even out loading times that vary; they do not help when loading is slower than the step on "
        "average. Host memory grows by num_workers × prefetch_factor batches, held in /dev/shm."
    ),
    trades=("speed", "memory"),
    stage="loader",
    restart=True,
    candidates=lambda facts: (None, 4, 8),
    guard=_guard,
    apply=_apply,
    observe=lambda setup: setup.loader.prefetch_factor,
    complexity=lambda value: 0.0 if value is None else 0.1 * value,
)
