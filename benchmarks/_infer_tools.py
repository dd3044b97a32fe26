"""Run ``fulltilt infer search`` as a user does, and measure what it chose."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._runner import ROOT
from fulltilt.infer.search.bench import OrderedArm, open_artefacts
from fulltilt.infer.search.result import SearchResult
from fulltilt.records import decode, encode
from fulltilt.stats import Comparison, Evidence, run_group


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


def compare_chosen(base: SearchResult, other: SearchResult, *, n_groups: int, n_samples: int = 256) -> Comparison:
    """Compare what two searches chose, each with its policy, in turns of fresh processes."""
    evidence: Evidence[str] = Evidence()
    results = {"base": base, "other": other}
    folders = {name: Path(result.artefact) for name, result in results.items()}
    for _ in range(n_groups):
        with open_artefacts(folders, folders["base"].parent) as arms:
            orders = {name: order_of(results[name], n_samples) for name in arms}
            evidence.add(run_group({name: OrderedArm(arm, orders[name]) for name, arm in arms.items()}))
    return evidence.compare("base", "other")
