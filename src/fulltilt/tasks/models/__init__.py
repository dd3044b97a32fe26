"""The zoo: models by name, and the door to models of torchvision, timm and the user's own modules."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from fulltilt.config import ComponentCall, build_component, check_component, parse_call
from fulltilt.errors import ConfigError
from fulltilt.tasks.facts import FACTS
from fulltilt.tasks.models.bilm import BiLM
from fulltilt.tasks.models.convolutional import MLP, SmallCNN
from fulltilt.tasks.models.gpt import GPT
from fulltilt.tasks.models.resnet import resnet18, resnet34, resnet50, resnet101, resnet152
from fulltilt.tasks.models.sensor_transformer import SensorTransformer
from fulltilt.tasks.models.text_encoder import TextClassifier, TextEncoder
from fulltilt.tasks.models.whitened_cnn import WhitenedCNN
from fulltilt.tasks.models.wideresnet import WideResNet
from fulltilt.tasks.vision import find_timm_model, find_torchvision_model

__all__ = ["MODELS", "build_model", "check_model"]

MODELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "small_cnn": SmallCNN,
        "mlp": MLP,
        "wideresnet": WideResNet,
        **{builder.__name__: builder for builder in (resnet18, resnet34, resnet50, resnet101, resnet152)},
        "whitened_cnn": WhitenedCNN,
        "sensor_transformer": SensorTransformer,
        "bilm": BiLM,
        "gpt": GPT,
        "text_classifier": TextClassifier,
        "text_encoder": TextEncoder,
        "torchvision:": find_torchvision_model,
        "timm:": find_timm_model,
    }
)
"""Name → builder. A key that ends with a colon is a resolver: called with the rest of the name, it returns one."""


def build_model(
    call: str | ComponentCall, *, where: str = "model", base_dir: str | None = None, **facts: Any
) -> nn.Module:
    """Build a model from its component call; its weights are random, nothing is ever downloaded.

    Args:
        call: ``wideresnet(depth=28, width=2)``, ``resnet50(num_classes=10)``, ``torchvision:resnet50``,
            ``timm:convnext_tiny(drop_rate=0.1)`` or ``my_module:build(width=64)``.
        where: The configuration key that messages name.
        base_dir: Folder that ``my_module`` is looked up in first.
        facts: What is known of the data (``read_data_facts``); each reaches a model that has a parameter of that
            name which the call leaves open. Libraries get ``n_classes`` and ``in_channels`` in their own spelling.

    Raises:
        ConfigError: no such model or argument, a library that is not installed, pretrained weights asked for, or
            something that is not a module; of an own model or one of torch, a value that it refuses itself.
    """
    call = _translate(parse_call(call) if isinstance(call, str) else call)
    try:
        model = build_component(call, MODELS, kind="model", where=where, base_dir=base_dir, **facts)
    except (TypeError, ValueError, AssertionError) as error:
        if ":" in call.name and not call.name.startswith(("torch.", "torch:")):  # the user's own code keeps its trace
            raise
        raise ConfigError(f"{call}: {error}; correct its arguments", key=where) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{call} returned {type(model).__name__}, expected an nn.Module", key=where)
    return model


def check_model(text: str, *, where: str = "model", base_dir: str | None = None) -> None:
    """Raise the ConfigError of ``build_model`` as far as neither the data nor the model's own code is needed for it."""
    check_component(_translate(parse_call(text)), MODELS, kind="model", where=where, base_dir=base_dir, given=FACTS)


def _translate(call: ComponentCall) -> ComponentCall:
    """Rename ``num_classes``, as libraries and guides write it, to ``n_classes`` for the own models."""
    if call.name not in MODELS or "num_classes" not in call.kwargs or "n_classes" in call.kwargs:
        return call
    renamed = {"n_classes" if name == "num_classes" else name: value for name, value in call.kwargs.items()}
    return dataclasses.replace(call, kwargs=renamed)
