"""cuda_graphs: a model is recorded once a shape and replayed as one launch."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fulltilt.levers._spec import Facts, Lever, PlanValues, note_choice

MULTIPLE = 32  # of a length that is recorded
N_WARMING = 2  # calls before a recording: libraries take their memory, compilers compile


class Recorded:
    """Calls a function of tensors by CUDA graphs, of which the first call of a shape records one.

    Samples are filled up to a power of two and lengths to a multiple of 32, so few shapes occur. Outputs are
    overwritten by the next call.

    Args:
        pads: What fills up the length, the second dimension, of each input; None: the input has no length.
        multiple: 1 where padding would change the outputs.
    """

    def __init__(
        self, forward: Callable[..., Any], pads: Sequence[float | None], max_length: int, multiple: int = MULTIPLE
    ):
        self.known: dict[tuple[int, int], tuple[Any, list[Any], tuple[Any, ...]]] = {}
        self._forward, self._pads, self._max_length, self._multiple = forward, pads, max_length, multiple
        self._pool: Any = None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        has_length = [tensor for tensor, pad in zip(inputs, self._pads, strict=True) if pad is not None]
        n, length = len(inputs[0]), max((tensor.shape[1] for tensor in has_length), default=1)
        shape = self.round_shape(n, length)
        if shape not in self.known:
            self.known[shape] = self._record(shape, inputs)
        graph, places, outputs = self.known[shape]
        for place, tensor, pad in zip(places, inputs, self._pads, strict=True):
            if pad is None:
                place[:n].copy_(tensor)
            else:
                place[:n, :length].copy_(tensor)
                place[:n, length:].fill_(pad)
        graph.replay()
        return tuple(output[:n] for output in outputs)  # rows behind them answer samples of an earlier call

    def record(self, max_samples: int, *inputs: Any) -> None:
        """Record all shapes up to so many samples, from the first of a batch."""
        for shape in self.list_shapes(max_samples):
            self.known[shape] = self._record(shape, inputs)

    def list_shapes(self, max_samples: int) -> Iterable[tuple[int, int]]:
        """List samples and length of all shapes up to these, the largest first: smaller ones share its memory."""
        sizes = [1 << power for power in reversed(range((max_samples - 1).bit_length() + 1))]
        lengths = dict.fromkeys(self.round_shape(1, length)[1] for length in range(self._max_length, 0, -1))
        return itertools.product(sizes, lengths)

    def round_shape(self, n: int, length: int) -> tuple[int, int]:
        rounded = -(-length // self._multiple) * self._multiple
        return 1 << (n - 1).bit_length(), max(length, min(rounded, self._max_length))

    def _record(self, shape: tuple[int, int], inputs: Sequence[Any]) -> tuple[Any, list[Any], tuple[Any, ...]]:
        import torch

        places = [self._place(tensor, pad, shape) for tensor, pad in zip(inputs, self._pads, strict=True)]
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(N_WARMING):
                self._forward(*places)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            return graph, places, tuple(self._forward(*places))

    def _place(self, tensor: Any, pad: float | None, shape: tuple[int, int]) -> Any:
        """Return where inputs of a shape lie, with the first sample in all rows: real ones, on which nothing fails."""
        n, length = shape
        if pad is None:
            return tensor[:1].repeat(n, *[1] * (tensor.dim() - 1))
        place = tensor.new_full((n, length, *tensor.shape[2:]), pad)
        place[:, : tensor.shape[1]] = tensor[:1, :length]
        return place


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
