"""Run a search from a configuration: plan it, search, accept the best live, write what was chosen."""

import dataclasses
import functools
import importlib.util
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fulltilt._version import __version__
from fulltilt.config import Config, plan_of
from fulltilt.engine.checkpoints.files import NEWEST, PREVIOUS
from fulltilt.hardware import count_usable_cores, has_c_compiler, read_machine
from fulltilt.infer.manifest import Promise
from fulltilt.infer.search.accept import accept
from fulltilt.infer.search.bench import ProcessBench
from fulltilt.infer.search.front import choose, find_front
from fulltilt.infer.search.journal import FILE, Journal
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.result import Candidate, Live, SearchResult
from fulltilt.infer.search.search import Search
from fulltilt.infer.targets import QUANTILES, Load, Target
from fulltilt.infer.training import describe_training
from fulltilt.levers import Facts, load_inference_catalogue
from fulltilt.records import decode, encode
from fulltilt.records.run_folder import RunFolder, write_atomic

RESULT, CHOSEN, ARTEFACTS = "result.json", "chosen", "artefacts"
N_ACCEPTED = 3
PACKAGES = ("onnxruntime", "onnx", "onnxscript", "torchao", "mslk")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchPlan:
    """A search, decided before any process is started.

    Attributes:
        weights: Folder of the training; None: the model as its function builds it.
        artefact_out: Where the chosen artefact goes; None: into the folder of the search.
    """

    config: Config
    name: str
    goal: Goal
    device: str
    weights: Path | None
    budget_s: float
    is_exhaustive: bool = False
    artefact_out: Path | None = None


def plan_goal(config: Config, targets: tuple[Target, ...], load: Load) -> Goal:
    """Plan what to find the most of: the strictest percentile of the response decides, without one throughput."""
    of_response = [t for t in targets if t.figure == "response_s" and t.statistic in QUANTILES]
    of_batch = [t.limit / 1000 for t in targets if t.figure == "batch_latency_ms"]
    goal = Goal(
        requests_per_s=config.targets.requests_per_s,
        samples_per_request=load.samples_per_request,
        batch_limit_s=min(of_batch, default=None),
        memory_gib=next((t.limit for t in targets if t.figure == "memory_gib"), None),
    )
    if not of_response:
        return goal
    strictest = max(of_response, key=lambda t: QUANTILES[t.statistic or ""])
    return dataclasses.replace(goal, quantile=QUANTILES[strictest.statistic or ""], limit_s=strictest.limit)


def open_search_folder(plan: SearchPlan, out_dir: Path) -> RunFolder:
    """Open and lock the folder of a search. What was measured of other weights or targets is set aside.

    Raises:
        RunFolderError: another process holds it, or it is the folder of another command.
    """
    config = plan.config
    parts = {
        "training": describe_training(config),
        "weights": _stamp(plan.weights),
        "device": plan.device,
        "goal": encode(plan.goal),
        "strategy": _name_strategy(plan),
        "versions": {"fulltilt": __version__, **read_machine().packages},
    }
    results = (FILE, RESULT, ARTEFACTS, CHOSEN)
    return RunFolder(out_dir, fingerprint_parts=parts, command="infer search", results=results, aging=[*parts])


def run_search(plan: SearchPlan, out_dir: Path, *, on_progress: Callable[[int, int, str], None]) -> SearchResult:
    """Search, accept, and write the chosen artefact and ``result.json``.

    Raises:
        FulltiltError: eager fp32 cannot be built or measured. StorageError: no space is left.
    """
    config, journal = plan.config, Journal(out_dir)

    def tell(part: str) -> None:
        spent_ms, budget_ms = round(1000 * journal.spent_s), round(1000 * plan.budget_s)
        on_progress(min(spent_ms, budget_ms - 1), budget_ms, part)

    request = {
        "config": config.to_values(),
        "base_dir": config.base_dir,
        "provenance": config.provenance,
        "device": plan.device,
        "weights": None if plan.weights is None else str(plan.weights),
        "name": plan.name,
    }
    bench = ProcessBench(out_dir, request, journal, tell=tell)
    search = Search(
        bench=bench,
        catalogue=load_inference_catalogue(),
        facts=read_facts(plan.device),
        own=plan_of(config),
        goal=plan.goal,
        budget_s=plan.budget_s,
    )
    search.run_exhaustive() if plan.is_exhaustive else search.run()
    _refuse_large(search)
    if plan.goal.is_capacity:
        _accept_best(search, bench, journal, out_dir)
    chosen = choose(search.offered, plan.goal)
    chosen.status = "chosen"
    artefact = plan.artefact_out or out_dir / CHOSEN
    for row in search.offered:
        row.folder = str(bench.find_artefact(row.name))
    result = _build_result(plan, out_dir, search, journal, chosen, artefact)
    write_chosen(bench.find_artefact(chosen.name), artefact, chosen, result)
    write_atomic(out_dir / RESULT, json.dumps(encode(result), indent=1, ensure_ascii=False) + "\n")
    return result


def read_facts(device: str) -> Facts:
    """Read what guards of levers may know without torch; what only torch or the model tells stays open."""
    machine = read_machine()
    capability = next((d.compute_capability for d in machine.devices if d.compute_capability), None)
    return Facts(
        device_type=device.partition(":")[0],
        compute_capability=capability if device != "cpu" else None,
        n_cores_usable=count_usable_cores(),
        has_c_compiler=has_c_compiler(),
        has_native_bf16=_has_native_bf16() if device == "cpu" else None,
        packages=tuple(name for name in PACKAGES if importlib.util.find_spec(name)),
    )


def write_chosen(source: Path, target: Path, chosen: Candidate, result: SearchResult) -> None:
    """Copy an artefact, with its policy, its promise and the evidence of the search."""
    from fulltilt.infer.artefact import EVIDENCE, read_manifest, write_manifest

    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh)
    evidence, values = fresh / EVIDENCE, encode(result)
    told = ("goal", "gain", "gain_over_naive", "strategy", "cpu_pressure_pct", "utc", "machine")
    kept = {name: values[name] for name in told}
    known = json.loads(evidence.read_text()) | {"search": {"candidate": encode(chosen), **kept}}
    write_atomic(evidence, json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    write_manifest(fresh, dataclasses.replace(read_manifest(fresh), policy=chosen.policy, promise=result.promise))
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def _refuse_large(search: Search) -> None:
    limit = search.goal.memory_gib
    for row in search.offered:
        if limit is not None and row.status != "baseline" and (row.memory_gib or 0.0) > limit:
            row.drop("refused", f"holds {row.memory_gib:.2f} GiB, targets.memory_gib is {limit:g}")


def _accept_best(search: Search, bench: ProcessBench, journal: Journal, out_dir: Path) -> None:
    """Serve and load the best three of the simulation; who misses the target is not offered, eager apart."""
    ranked = sorted(search.offered, key=lambda row: -(row.capacity_requests_per_s or 0.0))
    for row in ranked[:N_ACCEPTED]:
        bench.tell(f"{row.name} under load")
        question = f"accept {row.name} {row.policy} {search.goal}"
        folder = bench.find_artefact(row.name)
        find = functools.partial(accept, row, folder, search.goal, search.arrivals, out_dir / "logs")
        row.live = decode(Live, journal.ask(question, lambda find=find: encode(find())))
        if row.live.verdict == "missed" and row.status != "baseline":
            row.drop("refused", f"missed under load: {row.live.why or 'too many responses were late'}")


def _build_result(
    plan: SearchPlan, out_dir: Path, search: Search, journal: Journal, chosen: Candidate, artefact: Path
) -> SearchResult:
    rows, live = list(search.candidates.values()), chosen.live
    return SearchResult(
        workload=plan.name,
        device=plan.device,
        goal=plan.goal,
        lengths=search.lengths,
        chosen=chosen.name,
        gain=chosen.gain,
        gain_over_naive=search.gain_over_naive,
        artefact=str(artefact),
        promise=decode(Promise, encode(live)) if live is not None and live.verdict == "met" else None,
        front=tuple(row.name for row in find_front(rows)),
        candidates=tuple(rows),
        not_applicable=search.not_applicable,
        strategy=_name_strategy(plan),
        seconds=journal.spent_s,
        budget_s=plan.budget_s,
        n_groups=search.n_groups,
        next=f"fulltilt infer serve {artefact}",
        notes=(*journal.notes, *_note_acceptance(chosen)),
        cpu_pressure_pct=search.cpu_pressure_pct,
        out_dir=str(out_dir),
        utc=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=read_machine(),
    )


def _note_acceptance(chosen: Candidate) -> list[str]:
    """Say what of the acceptance a user has to know: nothing is promised, and why."""
    if chosen.live is None or chosen.live.verdict == "met":
        return []
    why = f": {chosen.live.why}" if chosen.live.why else ""
    share = f"p{100 * chosen.live.quantile:g} within {chosen.live.limit_s:g} s"
    return [f"nothing is promised: {share} at {chosen.live.requests_per_s:g} requests/s is {chosen.live.verdict}{why}"]


def _name_strategy(plan: SearchPlan) -> str:
    return "exhaustive" if plan.is_exhaustive else "halving"


def _stamp(weights: Path | None) -> list[list[Any]]:
    """Describe a checkpoint so that another one in the same folder is told from it."""
    files = [weights / name for name in (NEWEST, PREVIOUS)] if weights else []
    return [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.exists()][:1]


def _has_native_bf16() -> bool:
    words = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & {*words})
