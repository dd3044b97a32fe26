"""prefetch_factor: batches that each data worker prepares ahead."""

from fulltilt.levers._spec import Count, Lever, Setup

_NO_WORKERS = "there are no data workers to prefetch; set num_workers to 1 or more"


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
    obstacle=lambda value, plan, facts: None if plan.get("num_workers") else _NO_WORKERS,
    apply=_apply,
    observe=lambda setup: setup.loader.prefetch_factor,
    complexity=lambda value: 0.0 if value is None else 0.1 * value,
)
