"""Finds untrained models of torchvision and timm, and imports torchvision even without its compiled operators."""

import difflib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fulltilt.errors import ConfigError

OPERATORS = ("torchvision::nms", "torchvision::qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
"""What torchvision's Python half expects its compiled half to have declared."""

_MISSING_OPERATOR = re.compile(r"operator (torchvision::\w+) does not exist")
_WEIGHT_ARGUMENTS = ("weights", "weights_backbone", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")


def find_torchvision_model(name: str) -> Callable[..., nn.Module]:
    """Return the builder behind ``torchvision:name(…)``; its model has random weights.

    ``n_classes`` is the library's ``num_classes``; its models take three channels.

    Raises:
        ConfigError: not installed, no such model; from the builder: an unknown argument, pretrained weights asked
            for, data that has not three channels.
    """
    models = import_torchvision().models
    names = models.list_models(module=models)
    if name not in names:
        raise ConfigError(f"torchvision has no model {name!r}; {_find_near(name, names)}")
    builder, title = models.get_model_builder(name), f"torchvision:{name}"

    def build(*, n_classes: int | None = None, in_channels: int = 3, **arguments: Any) -> nn.Module:
        if in_channels != 3:
            raise ConfigError(
                f"{title} takes 3 channels, the data has {in_channels}; take a timm: model or one of the own zoo"
            )
        return _call(title, builder, {"num_classes": n_classes} | _refuse_weights(title, arguments))

    return build


def find_timm_model(name: str) -> Callable[..., nn.Module]:
    """Return the builder behind ``timm:name(…)``; its model has random weights.

    ``n_classes`` and ``in_channels`` are the library's ``num_classes`` and ``in_chans``.

    Raises:
        ConfigError: not installed, no such model; from the builder: an unknown argument, pretrained weights.
    """
    import_torchvision()  # timm imports it
    timm, title = _import("timm"), f"timm:{name}"
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model {name!r}; {_find_near(name, timm.list_models())}")

    def build(*, n_classes: int | None = None, in_channels: int | None = None, **arguments: Any) -> nn.Module:
        given = {"num_classes": n_classes, "in_chans": in_channels} | _refuse_weights(title, arguments)
        return _call(title, functools.partial(timm.create_model, name, pretrained=False), given)

    return build


def import_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled operators cannot be loaded.

    The wheel for CUDA beside a CPU-only PyTorch cannot load its library; its Python half then fails on the first
    operator that the library would have declared. The schemas are declared here once the import asks for them: models
    train, and only calling such an operator fails.

    Raises:
        ConfigError: not installed, or it fails for another reason.
    """
    before = set(sys.modules)
    for _ in range(len(OPERATORS) + 1):
        try:
            return _import("torchvision")
        except RuntimeError as error:
            missing = _MISSING_OPERATOR.search(str(error))
            if not missing or missing[1] not in OPERATORS:
                raise ConfigError(
                    f"torchvision fails to import ({error}); install the version made for torch {torch.__version__}"
                ) from error
            torch.library.define(missing[1], SCHEMA)
            for module in [m for m in sys.modules if m.split(".")[0] == "torchvision" and m not in before]:
                del sys.modules[module]
    raise AssertionError("every schema was declared and the import still asks for one")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(f'{name} is not installed; pip install "fulltilt[vision]"') from error


def _refuse_weights(title: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` without the switches of pretrained weights, and refuse one that is on."""
    for name in _WEIGHT_ARGUMENTS:
        if arguments.get(name) not in (None, False):
            raise ConfigError(
                f"{title}: {name}={arguments[name]} would download weights, which fulltilt never does; load them in "
                "a function of your own and name it: model: my_module:build"
            )
    return {name: value for name, value in arguments.items() if name not in _WEIGHT_ARGUMENTS}


def _call(title: str, build: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    try:
        return build(**{name: value for name, value in arguments.items() if value is not None})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{title} cannot be built: {error}; correct its arguments") from error


def _find_near(name: str, names: list[str]) -> str:
    """Name the nearest only: these libraries have hundreds."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"it has {len(names)}, for instance resnet18"
