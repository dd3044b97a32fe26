"""Rule slow-transform: loading runs Python for each element of a sample, or reads a whole file for each sample."""

import ast
import re
import statistics
from collections.abc import Iterator

from fulltilt.doctor.breakdown import compute_breakdown_pct
from fulltilt.doctor.finding import Finding
from fulltilt.doctor.observation import LineTime, Observation
from fulltilt.doctor.source import (
    Reached,
    Source,
    build_suspicion,
    find_values,
    get_dotted,
    get_full_name,
    list_parameters,
)

NAME = "slow-transform"
MIN_WAIT_PCT = 5.0  # least share of a step spent waiting for data
MIN_SAMPLE_SHARE = 0.4  # least share of the time of loading a sample
FIX_WATCHED = "do it once and keep it, or on whole arrays"
FIX_BESIDE = f"{FIX_WATCHED}, or beside training (num_workers)"
FIX_LOOP = "replace the loop by array operations on the whole sample, or do it once before training"
FIX_FILE = "read the file once, in __init__ or on first use, and keep it"
FIX_CALLS = {
    "numpy.vectorize": "it is a Python loop over the elements: use array operations on the whole sample",
    "re.compile": "compile the pattern once, outside of what runs for every sample",
    "time.sleep": "take it out",
}
WHOLE_FILES = re.compile(
    r"pandas\.read_\w+|h5py\.File|numpy\.(load|loadtxt|genfromtxt)|json\.load|pickle\.load|torch\.load"
)
FEW = 16  # a loop over fewer elements is not one over a sample's elements
_FIELDS = re.compile(
    r"key|field|name|col|modal|_type|\.split\(.+\)|\.(items|values)\(\)|\.(size|shape)$", re.IGNORECASE
)
_DRAWN = re.compile(r"rand|choice|sample", re.IGNORECASE)
Loop = ast.For | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def read(source: Source) -> list[Finding]:
    return [
        *(build_suspicion(source, NAME, seen.node, seen.why, FIX_LOOP) for seen in _find_loops(source)),
        *(
            build_suspicion(source, NAME, seen.node, seen.why, fix)
            for seen in source.each_sample
            if isinstance(seen.node, ast.Call) and (fix := _find_fix(source, seen, seen.node))
        ),
    ]


def _find_loops(source: Source) -> Iterator[Reached]:
    """Yield the outermost loops over elements; a batch function's loop over samples is left out."""
    loops = [(seen, seen.node) for seen in source.each_sample if isinstance(seen.node, Loop)]
    nested = {inner for _, loop in loops for inner in ast.walk(loop) if inner is not loop}
    told: set[ast.AST] = set()
    for seen, loop in sorted(loops, key=lambda pair: (pair[1].lineno, pair[1].col_offset)):
        if loop not in told and (loop in nested or not seen.takes_batch) and _is_over_elements(loop):
            told.update(ast.walk(loop))
            yield seen


def _is_over_elements(loop: Loop) -> bool:
    """Return whether the loop runs over indices or numbers, and not over a few transforms or fields."""
    if isinstance(loop, ast.While):
        return _is_index(loop, _list_names(loop.test))
    generators = [loop] if isinstance(loop, ast.For) else loop.generators
    for generator in generators:
        if _is_short(generator.iter) or _FIELDS.search(ast.unparse(generator.iter)):
            continue
        names = _list_names(generator.target)
        if _is_index(loop, names) or (not _is_range(generator.iter) and _is_operand(loop, names)):
            return True
    return False


def _is_range(looped: ast.expr) -> bool:
    return isinstance(looped, ast.Call) and ast.unparse(looped.func) == "range"


def _is_short(looped: ast.expr) -> bool:
    if isinstance(looped, ast.Call) and ast.unparse(looped.func) in ("range", "enumerate", "zip", "reversed"):
        if not _is_range(looped):
            return any(map(_is_short, looped.args))
        return all(isinstance(bound, ast.Constant) and bound.value in range(FEW + 1) for bound in looped.args)
    if isinstance(looped, ast.Constant):
        return isinstance(looped.value, str) and len(looped.value) <= FEW
    return isinstance(looped, ast.List | ast.Tuple | ast.Set) and len(looped.elts) <= FEW


def _is_index(loop: ast.AST, names: set[str]) -> bool:
    called = {node.func for node in ast.walk(loop) if isinstance(node, ast.Call)}  # self.transforms[i](image)
    return any(
        isinstance(node, ast.Subscript) and node not in called and names & _list_names(node.slice)
        for node in ast.walk(loop)
    )


def _is_operand(loop: ast.AST, names: set[str]) -> bool:
    for node in ast.walk(loop):
        match node:
            case ast.BinOp(left=left, op=ast.Div()):  # folder / name is a path
                sides = [left]
            case ast.BinOp(left=left, right=right) if not (_is_text(left) or _is_text(right)):
                sides = [left, right]
            case ast.Call(func=ast.Name(id="int" | "float" | "ord"), args=sides):
                pass
            case _:
                continue
        if any(isinstance(side, ast.Name) and side.id in names for side in sides):
            return True
    return False


def _is_text(node: ast.expr) -> bool:
    return any(
        isinstance(getattr(inner, "value", None), str) for inner in ast.walk(node) if isinstance(inner, ast.Constant)
    )


def _list_names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _find_fix(source: Source, seen: Reached, call: ast.Call) -> str | None:
    name = get_full_name(source, get_dotted(call.func))
    if WHOLE_FILES.fullmatch(name) and call.args and not _is_own(source, seen.scope, call.args[0]):
        return FIX_FILE
    return FIX_CALLS.get(name)


def _is_own(source: Source, scope: ast.AST, file: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
    """Return whether the file depends on the sample or a random draw, so that it differs between samples."""
    names = _list_names(file)
    if _DRAWN.search(ast.unparse(file)) or names & set(list_parameters(scope)):
        return True
    values = [value for name in names - seen for value in find_values(source, scope, name)]
    return any(_is_own(source, scope, value, seen | names) for value in values)


def can_judge(observation: Observation) -> bool:
    """Return whether samples were traced, or steps hardly wait for them."""
    is_traced = observation.samples is not None and observation.samples.total_ns > 0
    return is_traced or compute_breakdown_pct(observation).get("data_wait", 0.0) < MIN_WAIT_PCT


def judge(observation: Observation) -> list[Finding]:
    """Find the user's function that takes most of a sample's time, if steps wait for data."""
    wait_pct = compute_breakdown_pct(observation)["data_wait"]
    samples = observation.samples
    if samples is None or wait_pct < MIN_WAIT_PCT or not samples.total_ns:
        return []
    by_function: dict[tuple[str, str], list[LineTime]] = {}
    for line in samples.lines:
        by_function.setdefault((line.file, line.function), []).append(line)
    lines = max(by_function.values(), key=lambda lines: sum(line.ns for line in lines), default=[])
    share = sum(line.ns for line in lines) / samples.total_ns
    if share < MIN_SAMPLE_SHARE:
        return []
    hottest = max(lines, key=lambda line: line.ns)
    batch_ms = statistics.median(samples.plain_ns) / 1e6 if samples.plain_ns else None
    return [
        Finding(
            rule=NAME,
            file=hottest.file,
            line=hottest.line,
            verdict="unconfirmed",
            evidence={
                "function": hottest.function,
                "share_of_sample_pct": 100 * share,
                "data_wait_pct": wait_pct,
                "batch_load_ms": batch_ms,
                "in_worker": samples.is_worker,
            },
            ceiling_pct=wait_pct * (1 if samples.is_worker else share),
            fix=FIX_WATCHED if samples.is_worker else FIX_BESIDE,
        )
    ]
