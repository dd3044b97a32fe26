"""Find what a DataLoader runs for each sample (``__getitem__``, transforms) and batch (``collate_fn``)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from fulltilt.doctor.calls import Files, Place, find_function, find_instance, find_method
from fulltilt.doctor.hot_loop import follow, get_body
from fulltilt.doctor.source import find_class, get_dotted

_DATASET = re.compile(r"Dataset|Folder$")
_TRANSFORMS = ("transform", "transforms", "target_transform")


def reach_samples(files: Files) -> None:
    """Record in each source what runs for every sample."""
    for place, takes_batch in _find_roots(files):
        owner = find_class(place.source, place.node)
        name = f"{f'{owner.name}.' if owner else ''}{getattr(place.node, 'name', 'a lambda')}"
        where = f"{name} at {place.source.path}:{getattr(place.node, 'lineno', 1)}"
        why = f"for every {'batch' if takes_batch else 'sample'} that a DataLoader builds, in {where}"
        for source, reached in follow(files, place.source, place.node, get_body(place.node), why, takes_batch):
            source.each_sample.append(reached)


def _find_roots(files: Files) -> Iterator[tuple[Place, bool]]:
    """Yield the functions that a DataLoader runs, and whether they take a whole batch."""
    for source in files.sources:
        for node in source.parents:
            if isinstance(node, ast.ClassDef) and _DATASET.search(" ".join([node.name, *map(ast.unparse, node.bases)])):
                yield from _list_getters(files, Place(source, node))
        for call, scope in source.calls:
            for given, takes_batch in _list_given(call):
                if place := find_function(files, source, scope, given):
                    yield place, takes_batch
            is_loader = (get_dotted(call.func) or "").endswith("DataLoader")
            if is_loader and call.args and (dataset := find_instance(files, source, scope, call.args[0])):
                yield from _list_getters(files, dataset)


def _list_getters(files: Files, dataset: Place) -> Iterator[tuple[Place, bool]]:
    for name in ("__getitem__", "__getitems__"):
        if method := find_method(files, dataset, name):
            yield method, name == "__getitems__"


def _list_given(call: ast.Call) -> Iterator[tuple[ast.expr, bool]]:
    """List the expressions that a call passes as a transform, or (True) as ``collate_fn``."""
    for keyword in call.keywords:
        if keyword.arg in (*_TRANSFORMS, "collate_fn"):
            yield keyword.value, keyword.arg == "collate_fn"
    last = (get_dotted(call.func) or "").rpartition(".")[2]
    if last == "Compose" and call.args and isinstance(call.args[0], ast.List | ast.Tuple):
        yield from ((step, False) for step in call.args[0].elts)
    if last == "Lambda" and call.args:
        yield call.args[0], False
