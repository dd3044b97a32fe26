"""``Source``: one Python file as a syntax tree with its names resolved. It is read, never imported."""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from fulltilt.doctor.finding import Finding

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Source:
    """One Python file.

    Attributes:
        path: Path, relative to the current folder if below it.
        module: ``(…, pkg, utils)`` of ``pkg/utils.py``, ``(…, pkg)`` of ``pkg/__init__.py``.
        parents: Function, lambda or class → the definition, or the module, that it stands in.
        members: Definition or module → the functions and classes in it, by name.
        imports: Name in this file → what it was imported as, in full: ``np`` → ``numpy``.
        values: (definition or module, name) → every expression that the name gets there. A name that a loop binds gets
            what is looped over, an attribute of ``self`` belongs to its class.
        calls: Every call with the definition, or the module, that it stands in.
        each_step: What runs at every training step.
        each_sample: What a DataLoader runs for every sample.
    """

    path: str
    module: tuple[str, ...]
    lines: list[str]
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = dataclasses.field(default_factory=dict)
    members: dict[ast.AST, dict[str, ast.AST]] = dataclasses.field(default_factory=dict)
    imports: dict[str, str] = dataclasses.field(default_factory=dict)
    values: dict[tuple[ast.AST, str], list[ast.expr]] = dataclasses.field(default_factory=dict)
    calls: list[tuple[ast.Call, ast.AST]] = dataclasses.field(default_factory=list)
    each_step: list[Reached] = dataclasses.field(default_factory=list)
    each_sample: list[Reached] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reached:
    """A statement or expression that runs for every step or sample.

    Attributes:
        scope: The function or module that holds it.
        why: Why it runs that often, in words.
        takes_batch: The function gets a whole batch, so one loop over its samples is fine.
    """

    node: ast.AST
    scope: ast.AST
    why: str
    takes_batch: bool = False


def read_source(file: Path, path: str) -> Source:
    """Parse ``file`` and name it ``path``.

    Raises:
        SyntaxError: with the line.
        ValueError, RecursionError, OSError: not text, nested too deeply for Python, or unreadable.
    """
    code = file.read_bytes()
    with warnings.catch_warnings():  # Python's warnings about the user's code are not shown
        warnings.simplefilter("ignore")
        tree = ast.parse(code)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(code).readline)
    module = file.parent.parts if file.stem == "__init__" else file.with_suffix("").parts
    source = Source(
        path=path, module=module, lines=re.split(r"\r\n|\r|\n", code.decode(encoding, errors="replace")), tree=tree
    )
    to_visit: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while to_visit:
        node, scope = to_visit.pop()
        _note(source, node, scope)
        if isinstance(node, DEFINITIONS):
            source.parents[node] = scope
            if not isinstance(node, ast.Lambda):
                source.members.setdefault(scope, {})[node.name] = node
            scope = node
        to_visit.extend((child, scope) for child in ast.iter_child_nodes(node))
    return source


def _note(source: Source, node: ast.AST, scope: ast.AST) -> None:
    """Record what ``node`` says about names."""
    match node:
        case ast.Import():
            for name in node.names:
                source.imports[name.asname or name.name.split(".")[0]] = (
                    name.name if name.asname else name.name.split(".")[0]
                )
        case ast.ImportFrom():
            for name in node.names:
                source.imports[name.asname or name.name] = ".".join(filter(None, (node.module, name.name)))
        case ast.Assign():
            for target in node.targets:
                _bind(source, scope, target, node.value)
        case ast.AnnAssign(value=ast.expr() as value) | ast.AugAssign(value=value) | ast.NamedExpr(value=value):
            _bind(source, scope, node.target, value)
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            _bind(source, scope, node.target, node.iter)
        case ast.withitem(optional_vars=ast.expr() as target):
            _bind(source, scope, target, node.context_expr)
        case ast.Call():
            source.calls.append((node, scope))


def _bind(source: Source, scope: ast.AST, target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        pairs = zip(target.elts, value.elts, strict=False)
    else:
        pairs = ((inner, value) for inner in ast.walk(target) if isinstance(getattr(inner, "ctx", None), ast.Store))
    for inner, given in pairs:
        if name := get_dotted(inner):
            owner = find_class(source, scope) if name.startswith("self.") else None
            source.values.setdefault((owner or scope, name), []).append(given)


def get_dotted(node: ast.AST | None) -> str | None:
    """Return ``a.b.c`` as text; None if the node is not a plain chain of names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def get_full_name(source: Source, name: str | None) -> str:
    """Return the full name of a chain of names by the imports: ``numpy.mean`` for ``np.mean``."""
    head, dot, rest = (name or "").partition(".")
    return source.imports.get(head, head) + dot + rest


def list_scopes(source: Source, scope: ast.AST | None) -> Iterator[ast.AST]:
    """List a definition and those around it, up to the module."""
    while scope is not None:
        yield scope
        scope = source.parents.get(scope)


def find_class(source: Source, scope: ast.AST) -> ast.ClassDef | None:
    return next((around for around in list_scopes(source, scope) if isinstance(around, ast.ClassDef)), None)


def find_values(source: Source, scope: ast.AST, name: str) -> list[ast.expr]:
    """Return every expression assigned to ``name`` as seen from ``scope``; none for parameters and unknown names."""
    for around in list_scopes(source, scope):
        if values := source.values.get((around, name)):
            return values
        if name in list_parameters(around):
            break
    return []


def list_parameters(scope: ast.AST) -> list[str]:
    if not isinstance(scope, Function):
        return []
    args = scope.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return [arg.arg for arg in named if arg and arg.arg != "self"]


def build_suspicion(source: Source, rule: str, node: ast.AST, why: str, fix: str) -> Finding:
    """Build the finding for a line that was read but not run."""
    line = getattr(node, "lineno", 1)
    return Finding(
        rule=rule,
        file=source.path,
        line=line,
        verdict="unconfirmed",
        evidence={"code": source.lines[line - 1].strip(), "why_hot": why},
        fix=fix,
    )
