"""What the peers' batch-size finders recommend, against what ``tune`` recommends: same model, data, limit, machine.

Every finder searches in a process of its own under a memory limit, so that a batch too large truly fails.
What each recommends is then measured by the same engine in fresh trial processes, all of them in every round. These
runs have no limit: a recommendation that would break it still gets its figure, and its memory says so.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._duel import RunPlan, open_runner, span_axes
from benchmarks._peers_finders import FINDERS, is_available
from benchmarks._peers_job import Attempt
from benchmarks._peers_process import Found, Search, run_search
from benchmarks._peers_workloads import CASES, Case
from benchmarks._rounds import Round, compute_means, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge, judge_median
from fulltilt.config import Config, plan_of
from fulltilt.records import PROBES, Trial
from fulltilt.tuner import TuneResult, tune
from fulltilt.tuner.question.source import resolve_target

CLAIM = (
    "The recommended batch size trains at 0.97 or more of the speed of what any peer's batch finder recommends, keeps "
    "the memory limit, and was run before it was recommended."
)
NEEDS_PEERS = True
DEVICES = ("cpu", "cuda")
DEVICE_NAMES = {"cpu": "cpu", "cuda": "cuda:0"}

OURS = "fulltilt"
LIMIT_RATIO = 0.97  # a tie reaches 3 % down: the smaller batch is taken there
N_ROUNDS = 6
MAX_MEASURE_S = 4.0  # of a trial, once its steps are in
REPLICATION = "round of two trial processes a batch size, interleaved"
OURS_SETTINGS = "tune with its defaults; axis: batch size; its seconds hold the start of every trial process"
QUICK_SPACE = {"batch_sizes": (64, 256, 1024), "room_mib": 128}
METHOD = (
    "every finder has the same model, rows in memory, loader (no workers), loss and AdamW, fp32; on a CPU 1 thread",
    "a peer's memory limit is set in its process after one step at the smallest batch: RLIMIT_DATA on a CPU, the "
    "allocator's share on a GPU; tune gets its own by --memory-limit and keeps 20 % of it free, its default",
    "on a CPU a peer's process gives freed tensors back at once (MALLOC_MMAP_THRESHOLD_ of glibc), so that a retry "
    "after a failure starts clean; without it freed memory counts on, and convolutions were seen to end by SIGSEGV",
    "a peer's seconds are those of the finder's call in a warm process; what it tried is seen from inside the step",
    "finders with the same recommendation share its measurement",
    "optimum-benchmark is left out: it runs one configuration a call, so a grid costs as many calls as it has "
    "points and nothing is recommended, and it takes models of transformers, diffusers and timm on generated data "
    'only; 0.6.0 installs beside transformers 5.23.0 and fails there with "cannot import name '
    "'SpecialTokensMixin'\": https://github.com/huggingface/optimum-benchmark",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Batch sizes measured again in turn, and how those failed that have no figure."""

    rounds: list[Round[Trial]]  # keyed by the batch size as text
    failures: dict[int, str]
    limit_gib: float

    def has(self, found: Found) -> bool:
        return found.recommended is not None and found.recommended not in self.failures

    def read(self, found: Found) -> dict[str, list[float]]:
        """Return samples per second and the peak as a share of the limit of what was recommended, one a round."""
        figures = {
            "samples_per_s": lambda trial: trial.samples_per_s or 0.0,
            "memory_peak_pct_of_limit": lambda trial: 100 * (trial.device_memory_peak_gib or 0.0) / self.limit_gib,
        }
        size = str(found.recommended)
        return {metric: compute_means(self.rounds, size, read) for metric, read in figures.items()}

    def compute_ratios(self, ours: Found, other: Found) -> list[float]:
        pairs = zip(self.read(ours)["samples_per_s"], self.read(other)["samples_per_s"], strict=True)
        return [a / b for a, b in pairs]


def run(context: Context) -> Findings:
    names = [name for name, finder in FINDERS.items() if is_available(finder)]
    missing = [name for name in FINDERS if name not in names]
    if context.quick:
        names = list({FINDERS[name].package: name for name in reversed(names)}.values())  # the first of each peer
    notes = [*METHOD, *([f"not installed here and left out: {', '.join(missing)}"] if missing else [])]
    arms: list[Arm] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        for number, case in enumerate(list_cases(context)):
            findings = compare_finders(case, names, context, Path(folder) / str(number))
            arms += findings.arms
            targets += findings.targets
            notes += findings.notes
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=tuple(notes))


def compare_finders(case: Case, names: Sequence[str], context: Context, folder: Path) -> Findings:
    """Run all searches, then everything that was recommended side by side. Cost: minutes; ``--quick`` most of one."""
    settings = build_settings(case, context)
    aim = resolve_target(case.target, settings)
    max_measure_s = 0.3 if context.quick else MAX_MEASURE_S
    with open_runner(
        aim, folder / "measured", device=DEVICE_NAMES[context.device], max_measure_s=max_measure_s,
        why="recommended, measured beside the others",
    ) as run_plan:  # fmt: skip
        limit_bytes = find_limit_bytes(case, aim.config, context, run_plan)
        searches = {name: run_search(plan_search(name, case, context)) for name in names}
        options: dict[str, Any] = {"quick": True, "budget": 60.0} if context.quick else {}
        result = tune(case.target, settings=settings, memory_limit=limit_bytes, out=folder / "tune", **options)
        plan = result.picks.recommended.trial.plan
        searches = {OURS: describe_tune(result), **searches}
        measured = measure_again(
            sorted({found.recommended for found in searches.values() if found.recommended}),
            lambda size: run_plan(plan.replace(batch_size=size)),
            n_rounds=1 if context.quick else N_ROUNDS,
            limit_bytes=limit_bytes,
        )
    return Findings(
        arms=tuple(describe_searches(case.name, searches, measured)),
        targets=tuple(judge_searches(case.name, searches, measured)),
        notes=tuple(describe_findings(case, searches, measured)),
    )


def list_cases(context: Context) -> list[Case]:
    """Return both; when quick the one with the small steps, with a space and a limit to match."""
    if not context.quick:
        return list(CASES.values())
    return [dataclasses.replace(CASES["digits, small transformer"], **QUICK_SPACE)]


def build_settings(case: Case, context: Context) -> dict[str, Any]:
    """Span one axis, the batch size: it is the only lever that the peers have."""
    n_steps = 3 if context.quick else 10
    return {"data.batch_size": 64, **span_axes(case.batch_sizes, [0], {}, device=context.device, n_steps=n_steps)}


def plan_search(name: str, case: Case, context: Context) -> Search:
    n_steps = FINDERS[name].n_steps
    return Search(
        finder=name,
        case=case.name,
        device=DEVICE_NAMES[context.device],
        n_steps=min(3, n_steps) if context.quick else n_steps,
        smallest=min(case.batch_sizes),
        largest=max(case.batch_sizes),
        room_mib=case.room_mib,
    )


def find_limit_bytes(case: Case, config: Config, context: Context, run_plan: RunPlan) -> int:
    """Return the limit of a trial that leaves it the room of the case.

    On a CPU the room is beside what a run of the smallest batch holds, as the peers get theirs beside what a first step
    holds.

    Raises:
        RuntimeError: the smallest batch cannot be run.
    """
    room_bytes = case.room_mib * 2**20
    if context.device == "cuda":
        return room_bytes
    trial = run_plan(plan_of(config).replace(batch_size=case.batch_sizes[0]))
    if trial.device_memory_peak_gib is None:
        raise RuntimeError(f"{case.name}: batch size {case.batch_sizes[0]} ended with {trial.status}: {trial.reason}")
    return int(trial.device_memory_peak_gib * 2**30) + room_bytes


def describe_tune(result: TuneResult) -> Found:
    """Say our own search in the words of the others: probes and processes that took turns count as trials."""
    runs = [*result.trials, *result.repeats, *(row for row in result.probes if row.kind != "memory")]
    tried = tuple(
        Attempt(
            batch_size=row.plan["batch_size"],
            largest_step=row.plan["batch_size"] if row.status == "ok" and row.kind not in PROBES else 0,
            status=row.status,
            said=_cut_log(row.reason),
        )
        for row in runs
        if row.status != "skipped"
    )
    recommended = result.picks.recommended.trial.plan["batch_size"]
    return Found(recommended=recommended, seconds=result.search.seconds, tried=tried)


def measure_again(
    sizes: Sequence[int], run_batch: Callable[[int], Trial], *, n_rounds: int, limit_bytes: int
) -> Measured:
    """Run all sizes in every round. One that failed in any of its runs has no figure: the others would flatter it."""
    names = [str(size) for size in sizes]
    rounds = run_rounds(names, lambda size: run_batch(int(size)), n_rounds=n_rounds) if names else []
    failures = {}
    for size in names:
        trials = [trial for blocks in rounds for trial in blocks[size]]
        failed = [trial for trial in trials if trial.status != "ok"]
        if failed:
            said = f"{failed[0].status}: {_cut_log(failed[0].reason)}"
            failures[int(size)] = f"{len(failed)} of {len(trials)} runs failed, {said}"
    return Measured(rounds=rounds, failures=failures, limit_gib=limit_bytes / 2**30)


def describe_searches(case: str, searches: Mapping[str, Found], measured: Measured) -> list[Arm]:
    """Build arms for what each search cost and came to, for the speed and memory of that, and our speed over it."""
    arms = []
    for name, found in searches.items():
        note = OURS_SETTINGS if name == OURS else FINDERS[name].settings
        build = functools.partial(build_arm, case=case, arm=name, note=note)
        figures = {"trials": len(found.tried), "out_of_memory": found.n_out_of_memory, "seconds": found.seconds}
        if found.recommended is not None:
            figures["recommended_batch_size"] = found.recommended
            figures["recommended_was_run"] = int(found.has_run_its_own)
        arms += [build([float(v)], metric=metric, unit_of_replication="search") for metric, v in figures.items()]
        if not measured.has(found):
            continue
        columns = measured.read(found)
        if name != OURS and measured.has(searches[OURS]):
            columns["ratio_of_fulltilt_to_it"] = measured.compute_ratios(searches[OURS], found)
        arms += [build(values, metric=metric, unit_of_replication=REPLICATION) for metric, values in columns.items()]
    return arms


def judge_searches(case: str, searches: Mapping[str, Found], measured: Measured) -> list[Target]:
    """Hold our recommendation against each peer's and against the limit, and ask whether it was run."""
    ours = searches[OURS]
    never_run = float(not ours.has_run_its_own)
    targets = [judge(f"{case}: recommendations of fulltilt that it never ran", never_run, None, at_most=0)]
    if not measured.has(ours):
        return targets
    title = f"{case}: memory of fulltilt's, % of the limit"
    targets.append(judge_median(title, measured.read(ours)["memory_peak_pct_of_limit"], at_most=100))
    for name, found in searches.items():
        if name == OURS or not measured.has(found):
            continue
        title = f"{case}: fulltilt's over that of {name}"
        if found.recommended == ours.recommended:
            targets.append(judge(title, 1.0, None, at_least=LIMIT_RATIO, note="the same batch size"))
        else:
            targets.append(judge_median(title, measured.compute_ratios(ours, found), at_least=LIMIT_RATIO))
    return targets


def describe_findings(case: Case, searches: Mapping[str, Found], measured: Measured) -> Iterator[str]:
    """Say in words what was not run, what failed and how it was said, and what a search did not survive."""
    limit = f"limit {measured.limit_gib * 1024:.0f} MiB, {case.room_mib} of it beside what is loaded"
    yield f"{case.name}: space {case.batch_sizes[0]} to {case.batch_sizes[-1]}, {limit}"
    for name, found in searches.items():
        if found.failure is not None:
            yield f"{case.name}: {name} ended without a recommendation: {found.failure}"
        elif not found.has_run_its_own:
            largest = max((a.largest_step for a in found.tried if a.status == "ok"), default=0)
            yield f"{case.name}: {name} recommends {found.recommended}, never run; the largest it ran was {largest}"
        if found.recommended in measured.failures:
            yield f"{case.name}: {found.recommended} of {name} was left out: {measured.failures[found.recommended]}"
        words = [a.said or "ended outside the training step" for a in found.tried if a.status != "ok"]
        if words:
            yield f"{case.name}: {name}, first of {len(words)} failures: {words[0]}"


def _cut_log(reason: str | None) -> str | None:
    """Cut off the path of a log that is gone when the result is read."""
    return None if reason is None else reason.partition(" (log: ")[0]
