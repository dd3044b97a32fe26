"""persistent_workers: data workers live on from one epoch to the next."""

from fulltilt.levers._spec import Facts, Lever, PlanValues, set_loader_option


def _find_obstacle(value: bool, plan: PlanValues, facts: Facts) -> str | None:
    if not plan.get("num_workers"):
        return "there are no data workers to keep; set num_workers to 1 or more"
    if facts.is_iterable:
        return "a stream in a worker that lives on does not learn of the next epoch (set_epoch); use false"
    return None


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
    obstacle=_find_obstacle,
    apply=set_loader_option("persistent_workers"),
    observe=lambda setup: setup.loader.persistent_workers,
)
