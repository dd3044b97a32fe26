"""One model on several ranks: its wrapping, when gradients are joined, and each rank's part of a batch.

*Replicated* (DistributedDataParallel): every rank holds the model, gradients are averaged while the backward
pass still runs. *Sharded* (FSDP2): every rank holds a part of each weight, of its gradient and of its optimizer state,
and gathers a block's weights when the block runs; for a model that does not fit into one device.

Both average gradients over the ranks. Each rank weighs its loss by its share of the window's samples (``TrainStep``),
so that the average is the gradient of the mean loss over the window, however unevenly a batch divides.

FSDP2 and divided tensors are imported where they are used: loading them takes seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fulltilt.engine.ranks.world import World
from fulltilt.levers.activation_checkpointing import find_blocks
from fulltilt.measure.nested import count_samples, map_tensors, slice_samples
from fulltilt.records import format_bytes

STATE_COPIES = 4  # weight, gradient and Adam's two moments
STATE_LIMIT = 0.8  # of free device memory; activations need the rest


class GradientSync:
    """Decides before each micro-step whether its backward pass joins the gradients of all ranks.

    Only the last one of a window has to. Of the first window each does: torch records a static graph in the first
    backward pass, which must not be left out, and an average of averages is the average.
    """

    def __init__(self, switch: Callable[[bool], None], *, joins_first_window: bool, is_sharded: bool = False):
        self._switch = switch
        self.is_sharded = is_sharded  # the ranks divide the weights; running the model needs all of them
        self._always = joins_first_window
        self._is_on = True

    def __call__(self, is_last: bool) -> None:
        wanted = is_last or self._always
        if wanted != self._is_on:
            self._switch(wanted)
            self._is_on = wanted
        if is_last:
            self._always = False


def replicate(model: nn.Module, *, static_graph: bool) -> tuple[nn.Module, GradientSync]:
    """Wrap the model so that ranks average their gradients; all take rank 0's weights and buffers.

    Without ``static_graph`` the parameters that take part are looked for in every step.
    """
    # Buffers (BatchNorm's statistics) stay each rank's own between evaluations; the old name warns from torch 2.13 on.
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    wrapped = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        find_unused_parameters=not static_graph,
        **{name: False},  # type: ignore[arg-type]
    )

    def switch(is_on: bool) -> None:
        wrapped.require_backward_grad_sync = is_on  # what no_sync() sets, over forward and backward

    return wrapped, GradientSync(switch, joins_first_window=static_graph)


def shard(model: nn.Module, device: torch.device, world: World) -> tuple[nn.Module, GradientSync]:
    """Divide the weights in place: the blocks that repeat one by one, then what is left."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (world.n_ranks,))
    for block in find_blocks(model):
        if block is not model and any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    return model, GradientSync(model.set_requires_gradient_sync, joins_first_window=False, is_sharded=True)


def choose_shard(wanted: str, model: nn.Module, device: torch.device, world: World) -> tuple[bool, str | None]:
    """Decide whether to divide the weights, and what to tell the user. ``auto`` does where they do not fit.

    The device with the least free memory decides for all: ranks that chose apart would wait for each other for ever.
    """
    if not world.is_divided:
        note = "shard full needs several devices; on one there is nothing to divide" if wanted == "full" else None
        return False, note
    if wanted != "auto":
        return wanted == "full", None
    state_bytes = STATE_COPIES * sum(p.numel() * p.element_size() for p in model.parameters())
    if device.type != "cuda":
        return False, None
    free_bytes = min(world.collect(torch.cuda.mem_get_info(device)[0]))
    if state_bytes <= STATE_LIMIT * free_bytes:
        return False, None
    return True, (
        f"weights, gradients and Adam's moments would take about {format_bytes(state_bytes)} of the "
        f"{format_bytes(free_bytes)} that are free on the fullest device: they are divided over {world.n_ranks} devices"
    )


class DealtBatches:
    """Yields this rank's parts of the global batches.

    Args:
        batches: The loader's: parts already, or whole batches where ``sizes`` is None (data that streams).
        sizes: Samples of each global batch.

    Attributes:
        n_global: Samples of the newest batch, of all ranks.
        n_local: How many of them are here; 0 where there were too few and another sample stands in.
        is_last: No batch follows.
    """

    def __init__(self, batches: Iterator[Any], world: World, sizes: Iterator[int] | None):
        assert world.share is not None
        self._batches, self._sizes, self._share = batches, sizes, world.share
        self.n_global = self.n_local = 0
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Take the next size, or the next whole batch where sizes are not known."""
        self._next: Any = next(self._batches if self._sizes is None else self._sizes, None)
        self.is_last = self._next is None

    def __iter__(self) -> DealtBatches:
        return self

    def __next__(self) -> Any:
        found = self._next
        if found is None:
            raise StopIteration
        batch = found if self._sizes is None else next(self._batches)
        n_samples = count_samples(found) if self._sizes is None else found
        self._look_ahead()
        cut = self._share.cut(n_samples)
        self.n_global, self.n_local = n_samples, cut.stop - cut.start
        if self._sizes is not None:
            return batch
        return slice_samples(batch, n_samples, cut if self.n_local else slice(0, 1))


def list_sizes(n_samples: int, batch_size: int, *, drop_last: bool) -> Iterator[int]:
    """Yield the sizes of the batches that ``n_samples`` make."""
    for first in range(0, n_samples, batch_size):
        size = min(batch_size, n_samples - first)
        if size == batch_size or not drop_last:
            yield size


def gather_state(state: Any, *, keep: bool) -> Any:
    """Put divided tensors of a state together on the CPU; ranks that do not ``keep`` it only give their parts."""
    from torch.distributed.tensor import DTensor

    def gather(tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, DTensor):
            return tensor
        whole = tensor.full_tensor()
        return whole.cpu() if keep else None

    return map_tensors(gather, state)


def divide_like(whole: Tensor, like: Any) -> Tensor:
    """Divide ``whole`` as ``like`` is, if it is. Every rank brings its own copy."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(device=like.device), like.device_mesh, like.placements, src_data_rank=None)


def divide_optimizer_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Divide the moments in a saved state of an optimizer as its parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for index, values in saved["state"].items():
        like = parameters[index]
        state[index] = {
            name: divide_like(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value
            for name, value in values.items()
        }
    return {**saved, "state": state}
