"""Let the names of a package load on first use, so that unused ones cost no start."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def load_on_use(
    package: str, homes: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build ``__getattr__`` and ``__dir__`` of ``package``, where ``homes`` maps its modules to the names they hold."""
    home_of = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(home_of))}")
        value = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)  # asked for once
        return value

    return load, lambda: sorted(home_of)
