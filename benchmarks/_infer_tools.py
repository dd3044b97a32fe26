"""Run ``fulltilt infer search`` as a user does, and measure what it chose."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._runner import ROOT
from fulltilt.infer.search.bench import open_artefacts
from fulltilt.infer.search.result import SearchResult
from fulltilt.records import decode, encode
from fulltilt.stats import Comparison, Evidence, Turns, run_group


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
    begin_s = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT)
    return Searched(decode(SearchResult, json.loads((out / "result.json").read_text())), time.monotonic() - begin_s)


def order_of(result: SearchResult, n_samples: int) -> dict[str, Any]:
    return {"policy": encode(result.find(result.chosen).policy), "n_samples": n_samples}


def take_turns(folders: Mapping[str, Path], orders: Mapping[str, Any]) -> dict[str, Turns]:
    """Have artefacts take turns in a group of fresh processes."""
    with open_artefacts(folders, next(iter(folders.values())).parent) as arms:
        for name, arm in arms.items():
            arm.order = json.dumps(orders[name])
        return run_group(arms)


def compare_chosen(base: SearchResult, other: SearchResult, *, n_groups: int, n_samples: int = 256) -> Comparison:
    """Compare what two searches chose, each with its policy, in turns of fresh processes."""
    evidence: Evidence[str] = Evidence()
    results = {"base": base, "other": other}
    folders = {name: Path(result.artefact) for name, result in results.items()}
    orders = {name: order_of(result, n_samples) for name, result in results.items()}
    for _ in range(n_groups):
        evidence.add(take_turns(folders, orders))
    return evidence.compare("base", "other")
