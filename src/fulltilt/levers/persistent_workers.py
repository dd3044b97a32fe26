"""persistent_workers: data workers live on from one epoch to the next."""

from fulltilt.levers._spec import Lever, set_loader_option

_NO_WORKERS = "there are no data workers to keep; set num_workers to 1 or more"

LEVER = Lever(
    name="persistent_workers",
    key="data.persistent_workers",
    summary="Data workers live on from one epoch to the next instead of being started anew.",
    doc=(
        "Saves the start of every worker at each epoch edge, which is most of the epoch when the dataset is small. "
        "Workers keep their memory between epochs, and what a dataset caches or leaks stays with them."
    ),
    trades=("speed", "memory"),
    stage="loader",
    restart=True,
    candidates=lambda facts: (False, True),
    obstacle=lambda value, plan, facts: None if plan.get("num_workers") else _NO_WORKERS,
    apply=set_loader_option("persistent_workers"),
    observe=lambda setup: setup.loader.persistent_workers,
)
