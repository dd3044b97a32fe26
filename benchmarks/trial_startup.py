"""How long a trial takes to start: through the product's zygote, and by the other ways Python offers."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import _rounds
from benchmarks._rounds import compute_ratios, run_rounds
from benchmarks._runner import ROOT, Context, Findings
from benchmarks._schema import build_arm, judge
from benchmarks._startup import FRESH, OURS, STAGES, list_ways
from fulltilt.config import load_config, plan_of
from fulltilt.records import TrialRequest
from fulltilt.tuner.question.source import resolve_target
from fulltilt.tuner.trials.process import Zygote

NAME = "trial_startup"
CLAIM = "A trial forked from the running zygote starts at least 10 times sooner than one in a fresh Python."
NEEDS_PEERS = False
DEVICES = ("cpu",)

WORKLOAD = "configs/digits.yaml"
LIMIT_RATIO = 10.0


def run(context: Context) -> Findings:
    request = build_request()
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder, Zygote(Path(folder) / "warm.log") as zygote:
        ways = list_ways(request, zygote, Path(folder))
        for start in ways.values():
            start()  # reads files from the disk, starts the zygote and the forkserver
        rounds = run_rounds(list(ways), lambda name: ways[name](), n_rounds=1 if context.quick else 8)
    unit = "round of two processes a way, the ways interleaved"
    arms = [
        arm
        for stage, case in STAGES.items()
        for arm in _rounds.build_arms(
            rounds, lambda found, stage=stage: found[stage], case=case, metric="seconds", unit_of_replication=unit
        )
    ]
    ratios = compute_ratios(rounds, FRESH, OURS, lambda found: found["configured"])
    ratio = build_arm(ratios, case="first sign of life", arm=FRESH, metric="ratio", unit_of_replication="round")
    target = judge(f"{FRESH} over {OURS}, first sign of life", ratio.median, ratio.ci95, at_least=LIMIT_RATIO)
    notes = (
        f"the request is the default plan of {WORKLOAD} on the CPU; a trial is ended after its first steps",
        "'zygote, first trial' includes the start of the zygote, which a search pays once",
        "the forkserver has loaded the modules that the zygote has; spawn and fresh python load all of them",
    )
    return Findings(arms=(*arms, ratio), targets=(target,), notes=notes)


def build_request() -> TrialRequest:
    """Ask for the plan of the configuration itself, as a search would."""
    target = resolve_target(load_config(ROOT / WORKLOAD))
    return TrialRequest(id="startup", source=target.source, plan=plan_of(target.config), device="cpu", n_steps=10)
