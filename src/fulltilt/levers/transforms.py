"""transforms: whether image transforms run in the loader, or on the device at the head of the step."""

from typing import Literal

from fulltilt.levers._spec import Facts, Lever, Setup, set_loader_option

_OBSTACLES = {
    "none": (
        "the training set has no transforms that could be taken out of it; use transforms loader, or a dataset of "
        "images (cifar10, digits, image_folder, hdf5 with uint8 inputs)"
    ),
    "own": "a transform of your own works image by image, and only in the loader; use transforms loader",
}


def _candidates(facts: Facts) -> tuple[str, ...]:
    """Offer the device on a GPU only: on a CPU it moves work from the workers into the training process."""
    return ("loader", "device") if facts.transforms == "pipeline" and facts.device_type == "cuda" else ("loader",)


def _observe(setup: Setup) -> str:
    """Whether the loader hands out images as they were read; once a step has run, where it transformed them."""
    if getattr(setup.loader, "transform", None) is None:
        return "loader"
    transform = setup.state.get("transform")
    seen = None if transform is None else transform.seen
    return "device" if seen is None or seen[1] == setup.device.type else f"transformed on {seen[1]}"


LEVER = Lever(
    name="transforms",
    key="data.transforms",
    type=Literal["loader", "device"],
    default="loader",
    summary="Where image transforms run: in the loader, or on the device at the head of the step.",
    doc=(
        "loader transforms each batch where it is read: in the workers, or in the training process without them. "
        "device lets images out of the loader as uint8, a quarter of the bytes, and transforms the whole batch on the "
        "device, with other parameters for every image, normalisation last; with compile on, the pipeline is compiled "
        "too. What brings images of a folder to one size stays in the loader. On a CPU it moves the work into the "
        "training process, on all of its threads. Both draw from seeds of the run, and not the same numbers. "
        "Measured by benchmarks/data_path.py."
    ),
    trades=("speed", "memory", "reproducibility"),
    stage="loader",
    candidates=_candidates,
    obstacle=lambda value, plan, facts: _OBSTACLES.get(facts.transforms or "") if value == "device" else None,
    apply=set_loader_option("transforms"),
    observe=_observe,
    complexity=lambda value: float(value == "device"),
)
