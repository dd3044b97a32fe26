"""What a run over several ranks divides, and why some runs cannot be divided: known before a rank starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fulltilt.config import parse_on_bad_sample
from fulltilt.data.loading.sampler import Share
from fulltilt.tasks import Workload

if TYPE_CHECKING:
    from fulltilt.config import Config


def find_obstacles(
    n_ranks: int, batch_size: int, config: Config | None, workload: Workload, model: nn.Module
) -> list[str]:
    """List why ``n_ranks`` could not train what one process built, with micro-batches of ``batch_size`` over all."""
    found = find_obstacles_to_ranks(n_ranks, batch_size, config, workload)
    if n_ranks > 1 and config is not None and config.speed.shard == "full":
        found += find_obstacles_to_shards(model, config, workload)
    return found


def find_obstacles_to_ranks(n_ranks: int, batch_size: int, config: Config | None, workload: Workload) -> list[str]:
    """List why a run over ``n_ranks`` is refused, whatever its model. ``batch_size`` is that over all ranks."""
    if n_ranks == 1:
        return []
    found = []
    if n_ranks > batch_size:
        found.append(
            f"batch_size {batch_size} is over all {n_ranks} devices, and some would get no sample; "
            f"use batch_size {n_ranks} or more, or fewer devices"
        )
    if workload.couples_samples or workload.compares_samples:
        found.append(
            f"the loss of {workload.name} compares the samples of a batch with each other, and each of {n_ranks} "
            "devices would see its own part only; train it on one, with run.device naming one and run.n_ranks null "
            "(a smaller batch_size with a larger accumulate keeps the effective batch where memory is short)"
        )
    if config is not None and parse_on_bad_sample(config.data.on_bad_sample) is not None:
        found.append(
            "data.on_bad_sample skip counts the samples of one process, and each of several devices reads a part of "
            "every batch; over several devices use stop"
        )
    return found


def find_obstacles_to_shards(model: nn.Module, config: Config | None, workload: Workload) -> list[str]:
    """List why the weights of a model, the levers of stage "model" applied, cannot be divided."""
    found = []
    if config is not None and config.optim.ema is not None:
        found.append(
            "optim.ema keeps the average of whole weights, and shard full divides them; use shard none, or no ema"
        )
    if workload.assess is not None:
        found.append(
            f"evaluations of {workload.name} assess the model by themselves, and may call parts of it (encode) that "
            "hold no whole weights with shard full; use shard none, or a workload without assess"
        )
    bad = [name for name, parameter in model.named_parameters() if not parameter.is_contiguous()]
    if bad:
        found.append(
            f"shard full needs weights in the usual layout, {bad[0]} and {len(bad) - 1} more are stored otherwise; "
            "use channels_last false, or shard none"
        )
    return found


def describe_split(model: nn.Module, loader: DataLoader, n_ranks: int) -> list[str]:
    """List what a run over several ranks says at its start."""
    batch_size = loader.batch_size
    assert batch_size is not None
    parts = ", ".join(str(_count_part(batch_size, rank, n_ranks)) for rank in range(n_ranks))
    notes = [f"{n_ranks} ranks; of a micro-batch of {batch_size} they get {parts} samples"]
    is_streamed = isinstance(loader.dataset, IterableDataset)
    norm = nn.modules.batchnorm._BatchNorm
    if any(isinstance(m, norm) and not isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        notes.append(
            "BatchNorm takes its statistics from each rank's part of a batch; rank 0's are evaluated and saved"
        )
        tail = 0 if is_streamed or loader.drop_last else len(loader.sampler) % batch_size  # type: ignore[arg-type]
        if tail and _count_part(tail, n_ranks - 1, n_ranks) < 2:
            notes.append(
                f"the last batch of an epoch has {tail} samples, one of them on some ranks: BatchNorm can refuse to "
                "train on a single value per channel; drop_last leaves that batch out"
            )
    if is_streamed:
        notes.append("the data stream: every rank reads all of it and keeps its part, which costs as much on each")
    if loader.num_workers:
        notes.append(f"num_workers {loader.num_workers} are those of one rank: {n_ranks * loader.num_workers} in all")
    return notes


def _count_part(n_samples: int, rank: int, n_ranks: int) -> int:
    cut = Share(rank, n_ranks).cut(n_samples)
    return cut.stop - cut.start
