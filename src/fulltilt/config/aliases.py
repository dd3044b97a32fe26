"""List every spelling that a configuration accepts, and the key it stands for.

Three kinds: a key's own bare name (``batch_size`` for ``data.batch_size``), other names (``learning_rate``; those of
levers come from the catalogue), and foreign sections (``training:``, ``gpu:``) that may hold either.
"""

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

NOT_BARE: frozenset[str] = frozenset({"benchmark", "targets", "inference", "data.transform"})
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """Says which keys one dotted spelling sets, and how its values become theirs."""

    keys: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: value


@functools.cache
def list_bare_names() -> Mapping[str, Spelling]:
    """Return the names accepted at the top of a file and in foreign sections."""
    sections = {key: key.rpartition(".")[0] for key in LEAVES}
    own = [key for key, section in sections.items() if section and section not in NOT_BARE]
    names = {key.rpartition(".")[2]: Spelling(keys=(key,)) for key in own}
    names |= {name: Spelling(keys=keys) for name, keys in OTHER_NAMES.items()}
    for lever in load_catalogue().values():
        for alias in lever.aliases:
            names[alias] = Spelling(keys=(lever.key,))
            if lever.parse_alias:
                names[alias] = Spelling(keys=(lever.key,), convert=functools.partial(lever.parse_alias, alias))
    return names


def resolve_spelling(spelled: str) -> Spelling | None:
    """Return the meaning of a dotted spelling that holds a value, None when it is unknown."""
    section, _, name = spelled.partition(".")
    key = f"data.{spelled}" if section == "transform" else spelled
    if key in LEAVES:
        return Spelling(keys=(key,))
    bare = list_bare_names()
    if spelled in bare:
        return bare[spelled]
    found = bare.get(name)
    if section in FOREIGN_SECTIONS:
        return found or (Spelling(keys=(name,)) if name in LEAVES and "." not in name else None)
    is_own = found and section in SECTIONS and all(key.startswith(f"{section}.") for key in found.keys)
    return found if is_own else None


def resolve_section(spelled: str) -> str | None:
    """Return the canonical or foreign section that a mapping at ``spelled`` is; None when it is none."""
    if spelled in ("transform", "training.transform"):
        return "transform"
    return spelled if spelled in SECTIONS or spelled in FOREIGN_SECTIONS else None


def suggest_names(spelled: str) -> str:
    """Return ``did you mean …? valid: …`` for a spelling that is not known, or where it belongs."""
    section, _, name = spelled.rpartition(".")
    if name in ARGUMENTS:
        return f"it is an argument of a component, for instance {ARGUMENTS[name]}"
    section = "data.transform" if section == "transform" else section
    if section in SECTIONS:
        valid = [key.removeprefix(f"{section}.") for key in LEAVES if key.startswith(f"{section}.")]
    elif section in FOREIGN_SECTIONS:
        valid = [bare for bare, spelling in list_bare_names().items() if spelling.keys[0].endswith(f".{bare}")]
    else:
        section, valid = "", [key for key in LEAVES if "." not in key] + [s for s in SECTIONS if "." not in s]
    elsewhere = _find_elsewhere(name, section)
    if elsewhere:
        return f"did you mean {elsewhere}? valid{f' in {section}' if section else ''}: {', '.join(sorted(valid))}"
    return format_nearest(name, valid)


def _find_elsewhere(name: str, section: str) -> str | None:
    """Return the key whose bare name or alias is ``name`` or close to it."""
    bare = list_bare_names()
    near = difflib.get_close_matches(name, [*bare, *SECTIONS, *(k for k in LEAVES if "." not in k)], n=1, cutoff=0.7)
    if not near or section in FOREIGN_SECTIONS:
        return near[0] if near else None
    keys = bare[near[0]].keys if near[0] in bare else (near[0],)
    return " and ".join(key.removeprefix(f"{section}.") for key in keys)
