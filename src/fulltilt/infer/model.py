"""A configuration's model in evaluation mode, with real samples of its data as the model takes them. Imports torch."""

import dataclasses
import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.data import IterableDataset

from fulltilt.config import Config, parse_on_bad_sample
from fulltilt.data import build_loader
from fulltilt.engine.build import builder
from fulltilt.engine.build.assemble import build_workload
from fulltilt.engine.build.facts import describe
from fulltilt.engine.checkpoints.checkpoint import load_checkpoint, load_model_state
from fulltilt.engine.checkpoints.export import find_evaluated, read_weights
from fulltilt.engine.step.rng import seed_everything
from fulltilt.errors import DataError, FulltiltError
from fulltilt.infer.gates.accuracy import compare_outputs
from fulltilt.infer.joining import MIN_LENGTH, Sample, join_samples, read_length, split_outputs
from fulltilt.infer.manifest import InputSpec
from fulltilt.levers import Facts
from fulltilt.measure.nested import SEQUENCES
from fulltilt.tasks import Workload

N_SAMPLES = 1024
GROUP, N_GROUPS = 8, 4  # batches of the workload's own that joining is held against
INDEPENDENT_DB = 60.0  # outputs beside padding against those without: rounding of fp32 is 100 dB and more below
PACKAGES = ("onnx", "onnxruntime", "onnxscript", "torchao", "mslk")
LAYERS = (nn.Linear, nn.LSTM, nn.GRU)


class Flat(nn.Module):
    """Calls a model with its inputs one by one, and returns its outputs as a tuple."""

    def __init__(self, model: nn.Module, names: Sequence[str], takes_mapping: bool):
        super().__init__()
        self.model, self.names, self.takes_mapping = model, tuple(names), takes_mapping

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in tree_leaves(self.call(*inputs)) if _is_answer(leaf))

    def call(self, *inputs: Tensor) -> Any:
        """Return the outputs as the model gives them."""
        return self.model(dict(zip(self.names, inputs, strict=True))) if self.takes_mapping else self.model(*inputs)


def _is_answer(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0  # a loss of the whole batch is none


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceModel:
    """A model that was trained or built, and what it answers.

    Attributes:
        module: In evaluation mode and fp32, on ``device``.
        data: "validation set", or "training set" where there is none: where the samples come from, in random order.
        targets: Of each sample, as a batch of one.
        joins: As in ``Manifest``; ``notes`` say why samples are answered alone.
        weights: The checkpoint and its training metrics; None: the model as it was built.
    """

    config: Config
    workload: Workload
    device: torch.device
    module: Flat
    data: str
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
        """Answer samples in one batch; one by one, where they cannot be joined."""
        if self.joins != "pad" and len(samples) > 1:
            return [self.answer([sample])[0] for sample in samples]
        outputs = run_module(self.module, join_samples(samples, self.inputs), self.device)
        return split_outputs(outputs, [read_length(sample, self.inputs) for sample in samples], self.outputs_vary)

    def rebuild(self, outputs: Sample) -> Any:
        """Give the outputs of one sample the form that the workload's metrics take, as a batch of one."""
        given = (torch.from_numpy(np.asarray(array)[None]) for array in outputs)
        leaves, form = self._form
        return tree_unflatten([next(given) if _is_answer(leaf) else leaf for leaf in leaves], form)

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
        DataError: no sample, none short enough, or samples that no batch of arrays can hold.
        FulltiltError: an output is NaN or infinite.
    """
    place = builder.check_device(device)
    workload = build_workload(config)
    data = "training set" if workload.validation is None else "validation set"
    seed_everything(config.run.seed)
    dataset = (workload.validation or workload.dataset)()
    model = build_model(workload, config)
    trained = None if weights is None else load_weights(model, weights)
    model.to(place)
    read = functools.partial(_read_batches, config, workload, dataset, place)
    singles = list(itertools.islice(read(1), n_samples))
    if not singles:
        raise DataError(f"the {data} holds no sample; a model is measured and verified with real ones")
    names, takes_mapping = _name_inputs(model, singles[0][0])
    samples = tuple(tuple(array[0] for array in _flatten(inputs)) for inputs, _ in singles)
    flat = Flat(model, names, takes_mapping)
    specs, problem = _find_pads(samples, _find_specs(names, samples), read)
    most = config.inference.max_length or max(read_length(sample, specs) for sample in samples)
    kept = [n for n, sample in enumerate(samples) if read_length(sample, specs) <= most]
    if not kept:
        raise DataError(f"inference.max_length is {most}, and all of {len(samples)} samples are longer; set it higher")
    samples, targets = tuple(samples[n] for n in kept), tuple(singles[n][1] for n in kept)
    specs = tuple(_find_bounds(flat, samples[0], specs, place))
    longest = max(read_length(sample, specs) for sample in samples) if any(s.varies for s in specs) else None
    vary, dependence = _find_dependence(flat, samples, specs, place)
    problem = problem or dependence
    return InferenceModel(
        config=config,
        workload=workload,
        device=place,
        module=flat,
        data=data,
        samples=samples,
        targets=targets,
        inputs=specs,
        max_length=longest and (config.inference.max_length or longest),
        joins="alone" if problem else "pad",
        outputs_vary=vary,
        facts=dataclasses.replace(
            describe(model, dataset, place, is_batch_known=workload.collate is None),
            has_linear=any(isinstance(module, LAYERS) for module in model.modules()),
            has_attention=_has_attention(flat, samples[0], place),
            packages=tuple(package for package in PACKAGES if importlib.util.find_spec(package)),
        ),
        weights=trained,
        notes=(f"samples are answered one by one: {problem}",) if problem else (),
    )


def build_model(workload: Workload, config: Config) -> nn.Module:
    """Build the model in evaluation mode, as training initialises it."""
    seed_everything(config.run.seed)
    return builder.build_model(workload).eval()


def load_weights(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Put the newest checkpoint of a training into ``model``, the running average where it kept one."""
    loaded = load_checkpoint(folder)
    assert loaded is not None, folder  # it existed when the command began
    kind = find_evaluated(loaded.state)
    load_model_state(model, read_weights(loaded.state, kind), loaded.path)
    evaluations = loaded.state["evaluations"]
    metrics: Mapping[str, float] = evaluations[-1]["metrics"] if evaluations else {}
    return {"checkpoint": str(loaded.path), "kind": kind, "step": loaded.state["progress"]["step"], "metrics": metrics}


def run_module(module: nn.Module, inputs: Sample, device: torch.device) -> Sample:
    """Call a module with arrays, batch first, and return its outputs as arrays.

    Raises:
        DataError: there is no output, or one that does not have the samples first.
        FulltiltError: an output is NaN or infinite.
    """
    with torch.no_grad():
        outputs = [tensor.cpu() for tensor in module(*(torch.from_numpy(array).to(device) for array in inputs))]
    if not outputs or any(len(tensor) != len(inputs[0]) for tensor in outputs):
        shapes = [tuple(tensor.shape) for tensor in outputs]
        raise DataError(f"outputs of {len(inputs[0])} samples have shapes {shapes}; answer each sample, samples first")
    for tensor in outputs:
        if n_bad := int((~torch.isfinite(tensor)).sum()):
            raise FulltiltError(
                f"{n_bad} of {tensor.numel()} outputs of the model are NaN or infinite; "
                "measuring it would say nothing; train it anew, or use another precision"
            )
    return tuple(tensor.numpy() for tensor in outputs)


def _read_batches(
    config: Config, workload: Workload, dataset: Any, device: torch.device, size: int
) -> Iterator[tuple[Any, Any]]:
    """Read the same samples at every call, in batches of any size, prepared as for training.

    Raises:
        DataError: a batch is no pair of inputs and targets.
    """
    loader = build_loader(
        dataset,
        batch_size=size,
        shuffle=not isinstance(dataset, IterableDataset),  # data sets are often sorted by class
        drop_last=False,
        generator=torch.Generator().manual_seed(config.run.seed),
        collate=workload.collate,
        skip_limit=parse_on_bad_sample(config.data.on_bad_sample),
    )
    generator = torch.Generator(device).manual_seed(config.run.seed)
    for batch in loader:
        if workload.prepare is not None:
            with torch.no_grad():
                batch = workload.prepare(tree_map_only(Tensor, lambda tensor: tensor.to(device), batch), generator)
        if not isinstance(batch, SEQUENCES) or len(batch) != 2:
            raise DataError(f"a batch is {type(batch).__name__}, expected (inputs, targets); change the collate")
        yield batch[0], batch[1]


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
    samples: Sequence[Sample], specs: tuple[InputSpec, ...], read: Callable[[int], Iterator[Any]]
) -> tuple[tuple[InputSpec, ...], str | None]:
    """Find what the workload pads with, and why joining cannot do as it does; None: it can."""
    size = min(GROUP, len(samples))
    try:
        batches = [_flatten(inputs) for inputs, _ in itertools.islice(read(size), min(N_GROUPS, len(samples) // size))]
    except (DataError, RuntimeError) as error:  # no collate, or one of the user's that does not take such a batch
        return specs, f"the workload cannot join them ({str(error).splitlines()[0]})"
    pairs = [(samples[size * i : size * (i + 1)], batch) for i, batch in enumerate(batches)]
    found = []
    for i, spec in enumerate(specs):
        rows = [pair for group, batch in pairs for pair in zip(group, batch[i], strict=False)] if spec.varies else ()
        pads = {pad for sample, row in rows for pad in np.unique(row[len(sample[i]) :]).tolist()}
        if len(pads) > 1:
            return specs, f"its collate fills {spec.name} with several values"
        found.append(dataclasses.replace(spec, pad=float(next(iter(pads), 0.0))))
    for group, batch in pairs:
        for mine, theirs in zip(join_samples(group, found), batch, strict=True):
            if mine.ndim > 1 and theirs.ndim > 1:  # one may be longer, to a multiple; what follows is padding
                length = min(mine.shape[1], theirs.shape[1])
                mine, theirs = mine[:, :length], theirs[:, :length]
            if mine.dtype != theirs.dtype or not np.array_equal(mine, theirs):
                return tuple(found), "its collate or prepare joins them another way than by padding at the end"
    return tuple(found), None


def _find_bounds(flat: Flat, sample: Sample, specs: Sequence[InputSpec], device: torch.device) -> Iterator[InputSpec]:
    """Find the rows of an embedding that reads an input: compiled code aborts beyond them."""
    inputs, read = join_samples([sample], specs), list[tuple[Any, int]]()

    def note(module: nn.Module, given: Any) -> None:
        if isinstance(module, nn.Embedding):
            read.append((given[0].cpu().numpy(), module.num_embeddings))

    with register_module_forward_pre_hook(note):
        run_module(flat, inputs, device)
    for spec, array in zip(specs, inputs, strict=True):
        rows = [n for seen, n in read if np.array_equal(seen, array) and array.min() < array.max()]
        yield dataclasses.replace(spec, below=min(rows, default=None))


def _find_dependence(
    flat: Flat, samples: Sequence[Sample], specs: Sequence[InputSpec], device: torch.device
) -> tuple[tuple[bool, ...], str | None]:
    """Find which outputs have a dimension of the length, and how far answers depend on padding; None: by rounding."""
    ordered = sorted(samples, key=lambda sample: read_length(sample, specs))
    group = [*samples[: GROUP - 2], ordered[0], ordered[-1]]
    lengths = [read_length(sample, specs) for sample in group]
    if lengths[-2] == lengths[-1]:
        return (False,) * len(run_module(flat, join_samples(group[-1:], specs), device)), None
    alone = [run_module(flat, join_samples([sample], specs), device) for sample in group]
    vary = tuple(a.ndim > 1 and a.shape[1] != b.shape[1] for a, b in zip(*alone[-2:], strict=True))
    for outputs, length in zip(alone[-2:], lengths[-2:], strict=True):
        if any(out.shape[1] != max(MIN_LENGTH, length) for out in itertools.compress(outputs, vary)):
            return (False,) * len(vary), "an output has another length than its sample"
    alone = [split_outputs(outputs, [length], vary)[0] for outputs, length in zip(alone, lengths, strict=True)]
    together = split_outputs(run_module(flat, join_samples(group, specs), device), lengths, vary)
    sqnr_db, _ = compare_outputs(alone, together)
    return vary, None if sqnr_db >= INDEPENDENT_DB else f"padding changes the model's answers ({sqnr_db:.0f} dB)"


def _has_attention(flat: Flat, sample: Sample, device: torch.device) -> bool:
    """Ask for an answer with every kernel of attention forbidden; torch's profiler would print lines of its own."""
    try:
        with sdpa_kernel([]):
            run_module(flat, tuple(array[None] for array in sample), device)
    except RuntimeError as error:
        return "scaled_dot_product" in str(error)
    return False
