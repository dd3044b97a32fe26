"""Every spelling that a configuration accepts, and the key it stands for.

Three kinds: a key's own bare name (``batch_size`` for ``data.batch_size``), other names (``learning_rate``; those of
levers come from the catalogue), and foreign sections (``training:``, ``gpu:``) that may hold either.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from fulltilt.config.leaves import LEAVES, SECTIONS
from fulltilt.errors import format_nearest
from fulltilt.levers import load_catalogue

FOREIGN_SECTIONS: tuple[str, ...] = ("training", "gpu")
"""Sections of other projects' files; they may hold any key under its bare name."""

NOT_BARE: frozenset[str] = frozenset({"benchmark", "targets", "data.transform"})
"""Sections whose keys need their section: their bare names would be ambiguous or say too little."""

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("optim.lr",),
    "scheduler": ("optim.schedule",),
    "lr_scheduler": ("optim.schedule",),
    "warmup_steps": ("optim.warmup",),
    "grad_clip": ("optim.clip_norm",),
    "max_grad_norm": ("optim.clip_norm",),
    "criterion": ("loss",),
    "num_epochs": ("run.epochs",),
    "data_path": ("data.path",),
    "transform": ("data.transform.train", "data.transform.val"),
}
"""Alias → the keys it sets. A transform given as one text is that of both splits."""

ARGUMENTS: Mapping[str, str] = {
    "seq_len": "dataset: text(seq_len=…)",
    "vocab_size": "dataset: text(vocab_size=…)",
    "depth": "model: bilm(depth=…)",
    "num_layers": "model: bilm(depth=…)",
    "embedding_dim": "model: bilm(embedding=…)",
    "hidden_dim": "model: bilm(hidden=…)",
    "hidden_size": "model: bilm(hidden=…)",
    "projection_dim": "model: bilm(projection=…)",
    "dropout": "model: bilm(dropout=…)",
}
"""Keys of other projects' files that are arguments of a component here, with how to write them."""

CALL_SECTION = "dataloader"
"""``dataloader: {train: basic(shuffle=true, prefetch_factor=2)}``: the arguments are keys of ``data``."""


def _keep(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """What one dotted spelling means."""

    keys: tuple[str, ...]
    is_alias: bool
    convert: Callable[[Any], Any] = _keep


@functools.cache
def list_bare_names() -> Mapping[str, Spelling]:
    """Names accepted at the top of a file and in foreign sections."""
    names: dict[str, Spelling] = {}
    for key in LEAVES:
        section, _, name = key.rpartition(".")
        if section and section not in NOT_BARE:
            names[name] = Spelling(keys=(key,), is_alias=True)
    for name, keys in OTHER_NAMES.items():
        names[name] = Spelling(keys=keys, is_alias=True)
    for lever in load_catalogue().values():
        for alias in lever.aliases:
            convert = functools.partial(lever.parse_alias, alias) if lever.parse_alias else _keep
            names[alias] = Spelling(keys=(lever.key,), is_alias=True, convert=convert)
    return names


def resolve_spelling(spelled: str) -> Spelling | None:
    """The meaning of a dotted spelling that holds a value, None when it is unknown."""
    if spelled in LEAVES:
        return Spelling(keys=(spelled,), is_alias=False)
    bare = list_bare_names()
    if spelled in bare:
        return bare[spelled]
    section, _, name = spelled.partition(".")
    if section == "transform":
        key = f"data.{spelled}"
        return Spelling(keys=(key,), is_alias=True) if key in LEAVES else None
    found = bare.get(name)
    if section in FOREIGN_SECTIONS:
        return found or (Spelling(keys=(name,), is_alias=True) if name in LEAVES and "." not in name else None)
    if section in SECTIONS and found and all(key.startswith(f"{section}.") for key in found.keys):
        return found
    return None


def resolve_section(spelled: str) -> str | None:
    """The canonical section, or the foreign one, that a mapping at ``spelled`` is; None when it is none."""
    if spelled in SECTIONS or spelled in FOREIGN_SECTIONS:
        return spelled
    if spelled in ("transform", "training.transform"):
        return "transform"
    return None


def suggest_names(spelled: str) -> str:
    """``did you mean …? valid: …`` for a spelling that is not known, or where it belongs."""
    section, _, name = spelled.rpartition(".")
    if name in ARGUMENTS:
        return f"it is an argument of a component, for instance {ARGUMENTS[name]}"
    section = "data.transform" if section == "transform" else section
    if section in SECTIONS:
        valid = [key.removeprefix(f"{section}.") for key in LEAVES if key.startswith(f"{section}.")]
    elif section in FOREIGN_SECTIONS:
        valid = [bare for bare, spelling in list_bare_names().items() if spelling.keys[0].endswith(f".{bare}")]
    else:
        valid = [key for key in LEAVES if "." not in key] + [s for s in SECTIONS if "." not in s]
    elsewhere = _find_elsewhere(name, section)
    if elsewhere:
        return f"did you mean {elsewhere}? valid{f' in {section}' if section else ''}: {', '.join(sorted(valid))}"
    return format_nearest(name, valid)


def _find_elsewhere(name: str, section: str) -> str | None:
    """The key whose bare name or alias is ``name`` or close to it."""
    bare = list_bare_names()
    near = difflib.get_close_matches(name, [*bare, *SECTIONS, *(k for k in LEAVES if "." not in k)], n=1, cutoff=0.7)
    if not near:
        return None
    if section in FOREIGN_SECTIONS:
        return near[0]
    keys = bare[near[0]].keys if near[0] in bare else (near[0],)
    prefix = f"{section}."
    return " and ".join(key.removeprefix(prefix) if section else key for key in keys)
