"""An artefact that adds up its input, notes its batches, and fails where a test asks for it."""

import threading
from pathlib import Path

import numpy as np

from fulltilt.infer.manifest import InputSpec, Manifest, Policy

FAILS, IS_NAN, SPOILS = 13, 14, 15
"""First values of samples that make the model raise, answer NaN, and make all of its batch NaN."""


def build_manifest(*inputs, policy=None, **fields):
    inputs = inputs or (InputSpec(name="x", dtype="float32", shape=(None,)),)
    values = {"name": "adder", "plan": {"engine": "eager"}, "device": "cpu", "max_length": 8, "n_parameters": 0}
    values |= {"built_with": {}, "files": {}, "config": {}, "policy": policy or Policy(max_batch=4)}
    return Manifest(inputs=inputs, **(values | fields))


class FakeArtefact:
    """Attributes:
    calls: The batches that were answered, as the first values of their samples.
    gate: The model waits for it, which begins open.
    """

    def __init__(self, manifest=None, *, most_samples=100, notes=()):
        self.folder = Path("nowhere")
        self.manifest, self.notes, self._most = manifest or build_manifest(), notes, most_samples
        self.samples = tuple((np.arange(1, n + 1, dtype=np.float32),) for n in (3, 1, 8))
        self.calls = []
        self.gate, self.has_begun = threading.Event(), threading.Event()
        self.gate.set()

    def answer(self, samples):
        first = [float(sample[0].flat[0]) for sample in samples]
        self.calls.append(first)
        self.has_begun.set()
        assert self.gate.wait(20)
        if len(samples) > self._most:
            raise MemoryError("no room")
        if FAILS in first:
            raise ValueError("index 13 is out of bounds")
        spoilt = np.nan if SPOILS in first else 0.0
        return [
            (np.array([sum(part.sum() for part in sample) + (np.nan if value == IS_NAN else spoilt)], np.float32),)
            for sample, value in zip(samples, first, strict=True)
        ]


def build_sample(*values):
    return (np.array(values, np.float32),)
