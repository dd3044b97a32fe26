"""What tuners leave the user with: ``tune`` against pytorch-autotune and the batch finders of Lightning and Accelerate.

Each tool gets the same model, optimizer, loader and all the time that it takes. What it leaves is written as a plan of
ours, and all plans of a workload take turns in the groups in which ``tune`` proves its own gains: fresh processes that
live at the same time. A finder changes the batch size, and with it the recipe: its samples/s are at its own batch, and
it is held against ``tune --free-batch``, which may do so, too.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks._duel import describe_plan
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge, judge_median
from benchmarks._tuner_cases import CASES, Case
from benchmarks._tuner_tools import TOOLS, Left, Question, ask_tool, is_available
from fulltilt.records import Plan, Trial, TrialRequest
from fulltilt.stats import Comparison, Evidence, Turns
from fulltilt.tuner import ProcessTarget, TuneResult, tune
from fulltilt.tuner.question.source import resolve_target

CLAIM = (
    "What tune leaves the user with trains at 0.97 or more of the speed of what pytorch-autotune leaves, and with the "
    "batch size freed, of what the batch finders of Lightning and Accelerate leave."
)
NEEDS_PEERS = True
DEVICES = ("cpu", "cuda")
DEVICE_NAMES = {"cpu": "cpu", "cuda": "cuda:0"}

OWN, OURS, OURS_FREE = "the user's own", "fulltilt", "fulltilt, batch freed"
LIMIT_RATIO = 0.97
N_GROUPS = 13  # one of the looks at which a comparison may end
DEADLINE_S = 300.0  # of a process that takes turns: some compile first
REPLICATION = "group of fresh processes that take turns"
METHOD = (
    "a peer's seconds are those of its call in a warm process that finds nothing compiled; those of tune hold the "
    "start of every process",
    "there is no memory limit: where a batch finder meets none it ends at the size of the data, or at its own cap",
    "tools that leave the same settings share their measurement",
    "pytorch-autotune asks for a CUDA GPU; its argument device='cpu' is taken, and it offers neither bf16 nor a fused "
    "optimizer there; the search of the digits CNN has the levers that configs/digits.yaml names",
)
OURS_SETTINGS = {OURS: "tune with its defaults", OURS_FREE: "tune --free-batch, else its defaults"}
Measure = Callable[[Mapping[str, Plan]], list[Trial]]
"""Has fresh processes of the plans take turns; returns a row of each by its id, or of those alone that failed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What all tools left, in turns.

    Attributes:
        rates: Plan → its samples/s, one a group.
        failures: Plan that could not be trained each time → why.
        stalled_pct: Of the timed seconds, those of steps that took over five times as long as usual.
    """

    rates: dict[Plan, list[float]]
    failures: dict[Plan, str]
    stalled_pct: float = 0.0

    def compute_ratios(self, plan: Plan, base: Plan) -> list[float]:
        return [a / b for a, b in zip(self.rates[plan], self.rates[base], strict=True)]

    def compare(self, base: Plan, plan: Plan) -> Comparison:
        """Compare as the product does."""
        evidence: Evidence[Plan] = Evidence()
        for rates in zip(self.rates[base], self.rates[plan], strict=True):
            both = zip((base, plan), rates, strict=True)
            evidence.add({one: Turns(samples_per_s=rate, stalled_pct=0.0) for one, rate in both})
        return evidence.compare(base, plan)


def run(context: Context) -> Findings:
    names = [name for name, tool in TOOLS.items() if is_available(tool)]
    missing = [name for name in TOOLS if name not in names]
    cases = list(CASES.values())
    if context.quick:
        names, cases = [name for name in names if name not in ("lightning, power", "lightning, binsearch")], cases[:1]
    arms: list[Arm] = []
    targets: list[Target] = []
    notes = [*METHOD, *([f"not installed here and left out: {', '.join(missing)}"] if missing else [])]
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        for number, case in enumerate(cases):
            own, left = ask_all(case, names, context, Path(folder) / str(number))
            plans = {OWN: own, **build_plans(own, left)}
            with open_turns(case, Path(folder) / str(number) / "turns", context) as measure:
                measured = take_turns(plans, measure, n_groups=2 if context.quick else N_GROUPS)
            arms += describe_tools(case.name, plans, left, measured)
            targets += judge_tools(case.name, plans, measured)
            notes += describe_findings(case.name, plans, left, measured)
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=tuple(notes))


def ask_all(case: Case, names: list[str], context: Context, folder: Path) -> tuple[Plan, dict[str, Left]]:
    """Let every tool search, one after the other; return the user's own plan and what each left."""
    device = DEVICE_NAMES[context.device]
    limits: dict[str, Any] = {"quick": True, "budget": 40.0} if context.quick else {}
    ours = tune(case.target, device=device, out=folder / "tune", **limits)
    free = tune(
        case.target, device=device, out=folder / "free", free_batch=True, settings={"benchmark.batch_sizes": None},
        **limits,
    )  # fmt: skip
    left = {OURS: read_tune(ours), OURS_FREE: read_tune(free)}
    for name in names:
        left[name] = ask_tool(Question(tool=name, case=case.name, device=device, quick=context.quick))
    return ours.user_plan, left


def read_tune(result: TuneResult) -> Left:
    """Say what our own search left in the words of the others."""
    picks = result.picks
    gain, plan = picks.best.gain, picks.recommended.trial.plan
    ahead = None if picks.unproven is None else describe_changes(result.user_plan, picks.unproven.trial.plan)
    return Left(
        settings={name: value for name, value in plan.items() if value != result.user_plan[name]},
        seconds=result.search.seconds,
        said_speedup=None if gain is None else gain.speedup,
        said_ci=None if gain is None else (1 + gain.ci_pct[0] / 100, 1 + gain.ci_pct[1] / 100),
        told=() if ahead is None else (f"of what was ahead and is not proven: {ahead}",),
    )


def build_plans(own: Plan, left: Mapping[str, Left]) -> dict[str, Plan]:
    """Write what each tool left as a plan; a tool that ended with an error has none."""
    return {name: own.replace(**found.settings) for name, found in left.items() if found.settings is not None}


@contextlib.contextmanager
def open_turns(case: Case, folder: Path, context: Context) -> Iterator[Measure]:
    """Yield a function that has plans take turns, in processes set up as a search sets up its own."""
    device = DEVICE_NAMES[context.device]
    aim = resolve_target(case.target, {"run.device": device})
    usual = TrialRequest(
        source=aim.source, device=device, seed=aim.config.run.seed, deadline_s=DEADLINE_S, patience_s=DEADLINE_S
    )
    target = ProcessTarget(usual, folder)
    try:
        yield lambda plans: target.run_group(plans, why="left by a tool, in turns with the others")
    finally:
        target.close()


def take_turns(plans: Mapping[str, Plan], measure: Measure, *, n_groups: int) -> Measured:
    """Measure groups of all different plans. One that fails in any group has no figure, and the others begin anew.

    Raises:
        RuntimeError: the user's own settings cannot be trained.
    """
    ids = {f"p{number}": plan for number, plan in enumerate(dict.fromkeys(plans.values()))}
    groups: list[list[Trial]] = []
    failures: dict[Plan, str] = {}
    while len(groups) < n_groups:
        rows = measure(ids)
        failed = [row for row in rows if row.status != "ok"]
        for row in failed:
            failures[ids.pop(row.id)] = f"{row.status}: {(row.reason or '').partition(' (log: ')[0]}"
        groups = [] if failed else [*groups, rows]
        if plans[OWN] in failures:
            raise RuntimeError(f"{OWN} settings ended with {failures[plans[OWN]]}")
    rates: dict[Plan, list[float]] = collections.defaultdict(list)
    for row in (row for rows in groups for row in rows):
        rates[row.plan].append(row.samples_per_s or 0.0)
    stalled = [row.stalled_pct or 0.0 for rows in groups for row in rows]
    return Measured(rates=dict(rates), failures=failures, stalled_pct=sum(stalled) / len(stalled))


def describe_tools(case: str, plans: Mapping[str, Plan], left: Mapping[str, Left], measured: Measured) -> list[Arm]:
    """Build arms for what each tool took, said and left, beside the user's own."""
    arms: list[Arm] = []
    for name in (OWN, *left):
        note = OURS_SETTINGS.get(name) or (TOOLS[name].settings if name in TOOLS else None)
        build = functools.partial(build_arm, case=case, arm=name, note=note)
        if found := left.get(name):
            figures = {"seconds": found.seconds, "said_interval": float(found.said_ci is not None)}
            if found.said_speedup is not None:
                figures["said_speedup"] = found.said_speedup
            arms += [build([value], metric=metric, unit_of_replication="search") for metric, value in figures.items()]
        plan = plans.get(name)
        if plan is not None and plan in measured.rates:
            columns = {"samples_per_s": measured.rates[plan]}
            if name != OWN:
                columns["ratio_to_own"] = measured.compute_ratios(plan, plans[OWN])
            arms += [
                build([float(plan.effective_batch_size)], metric="effective_batch_size", unit_of_replication="plan")
            ]
            arms += [
                build(values, metric=metric, unit_of_replication=REPLICATION) for metric, values in columns.items()
            ]
    return arms


def judge_tools(case: str, plans: Mapping[str, Plan], measured: Measured) -> Iterator[Target]:
    """Hold what tune left against the user's own settings, and against each peer that may change as much."""
    pairs = [(OURS, OWN), (OURS_FREE, OWN)]
    pairs += [(OURS_FREE if TOOLS[name].frees_batch else OURS, name) for name in plans if name in TOOLS]
    for ours, other in pairs:
        plan, base = plans[ours], plans[other]
        if plan not in measured.rates or base not in measured.rates:
            continue
        title = f"{case}: {ours}, over {other}"
        if plan == base:
            yield judge(title, 1.0, None, at_least=LIMIT_RATIO, note="the same settings")
        else:
            yield judge_median(title, measured.compute_ratios(plan, base), at_least=LIMIT_RATIO)


def describe_findings(
    case: str, plans: Mapping[str, Plan], left: Mapping[str, Left], measured: Measured
) -> Iterator[str]:
    """Say what each tool left, in how long, what that is worth, and what it promised."""
    own = plans[OWN]
    yield f"{case}: effective batch {own.effective_batch_size}; steps stalled {measured.stalled_pct:.1f} % of the time"
    for name, found in left.items():
        if found.settings is None:
            yield f"{case}: {name} ended after {found.seconds:.0f} s without an answer: {found.failure}"
            continue
        plan = plans[name]
        words = [describe_changes(own, plan)]
        if plan.effective_batch_size != own.effective_batch_size:
            words.append(f"another recipe: effective batch {plan.effective_batch_size}")
        words.append(describe_gain(own, plan, measured))
        words.append("it said no gain" if found.said_speedup is None else f"it said {describe_said(found)}")
        yield f"{case}: {name}, {found.seconds:.0f} s: {'; '.join([*words, *found.told])}"


def describe_changes(own: Plan, plan: Plan) -> str:
    changed = [name for name in plan if plan[name] != own[name]]
    return describe_plan(plan, changed) if changed else "the settings as they were"


def describe_gain(own: Plan, plan: Plan, measured: Measured) -> str:
    if plan in measured.failures:
        return f"cannot be trained ({measured.failures[plan]})"
    if plan == own:
        return "so nothing gained"
    found = measured.compare(own, plan)
    low, high = found.ci_pct
    return f"{found.verdict}, {found.gain_pct:+.1f} % (98 % interval {low:+.1f} to {high:+.1f})"


def describe_said(found: Left) -> str:
    ends = "no interval" if found.said_ci is None else f"{found.said_ci[0]:.3g} to {found.said_ci[1]:.3g}"
    return f"{found.said_speedup:.3g} times, {ends}"
