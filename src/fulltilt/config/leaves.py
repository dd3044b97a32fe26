"""List every configuration key that holds a value, with its type, default and description."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import annotated_types
from pydantic import BaseModel

from fulltilt.config.hints import admits
from fulltilt.config.model import Config


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """Describes one key that holds a value."""

    key: str
    hint: Any
    default: Any
    doc: str
    is_list: bool  # a list there is one value and not a grid axis


def _collect_leaves(model: type[BaseModel], prefix: str = "") -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            leaves |= _collect_leaves(field.annotation, f"{key}.")
        else:
            bounds = tuple(m for m in field.metadata if isinstance(m, annotated_types.BaseMetadata))
            leaves[key] = Leaf(
                key=key,
                hint=Annotated[(field.annotation, *bounds)] if bounds else field.annotation,
                default=field.get_default(call_default_factory=True, validated_data={}),
                doc=field.description or "",
                is_list=admits(field.annotation, list, tuple, Any),
            )
    return leaves


LEAVES: Mapping[str, Leaf] = _collect_leaves(Config)
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(key.rpartition(".")[0] for key in LEAVES if "." in key))
