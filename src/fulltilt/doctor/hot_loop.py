"""Find the loop in which a script takes its training steps: it holds ``.backward()`` and the optimizer's ``.step()``.

It is the innermost loop around both, so a loop over micro-batches belongs to the step; where no optimizer's step is in
sight, the innermost around ``.backward()``. Both count where a function that the loop calls holds them.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Sequence

from fulltilt.doctor.calls import Files, list_callees
from fulltilt.doctor.source import DEFINITIONS, Reached, Source

Loop = ast.For | ast.AsyncFor | ast.While
_OPTIMIZER = re.compile(r"opt|scaler|adam|sgd|muon|engine|accelerator", re.IGNORECASE)
_SELDOM = re.compile(  # words in the condition of a step guard or a cache
    r"%|\bin\b|is not None|every|interval|freq|rank|main|master|log(?!it)|step\w* [!=]=", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HotLoop:
    source: Source
    scope: ast.AST
    loop: Loop

    def __str__(self) -> str:
        return f"the training loop at {self.source.path}:{self.loop.lineno}"


@dataclasses.dataclass(slots=True)
class _Held:
    """The parts of a training step that a piece of code holds, outside of hot loops in it."""

    marks: set[str] = dataclasses.field(default_factory=set)
    inner: list[HotLoop] = dataclasses.field(default_factory=list)  # innermost loops around .backward() alone

    def add(self, other: _Held) -> None:
        self.marks |= other.marks
        self.inner += other.inner


def find_hot_loops(files: Files) -> list[HotLoop]:
    hot: list[HotLoop] = []
    absorbed: set[HotLoop] = set()
    of_scope: dict[ast.AST, _Held] = {}

    def hold_scope(source: Source, scope: ast.AST) -> _Held:
        if scope not in of_scope:
            of_scope[scope] = _Held()  # a function that calls itself adds nothing
            of_scope[scope] = hold(source, scope, list(ast.iter_child_nodes(scope)))
        return of_scope[scope]

    def hold(source: Source, scope: ast.AST, to_visit: list[ast.AST]) -> _Held:
        held = _Held()
        while to_visit:
            node = to_visit.pop()
            if isinstance(node, Loop):
                held.add(hold_loop(HotLoop(source, scope, node)))
            elif not isinstance(node, DEFINITIONS):
                to_visit.extend(ast.iter_child_nodes(node))
            if isinstance(node, ast.Call):
                held.marks |= _list_marks(node)
                for callee in list_callees(files, source, scope, node):
                    held.add(hold_scope(callee.source, callee.node))
        return held

    def hold_loop(place: HotLoop) -> _Held:
        held = hold(place.source, place.scope, list(ast.iter_child_nodes(place.loop)))
        if held.marks >= {"backward", "step"}:
            hot.append(place)
            absorbed.update(held.inner)
            return _Held()
        if "backward" in held.marks and not held.inner:
            held.inner.append(place)
        return held

    for source in files.sources:
        for scope in (source.tree, *source.parents):
            hold_scope(source, scope)
    lonely = {loop for held in of_scope.values() for loop in held.inner} - absorbed
    return sorted({*hot, *lonely}, key=lambda place: (place.source.path, place.loop.lineno))


def _list_marks(call: ast.Call) -> set[str]:
    match call.func:
        case ast.Attribute(attr="backward"):
            return {"backward"}
        case ast.Name(id=name) if "scaler" in name and len(call.args) > 1:  # loss_scaler(loss, optimizer, …)
            return {"backward", "step"}
        case ast.Attribute(attr="step", value=receiver) if _OPTIMIZER.search(ast.unparse(receiver)):
            return {"step"}
    return set()


def reach_steps(files: Files, hot: HotLoop) -> None:
    """Record in each source what runs at every step of a hot loop."""
    loop = hot.loop
    body = [loop.test, *loop.body] if isinstance(loop, ast.While) else loop.body
    for source, reached in follow(files, hot.source, hot.scope, body, f"in every pass of {hot}"):
        source.each_step.append(reached)


def follow(
    files: Files,
    source: Source,
    scope: ast.AST,
    body: Sequence[ast.AST],
    why: str,
    takes_batch: bool = False,
) -> Iterator[tuple[Source, Reached]]:
    """Yield all that runs whenever ``body`` does, through the functions that it calls."""
    to_visit = [(source, scope, body, why)]
    seen = {scope}
    while to_visit:
        source, scope, body, why = to_visit.pop(0)
        for node in _walk_unguarded(body):
            yield source, Reached(node=node, scope=scope, why=why, takes_batch=takes_batch)
            for callee in list_callees(files, source, scope, node) if isinstance(node, ast.Call) else ():
                if callee.node not in seen and not _is_cached(callee.node):
                    seen.add(callee.node)
                    name = getattr(callee.node, "name", "a lambda")
                    through = why if ", through " in why else f"{why}, through {name}()"
                    to_visit.append((callee.source, callee.node, get_body(callee.node), through))


def get_body(function: ast.AST) -> list[ast.AST]:
    body = getattr(function, "body", [])
    return body if isinstance(body, list) else [body]


def _is_cached(function: ast.AST) -> bool:
    return any("cache" in ast.unparse(decorator) for decorator in getattr(function, "decorator_list", ()))


def _walk_unguarded(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield each node that always runs with ``body``: none under an ``if``, in an ``except`` or a definition."""
    to_visit = _cut_guarded(body)
    while to_visit:
        node = to_visit.pop()
        yield node
        to_visit.extend(_list_unguarded(node))


def _list_unguarded(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.If() | ast.IfExp() | ast.Assert():
            return [node.test]
        case ast.BoolOp():
            return [node.values[0]]
        case ast.Match():
            return [node.subject]
        case ast.Try() | ast.TryStar():
            return [*_cut_guarded([*node.body, *node.orelse]), *node.finalbody]
        case ast.For() | ast.AsyncFor():
            return [node.iter, *_cut_guarded(node.body)]
        case ast.While():
            return [node.test, *_cut_guarded(node.body)]
        case ast.With() | ast.AsyncWith():
            return [*node.items, *_cut_guarded(node.body)]
    return [] if isinstance(node, DEFINITIONS) else list(ast.iter_child_nodes(node))


def _cut_guarded(body: Sequence[ast.AST]) -> list[ast.AST]:
    """Drop what follows an ``if`` that leaves, such as ``if step % 100: continue``."""
    kept: list[ast.AST] = []
    for statement in body:
        kept.append(statement)
        match statement:
            case ast.If(test=test, body=[*_, ast.Continue() | ast.Return()]) if _SELDOM.search(ast.unparse(test)):
                break
    return kept
