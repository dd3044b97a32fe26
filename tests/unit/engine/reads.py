"""Counts what brings a value of a tensor to the host."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class CountReads(TorchFunctionMode):
    """Counts what brings a floating-point value to the host; whole numbers are the loader's own.

    A copy with ``to`` is no wait where device and host are one; on a GPU torch's own debug mode sees it.
    """

    READERS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.READERS and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            self.reads.append(name)
        return function(*args, **(kwargs or {}))
