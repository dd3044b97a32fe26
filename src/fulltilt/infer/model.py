"""A configuration's model in evaluation mode, with real samples of its data as the model takes them. Imports torch."""

import dataclasses
import functools
import importlib.util
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import IterableDataset

from fulltilt.config import Config, parse_on_bad_sample
from fulltilt.data import build_loader
from fulltilt.engine.build.assemble import build_workload
from fulltilt.engine.build.builder import check_device
from fulltilt.engine.build.facts import describe
from fulltilt.errors import DataError
from fulltilt.infer.gates.accuracy import compare_outputs
from fulltilt.infer.joining import Array, Sample, join_samples, read_length, split_outputs
from fulltilt.infer.manifest import InputSpec
from fulltilt.infer.served import build_model, build_samples, check_finite, load_weights, split_batch
from fulltilt.levers import Facts
from fulltilt.measure.nested import SEQUENCES
from fulltilt.tasks import Workload

N_SAMPLES = 1024
GROUP, N_GROUPS = 8, 4  # batches of the workload's own that joining is held against
INDEPENDENT_DB = 60.0  # outputs beside padding against those without: rounding of fp32 is 100 dB and more below
PACKAGES = ("onnx", "onnxruntime", "onnxscript", "torchao", "mslk")
LAYERS = (nn.Linear, nn.LSTM, nn.GRU)


class Flat(nn.Module):
    """Calls a model with its inputs one by one, and returns the tensors of its outputs as one tuple.

    Args:
        names: Of the inputs; the keys, where the model takes them as one mapping.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], takes_mapping: bool):
        super().__init__()
        self.model, self.names, self.takes_mapping = model, tuple(names), takes_mapping

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in tree_leaves(self.call(*inputs)) if isinstance(leaf, Tensor))

    def call(self, *inputs: Tensor) -> Any:
        """Return the outputs as the model gives them."""
        return self.model(dict(zip(self.names, inputs, strict=True))) if self.takes_mapping else self.model(*inputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceModel:
    """A model that was trained or built, and what it answers.

    Attributes:
        module: In evaluation mode and fp32, on ``device``.
        samples: Of the validation set, or of the training set where there is none, in random order.
        targets: Of each sample, as a batch of one.
        joins: As in ``Manifest``; ``notes`` say why samples are answered alone.
        weights: The checkpoint and its training metrics; None: the model as it was built.
    """

    config: Config
    workload: Workload
    device: torch.device
    module: Flat
    samples: tuple[Sample, ...]
    targets: tuple[Any, ...]
    inputs: tuple[InputSpec, ...]
    max_length: int | None
    joins: str
    outputs_vary: tuple[bool, ...]
    facts: Facts
    weights: dict[str, Any] | None
    notes: tuple[str, ...]

    @property
    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def answer(self, samples: Sequence[Sample]) -> list[Sample]:
        """Answer samples in eager fp32, in one batch."""
        outputs = run_module(self.module, join_samples(samples, self.inputs), self.device)
        return split_outputs(outputs, [read_length(sample, self.inputs) for sample in samples], self.outputs_vary)

    def rebuild(self, outputs: Sample) -> Any:
        """Give the outputs of one sample the form that the workload's metrics take, as a batch of one."""
        given = (torch.from_numpy(np.asarray(array)[None]) for array in outputs)
        leaves, form = self._form
        return tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)

    @functools.cached_property
    def _form(self) -> Any:
        first = [torch.from_numpy(array[None]).to(self.device) for array in self.samples[0]]
        with torch.no_grad():
            return tree_flatten(self.module.call(*first))


def build_inference_model(
    config: Config, *, device: str, weights: Path | None = None, n_samples: int = N_SAMPLES
) -> InferenceModel:
    """Build the model of a configuration, read samples, and find out how they are joined to batches.

    Args:
        weights: Folder of a training; None: the model as its function builds it.

    Raises:
        DataError: no sample, or samples that no batch of arrays can hold.
        FulltiltError: an output is NaN or infinite.
    """
    place = check_device(device)
    workload = build_workload(config)
    name, dataset = build_samples(workload, config)
    model = build_model(workload, config)
    trained = None if weights is None else load_weights(model, weights)
    model.to(place)
    read = _Reader(config, workload, dataset, place)
    singles = list(itertools.islice(read.batches(1), n_samples))
    if not singles:
        raise DataError(f"the {name} holds no sample; artefacts are built and verified with real ones")
    names, takes_mapping = _name_inputs(model, singles[0][0])
    samples = tuple(tuple(array[0] for array in _flatten(inputs)) for inputs, _ in singles)
    flat = Flat(model, names, takes_mapping)
    specs = _find_specs(names, samples)
    longest = max(read_length(sample, specs) for sample in samples) if any(s.varies for s in specs) else None
    specs, problem = _find_pads(samples, specs, read)
    vary = _find_varying_outputs(flat, samples, specs, place)
    problem = problem or _find_dependence(flat, samples, specs, vary, place)
    facts = describe(model, dataset, place, is_batch_known=workload.collate is None)
    return InferenceModel(
        config=config,
        workload=workload,
        device=place,
        module=flat,
        samples=samples,
        targets=tuple(targets for _, targets in singles),
        inputs=specs,
        max_length=longest and (config.inference.max_length or longest),
        joins="alone" if problem else "pad",
        outputs_vary=vary,
        facts=dataclasses.replace(
            facts,
            has_linear=any(isinstance(module, LAYERS) for module in model.modules()),
            has_attention=_has_attention(flat, samples[0], place),
            packages=tuple(package for package in PACKAGES if importlib.util.find_spec(package)),
        ),
        weights=trained,
        notes=(f"samples are answered one by one: {problem}",) if problem else (),
    )


def run_module(module: nn.Module, inputs: Sample, device: torch.device) -> Sample:
    """Call a module with arrays, batch first, and return its outputs as arrays.

    Raises:
        FulltiltError: an output is NaN or infinite.
    """
    with torch.no_grad():
        outputs = module(*(torch.from_numpy(array).to(device) for array in inputs))
    check_finite(outputs)
    return tuple(tensor.cpu().numpy() for tensor in outputs)


class _Reader:
    """Reads the same samples again and again, in batches of any size, prepared as for training."""

    def __init__(self, config: Config, workload: Workload, dataset: Any, device: torch.device):
        self._config, self._workload, self._dataset, self._device = config, workload, dataset, device

    def batches(self, size: int) -> Iterator[tuple[Any, Any]]:
        seed = self._config.run.seed
        loader = build_loader(
            self._dataset,
            batch_size=size,
            shuffle=not isinstance(self._dataset, IterableDataset),  # data sets are often sorted by class
            drop_last=False,
            generator=torch.Generator().manual_seed(seed),
            collate=self._workload.collate,
            skip_limit=parse_on_bad_sample(self._config.data.on_bad_sample),
        )
        generator = torch.Generator(self._device).manual_seed(seed)
        for batch in loader:
            if self._workload.prepare is not None:
                moved = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device), batch)
                with torch.no_grad():
                    batch = self._workload.prepare(moved, generator)
            inputs, targets = split_batch(batch)
            yield inputs, targets


def _name_inputs(model: nn.Module, inputs: Any) -> tuple[list[str], bool]:
    """Name the inputs by the keys of their mapping, else by the parameters of the model's forward."""
    if isinstance(inputs, Mapping):
        return list(inputs), True
    n = len(inputs) if isinstance(inputs, SEQUENCES) else 1
    names = list(inspect.signature(model.forward).parameters)[:n]
    return (names if len(names) == n else [f"input_{i}" for i in range(n)]), False


def _flatten(inputs: Any) -> Sample:
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, SEQUENCES) else (inputs,)
    for part in parts:
        if not isinstance(part, Tensor) or not part.dim():
            raise DataError(
                f"an input of the model is {type(part).__name__}; artefacts take tensors with the batch first, in a "
                "tuple or a mapping without further nesting"
            )
    return tuple(part.cpu().numpy() for part in parts)


def _find_specs(names: Sequence[str], samples: Sequence[Sample]) -> tuple[InputSpec, ...]:
    """Derive the inputs from the samples: a first dimension that differs is the length.

    Raises:
        DataError: samples differ in another dimension.
    """
    specs = []
    for name, arrays in zip(names, zip(*samples, strict=True), strict=True):
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1 and len({shape[1:] for shape in shapes}) > 1:
            raise DataError(
                f"input {name} has the shapes {', '.join(map(str, shapes[:4]))}: only the first dimension, the length, "
                "may differ between samples; resize or pad the others in the data set"
            )
        shape = (None, *shapes[0][1:]) if len(shapes) > 1 else shapes[0]
        specs.append(InputSpec(name=name, dtype=str(arrays[0].dtype), shape=shape))
    return tuple(specs)


def _find_pads(
    samples: Sequence[Sample], specs: tuple[InputSpec, ...], read: _Reader
) -> tuple[tuple[InputSpec, ...], str | None]:
    """Find what the workload pads with, and why joining cannot do as it does; None: it can."""
    size, joined = min(GROUP, len(samples)), []
    try:
        for inputs, _ in itertools.islice(read.batches(size), min(N_GROUPS, len(samples) // size)):
            joined.append(_flatten(inputs))
    except (DataError, RuntimeError) as error:  # no collate, or one of the user's that does not take such a batch
        return specs, f"the workload cannot join them ({str(error).splitlines()[0]})"
    groups = [samples[size * i : size * (i + 1)] for i in range(len(joined))]
    found = []
    for i, spec in enumerate(specs):
        pads = {
            pad for group, batch in zip(groups, joined, strict=True) for pad in _read_pads(group, batch[i], i, spec)
        }
        if len(pads) > 1:
            return specs, f"its collate fills {spec.name} with several values"
        found.append(dataclasses.replace(spec, pad=float(next(iter(pads), 0.0))))
    for group, batch in zip(groups, joined, strict=True):
        for mine, theirs in zip(join_samples(group, found), batch, strict=True):
            # Theirs may be longer, to a multiple; what follows is padding.
            cut = theirs[:, : mine.shape[1]] if mine.ndim > 1 else theirs
            if mine.dtype != theirs.dtype or not np.array_equal(
                mine[:, : cut.shape[1]] if mine.ndim > 1 else mine, cut
            ):
                return tuple(found), "its collate or prepare joins them another way than by padding at the end"
    return tuple(found), None


def _read_pads(group: Sequence[Sample], batch: Array, i: int, spec: InputSpec) -> Iterator[Any]:
    if spec.varies and batch.shape[0] == len(group):
        for row, sample in zip(batch, group, strict=True):
            yield from np.unique(row[sample[i].shape[0] :]).tolist()


def _find_varying_outputs(
    flat: Flat, samples: Sequence[Sample], specs: Sequence[InputSpec], device: torch.device
) -> tuple[bool, ...]:
    """Find the outputs whose first dimension is the length of the sample."""
    lengths = [read_length(sample, specs) for sample in samples]
    ends = [samples[lengths.index(pick(lengths))] for pick in (min, max)]
    short, long = (run_module(flat, join_samples([sample], specs), device) for sample in ends)
    if min(lengths) == max(lengths):
        return (False,) * len(short)
    return tuple(a.ndim > 1 and a.shape[1] != b.shape[1] for a, b in zip(short, long, strict=True))


def _find_dependence(
    flat: Flat, samples: Sequence[Sample], specs: Sequence[InputSpec], vary: tuple[bool, ...], device: torch.device
) -> str | None:
    """Say how far answers depend on the padding beside them; None: no more than by rounding."""
    group = samples[:GROUP]
    lengths = [read_length(sample, specs) for sample in group]
    if len(set(lengths)) < 2:
        return None
    together = split_outputs(run_module(flat, join_samples(group, specs), device), lengths, vary)
    alone = [
        split_outputs(run_module(flat, join_samples([sample], specs), device), [length], vary)[0]
        for sample, length in zip(group, lengths, strict=True)
    ]
    sqnr_db, _ = compare_outputs(alone, together)
    return None if sqnr_db >= INDEPENDENT_DB else f"padding changes the model's answers ({sqnr_db:.0f} dB)"


def _has_attention(flat: Flat, sample: Sample, device: torch.device) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run_module(flat, tuple(array[None] for array in sample), device)
    return any("scaled_dot_product" in event.key for event in seen.key_averages())
