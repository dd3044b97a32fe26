"""Builds a Workload from a configuration: finds model, data, loss, optimizer and task by name and joins them."""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from fulltilt.config import ComponentCall, Config, build_component, check_component, parse_call, parse_pipeline
from fulltilt.config.binding import find_target
from fulltilt.config.reading import raise_problems
from fulltilt.data import DATASETS, TRANSFORMS, build_pipeline
from fulltilt.data.paths import resolve_path
from fulltilt.data.transforms.mixing import MIXES
from fulltilt.engine.build.optimizers import OPTIMIZERS
from fulltilt.engine.build.views import plan_view_data
from fulltilt.engine.step.schedule import check_schedule
from fulltilt.errors import ConfigError
from fulltilt.tasks import LOSSES, TASKS, Workload, build_model, check_model, read_data_facts

_PLACE = re.compile(
    r"(?!default$)(?:alias \S+ \()?(?P<file>.+?)(?::(?P<line>\d+))?\)?"
)  # as ``Config.provenance`` has it


def build_workload(config: Config) -> Workload:
    """Build what ``config`` names. Model and data themselves are built when the Workload's functions are called.

    Every component is looked up first and its arguments are checked, so that one error names all mistakes.

    ``task: module:object`` is a Workload in the user's code, or a function that returns one (its parameters ``path``
    and ``lr`` receive ``data.path`` and ``optim.lr``); the configuration then adds the optimizer when the Workload has
    none. A task by name needs ``model`` and ``data.dataset``.

    Raises:
        ConfigError: an unknown name or argument, something missing, or an object of the wrong kind; names the key.
    """
    return _import_workload(config) if ":" in parse_call(config.task).name else _build_named(config)


@contextlib.contextmanager
def _say_where(config: Config, key: str, problems: list[ConfigError] | None = None) -> Iterator[None]:
    """Add file, line and key to the ConfigError of the block.

    Args:
        key: Where the error names none.
        problems: Takes the error, instead of it being raised.
    """
    try:
        yield
    except ConfigError as error:
        key, file, line = error.key or key, error.file, error.line
        found = _PLACE.fullmatch(config.provenance.get(key, ""))
        if file is None and found is not None:
            file, line = found["file"], found["line"] and int(found["line"])
        located = ConfigError(error.message, file=file, line=line, key=key)
        if problems is None:
            raise located from error
        problems.append(located)


def find_problems(config: Config) -> list[ConfigError]:
    """List all components of a configuration that cannot be built; a task of the user's own is not called."""
    problems: list[ConfigError] = []
    (_check_imported if ":" in parse_call(config.task).name else _plan_named)(config, problems)
    return problems


def _plan_named(config: Config, problems: list[ConfigError]) -> tuple[Any, Any, Any]:
    """Plan the loss, the datasets and the optimizer; what is wrong with any component joins ``problems``."""
    with _say_where(config, "task", problems):
        parts = ("model", "train", "validation", "views", "labelled", "loss", "optimizer", "name")
        check_component(config.task, TASKS, kind="task", where="task", given=parts)
    with _say_where(config, "model", problems):
        if config.model is None:
            raise ConfigError("a model is needed; write model: small_cnn, torchvision:resnet50 or module:function")
        check_model(config.model, base_dir=config.base_dir)
    loss = None
    with _say_where(config, "loss", problems):
        loss = _build_loss(config) if config.loss is not None else None
    _check_datasets(config, problems)
    datasets = None
    with _say_where(config, "data.dataset", problems):
        datasets = _plan_datasets(config)
    _check_transforms(config, problems)
    optimizer = None
    with _say_where(config, "optim.optimizer", problems):
        optimizer = _plan_optimizer(config)
    _check_schedule(config, problems)
    return loss, datasets, optimizer


def _build_named(config: Config) -> Workload:
    name = parse_call(config.task).name
    problems: list[ConfigError] = []
    loss, datasets, optimizer = _plan_named(config, problems)
    raise_problems(problems)
    train, validation = datasets
    data: dict[str, Any] = {"train": train, "validation": validation}
    if "views" in _read_parameters(TASKS[name]):
        data = plan_view_data(train, validation, has_transform=config.data.transform.train is not None)
    model = functools.partial(_build_model, config, train)
    given = data | {"model": model, "loss": loss, "optimizer": optimizer, "name": config.run_name}
    with _say_where(config, "task"):
        workload: Workload = build_component(config.task, TASKS, kind="task", where="task", **given)
    assert config.data.dataset is not None
    collate = getattr(DATASETS.get(parse_call(config.data.dataset).name), "collate", None)
    return workload if collate is None else dataclasses.replace(workload, collate=workload.collate or collate)


def _check_imported(config: Config, problems: list[ConfigError]) -> None:
    """Check the call of a task of the user's own, and the components beside it."""
    call, place = parse_call(config.task), _place(config, "task", "task")
    with _say_where(config, "task", problems):
        bound = check_component(config.task, {}, **place, given=("path", "lr"))
        path = _read_parameters(find_target(call.name, {}, **place)).get("path")
        if config.data.path is not None and (path is None or "path" in bound):
            why = f"{call.name} takes no path; make it a function that does, def workload(path): return Workload(…)"
            why = f"{config.task} names its own; leave one out" if "path" in bound else why
            raise ConfigError(f"{config.data.path!r} would not be read: {why}", key="data.path")
        needs_path = path is not None and path.default is path.empty and "path" not in bound
        if config.data.path is None and needs_path:
            raise ConfigError(f"{call.name} takes a path, and none is given; name it with --data-path", key="data.path")
    with _say_where(config, "optim.optimizer", problems):
        _plan_optimizer(config)
    _check_schedule(config, problems)


def _import_workload(config: Config) -> Workload:
    place = _place(config, "task", "task")
    problems: list[ConfigError] = []
    _check_imported(config, problems)
    raise_problems(problems)
    with _say_where(config, "task"):
        given = {"lr": config.optim.lr} | ({} if config.data.path is None else {"path": config.data.path})
        found = build_component(config.task, {}, **place, **given)
        if not isinstance(found, Workload):
            raise ConfigError(
                f"{config.task} is of type {type(found).__name__}, expected a fulltilt.Workload or what returns one; "
                "write workload = fulltilt.Workload(model=…, dataset=…, loss=…)"
            )
    with _say_where(config, "optim.optimizer"):
        return found if found.optimizer else dataclasses.replace(found, optimizer=_plan_optimizer(config))


def _check_datasets(config: Config, problems: list[ConfigError]) -> None:
    data = config.data
    known = {"split": True, "path": data.path, "transform": data.transform.train or data.transform.val}
    given = [name for name, value in known.items() if value is not None]
    named, unread = (("data.dataset", data.dataset), ("data.val_dataset", data.val_dataset)), []
    texts = {key: text for key, text in named if text is not None}
    for key, text in texts.items():
        with _say_where(config, key, problems):
            bound = check_component(text, _find_datasets(config), **_place(config, "dataset", key), given=given)
            if "path" in bound or "path" not in _read_parameters(_find_dataset(config, text, key)):
                unread.append(f"{text} {'names its own' if 'path' in bound else 'takes no path'}")
    if data.path is not None and unread and len(unread) == len(texts):
        with _say_where(config, "data.path", problems):
            raise ConfigError(f"{data.path!r} would not be read: {' and '.join(unread)}; leave it out")


def _check_transforms(config: Config, problems: list[ConfigError]) -> None:
    """Check the calls of every pipeline; one that stands at both splits is told once."""
    train, val = config.data.transform.train, config.data.transform.val
    pipelines: list[tuple[str, str | None, str, Mapping[str, Callable[..., Any]]]] = [
        ("data.transform.train", train, "transform", TRANSFORMS),
        ("data.transform.val", None if val == train else val, "transform", TRANSFORMS),
        ("data.mix", config.data.mix, "mix", MIXES),
    ]
    for key, text, kind, registry in pipelines:
        with _say_where(config, key, problems):
            for call in parse_pipeline(text) if text and text.strip() else ():
                check_component(call, registry, **_place(config, kind, key), given=("mean", "std"))


def _check_schedule(config: Config, problems: list[ConfigError]) -> None:
    with _say_where(config, "optim.schedule", problems):
        check_schedule(config.optim.schedule, base_dir=config.base_dir)


def _build_model(config: Config, train: Callable[[], Dataset]) -> Any:
    assert config.model is not None
    with _say_where(config, "model"):
        return build_model(config.model, where="model", base_dir=config.base_dir, **read_data_facts(train()))


def _plan_datasets(config: Config) -> tuple[Callable[[], Dataset], Callable[[], Dataset] | None]:
    """Return functions that build the training and validation set, each once: a dataset holds no state of a run."""
    text = config.data.dataset
    if text is None:
        raise ConfigError(f"a dataset is needed; write one of {', '.join(DATASETS)}", key="data.dataset")

    def plan(text: str, split: str, where: str) -> Callable[[], Dataset]:
        return functools.cache(functools.partial(_build_dataset, config, text, split, where))

    train, call = plan(text, "train", "data.dataset"), parse_call(text)
    if config.data.val_dataset is not None:
        return train, plan(config.data.val_dataset, "val", "data.val_dataset")
    if "split" not in _read_parameters(_find_dataset(config, text, "data.dataset")):
        return train, None
    if call.kwargs.get("val_fraction") == 0 and _is_split_by_share(config, call):
        return train, None
    return train, plan(text, "val", "data.dataset")


def _build_dataset(config: Config, text: str, split: str, where: str) -> Dataset:
    name = parse_call(text).name
    transform: Any = config.data.transform.train if split == "train" else config.data.transform.val
    given: dict[str, Any] = {"split": split}
    if config.data.path is not None:
        given["path"] = config.data.path
    if where == "data.val_dataset" and _is_own_file(config):
        given["val_fraction"] = 1.0
    with _say_where(config, where):
        if transform is not None:
            if "transform" not in _read_parameters(_find_dataset(config, text, where)):
                raise ConfigError(
                    f"{name} takes no transform; remove it, or transform inside the dataset",
                    key=f"data.transform.{split}",
                )
            given["transform"] = transform if name in DATASETS else build_pipeline(transform)
        dataset = build_component(text, _find_datasets(config), **_place(config, "dataset", where), **given)
        if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
            raise ConfigError(f"{name} returned {type(dataset).__name__}, expected a Dataset", key=where)
        return dataset


def describe_files(config: Config) -> str:
    """Say where a share of the training file is neither trained on nor evaluated; empty where none is."""
    text = config.data.dataset
    if text is None or not _is_own_file(config):
        return ""
    call = parse_call(text)
    if call.kwargs.keys() & {"split", "val_fraction"} or not _is_split_by_share(config, call):
        return ""
    return f"data.val_dataset is another file, and {text} leaves a share of its own out: add val_fraction=0"


def _is_own_file(config: Config) -> bool:
    """Tell whether ``val_dataset`` names another file than ``dataset``, and no part of it: all is for validation."""
    if config.data.dataset is None or config.data.val_dataset is None:
        return False
    train, val = parse_call(config.data.dataset), parse_call(config.data.val_dataset)
    if val.kwargs.keys() & {"split", "val_fraction"} or "val_fraction" not in _read_parameters(DATASETS.get(val.name)):
        return False
    files = [_find_file(config, call) for call in (train, val)]
    return None not in files and files[0] != files[1]


def _is_split_by_share(config: Config, call: ComponentCall) -> bool:
    """Tell whether ``val_fraction`` decides what is trained on: not where a folder of images has train/ and val/."""
    file = _find_file(config, call)
    has_share = "val_fraction" in _read_parameters(DATASETS.get(call.name))
    return has_share and file is not None and not (file / "train").is_dir()


def _find_file(config: Config, call: ComponentCall) -> Path | None:
    """Find what a dataset of ``DATASETS`` reads; None where its call does not name it."""
    path = call.kwargs.get("path") or config.data.path or call.kwargs.get("root")
    if path is None or call.args or call.name not in DATASETS:
        return None
    return resolve_path(path, config.base_dir).resolve()


def _find_datasets(config: Config) -> dict[str, Callable[..., Dataset]]:
    found = dict(DATASETS)
    for name, builder in DATASETS.items():
        if "base_dir" in _read_parameters(builder):
            found[name] = functools.partial(builder, base_dir=config.base_dir)
    return found


def _find_dataset(config: Config, text: str, where: str) -> Any:
    return find_target(parse_call(text).name, _find_datasets(config), **_place(config, "dataset", where))


def _place(config: Config, kind: str, where: str) -> dict[str, Any]:
    """Return what finding a component needs beside its name: for messages, and where the user's modules lie."""
    return {"kind": kind, "where": where, "base_dir": config.base_dir}


def _build_loss(config: Config) -> Callable[[Any, Any], Any]:
    """Build the loss by name; a user's function of (outputs, targets) is the loss itself."""
    assert config.loss is not None
    call = parse_call(config.loss)
    place = _place(config, "loss", "loss")
    if ":" in call.name and not call.args and not call.kwargs:
        target = find_target(call.name, LOSSES, **place)
        needed = [p for p in _read_parameters(target).values() if p.default is p.empty]
        if inspect.isfunction(target) and len(needed) >= 2:
            return target
    loss = build_component(config.loss, LOSSES, **place)
    if not callable(loss):
        raise ConfigError(
            f"{config.loss} returned {type(loss).__name__}, expected (outputs, targets) -> scalar", key="loss"
        )
    return loss


def _plan_optimizer(config: Config) -> Callable[[Any], Optimizer]:
    """Return a function (parameters) -> Optimizer; a wrong name or argument is an error already here."""
    plan = functools.partial(_build_optimizer, config)
    if parse_call(config.optim.optimizer).name in OPTIMIZERS:
        plan([nn.Parameter(torch.empty(1, 1))])  # torch refuses a value only when it builds one
    else:
        given, place = ("parameters", "params", "lr", "weight_decay"), _place(config, "optimizer", "optim.optimizer")
        check_component(config.optim.optimizer, OPTIMIZERS, **place, given=given)
    return plan


def _build_optimizer(config: Config, parameters: Any) -> Optimizer:
    given = {"parameters": parameters, "params": parameters, "lr": config.optim.lr}
    if config.optim.weight_decay is not None:
        given["weight_decay"] = config.optim.weight_decay
    with _say_where(config, "optim.optimizer"):
        try:
            place = _place(config, "optimizer", "optim.optimizer")
            return build_component(config.optim.optimizer, OPTIMIZERS, **place, **given)
        except ValueError as error:  # torch's own refusal of a value; of the user's code the place is needed
            if parse_call(config.optim.optimizer).name not in OPTIMIZERS:
                raise
            raise ConfigError(f"{config.optim.optimizer}: {error}", key="optim.optimizer") from None


def name_origins(config: Config, workload: Workload) -> dict[str, str]:
    """Name where batch size, optimizer and learning rate came from: a place, the workload's code, or nobody said."""

    def name(key: str) -> str:
        place = config.provenance.get(key, "default")
        return "fulltilt's default" if place == "default" else place

    own = workload.optimizer is not None and getattr(workload.optimizer, "func", None) is not _build_optimizer
    optimizer, rate = name("optim.optimizer"), name("optim.lr")
    if own:
        optimizer = rate = "the workload's own code"
    elif workload.optimizer is None:
        optimizer = rate = "PyTorch's default"
    elif "lr" in parse_call(config.optim.optimizer).kwargs:
        rate = optimizer
    return {"batch_size": name("data.batch_size"), "optimizer": optimizer, "learning_rate": rate}


def _read_parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
