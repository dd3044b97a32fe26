"""worker_threads: threads that torch may use inside each data worker."""

from typing import Any

from fulltilt.levers._spec import AtLeastOne, Lever, Setup

_NO_WORKERS = "there are no data workers; set num_workers to 1 or more, or worker_threads to 1"


def _apply(setup: Setup, value: int) -> None:
    setup.worker_options["threads"] = value


def _observe(setup: Setup) -> Any:
    """Read what the workers reported when they started; the planned value where none has started."""
    if not setup.loader.num_workers or "worker_threads" not in setup.state:
        return setup.worker_options.get("threads")
    reported = sorted({int(n) for n in setup.state["worker_threads"] if n})
    return reported[0] if len(reported) == 1 else reported or None


LEVER = Lever(
    name="worker_threads",
    key="data.worker_threads",
    type=AtLeastOne,
    default=1,
    unit="threads per worker",
    summary="Threads that torch may use inside each data worker.",
    doc=(
        "DataLoader sets 1. More helps when there are few workers, many cores and transforms that are single large "
        "tensor operations; otherwise workers take cores from each other and from the step. Libraries with thread "
        "pools of their own (OpenCV, numexpr) are not governed by it."
    ),
    trades=("speed",),
    stage="loader",
    restart=True,
    candidates=lambda facts: (1, 2) if facts.n_cores_usable >= 4 else (1,),
    obstacle=lambda value, plan, facts: None if value == 1 or plan.get("num_workers") else _NO_WORKERS,
    apply=_apply,
    observe=_observe,
)
