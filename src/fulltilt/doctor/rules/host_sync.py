"""Rule host-sync: a value is read from the device at every step, so Python waits for the device."""

import ast
from typing import Any

from fulltilt.doctor.breakdown import compute_breakdown_pct, compute_step_ms
from fulltilt.doctor.finding import Finding
from fulltilt.doctor.observation import EVERY_STEP_SHARE, Observation
from fulltilt.doctor.origin import is_on_host
from fulltilt.doctor.rules.file_write import is_save
from fulltilt.doctor.source import Reached, Source, build_suspicion, find_values, get_dotted

NAME = "host-sync"
FIX = "keep it on the device (detach() it), and read it every N steps"
METHODS = ("item", "cpu", "numpy", "tolist")
REDUCTIONS = ("sum", "mean", "norm", "detach")


def read(source: Source) -> list[Finding]:
    saves = (seen.node for seen in source.each_step if isinstance(seen.node, ast.Call) and is_save(source, seen.node))
    saved = {inner for save in saves for inner in ast.walk(save)}  # a copy for a file belongs to the file rule
    return [
        build_suspicion(source, NAME, seen.node, seen.why, FIX)
        for seen in source.each_step
        if seen.node not in saved and _waits(source, seen)
    ]


def _waits(source: Source, seen: Reached) -> bool:
    match seen.node:
        case ast.Call(func=ast.Attribute(attr=method, value=receiver), args=[]) if method in METHODS:
            is_module = method == "cpu" and any(word in ast.unparse(receiver).lower() for word in ("model", "net"))
            return not is_module and not is_on_host(source, seen.scope, receiver)
        case ast.Call(func=ast.Name(id="float" | "int"), args=[value]):
            return _is_loss(source, seen.scope, value) or _is_reduction(source, seen.scope, value)
        case ast.Call(func=ast.Name(id="print"), args=values):
            return any(_is_loss(source, seen.scope, value) for value in values)
        case ast.FormattedValue(value=value):
            return _is_loss(source, seen.scope, value)
    return False


def _is_loss(source: Source, scope: ast.AST, value: ast.expr) -> bool:
    """Return whether ``.backward()`` is called on the name in this function, and it is never a plain number."""
    name = get_dotted(value)
    given = [value for value in find_values(source, scope, name or "") if not isinstance(value, ast.Constant)]
    if not name or any(is_on_host(source, scope, value) for value in given):
        return False
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "backward"
        and name in map(get_dotted, ast.walk(call))
        for call, where in source.calls
        if where is scope
    )


def _is_reduction(source: Source, scope: ast.AST, value: ast.expr) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(attr=method, value=receiver)) if method in REDUCTIONS:
            return not is_on_host(source, scope, receiver)
    return False


def judge(observation: Observation) -> list[Finding]:
    """Find lines that make the host wait for the device in nearly every step.

    On a CPU they cost nothing. On a GPU the host's own part of the step (all but forward, backward and optimizer) could
    overlap with the device's work; a synchronisation prevents that, and the device may idle. Without the call a step
    still takes the longer of the wait and the rest; the shorter is the most that is saved.
    """
    n_steps, step_ms = len(observation.plain.rows), compute_step_ms(observation)
    shares_pct = compute_breakdown_pct(observation)
    host_pct = 100 - sum(shares_pct[kind] for kind in ("forward", "backward", "optimizer"))
    by_line: dict[tuple[str, int], Finding] = {}  # in x.cpu().tolist() only the first call waits
    for site in observation.sites:
        if site.kind != "host_sync" or site.n_steps < EVERY_STEP_SHARE * n_steps:
            continue
        blocked_ms = site.ns / n_steps / 1e6
        evidence: dict[str, Any] = {
            "call": site.does,
            "device": site.where,
            "calls_per_step": site.n_calls / n_steps,
            "blocked_ms_per_step": blocked_ms,
        }
        if site.where == "cpu":
            evidence |= {"host_part_ms": step_ms * host_pct / 100, "host_part_pct": host_pct}
            ceiling_pct = None
        else:
            ceiling_pct = 100 * max(min(blocked_ms, step_ms - blocked_ms), 0.0) / step_ms
        finding = Finding(
            rule=NAME,
            file=site.file,
            line=site.line,
            verdict="unconfirmed",
            evidence=evidence,
            ceiling_pct=ceiling_pct,
            numerics="equal",
            fix=FIX,
        )
        by_line.setdefault((site.file, site.line), finding)
    return list(by_line.values())
