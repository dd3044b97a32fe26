"""Run a search from a configuration: plan it, search, and write what was chosen."""

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fulltilt._version import __version__
from fulltilt.config import plan_of
from fulltilt.engine.checkpoints.files import NEWEST, PREVIOUS
from fulltilt.errors import FulltiltError
from fulltilt.hardware import read_machine
from fulltilt.infer.check import CheckPlan, build_request
from fulltilt.infer.manifest import Promise
from fulltilt.infer.search.bench import ProcessBench
from fulltilt.infer.search.journal import FILE, Journal
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.result import OVER, Candidate, SearchResult, choose, find_front
from fulltilt.infer.search.search import Search
from fulltilt.infer.targets import QUANTILES
from fulltilt.infer.training import describe_training
from fulltilt.levers import load_inference_catalogue
from fulltilt.records import decode, encode
from fulltilt.records.run_folder import RunFolder, write_atomic
from fulltilt.tuner.question.code_digest import digest_modules
from fulltilt.tuner.question.source import find_import_paths

RESULT, CHOSEN, ARTEFACTS = "result.json", "chosen", "artefacts"


def plan_goal(checked: CheckPlan) -> Goal:
    """Plan what to find the most of: the strictest percentile of the response decides, without one throughput."""
    found = [t for t in checked.targets if t.figure == "response_s" and t.statistic in QUANTILES]
    quantile, limit_s = max(((QUANTILES[t.statistic or ""], t.limit) for t in found), default=(0.99, None))
    of_batch = [t.limit / 1000 for t in checked.targets if t.figure == "batch_latency_ms"]
    return Goal(
        requests_per_s=checked.load.requests_per_s,
        samples_per_request=checked.load.samples_per_request,
        quantile=quantile,
        limit_s=limit_s,
        batch_limit_s=min(of_batch, default=None),
        memory_gib=next((t.limit for t in checked.targets if t.figure == "memory_gib"), None),
    )


def open_search_folder(checked: CheckPlan, weights: Path | None, out_dir: Path) -> RunFolder:
    """Open and lock the folder of a search. What was measured of other weights, code, limits or machines is set aside.

    Raises:
        RunFolderError: another process holds it, or it is the folder of another command.
    """
    checkpoints = [weights / name for name in (NEWEST, PREVIOUS)] if weights else []
    machine, inference = read_machine(), checked.config.inference
    parts = {
        "training": describe_training(checked.config),
        "code of the workload": digest_modules(checked.config, find_import_paths(checked.config.base_dir)),
        "weights": [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in checkpoints if f.exists()][:1],
        "device": checked.device,
        "goal": encode(plan_goal(checked)),
        "limits": [inference.max_length, inference.min_sqnr_db, inference.max_metric_drop_pct],
        "threads": plan_of(checked.config)["threads"],
        "versions": {"fulltilt": __version__, **machine.packages},
        "machine": [machine.cpu_model, machine.n_cores_usable, *(device.name for device in machine.devices)],
    }
    results = (FILE, RESULT, ARTEFACTS, CHOSEN)
    claim: dict[str, Any] = {"fingerprint_parts": parts, "command": "infer search", "results": results}
    return RunFolder(out_dir, **claim, writes=results, aging=[*parts])


def run_search(
    checked: CheckPlan,
    weights: Path | None,
    out_dir: Path,
    *,
    budget_s: float,
    artefact: Path,
    on_progress: Callable[[int, int, str], None],
    kind: type[Search] = Search,
) -> SearchResult:
    """Search, and write the chosen artefact and ``result.json``.

    Args:
        checked: What a check would measure; its targets are the search's.
        weights: Folder of the training; None: the model as its function builds it.
        artefact: Where the chosen one goes.

    Raises:
        FulltiltError: eager fp32 cannot be built or measured. StorageError: no space is left.
    """
    if not (out_dir / ARTEFACTS).is_dir():  # somebody removed them: all is built and measured anew
        (out_dir / FILE).unlink(missing_ok=True)
    journal = Journal(out_dir)

    def tell(part: str) -> None:
        spent_ms, budget_ms = round(1000 * journal.spent_s), round(1000 * budget_s)
        on_progress(min(spent_ms, budget_ms - 1), budget_ms, part)

    search = kind(
        bench=ProcessBench(out_dir, {**build_request(checked, weights), "name": checked.name}, journal, tell),
        catalogue=load_inference_catalogue(),
        own=plan_of(checked.config),
        goal=plan_goal(checked),
        budget_s=budget_s,
    )
    search.run()
    result = build_result(search, checked, artefact, out_dir)
    write_chosen(search.bench.find_artefact(result.chosen), artefact, result)
    write_atomic(out_dir / RESULT, json.dumps(encode(result), indent=1, ensure_ascii=False) + "\n")
    return result


def build_result(search: Search, checked: CheckPlan, artefact: Path, out_dir: Path) -> SearchResult:
    """Choose, and put together what was found."""
    chosen = choose(search.offered, search.goal)
    chosen.status = "chosen"
    rows, live = tuple(search.candidates.values()), chosen.live
    return SearchResult(
        workload=checked.name,
        device=checked.device,
        goal=search.goal,
        lengths=search.lengths,
        chosen=chosen.name,
        gain=chosen.gain,
        artefact=str(artefact),
        promise=decode(Promise, encode(live)) if live is not None and live.verdict == "met" else None,
        front=tuple(row.name for row in find_front(rows)),
        candidates=rows,
        not_applicable=search.not_applicable,
        seconds=search.bench.spent_s,
        budget_s=search.budget_s,
        n_groups=search.n_groups,
        next=f"fulltilt infer serve {artefact}",
        notes=(*_note_acceptance(chosen, search.goal), *_note_left_out(rows)),
        cpu_pressure_pct=search.cpu_pressure_pct,
        out_dir=str(out_dir),
        utc=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=read_machine(),
    )


def write_chosen(source: Path, target: Path, result: SearchResult) -> None:
    """Copy an artefact, with its policy, its promise and the evidence of the search."""
    from fulltilt.infer.artefact import EVIDENCE, find_damage, read_manifest, write_manifest

    manifest = read_manifest(source)
    if damage := find_damage(source, manifest, sorted(manifest.files)):
        raise FulltiltError(f"{source}: {damage}; remove {source.parent}, and the same command begins anew")
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh)
    chosen, told = result.find(result.chosen), ("goal", "gain", "cpu_pressure_pct", "utc", "machine")
    search = {"candidate": encode(chosen), **{name: encode(getattr(result, name)) for name in told}}
    evidence = json.loads((fresh / EVIDENCE).read_text()) | {"search": search}
    write_atomic(fresh / EVIDENCE, json.dumps(evidence, indent=1, ensure_ascii=False) + "\n")
    write_manifest(fresh, dataclasses.replace(manifest, policy=chosen.policy, promise=result.promise))
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def _note_acceptance(chosen: Candidate, goal: Goal) -> list[str]:
    """Say what of the acceptance a user has to know: nothing is promised, and why."""
    live = chosen.live
    if goal.limit_s is not None and goal.requests_per_s is None:
        return [
            "targets.response_s was not held, since no rate belongs to its scenario; infer check --artefact holds it"
        ]
    if not goal.is_capacity or (live is not None and live.verdict == "met"):
        return []
    said = chosen.reason if live is None else ": ".join(filter(None, (f"it is {live.verdict}", live.why)))
    return [f"nothing is promised of p{100 * goal.quantile:g} at {goal.requests_per_s:g} requests/s; {said}"]


def _note_left_out(rows: tuple[Candidate, ...]) -> list[str]:
    """Say what there was no time for."""
    counts = Counter(why.removeprefix(OVER).strip() for row in rows if (why := row.reason or "").startswith(OVER))
    said = ", ".join(f"{reason} ({n})" for reason, n in counts.items())
    return [f"{OVER} {said}; the same command with a larger --budget goes on from here"] if said else []
