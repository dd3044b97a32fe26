"""Run ``fulltilt infer search`` as a user does, and measure what it chose."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._runner import ROOT
from fulltilt.infer.search.bench import open_artefacts
from fulltilt.infer.search.result import SearchResult
from fulltilt.records import decode, encode
from fulltilt.stats import Comparison, Evidence, run_group

GROUP_S = 0.8  # of turns in a group


class Searched(NamedTuple):
    result: SearchResult
    seconds: float


def search(*words: str, out: Path) -> Searched:
    """Run a search in a process of its own.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "fulltilt", "infer", "search", *words, "--out", out, "--json", out / "result.json"]
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True, cwd=ROOT)
    result = decode(SearchResult, json.loads((out / "result.json").read_text()))
    return Searched(result, result.seconds)


class Contestant(NamedTuple):
    """An artefact, and what its blocks are of."""

    folder: Path
    order: Mapping[str, Any]


def read_chosen(result: SearchResult) -> Contestant:
    return Contestant(Path(result.artefact), {"policy": encode(result.find(result.chosen).policy), "n_samples": 256})


def compare_in_turns(base: Contestant, other: Contestant, *, n_groups: int) -> tuple[Comparison, list[float]]:
    """Have two artefacts take turns in fresh processes → how much faster the second is, and how many times a group."""
    evidence: Evidence[str] = Evidence()
    contestants = {"base": base, "other": other}
    for _ in range(n_groups):
        with open_artefacts({name: one.folder for name, one in contestants.items()}, base.folder.parent) as arms:
            for name, arm in arms.items():
                arm.order = json.dumps(contestants[name].order)
            evidence.add(run_group(arms, seconds=GROUP_S))
    return evidence.compare("base", "other"), [math.exp(log) for log in evidence.list_log_ratios("base", "other")]
