"""cuda_graphs: a model is recorded once a shape and replayed as one launch."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fulltilt.levers._spec import Facts, Lever, PlanValues, note_choice

LENGTH_MULTIPLE = 32
N_WARMING = 2  # calls before a recording: libraries take their memory, compilers compile
Shape = tuple[int, int]
"""Samples, and their length."""
_ONE_AT_A_TIME = threading.Lock()  # of a process, CUDA records one graph


def round_shape(n: int, length: int, max_length: int) -> Shape:
    """Round a shape up to one that is recorded: samples to a power of two, lengths to a multiple of 32."""
    rounded = -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return 1 << (n - 1).bit_length(), max(length, min(rounded, max_length))


def list_shapes(max_samples: int, max_length: int, max_tokens: float = math.inf) -> list[Shape]:
    """List all shapes to which batches round, the largest first: smaller ones share its memory.

    Args:
        max_tokens: Samples times their longest length of a batch.
    """
    sizes = [1 << power for power in reversed(range((max_samples - 1).bit_length() + 1))]
    longest = {round_shape(1, length, max_length)[1]: length for length in range(max_length, 0, -1)}  # → the shortest
    return [(n, long) for n in sizes for long, short in longest.items() if n == 1 or (n // 2 + 1) * short <= max_tokens]


class Recorded:
    """Calls a function of tensors by CUDA graphs, of which the first call of a shape records one.

    Batches are filled up, so few shapes occur. Outputs are overwritten by the next call.

    Args:
        pads: What fills up the length, the second dimension, of each input; None: the input has no length.
    """

    def __init__(self, forward: Callable[..., Any], pads: Sequence[float | None], max_length: int):
        self.known: dict[Shape, tuple[Callable[[], Any], list[Any], tuple[Any, ...]]] = {}
        self._forward, self._pads, self._max_length, self._pool = forward, pads, max_length, None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        has_length = [tensor for tensor, pad in zip(inputs, self._pads, strict=True) if pad is not None]
        n, length = len(inputs[0]), max((tensor.shape[1] for tensor in has_length), default=1)
        shape = round_shape(n, length, self._max_length)
        if shape not in self.known:
            self.record(shape, *inputs)
        replay, places, outputs = self.known[shape]
        for place, tensor, pad in zip(places, inputs, self._pads, strict=True):
            if pad is None:
                place[:n].copy_(tensor)
            else:
                place[:n, :length].copy_(tensor)
                place[:n, length:].fill_(pad)
        replay()
        return tuple(output[:n] for output in outputs)  # rows behind them answer samples of an earlier call

    def record(self, shape: Shape, *inputs: Any) -> None:
        """Record the call of a shape, with the first of these samples in all of its rows."""
        places = [self._fill(tensor, pad, shape) for tensor, pad in zip(inputs, self._pads, strict=True)]
        with _ONE_AT_A_TIME:
            replay, outputs = self._capture(places)
        self.known[shape] = replay, places, outputs

    def _capture(self, places: Sequence[Any]) -> tuple[Callable[[], Any], tuple[Any, ...]]:
        import torch

        device = places[0].device
        with torch.cuda.device(device):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(N_WARMING):
                    self._forward(*places)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                outputs = tuple(self._forward(*places))

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay, outputs

    def _fill(self, tensor: Any, pad: float | None, shape: Shape) -> Any:
        """Return a tensor of a shape whose rows are all the first of another one, cut or padded."""
        n, length = shape
        if pad is None:
            return tensor[:1].repeat(n, *[1] * (tensor.dim() - 1))
        filled = tensor.new_full((n, length, *tensor.shape[2:]), pad)
        filled[:, : tensor.shape[1]] = tensor[:1, :length]
        return filled


def _find_obstacle(value: bool, plan: PlanValues, facts: Facts) -> str | None:
    if facts.device_type != "cuda":
        return "CUDA graphs exist on NVIDIA GPUs only; use cuda_graphs false"
    if plan.get("engine", "eager") not in ("eager", "compile"):
        return "calls of eager and compiled models are recorded; set engine compile"
    return None


LEVER = Lever(
    name="cuda_graphs",
    key="inference.cuda_graphs",
    summary="The model's kernels are recorded once a shape and replayed as one launch.",
    doc=(
        "Takes away the launch of every kernel, which is most of the time of a small batch: an encoder of MiniLM's "
        "size on an RTX 4090 went from 1.34 to 2.96 times as fast as eager (Aureliolo/synthorg#2743). Each shape is "
        "recorded by itself and keeps its memory, so batches are filled up to a power of two and lengths to a multiple "
        "of 32. A shape that is recorded anew at every request is slower than eager (pytorch/pytorch#188150): the "
        "effect gate counts recordings over the declared shapes."
    ),
    trades=("speed", "memory"),
    stage="compile",
    restart=True,
    candidates=lambda facts: (False, True) if facts.device_type == "cuda" else (False,),
    obstacle=_find_obstacle,
    apply=note_choice("cuda_graphs"),
    observe=lambda setup: setup.state.get("cuda_graphs", False),
)
