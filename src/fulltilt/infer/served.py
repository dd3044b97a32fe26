"""Build a model for inference as training builds it, with the same levers, and answer requests. Imports torch."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from fulltilt.config import Config, parse_on_bad_sample, plan_of
from fulltilt.data import build_loader
from fulltilt.engine.build.assemble import build_workload
from fulltilt.engine.build.builder import build_transform, check_device
from fulltilt.engine.build.facts import describe, resolve_plan
from fulltilt.engine.checkpoints.checkpoint import load_checkpoint, load_model_state
from fulltilt.engine.checkpoints.export import find_evaluated, read_weights
from fulltilt.engine.step.rng import seed_everything
from fulltilt.errors import DataError, FulltiltError, PlanObstacleError, UsageError
from fulltilt.levers import Facts, Lever, Setup, find_notes, find_obstacles, load_catalogue, settle_plan
from fulltilt.measure.nested import SEQUENCES, find_tensor
from fulltilt.records import Plan
from fulltilt.tasks import Workload

HELD = ("channels_last", "compile", "precision", "threads")
"""Levers that decide what is measured: in force, or refused by name."""

SETTLED = ("pin_memory", "transforms")
"""With those of the process, levers that are in force where they can be, else there is a note, as in training. The
others (accumulate, num_workers, …) are about training alone."""


class ServedModel:
    """Answers requests with real samples, one after the other.

    A request's samples are read from the data set, joined to a batch, copied to the device and prepared as in
    training; then the model is called, and its outputs are brought to the host.

    Attributes:
        dataset_name: "validation set" or "training set": where the samples come from.
        weights: The checkpoint and its training metrics; None: the model as it was built.
        notes: Which levers could not apply, and why.

    Raises:
        UsageError: a lever that decides what is measured cannot apply; the weights are of another model.
        DataError: the data set holds less than one request.
    """

    def __init__(self, config: Config, *, device: str, samples_per_request: int, weights: Path | None = None):
        self._device = check_device(device)
        workload = build_workload(config)
        self.dataset_name, dataset = build_samples(workload, config)
        model = build_model(workload, config)
        self.weights = None if weights is None else load_weights(model, weights)
        self.n_parameters = sum(parameter.numel() for parameter in model.parameters())
        facts = describe(model, dataset, self._device, is_batch_known=workload.collate is None)
        self._plan, notes = _plan_levers(config, facts)
        self._setup = setup = _apply_levers(self._plan, model, self._device)
        self.notes, dtype = [*notes, *setup.notes], setup.autocast_dtype
        self._autocast = torch.autocast(self._device.type, dtype=dtype, enabled=dtype is not None)
        self._prepare = workload.prepare
        self._generator = torch.Generator(self._device).manual_seed(config.run.seed)
        loader = build_loader(
            dataset,
            batch_size=samples_per_request,
            shuffle=False,
            drop_last=True,  # every request has as many samples as the load says
            generator=torch.Generator().manual_seed(config.run.seed),
            options=setup.loader_options,
            collate=workload.collate,
            skip_limit=parse_on_bad_sample(config.data.on_bad_sample),
        )
        self._transform = build_transform(loader, setup)
        self._batches = _read_endlessly(loader, self.dataset_name, samples_per_request)

    def answer(self) -> float:
        """Answer the next request and return the seconds of the model's call. Waits for the device.

        Raises:
            FulltiltError: an output is NaN or infinite.
        """
        inputs = self.take_inputs()
        self._synchronize()
        begin_s = time.perf_counter()
        outputs = self._call(inputs)
        self._synchronize()
        call_s = time.perf_counter() - begin_s
        check_finite(outputs)
        return call_s

    @property
    def module(self) -> nn.Module:
        return self._setup.model

    def take_inputs(self) -> Any:
        """Take the inputs of the next request, on the device and prepared as in training."""
        inputs = self._prepare_inputs(tree_map_only(Tensor, self._place, next(self._batches)))
        self._note_layout(inputs)
        return inputs

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Compute without gradients, in the precision that was asked for."""
        setup, kind = self._setup, self._device.type
        with torch.no_grad(), self._autocast:
            setup.state["autocast_dtype"] = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            yield

    def read_levers(self) -> dict[str, Any]:
        """Read back the levers that affect inference. Call it after the first answers.

        Raises:
            PlanObstacleError: a lever of the plan is not in force.
        """
        catalogue = load_catalogue()
        observed = {name: catalogue[name].observe(self._setup) for name in HELD}
        for name in HELD:
            if self._plan[name] is not None and observed[name] != self._plan[name]:
                raise PlanObstacleError(
                    f"{catalogue[name].key} {self._plan[name]} is not in force in inference, {observed[name]} is; "
                    f"set it to {observed[name]}"
                )
        return observed

    def _call(self, inputs: Any) -> Any:
        forward = self._setup.forward
        assert forward is not None
        with self.in_force():
            return forward(*inputs) if isinstance(inputs, SEQUENCES) else forward(inputs)

    def _note_layout(self, inputs: Any) -> None:
        """Record the memory layout of the first request, which channels_last reads back."""
        if "input_channels_last" not in self._setup.state:
            first = find_tensor(inputs)
            is_image = first is not None and first.dim() == 4
            layout = first.is_contiguous(memory_format=torch.channels_last) if is_image else None
            self._setup.state["input_channels_last"] = layout

    def _place(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self._device, non_blocking=True)
        memory_format = self._setup.input_memory_format
        if (
            memory_format is not None and tensor.dim() == 4 and self._transform is None
        ):  # otherwise the transform moves the batch
            tensor = tensor.contiguous(memory_format=memory_format)
        return tensor

    def _prepare_inputs(self, batch: Any) -> Any:
        with torch.no_grad():
            if self._transform is not None:
                batch = self._transform(batch, self._generator)
            if self._prepare is not None:
                batch = self._prepare(batch, self._generator)
        return split_batch(batch)[0]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _plan_levers(config: Config, facts: Facts) -> tuple[Plan, list[str]]:
    """Return the plan for inference, with notes on levers that could not apply.

    Raises:
        PlanObstacleError: a lever of ``HELD`` cannot apply.
    """
    plan, notes = resolve_plan(plan_of(config).replace(placement="stream"), facts)
    obstacles = [text for text in find_obstacles(plan, facts) if text.startswith(tuple(f"{name}=" for name in HELD))]
    if obstacles:
        raise PlanObstacleError("; ".join(obstacles))
    plan, settled = settle_plan(plan, facts)
    applied = tuple(f"{lever.name}=" for lever in _list_applied())
    return plan, [*notes, *(text for text in (*settled, *find_notes(plan, facts)) if text.startswith(applied))]


def _list_applied() -> list[Lever]:
    """Return the levers of the plan in the order of their stages."""
    return [v for v in load_catalogue().values() if v.stage == "environment" or v.name in (*HELD, *SETTLED)]


def _apply_levers(plan: Plan, model: nn.Module, device: torch.device) -> Setup:
    setup = Setup(device=device)
    for lever in _list_applied():
        if setup.model is None and lever.stage != "environment":
            setup.model = model.to(device)
        lever.apply(setup, plan[lever.name])
    return setup


def build_samples(workload: Workload, config: Config) -> tuple[str, Any]:
    """Build the data set whose samples are answered, and name it: of validation, where there is one."""
    seed_everything(config.run.seed)
    name = "training set" if workload.validation is None else "validation set"
    return name, (workload.validation or workload.dataset)()


def build_model(workload: Workload, config: Config) -> nn.Module:
    """Build the model in evaluation mode, as training initialises it.

    Raises:
        UsageError: the workload's function returns something else.
    """
    seed_everything(config.run.seed)
    model = workload.model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is {type(model).__name__}; the function of the workload must return a Module")
    return model.eval()


def split_batch(batch: Any) -> Any:
    """Return inputs and targets of a batch.

    Raises:
        DataError: it is no pair.
    """
    if not isinstance(batch, SEQUENCES) or len(batch) != 2:
        raise DataError(f"a batch is {type(batch).__name__}, expected (inputs, targets); change the data set's collate")
    return batch


def load_weights(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Put the newest checkpoint of a training into ``model``, the running average where it kept one."""
    loaded = load_checkpoint(folder)
    assert loaded is not None, folder  # it existed when the check began
    kind = find_evaluated(loaded.state)
    load_model_state(model, read_weights(loaded.state, kind), loaded.path)
    evaluations = loaded.state["evaluations"]
    metrics: Mapping[str, float] = evaluations[-1]["metrics"] if evaluations else {}
    return {"checkpoint": str(loaded.path), "kind": kind, "step": loaded.state["progress"]["step"], "metrics": metrics}


def _read_endlessly(loader: DataLoader[Any], name: str, samples_per_request: int) -> Iterator[Any]:
    n_read = 0
    while True:
        for n_read, batch in enumerate(loader, start=1):  # noqa: B007
            yield batch
        if not n_read:
            raise DataError(
                f"the {name} holds fewer than {samples_per_request} samples, which is one request; "
                "lower targets.samples_per_request"
            )


def check_finite(outputs: Any) -> None:
    """Raise FulltiltError where an output is NaN or infinite."""
    for tensor in tree_leaves(outputs):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            n_bad = int((~torch.isfinite(tensor.detach().cpu())).sum())
            if n_bad:
                raise FulltiltError(
                    f"{n_bad} of {tensor.numel()} outputs of the model are NaN or infinite; "
                    "measuring it would say nothing; train it anew, or use another precision"
                )
