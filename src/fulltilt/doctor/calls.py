"""Resolve calls to functions of the given files, as far as their text tells.

A name is followed to its function in the same file, or in a given file that it is imported from. ``self.f`` is looked
up in the class and its bases, ``x.f`` and ``x(…)`` in the class ``C`` where the text says ``x = C(…)``.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence

from fulltilt.doctor.source import Source, find_class, find_values, get_dotted, get_full_name, list_scopes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A function or a class, and the file it is in."""

    source: Source
    node: ast.AST


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Files:
    """The files that were given; ``by_stem``: those whose module's name ends so."""

    sources: Sequence[Source]
    by_stem: dict[str, list[Source]]


def build_files(sources: Sequence[Source]) -> Files:
    by_stem: dict[str, list[Source]] = {}
    for source in sources:
        by_stem.setdefault(source.module[-1], []).append(source)
    return Files(sources, by_stem)


def list_callees(files: Files, source: Source, scope: ast.AST, call: ast.Call) -> Iterator[Place]:
    """What the call itself runs, and the closure that an optimizer's step is given."""
    wanted = [call.func]
    if isinstance(call.func, ast.Attribute) and call.func.attr == "step":
        wanted += call.args
    for expression in wanted:
        if place := find_function(files, source, scope, expression):
            yield place


def find_function(files: Files, source: Source, scope: ast.AST, called: ast.expr) -> Place | None:
    """The function behind what is called, or handed over to be called."""
    if isinstance(called, ast.Lambda):
        return Place(source, called)
    if (get_dotted(getattr(called, "func", None)) or "").endswith("partial") and isinstance(called, ast.Call):
        return find_function(files, source, scope, called.args[0])
    name = get_dotted(called) or ""
    place = _find_definition(files, source, scope, name)
    if place and isinstance(place.node, ast.FunctionDef | ast.AsyncFunctionDef):
        return place
    if instance := find_instance(files, source, scope, called):
        return find_method(files, instance, "forward") or find_method(files, instance, "__call__")
    if isinstance(called, ast.Attribute) and (owner := find_instance(files, source, scope, called.value)):
        return find_method(files, owner, called.attr)
    values = [value for value in find_values(source, scope, name) if isinstance(value, ast.Lambda)]
    return Place(source, values[0]) if values else None


def find_instance(files: Files, source: Source, scope: ast.AST, made: ast.expr) -> Place | None:
    """The class of an object: ``self``, ``C(…)``, ``C(…).to(device)``, and a name that gets one of these."""
    own = find_class(source, scope)
    name = get_dotted(made) or ""
    if name == "self":
        return own and Place(source, own)
    for value in [made] if isinstance(made, ast.Call) else find_values(source, scope, name):
        while isinstance(value, ast.Call):
            place = _find_definition(files, source, scope, get_dotted(value.func) or "")
            if place and isinstance(place.node, ast.ClassDef):
                return place
            value = getattr(value.func, "value", None)
    return None


def find_method(files: Files, owner: Place, name: str) -> Place | None:
    """A method of a class or of the first base that has it."""
    to_visit, seen = [owner], set()
    while to_visit:
        place = to_visit.pop(0)
        if method := place.source.members.get(place.node, {}).get(name):
            return Place(place.source, method)
        seen.add(place.node)
        bases = (
            _find_definition(files, place.source, place.source.tree, get_dotted(b) or "")
            for b in _list_bases(place.node)
        )
        to_visit += [base for base in bases if base and base.node not in seen]
    return None


def _list_bases(node: ast.AST) -> list[ast.expr]:
    return node.bases if isinstance(node, ast.ClassDef) else []


def _find_definition(files: Files, source: Source, scope: ast.AST, name: str) -> Place | None:
    for around in list_scopes(source, scope):
        if not isinstance(around, ast.ClassDef) and name in (here := source.members.get(around, {})):
            return Place(source, here[name])
    *module, last = get_full_name(source, name).split(".")
    for other in files.by_stem.get(module[-1], ()) if module else ():
        here = other.members.get(other.tree, {})
        if other is not source and last in here and other.module[-len(module) :] == tuple(module):
            return Place(other, here[last])
    return None
