"""Defines the lever num_workers, a tunable setting: how many DataLoader workers load and collate batches."""

from typing import Annotated

from annotated_types import Ge

from fulltilt.levers._spec import Facts, Lever, PlanValues, set_loader_option

MAX_WORKERS = 8192


def _candidates(facts: Facts) -> tuple[int, ...]:
    """Offer 0, then powers of two up to the usable cores: past those, workers only take turns."""
    return (0, *(2**n for n in range(facts.n_cores_usable.bit_length())))


def _find_obstacle(value: int, plan: PlanValues, facts: Facts) -> str | None:
    if facts.is_iterable and value > 1:
        return "an IterableDataset that does not split itself would deliver every sample once per worker; use 1 at most"
    if value > MAX_WORKERS:
        return f"at most {MAX_WORKERS:,} processes: each takes memory of its own and ten file descriptors"
    return None


LEVER = Lever(
    name="num_workers",
    key="data.num_workers",
    type=Annotated[int, Ge(0)],
    default=0,
    unit="processes",
    summary="Processes that load and collate batches beside the training process.",
    doc=(
        "Hides loading behind compute when loading is slow and cores are free; costs start-up time, memory per "
        "worker, and cores the step may need itself. There is no formula: image throughput was seen to peak at 8 "
        "workers and to fall by almost half at 32 (SPDL's published figures). Batches are the same for any number, "
        "augmented ones too; but a dataset of your own that draws from torch's global generator draws other numbers "
        "without workers than with them, unless its get_batch takes the generator it is given."
    ),
    trades=("speed", "memory"),
    stage="loader",
    restart=True,
    candidates=_candidates,
    obstacle=_find_obstacle,
    apply=set_loader_option("num_workers"),
    observe=lambda setup: setup.loader.num_workers,
)
