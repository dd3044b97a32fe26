"""batch_size: samples per micro-step, over all devices."""

from typing import Any

from fulltilt.levers._spec import AtLeastOne, Facts, Lever, PlanValues, Setup, set_loader_option


def _candidates(facts: Facts) -> tuple[int, ...]:
    """Offer powers of two between 16 and 1,024 that the training set can fill."""
    limit = 1024 if facts.n_samples is None else min(1024, facts.n_samples)
    return tuple(2**n for n in range(4, 11) if 2**n <= limit) or (max(1, limit),)


def _find_obstacle(value: int, plan: PlanValues, facts: Facts) -> str | None:
    if facts.n_samples is not None and value > facts.n_samples:
        return f"larger than the dataset ({facts.n_samples} samples); use batch_size {facts.n_samples} or less"
    if value < facts.n_ranks:
        return f"over all {facts.n_ranks} ranks, and some would get no sample; use batch_size {facts.n_ranks} or more"
    return None


def _observe(setup: Setup) -> Any:
    """Read the size of the first micro-batch that a step computed on; before any step, the loader's."""
    if "batch_size" in setup.state:
        return setup.state["batch_size"]
    sources = (setup.loader, getattr(setup.loader, "batch_sampler", None), getattr(setup.loader, "sampler", None))
    sizes = (getattr(source, "batch_size", None) for source in sources)
    return next((size for size in sizes if size is not None), None)


LEVER = Lever(
    name="batch_size",
    key="data.batch_size",
    type=AtLeastOne,
    default=32,
    unit="samples",
    summary="Samples per micro-step over all devices.",
    doc=(
        "Larger batches fill the device better until it is full, and take memory in proportion. They also change "
        "the recipe unless accumulate keeps batch_size × accumulate, the effective batch, as it was: fewer "
        "optimizer steps per epoch, another best learning rate, other BatchNorm statistics. Losses that compare "
        "samples within a batch see the micro-batch only, whatever accumulate says."
    ),
    trades=("speed", "memory", "recipe"),
    stage="loader",
    candidates=_candidates,
    obstacle=_find_obstacle,
    apply=set_loader_option("batch_size"),
    observe=_observe,
)
