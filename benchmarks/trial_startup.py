"""How long a trial takes to start: through the product's zygote, and by the other ways Python offers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._rounds import Round, compute_means, run_rounds
from benchmarks._runner import ROOT, Context, Findings
from benchmarks._schema import Arm, build_arm, judge
from benchmarks._startup import Startup, list_ways
from fulltilt.config import load_config, plan_of
from fulltilt.records import TrialRequest
from fulltilt.tuner.question.source import resolve_target
from fulltilt.tuner.trials.process import Zygote

NAME = "trial_startup"
CLAIM = "A trial forked from the running zygote starts at least 10 times sooner than one in a fresh Python."
NEEDS_PEERS = False
DEVICES = ("cpu",)

WORKLOAD = "configs/digits.yaml"
OURS, FRESH = "zygote, running", "fresh python"
LIMIT_RATIO = 10.0
REPLICATION = "round of two processes a way, the ways interleaved"

READERS: dict[str, Callable[[Startup], float]] = {
    "request read (first sign of life)": lambda startup: startup.configured_s,
    "model, data and optimizer built": lambda startup: startup.built_s,
    "first steps done": lambda startup: startup.measuring_s,
}


def run(context: Context) -> Findings:
    request = build_request()
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder, Zygote(Path(folder) / "warm.log") as zygote:
        ways = list_ways(request, zygote, Path(folder))
        for start in ways.values():
            start()  # reads files from the disk, starts the zygote and the forkserver
        rounds = run_rounds(list(ways), lambda name: ways[name](), n_rounds=1 if context.quick else 8)
    ratios = compute_ratios(rounds, next(iter(READERS.values())))
    ratio = build_arm(ratios, case="first sign of life", arm=FRESH, metric="ratio", unit_of_replication="round")
    target = judge(f"{FRESH} over {OURS}, first sign of life", ratio.median, ratio.ci95, at_least=LIMIT_RATIO)
    notes = (
        f"the request is the default plan of {WORKLOAD} on the CPU; a trial is ended after its first steps",
        "'zygote, first trial' includes the start of the zygote, which a search pays once",
        "the forkserver has loaded the modules that the zygote has; spawn and fresh python load all of them",
    )
    return Findings(arms=(*build_arms(rounds), ratio), targets=(target,), notes=notes)


def build_arms(rounds: Sequence[Round[Startup]]) -> list[Arm]:
    """Every way at every stage, a figure a round."""
    return [
        build_arm(
            compute_means(rounds, name, read),
            case=case,
            arm=name,
            metric="seconds",
            unit_of_replication=REPLICATION,
        )
        for case, read in READERS.items()
        for name in rounds[0]
    ]


def build_request() -> TrialRequest:
    """The plan of the configuration itself, as a search would ask for it."""
    target = resolve_target(load_config(ROOT / WORKLOAD))
    return TrialRequest(id="startup", source=target.source, plan=plan_of(target.config), device="cpu", n_steps=10)


def compute_ratios(
    rounds: Sequence[dict[str, tuple[Startup, Startup]]], read: Callable[[Startup], float]
) -> list[float]:
    """One a round: fresh Python over the running zygote."""
    pairs = zip(compute_means(rounds, FRESH, read), compute_means(rounds, OURS, read), strict=True)
    return [fresh / ours for fresh, ours in pairs]
