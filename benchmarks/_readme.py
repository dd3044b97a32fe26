"""``python -m benchmarks._readme``: writes the table of measured claims in both READMEs from the result files."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import NamedTuple

from benchmarks._runner import RESULTS, ROOT
from benchmarks._schema import Arm, BenchmarkResult, Target
from fulltilt.records import loads

PAGES = (ROOT / "README.md", ROOT / "README.ko.md")
START, END = "<!-- written by python -m benchmarks._readme -->", "<!-- end of what is written -->"


class Row(NamedTuple):
    """One claim and the figure of a result file that it rests on: of a target, or of a case, an arm and a metric."""

    stem: str
    claim: str
    figure: str | tuple[str, str, str]
    decimals: int
    unit: str


ROWS = (
    Row(
        "tuner_peers-cpu",
        "a small CNN with what `fulltilt tune` recommends, over PyTorch's defaults; batch size and recipe as they were",
        "digits, CNN: fulltilt, over the user's own",
        2,
        " ×",
    ),
    Row(
        "tuner_peers-cpu",
        "the same with the batch size freed, which changes the recipe",
        "digits, CNN: fulltilt, batch freed, over the user's own",
        2,
        " ×",
    ),
    Row(
        "search_replay-cpu",
        "speed that a search loses to the best of 336 settings (400 simulated machines, median)",
        "336 points: regret, median, %",
        2,
        " %",
    ),
    Row(
        "memory_prediction-cpu",
        "error of the peak memory that is predicted before anything runs (85 cases of 13 models, median)",
        "median error, pct",
        2,
        " %",
    ),
    Row(
        "trial_startup-cpu",
        "a setting is asked for and trains its first steps, in a process of its own",
        ("first steps done", "zygote, running", "seconds"),
        2,
        " s",
    ),
    Row(
        "loop_overhead-cpu",
        "what the training loop adds to a step of a hand-written one",
        "smallest step: overhead, µs a step",
        0,
        " µs",
    ),
    Row(
        "loop_overhead-cpu",
        "what Lightning's adds, in the same run",
        ("smallest step", "lightning", "overhead_cpu_us_per_step"),
        0,
        " µs",
    ),
    Row(
        "data_path-cpu",
        "images a second from JPEG files, over DataLoader with torchvision v2 (CIFAR-10)",
        "JPEG files: best of ours over best of DataLoader with torchvision v2",
        1,
        " ×",
    ),
    Row(
        "hdf5_loader-cpu",
        "random rows of 5 KB a second out of an HDF5 file, over a Dataset that reads row by row",
        "5 KB rows, h5py's own chunks: stream over per_row",
        0,
        " ×",
    ),
    Row(
        "bilm-cpu",
        "words a second of a bidirectional LSTM with adaptive softmax, over guide 004's own loop",
        "fulltilt adaptive: words/s over the guide",
        1,
        " ×",
    ),
    Row(
        "retain_memory-cpu",
        "one switch on a CPU, `retain_freed_memory`: speed of a small CNN on images of 96 px, over PyTorch's default",
        "small CNN, 64 images of 96 px: times as fast",
        1,
        " ×",
    ),
)
"""In the order of the table; each claim in words that a user has, and one figure."""


def build_table(results: Path = RESULTS) -> str:
    """Write ``ROWS``; the machine is named where it is not the one that most of them come from.

    Raises:
        FileNotFoundError: a row has no result file.
        KeyError: a result lacks the figure that its row speaks of.
    """
    found = {row.stem: loads(BenchmarkResult, (results / f"{row.stem}.json").read_text("utf-8")) for row in ROWS}
    usual = collections.Counter(map(name_machine, found.values())).most_common(1)[0][0]
    lines = [f"| measured on {usual}, where nothing else is said | (95 % interval) | |", "|---|---|---|"]
    for row in ROWS:
        result = found[row.stem]
        machine = "" if name_machine(result) == usual else f", {name_machine(result)}"
        file = f"[{result.name}](benchmarks/results/{row.stem}.json){machine}"
        lines.append(f"| {row.claim} | {say_interval(find_figure(result, row), row.decimals, row.unit)} | {file} |")
    return "\n".join(lines)


def replace_table(page: str, table: str) -> str:
    """Return the page with another table between its markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    head, start, rest = page.partition(START)
    _, end, tail = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page needs a line {START} and after it a line {END}, the table goes between them")
    return f"{head}{START}\n{table}\n{END}{tail}"


def name_machine(result: BenchmarkResult) -> str:
    cpu = re.sub(r"\(R\)|\bProcessor\b", "", result.machine.cpu_model or "unknown processor")
    return f"{result.machine.n_cores_usable} cores of {' '.join(cpu.split())}"


def find_figure(result: BenchmarkResult, row: Row) -> Arm | Target:
    figures: dict[object, Arm | Target] = {(arm.case, arm.arm, arm.metric): arm for arm in result.arms}
    figures |= {target.name: target for target in result.targets}
    return figures[row.figure]


def say(value: float, decimals: int = 0) -> str:
    """Print a figure: ``1,234``, ``−8``, and no ``−0``."""
    text = f"{value:,.{decimals}f}"
    return text.replace("-", "−") if float(text.replace(",", "")) else text.lstrip("-")


def say_interval(figure: Arm | Target, decimals: int = 0, unit: str = "") -> str:
    """Print a figure with its interval: ``12 µs (−8 to 27)``."""
    value = f"**{say(figure.median if isinstance(figure, Arm) else figure.measured, decimals)}{unit}**"
    if figure.ci95 is None or figure.ci95 == (None, None):
        return value
    low, high = ("no bound" if end is None else say(end, decimals) for end in figure.ci95)
    return f"{value} ({low} to {high})"


if __name__ == "__main__":
    written = build_table()
    for path in PAGES:
        path.write_text(replace_table(path.read_text("utf-8"), written), "utf-8")
