"""Tell by its source whether the user's own code changed since an earlier search."""

import argparse
import ast
import functools
import hashlib
import importlib.machinery
import inspect
import itertools
import os
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fulltilt.config import ComponentCall, Config, parse_call, parse_pipeline

MAX_SOURCE_FILES = 200  # of one module: what it imports, then the rest of its package
PARTS = (
    "model", "dataset", "loss", "optimizer", "validation", "metrics", "prepare", "collate", "derive", "assess",
    "explain",
)  # fmt: skip
PLAIN = (bool, int, float, complex, str, bytes, type(None))
MAX_ELEMENTS = 1000  # of a list or mapping: it may hold all samples


def digest_modules(config: Config, import_paths: tuple[str, ...]) -> dict[str, str]:
    """Digest the source of every ``module:object`` of the configuration, by module.

    That is the module with what it imports from the folder of the configuration and the current one, and its package.
    """
    digests, roots = {}, (config.base_dir, str(Path.cwd()))
    for name in sorted({call.name for call in _list_calls(config) if ":" in call.name}):
        module = name.partition(":")[0]
        digest = hashlib.sha256()
        imported = _follow_imports(_find_files(module, import_paths), roots)
        files = [*dict.fromkeys([*imported, *find_module_files(module, import_paths)])][:MAX_SOURCE_FILES]
        for file in files:
            digest.update(file.name.encode() + file.read_bytes())
        if files:
            digests[module] = digest.hexdigest()[:16]
    return digests


def _follow_imports(files: Iterable[Path], roots: Iterable[str | Path]) -> list[Path]:
    """List these files and those that they import, directly or not, without importing any; the nearest first."""
    found = [*dict.fromkeys(files)]
    for file in found:  # it grows
        if len(found) < MAX_SOURCE_FILES:
            found += [each for each in dict.fromkeys(_list_imported(file, roots)) if each not in found]
    return found


def _list_imported(file: Path, roots: Iterable[str | Path]) -> Iterator[Path]:
    """Yield the files of what a file imports; of ``from a import b`` also a module b."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the user's escapes
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _find_files(alias.name, roots)
        elif isinstance(node, ast.ImportFrom):
            places = file.absolute().parents[node.level - 1 : node.level] if node.level else roots
            for alias in node.names:
                yield from _find_files(".".join(filter(None, (node.module, alias.name))), places)


def _find_files(module: str, roots: Iterable[str | Path]) -> Iterator[Path]:
    """Yield the files that hold a module, or what is above it, below these folders."""
    names = module.split(".")
    for root in roots:
        for n in range(len(names)):
            folder = Path(root, *names[:n])
            yield from filter(Path.is_file, (folder / names[n] / "__init__.py", folder / f"{names[n]}.py"))


def find_module_files(module: str, import_paths: tuple[str, ...]) -> list[Path]:
    """List the source files of a module or of its whole package, without importing it; none where it is not found."""
    spec = importlib.machinery.PathFinder.find_spec(module.split(".")[0], list(import_paths))
    if spec is None or spec.origin is None:
        return []
    if spec.submodule_search_locations is None:
        return [Path(spec.origin)]
    return sorted(Path(spec.origin).parent.rglob("*.py"))[:MAX_SOURCE_FILES]


def _list_calls(config: Config) -> Iterator[ComponentCall]:
    """Yield every component call of the configuration, also those inside others."""
    data, optim = config.data, config.optim
    texts = (config.task, config.model, config.loss, data.dataset, data.val_dataset, optim.optimizer, optim.schedule)
    for text in texts:
        if text is not None:
            yield from _unfold(parse_call(text))
    for pipeline in (data.transform.train, data.transform.val, data.mix):
        for call in parse_pipeline(pipeline) if pipeline is not None else ():
            yield from _unfold(call)


def _unfold(value: Any) -> Iterator[ComponentCall]:
    if isinstance(value, ComponentCall):
        yield value
        value = [*value.args, *value.kwargs.values()]
    for part in value if isinstance(value, list | tuple) else ():
        yield from _unfold(part)


def digest_workload(workload: Any) -> dict[str, str]:
    """Digest each part of a workload, with what it uses of its module: its pickles differ from process to process."""
    parts = {name: getattr(workload, name, None) for name in PARTS}
    return {
        f"workload {name}": hashlib.sha256("\n".join(_list_sources(part, {})).encode()).hexdigest()[:16]
        for name, part in parts.items()
        if part is not None
    }


def _list_sources(part: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Yield the text of ``part``: the source of a function or class, then that of what it names in its own module.

    Args:
        seen: What was told already, by id; it keeps them alive, so that no id comes to stand for another.
    """
    if isinstance(part, PLAIN):
        yield repr(part)
        return
    part = inspect.unwrap(part) if callable(part) else part
    if id(part) in seen:
        return
    seen[id(part)] = part
    if isinstance(part, functools.partial | types.MethodType):
        parts = (part.func, part.args, part.keywords) if isinstance(part, functools.partial) else (part.__func__,)
        yield from _list_sources(parts, seen)
    elif isinstance(part, list | tuple):
        yield str(len(part))
        for element in part[:MAX_ELEMENTS]:
            yield from _list_sources(element, seen)
    elif isinstance(part, Mapping):
        yield str(len(part))
        names = sorted(part, key=lambda name: repr(name) if isinstance(name, PLAIN) else "")  # others show an address
        for name in itertools.islice(names, MAX_ELEMENTS):
            yield from (*_list_sources(name, seen), *_list_sources(part[name], seen))
    elif isinstance(part, types.ModuleType):
        file = str(getattr(part, "__file__", None) or "")
        is_own = file and not _is_installed(part)
        files = _follow_imports([Path(file)], (Path(file).parent, Path.cwd())) if is_own else ()
        yield from (part.__name__, *(each.read_text(errors="replace") for each in files))
    elif isinstance(part, types.SimpleNamespace | argparse.Namespace):
        yield from _list_sources(vars(part), seen)
    elif isinstance(part, types.FunctionType):
        yield _read_source(part)
        yield from _list_used(part, seen)
    elif isinstance(part, type):
        yield from _list_class(part, seen)
    elif _is_installed(type(part)):
        yield _name(type(part))
        yield f"{getattr(part, 'shape', None)} {getattr(part, 'dtype', None)}"
        yield from _list_sources({k: v for k, v in _list_plain(part) if not k.startswith("_")}, seen)
    else:  # an object of a class: that, and its plain attributes
        yield from _list_sources(type(part), seen)
        yield from _list_sources(dict(_list_plain(part)), seen)


def _list_plain(part: Any) -> Iterator[tuple[str, Any]]:
    return ((k, v) for k, v in getattr(part, "__dict__", {}).items() if isinstance(v, PLAIN))


def _list_class(part: type, seen: dict[int, Any]) -> Iterator[str]:
    yield _read_source(part)
    for base in part.__bases__:
        if base.__module__ == part.__module__:
            yield from _list_sources(base, seen)
    for member in vars(part).values():
        if isinstance(member, types.FunctionType):
            yield from _list_used(member, seen)


def _list_used(function: types.FunctionType, seen: dict[int, Any]) -> Iterator[str]:
    """Yield what a function takes from around it: defaults, closure, and its module's names."""
    yield from _list_sources((function.__defaults__, function.__kwdefaults__), seen)
    for cell in function.__closure__ or ():
        try:
            yield from _list_sources(cell.cell_contents, seen)
        except ValueError:  # not filled yet
            continue
    for name in _list_names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, PLAIN) or getattr(value, "__module__", None) == function.__module__:
            yield name
            yield from _list_sources(value, seen)
        elif value is not os.environ and not _is_installed(function):  # what libraries hold is not the user's
            yield name
            if hasattr(value, "__qualname__"):  # a function or class of another module
                yield _name(value)
                value = sys.modules.get(getattr(value, "__module__", None) or "")
            yield from _list_sources(value, seen)


def _is_installed(part: Any) -> bool:
    """Return whether a class or function is of the standard library, or of an installed package with a version."""
    name = part.__name__ if isinstance(part, types.ModuleType) else str(getattr(part, "__module__", None))
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_known = name.partition(".")[0] in (*sys.stdlib_module_names, "fulltilt")
    return is_known or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _list_names(code: types.CodeType) -> list[str]:
    """List the names that a function, and functions inside it, look up outside of themselves."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*code.co_names, *(name for each in inner for name in _list_names(each))]


def _read_source(part: Any) -> str:
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):  # built in, or typed at a prompt
        return _name(part)


def _name(part: Any) -> str:
    return f"{getattr(part, '__module__', None)}.{getattr(part, '__qualname__', type(part).__qualname__)}"
