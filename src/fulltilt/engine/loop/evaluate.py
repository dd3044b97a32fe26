"""Evaluation: the exact mean of loss and metrics over every sample of the validation set."""

import contextlib
import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from fulltilt.config import parse_on_bad_sample
from fulltilt.data.loading.loader import build_loader
from fulltilt.data.seeds import compute_seed
from fulltilt.engine.build.builder import build_transform
from fulltilt.engine.build.facts import count_dataset, refuse_loader
from fulltilt.engine.build.run import Run
from fulltilt.engine.loop.progress import LossMeter
from fulltilt.engine.step.train_step import TrainStep, fetch_batches
from fulltilt.errors import DataError, UsageError
from fulltilt.levers.compile import without_compiling
from fulltilt.measure.nested import count_samples, slice_samples
from fulltilt.tasks import Workload


def build_validation_loader(run: Run, *, batch_size: int | None = None) -> DataLoader | None:
    """Build the loader over the workload's validation set, in its own order; None when there is no such set.

    Its workers end after each pass: between two of them the cores and the memory belong to training.

    Raises:
        DataError: the validation set is empty, or numbers words or classes otherwise than the training set.
    """
    if run.workload.validation is None:
        return None
    dataset, name = run.workload.validation(), run.workload.name
    refuse_loader(dataset, f"validation set of {name}")
    if count_dataset(dataset) == 0:
        raise DataError(f"the validation set of {name} holds 0 samples; give it some, or leave it out")
    _check_numbers(run, dataset)
    options = {name: value for name, value in run.setup.loader_options.items() if name != "batch_size"}
    options |= {"persistent_workers": False} if options.get("num_workers") else {}
    return build_loader(
        dataset,
        batch_size=batch_size or run.batch_size,
        shuffle=False,
        drop_last=False,
        generator=torch.Generator().manual_seed(run.seed),
        options=options,
        worker_options=run.setup.worker_options,
        collate=run.workload.collate,
        seed=run.seed,
        share=run.world.share,
        skip_limit=parse_on_bad_sample(run.config.data.on_bad_sample),
    )


def _check_numbers(run: Run, dataset: Any) -> None:
    """Refuse words or classes with other numbers than in training: every figure would be of something else."""
    sets = run.dataset, dataset
    words = [getattr(getattr(each, "word_table", None), "words", None) for each in sets]
    classes = [getattr(each, "classes", None) for each in sets]
    if run.workload.prepare is not None or run.workload.compares_samples:
        classes = [None, None]  # the targets may be others, or only be compared with each other
    in_words = "leave it out, or prepare a folder of both: fulltilt data prepare-text FILE FOLDER --val FILE"
    in_classes = "give one folder with train/ and val/, or the same classes in both"
    for what, (train, val), remedy in ("words", words, in_words), ("classes", classes, in_classes):
        if not isinstance(train, list | tuple) or not isinstance(val, list | tuple) or list(train) == list(val):
            continue
        pairs = enumerate(itertools.zip_longest(train, val))
        number, mine, other = next((number, a, b) for number, (a, b) in pairs if a != b)
        raise DataError(
            f"the validation set of {run.workload.name} numbers its {what} otherwise than the training set: number "
            f"{number} is {mine!r} in training and {other!r} in validation; {remedy}"
        )


def evaluate(
    run: Run,
    loader: DataLoader | None,
    *,
    should_stop: Callable[[], object] = lambda: False,
    n_batches: int | None = None,
) -> dict[str, float] | None:
    """Compute mean loss and metrics per sample over ``loader``; a short last batch counts by its samples.

    What the workload derives from those means, and what it assesses by itself, joins them. Several ranks divide the
    samples and get the same figures, of rank 0's model with its buffers; the workload assesses on rank 0.

    Runs the model itself in evaluation mode, not its compiled form, which would be compiled once more for this mode and
    for the last batch. Precision is that of training; the weights are their running average where ``optim.ema`` keeps
    one. ``workload.prepare`` draws from a generator of its own, seeded anew each time: evaluations are comparable, and
    training goes on as if there had been none.

    Args:
        loader: None: the workload has no validation set, and only assesses.
        should_stop: Asked before each batch; true ends the evaluation, which then returns None.
        n_batches: Evaluate so many, and as few samples as the last one has, and assess nothing: to try it out.

    Raises:
        DataError: no batch came.
        UsageError: what the workload derives or assesses is no mapping of names to numbers.

    Device: synchronises once, at the end.
    """
    run.doing = "evaluation"
    average = contextlib.nullcontext() if run.average is None else run.average.in_force()
    with average, _evaluation_mode(run.setup.model), without_compiling(run.setup), torch.no_grad():
        run.world.copy_buffers(run.setup.model)
        means = {} if loader is None else _compute_means(run, loader, should_stop, n_batches)
        try:
            means = means and add_derived(run.workload, means)
        except ArithmeticError:
            if n_batches is None:  # a few batches may lack what a figure divides by
                raise
        if means is not None and n_batches is None and run.workload.assess is not None:
            run.doing, found = "assessment", None
            if run.config.data.val_batch_size and hasattr(run.workload.assess, "batch_size"):
                run.workload.assess.batch_size = min(run.workload.assess.batch_size, run.config.data.val_batch_size)
            if run.world.is_first:  # the others wait for it; a divided model is refused when it is built
                with run.world.work_alone():
                    said = run.workload.assess(run.setup.model, run.device)
                    found = _read_figures(f"assess of {run.workload.name}", said, means)
            means |= run.world.hand_out(found)
    run.doing = "elsewhere"
    return means


def add_derived(workload: Workload, means: dict[str, float]) -> dict[str, float]:
    """Add what the workload derives from means per sample.

    Raises:
        UsageError: it is no mapping of names to numbers.
    """
    if workload.derive is None:
        return means
    return means | _read_figures(f"derive of {workload.name}", workload.derive(dict(means)), means)


def _read_figures(source: str, said: Any, means: Mapping[str, float]) -> dict[str, float]:
    """Read what the user's code computed besides ``means``; raise UsageError where a name is one of theirs."""
    try:
        figures = {str(name): float(value) for name, value in said.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(
            f"{source} returned {textwrap.shorten(repr(said), 80)}; it must return a mapping of names to numbers, "
            'such as {"f1": 0.8}'
        ) from None
    if taken := sorted(figures.keys() & means.keys()):
        raise UsageError(f"{source} returned {', '.join(taken)}, which is there already; give that figure another name")
    return figures


def _compute_means(
    run: Run, loader: DataLoader, should_stop: Callable[[], object], n_batches: int | None
) -> dict[str, float] | None:
    world = run.world
    generator = torch.Generator(run.device).manual_seed(compute_seed(run.seed, world.rank) if world.rank else run.seed)
    meter = LossMeter(run.device, run.workload.metrics, world)
    own = dataclasses.replace(run, generator=generator, transform=build_transform(loader, run.setup))
    step = TrainStep(own, observe=meter.observe, forward=run.setup.model)
    batches: Any = run.deal(loader)
    for batch in itertools.islice(fetch_batches(batches), n_batches):
        if should_stop():
            return None
        n = n_local = count_samples(batch)
        if world.is_divided:
            n, n_local = batches.n_global, batches.n_local
        loss = step.compute_loss(batch, is_counted=n_local > 0)
        meter.add(loss if n_local == n else loss * (n_local / n), n)
        if world.link is not None:
            world.link.lap("evaluation")
        if n_batches is not None and loader.batch_size and not world.is_divided:
            n_last = (count_dataset(loader.dataset) or 0) % loader.batch_size
            if n_last:
                step.compute_loss(slice_samples(batch, n, slice(n_last)), is_counted=False)
    if (n_samples := meter.n_samples) == 0:
        raise DataError(f"the validation set of {run.workload.name} yielded no sample; give it some, or leave it out")
    return {name: total / n_samples for name, total in meter.take().read_sums().items()}


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode for the block; a layer that was in it before stays so."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
