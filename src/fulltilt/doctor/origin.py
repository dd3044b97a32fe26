"""Decide whether an expression is known not to be a tensor on an accelerator."""

from __future__ import annotations

import ast
import re

from fulltilt.doctor.source import Source, find_values, get_dotted, get_full_name

_HOST_CALLS = re.compile(
    r"(numpy|random|math|time|os|json|pandas|scipy|sklearn|statistics)\.|(len|float|int|str|bool|round|range|sorted|list|dict|set)$"
)
_MADE_ON_HOST = re.compile(r"torch\.(rand\w*|tensor|arange|zeros|ones|empty|full|from_numpy|as_tensor)$")
_READ_BACK = ("item", "tolist", "numpy", "cpu")
_LOADER = re.compile(r"loader|dataset|batches", re.IGNORECASE)
_PASSED_ON = ("enumerate", "tqdm", "zip", "iter", "next")


def is_on_host(source: Source, scope: ast.AST, node: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
    """Return whether a value is on the host: a number, text, NumPy array, CPU tensor or unmoved batch."""
    match node:
        case ast.Constant() | ast.JoinedStr() | ast.Tuple() | ast.List() | ast.Dict() | ast.ListComp():
            return True
        case ast.Call():
            return _gives_host(source, scope, node, seen)
        case ast.BinOp():
            return all(is_on_host(source, scope, side, seen) for side in (node.left, node.right))
        case ast.Name() | ast.Attribute() if get_dotted(node) in seen:
            return True  # its other values decide
        case ast.Name() | ast.Attribute() if values := find_values(source, scope, name := get_dotted(node) or ""):
            is_host = all(_is_batch(value) or is_on_host(source, scope, value, seen | {name}) for value in values)
            return is_host and not all(
                name in map(get_dotted, ast.walk(value)) for value in values
            )  # x = x / 2 says nothing new
        case ast.Attribute() | ast.Subscript() | ast.Starred():
            return is_on_host(source, scope, node.value, seen)
    return False


def _is_batch(looped: ast.expr) -> bool:
    """Return whether ``for … in looped`` binds batches of a DataLoader that are not moved yet."""
    if isinstance(looped, ast.Call):
        return (get_dotted(looped.func) or "").rpartition(".")[2] in _PASSED_ON and any(map(_is_batch, looped.args))
    return bool(_LOADER.search(get_dotted(looped) or ""))


def _gives_host(source: Source, scope: ast.AST, call: ast.Call, seen: frozenset[str]) -> bool:
    name = get_full_name(source, get_dotted(call.func))
    if _HOST_CALLS.match(name):
        return True
    if _MADE_ON_HOST.match(name):
        return not any(keyword.arg == "device" for keyword in call.keywords)
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr in ("to", "cuda"):
        return False
    return call.func.attr in _READ_BACK or is_on_host(source, scope, call.func.value, seen)
