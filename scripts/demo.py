"""``make demo``: tune real data on this machine, apply the pick to a copy of the YAML, train with both, compare.

Everything here goes through the command line as a user would; this file lines the commands up and does sums.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fulltilt.config import load_config
from fulltilt.report import format_duration
from fulltilt.report.verdict import describe_verdict
from fulltilt.stats import compute_interval, decide

ROOT = Path(__file__).parents[1]
OUT = ROOT / "demo"
CONFIG = ROOT / "configs" / "digits.yaml"
DEFAULTS = "PyTorch's defaults"  # what configs/digits.yaml says: no workers, fp32, every switch off
N_PAIRS = 3  # trainings of each arm, in turn, each with a seed of its own
MIN_PAIRS, TRAININGS_LIMIT_S = 2, 60.0  # beside other work one pair may take a minute: then fewer are begun
MOST_EPOCHS = 25  # enough for what happens once, such as the first step, to weigh little
MIN_EPOCHS, TRAINING_S = 4, 20.0  # the defaults took three minutes for 25 beside other work
SAID = {
    "faster": "the pick is faster",
    "slower": "the pick is slower",
    "tie": "a tie",
    "too_noisy": "too noisy to tell, other work is on this machine",
}
console = Console(highlight=False)


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "train").mkdir(parents=True)
    tuned = OUT / "digits-tuned.yaml"
    shutil.copy(CONFIG, tuned)

    say("1. find the fastest safe settings")
    run("tune", str(CONFIG), "--budget", "3m", "--out", str(OUT / "tune"), "--apply", str(tuned))

    found = json.loads((OUT / "tune" / "tune.json").read_text())
    if load_config(tuned).digest != load_config(CONFIG).digest:  # else there is nothing to compare
        say("2. train with PyTorch's defaults and with the pick, in turn")
        compare_trainings(tuned, n_epochs=count_epochs(found["savings"]))
    verdict = describe_verdict(found)
    console.print(f"\n{verdict}", style="bold", markup=False)
    console.print(f"report: {OUT / 'tune' / 'report.html'}\nsettings: {tuned}", soft_wrap=True)
    return 0


def count_epochs(savings: dict[str, Any]) -> int:
    """Return how many epochs the defaults are expected to train in the time of one training."""
    return max(MIN_EPOCHS, min(MOST_EPOCHS, int(TRAINING_S * savings["n_epochs"] / savings["before_s"])))


def compare_trainings(tuned: Path, *, n_epochs: int) -> None:
    """Train with the defaults and with the pick in turn, and print how they compare."""
    runs: dict[str, list[dict[str, Any]]] = {DEFAULTS: [], "the pick": []}
    began = time.monotonic()
    for pair in range(N_PAIRS):
        took_s = time.monotonic() - began
        if pair >= MIN_PAIRS and took_s > TRAININGS_LIMIT_S:
            console.print(f"{pair} of {N_PAIRS} pairs took {format_duration(took_s)}: no more are begun")
            break
        order = [(DEFAULTS, CONFIG), ("the pick", tuned)]
        for name, config in order if pair % 2 == 0 else reversed(order):
            runs[name].append(train(name, config, seed=pair, n_epochs=n_epochs))
    report(runs)


def say(text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


def run(*words: str, quiet: bool = False) -> None:
    """Run a fulltilt command and end with its exit code when it fails."""
    if not quiet:
        console.print(f"$ fulltilt {' '.join(words)}", markup=False, style="dim")
    done = subprocess.run([sys.executable, "-m", "fulltilt", *words], capture_output=quiet, text=True)
    if done.returncode:
        sys.stderr.write((done.stdout or "") + (done.stderr or ""))
        sys.exit(done.returncode)


def train(name: str, config: Path, *, seed: int, n_epochs: int) -> dict[str, Any]:
    out = OUT / "train" / f"{config.stem}-{seed}"
    words = ["train", str(config), f"run.seed={seed}", "--epochs", str(n_epochs), "--out", str(out), "--quiet"]
    with console.status(f"training {name}, seed {seed}"):
        run(*words, "--json", f"{out}.json", quiet=True)
    return json.loads(Path(f"{out}.json").read_text())


def report(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print throughput, time to the same validation accuracy, and accuracy: faster must not mean learning worse."""
    every = [result for results in runs.values() for result in results]
    target = min(max(point["metrics"]["accuracy"] for point in result["evaluations"]) for result in every)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "samples/s (95 % interval)", f"time to {100 * target:.1f} % accuracy", "final accuracy"):
        table.add_column(title)
    for name, results in runs.items():
        speeds = [result["samples_per_s"] for result in results]
        low, high = (math.exp(bound) for bound in compute_interval([math.log(speed) for speed in speeds]))
        times = [find_time_to(result, target) for result in results]
        final = [result["metrics"]["accuracy"] for result in results]
        table.add_row(
            name,
            f"{statistics.geometric_mean(speeds):,.0f} ({low:,.0f} to {high:,.0f})",
            f"{format_duration(statistics.median(times))} {describe_range(times, format_duration)}",
            f"{100 * statistics.mean(final):.1f} % {describe_range(final, lambda x: f'{100 * x:.1f}')}",
        )
    console.print(table)
    before, after = ([result["samples_per_s"] for result in results] for results in runs.values())
    decision = decide(before, after, higher_is_better=True)
    low, high = decision.ci_pct
    console.print(
        f"n = {len(before)} trainings each, in turn; throughput {decision.effect_pct:+.0f} % "
        f"({low:+.0f} to {high:+.0f}): {SAID[decision.verdict]}"
    )


def describe_range(values: list[float], show: Callable[[float], str]) -> str:
    return f"({show(min(values))} to {show(max(values))})"


def find_time_to(result: dict[str, Any], target: float) -> float:
    """Return the training seconds until an evaluation first reached ``target``; evaluation itself is not counted."""
    return next(point["training_seconds"] for point in result["evaluations"] if point["metrics"]["accuracy"] >= target)


if __name__ == "__main__":
    sys.exit(main())
