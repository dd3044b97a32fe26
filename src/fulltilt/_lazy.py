"""Let the names of a package load on first use, so that unused ones cost no start."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_on_use(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build ``__getattr__`` and ``__dir__`` of ``package`` from the imports in its own ``file``.

    The package imports its names ``if TYPE_CHECKING:``, where type checkers see them; this reads the same lines.
    """
    imports = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.ImportFrom)]
    own = [node for node in imports if node.module and node.module.startswith(f"{package}.")]
    home_of = {alias.name: str(node.module) for node in own for alias in node.names}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(home_of))}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)  # asked for once
        return value

    return load, lambda: sorted(home_of)
