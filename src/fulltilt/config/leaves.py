"""Every key that holds a value, as a flat list. Reading, references, grids, rewriting and the docs go by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fulltilt.config.hints import admits
from fulltilt.config.model import Config


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One key that holds a value."""

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
            leaves[key] = Leaf(
                key=key,
                hint=_hint_of(field),
                default=field.get_default(call_default_factory=True, validated_data={}),
                doc=field.description or "",
                is_list=admits(field.annotation, list, tuple, Any),
            )
    return leaves


def _hint_of(field: FieldInfo) -> Any:
    bounds = tuple(m for m in field.metadata if isinstance(m, annotated_types.BaseMetadata))
    return Annotated[(field.annotation, *bounds)] if bounds else field.annotation


LEAVES: Mapping[str, Leaf] = _collect_leaves(Config)
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(key.rpartition(".")[0] for key in LEAVES if "." in key))
