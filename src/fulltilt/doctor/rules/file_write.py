"""Rule file-write: the step waits while a file is written at every step."""

import ast
import dataclasses
import re
from typing import Any

from fulltilt.doctor.breakdown import compute_step_ms
from fulltilt.doctor.finding import Finding
from fulltilt.doctor.observation import EVERY_STEP_SHARE, Observation, Site
from fulltilt.doctor.proof import compute_proof
from fulltilt.doctor.source import Source, build_suspicion, get_dotted, get_full_name

NAME = "file-write"
MIN_SHARE_PCT = 1.0  # of the step's time
FIX = "write it every N steps, under an `if`, or once after the loop"
SAVES = re.compile(r"(torch|numpy)\.save\w*$|(json|pickle)\.dump$")
METHODS = ("to_csv", "to_json", "to_parquet", "savefig", "write_text", "write_bytes")


def read(source: Source) -> list[Finding]:
    calls = [(seen, seen.node) for seen in source.each_step if isinstance(seen.node, ast.Call)]
    bound = _list_bound(source)
    opens = [(seen, call) for seen, call in calls if _opens_to_write(source, call)]
    findings: list[Finding] = []
    told: set[ast.AST] = set()
    for seen, call in opens:
        name = bound.get(call)
        again = [other.lineno for _, other in opens if bound.get(other) == name and other.lineno > call.lineno]
        end = min(again, default=len(source.lines) + 1)
        uses = [use for _, use in calls if call.lineno <= use.lineno < end and _uses(use, name)]
        told.update(uses)
        first = min(uses, key=lambda use: use.lineno, default=call)  # the line that writes, if known
        findings.append(build_suspicion(source, NAME, first, seen.why, FIX))
    for seen, call in calls:
        if call not in told and is_save(source, call):
            findings.append(build_suspicion(source, NAME, call, seen.why, FIX))
    return findings


def is_save(source: Source, call: ast.Call) -> bool:
    """Return whether a call writes a whole file by itself."""
    if SAVES.match(get_full_name(source, get_dotted(call.func))):
        return True
    return isinstance(call.func, ast.Attribute) and call.func.attr in METHODS and bool(call.args)


def _opens_to_write(source: Source, call: ast.Call) -> bool:
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    if get_full_name(source, get_dotted(call.func)) == "open":
        modes += call.args[1:2]
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "open":
        modes += call.args[:2]  # Path.open(mode), gzip.open(path, mode)
    return any(
        isinstance(mode, ast.Constant) and re.fullmatch(r"[wax][bt+]*|r[bt]*\+[bt]*", str(mode.value)) for mode in modes
    )


def _list_bound(source: Source) -> dict[ast.AST, str]:
    """Map each call to the name that its result is assigned to."""
    return {value: name for (_, name), values in source.values.items() for value in values}


def _uses(call: ast.Call, file: str | None) -> bool:
    """Return whether a call writes into ``file``: as an argument, or as the receiver of a method but close()."""
    if file is None:
        return False
    if isinstance(call.func, ast.Attribute) and get_dotted(call.func.value) == file:
        return call.func.attr != "close"
    return file in map(get_dotted, [*call.args, *(keyword.value for keyword in call.keywords)])


def judge(observation: Observation) -> list[Finding]:
    """Find lines that write a file in nearly every step; the gain of one of them is proved."""
    n_steps, step_ms = len(observation.plain.rows), compute_step_ms(observation)
    by_file: dict[tuple[Any, ...], list[Site]] = {}
    for site in observation.sites:
        if site.kind == "file_write" and site.n_steps >= EVERY_STEP_SHARE * n_steps:
            by_file.setdefault((site.where,) if site.where else (site.file, site.line), []).append(site)
    findings = []
    for sites in by_file.values():
        write_ms = sum(site.ns for site in sites) / n_steps / 1e6
        if 100 * write_ms / step_ms < MIN_SHARE_PCT:
            continue
        costliest = max(sites, key=lambda site: (site.does != "open", site.ns))  # where it is written, if known
        finding = Finding(
            rule=NAME,
            file=costliest.file,
            line=costliest.line,
            verdict="unconfirmed",
            evidence={"path": costliest.where, "call": costliest.does, "write_ms_per_step": write_ms},
            ceiling_pct=min(100 * write_ms / step_ms, 100.0),
            numerics="equal",
            fix=FIX,
        )
        findings.append(_add_proof(finding, observation))
    return findings


def _add_proof(finding: Finding, observation: Observation) -> Finding:
    path = finding.evidence["path"]
    proof = compute_proof(observation) if path == observation.target else None
    why = None
    if path is None:
        why = "it is another file each time"
    elif path in observation.refused:
        why = observation.refused[path]
    elif path != observation.target:
        why = "another file was compared"
    elif proof is None:
        why = "the run was too short"
    elif not proof.is_quiet:
        why = "too noisy to tell: the step with it differed from itself"
    if why is not None or proof is None:
        return dataclasses.replace(finding, evidence={**finding.evidence, "not_proved": why})
    return dataclasses.replace(
        finding,
        verdict="act" if proof.is_act else "note",
        evidence={
            **finding.evidence,
            "n_rounds": proof.n_rounds,
            "n_a_a_rounds": proof.n_a_a_rounds,
            "a_a_ci95_pct": proof.a_a_ci95_pct,
        },
        gain_pct=proof.gain_pct,
        gain_ci95_pct=proof.gain_ci95_pct,
    )
