"""placement: where the rows of the training set lie while it is trained on."""

from collections.abc import Mapping
from typing import Literal

from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup
from fulltilt.records import format_bytes

PLACEMENTS = ("stream", "memory_map", "ram", "device", "block_shuffled")
PREFERENCE = ("device", "ram", "memory_map", "block_shuffled", "stream")
"""Fastest first."""
HOLDING = ("ram", "device")
"""Those that read all samples beforehand."""
MEMORY_SHARE = 0.5
"""Of the free memory, for the rows: the rest is for the model, the batches, and what else the machine does."""


def _candidates(facts: Facts) -> tuple[str, ...]:
    """List what fits here; ``block_shuffled``, which changes the order of samples, has to be asked for by name."""
    offered = facts.placements or ("stream",)
    if facts.is_held and facts.device_type == "cpu":
        return ("stream",)  # ram would be the same: it only adds page-locked batches for a GPU
    fitting = (value for value in PLACEMENTS[:-1] if value in offered and _explain_size(value, facts) is None)
    return tuple(value for value in fitting if value != "device" or facts.device_type != "cpu")


def _find_obstacle(value: str, plan: PlanValues, facts: Facts) -> str | None:
    if value not in PLACEMENTS:
        return f"unknown placement; valid: {', '.join(PLACEMENTS)}"
    if value == "device":
        if facts.device_type == "cpu":
            return "the device is the CPU, whose memory is ram; use placement ram"
        if plan.get("num_workers"):
            return "the training process gathers on the device and has nothing for data workers; set num_workers to 0"
        if plan.get("pin_memory"):
            return "batches are made on the device and are never copied there; set pin_memory to false"
        if facts.transforms == "pipeline" and plan.get("transforms", "device") != "device":
            return "the rows lie on the device and their transforms run in the loader; set transforms to device"
    if facts.placements is not None and value not in facts.placements:
        return _explain_dataset(value, facts.placements)
    return _explain_size(value, facts)


def _needs(value: str, facts: Facts) -> PlanValues:
    """Name what guards ask of other levers where the training process gathers rows on the device."""
    if value != "device":
        return {}
    transforms = {"transforms": "device"} if facts.transforms == "pipeline" else {}
    return {"num_workers": 0, "pin_memory": False} | transforms


def resolve(
    value: str, plan: PlanValues, facts: Facts, *, may_hold: bool = True, started_with: str | None = None
) -> tuple[str, str | None]:
    """Turn ``auto`` into the fastest placement that fits beside the rest of ``plan``, and say why none faster does.

    Args:
        may_hold: Whether all samples may be read beforehand; not where unreadable ones are to be left out.
        started_with: The placement of a resumed run. It stays where it can apply; else another one takes its place that
            keeps the order of samples. An order of blocks always stays.
    """
    if value != "auto":
        return value, None
    refused: dict[str, str] = {} if may_hold else dict.fromkeys(HOLDING, "data.on_bad_sample skip does not go with it")
    if started_with is not None:
        if started_with == "block_shuffled" or (
            started_with not in refused and _find_obstacle(started_with, plan, facts) is None
        ):
            return started_with, f"auto goes on as {started_with}, which the run was started with"
        refused["block_shuffled"] = "the run was started with another order of samples"
    choice, reasons = choose_placement(plan, facts, refused)
    if choice == "ram" and facts.is_held and facts.device_type == "cpu":
        return "stream", "auto is stream: the samples lie in host memory already"
    why = dict.fromkeys(reason.partition(": ")[2].partition("; ")[0] for reason in reasons)
    return choice, f"auto is {choice}" + (f"; faster ones cannot apply: {', and '.join(why)}" if why else "")


def choose_placement(plan: PlanValues, facts: Facts, refused: Mapping[str, str] | None = None) -> tuple[str, list[str]]:
    """Choose the fastest placement that fits beside the rest of ``plan``, and say why those before it do not.

    Args:
        refused: Values that cannot be taken, with the reason.
    """
    reasons = []
    for value in PREFERENCE:
        reason = (refused or {}).get(value) or _find_obstacle(value, plan, facts) or _explain_cache(value, facts)
        if reason is None:
            return value, reasons
        reasons.append(f"{value}: {reason}")
    return "stream", reasons


def _explain_cache(value: str, facts: Facts) -> str | None:
    """Say that the page cache cannot hold a mapped file: it would be read from the disk every epoch, row by row."""
    if value != "memory_map" or facts.data_bytes is None or facts.free_ram_bytes is None:
        return None
    if facts.data_bytes <= facts.free_ram_bytes:
        return None
    return f"the rows take {format_bytes(facts.data_bytes)} and the page cache has {format_bytes(facts.free_ram_bytes)}"


def _explain_dataset(value: str, offered: tuple[str, ...]) -> str:
    if offered == ("stream",):
        return "the dataset is no table of rows in an HDF5 file, and no images of one size; use placement stream"
    if value in ("memory_map", "block_shuffled") and "block_shuffled" not in offered:
        return f"the dataset is no table of rows in an HDF5 file; use {' or '.join(offered)}"
    if value == "memory_map":
        return "the rows are compressed, or lie on a network file system; use ram, or `fulltilt data repack` first"
    return f"the transforms of this dataset run in host memory; use {' or '.join(offered)}"


def _explain_size(value: str, facts: Facts) -> str | None:
    free_bytes = {"ram": facts.free_ram_bytes, "device": facts.free_device_bytes}.get(value)
    if free_bytes is None or facts.data_bytes is None or facts.data_bytes <= MEMORY_SHARE * free_bytes:
        return None
    where, instead = ("device", "ram") if value == "device" else ("host", "memory_map or block_shuffled")
    return (
        f"the rows take {format_bytes(facts.data_bytes)} and the {where} has {format_bytes(free_bytes)} free, of "
        f"which {MEMORY_SHARE:.0%} may go to rows; use placement {instead}"
    )


def _remark(value: str, plan: PlanValues, facts: Facts) -> str | None:
    if value == "stream" and facts.placements is not None and facts.data_bytes is not None:
        choice, _ = choose_placement(plan, facts)
        if choice == "stream" or (facts.is_held and choice == "ram"):
            return None
        remedy = f"measure it with benchmark.levers {{placement: [stream, {choice}]}}"
        return f"the rows take {format_bytes(facts.data_bytes)} in memory, and placement {choice} could apply; {remedy}"
    if value != "block_shuffled" or not facts.n_blocks_mixed:
        return None
    ratio = 1 + (plan.get("batch_size", 1) - 1) / facts.n_blocks_mixed
    return (
        f"each batch comes out of {facts.n_blocks_mixed} blocks: where the file is sorted by what is learnt, batch "
        f"means vary up to {ratio:.2f} times as much (in variance) as fully shuffled; in random order, as much"
    )


def _apply(setup: Setup, value: str) -> None:
    setup.loader_options["placement"] = value
    setup.loader_options["placement_device"] = setup.device


def _observe(setup: Setup) -> str:
    """Read where the loader's tables lie; for block shuffle, check the order of samples too."""
    placement = getattr(getattr(setup.loader.dataset, "source", None), "placement", "stream")
    if placement == "block_shuffled" and not hasattr(setup.loader.sampler, "n_mixed"):
        return "block_shuffled tables in an order without blocks"
    return placement


LEVER = Lever(
    name="placement",
    key="data.placement",
    type=Literal["stream", "memory_map", "ram", "device", "block_shuffled"],
    default="stream",
    summary="Where the rows of the training set lie: in their files, mapped, in host memory, or on the device.",
    doc=(
        "For HDF5 files, and for images of one size. stream reads every batch from where the data lies, and keeps at "
        "most 256 MiB of an HDF5 file mapped. memory_map keeps all of it mapped: as fast as memory once the pages are "
        "in the page cache, and the system may take them back. ram reads (or decodes) everything once and gathers "
        "batches from memory, into page-locked memory where pin_memory is on and there are no workers. device holds "
        "all rows on the GPU and gathers them there: no copy per batch; images need transforms device for it. "
        "block_shuffled reads whole blocks in random order and shuffles within a window of them: for files that are "
        "compressed or larger than memory; it changes the order of samples (fulltilt.data.loading.block_sampler "
        "derives by how much). In a configuration auto takes the first of device, ram, memory_map, block_shuffled and "
        "stream that can apply when the run starts, and a run that is resumed keeps it. "
        "Every data worker keeps a window of its own. HDF5 figures: "
        "benchmarks/results/hdf5_loader-cpu.json; images are measured by benchmarks/data_path.py."
    ),
    trades=("speed", "memory"),
    recipe_values=("block_shuffled",),
    stage="loader",
    candidates=_candidates,
    obstacle=_find_obstacle,
    needs=_needs,
    remark=_remark,
    apply=_apply,
    observe=_observe,
    complexity=lambda value: float(PLACEMENTS.index(value)),
)
