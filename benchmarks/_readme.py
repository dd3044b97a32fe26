"""``python -m benchmarks._readme``: writes the table of measured claims in README.md again, from the result files."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmarks._runner import RESULTS, ROOT
from benchmarks._schema import Arm, BenchmarkResult, Target
from fulltilt.records import loads

PAGE = ROOT / "README.md"
START, END = "<!-- written by python -m benchmarks._readme -->", "<!-- end of what is written -->"

Describe = Callable[[BenchmarkResult], tuple[str, str]]
"""A result → what is claimed, and what was measured."""


def build_table(results: Path = RESULTS) -> str:
    """Write the rows of ``ROWS``; the machine is named where it is not the one that most of them come from.

    Raises:
        FileNotFoundError: a row has no result file.
        KeyError: a result lacks an arm or a target that its row speaks of.
    """
    found = {stem: loads(BenchmarkResult, (results / f"{stem}.json").read_text("utf-8")) for stem in ROWS}
    usual = collections.Counter(map(name_machine, found.values())).most_common(1)[0][0]
    lines = [f"| claim; machine where none is named: {usual} | measured (95 % interval) | file |", "|---|---|---|"]
    for stem, result in found.items():
        claim, measured = ROWS[stem](result)
        machine = "" if name_machine(result) == usual else f"; {name_machine(result)}"
        lines.append(f"| {claim} | {measured} | [{result.name}](benchmarks/results/{stem}.json){machine} |")
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


def find_arm(result: BenchmarkResult, case: str, arm: str, metric: str) -> Arm:
    return {(a.case, a.arm, a.metric): a for a in result.arms}[case, arm, metric]


def find_target(result: BenchmarkResult, name: str) -> Target:
    return {target.name: target for target in result.targets}[name]


def say(value: float, decimals: int = 0) -> str:
    """Print a figure: ``1,234``, ``−8``, and no ``−0``."""
    text = f"{value:,.{decimals}f}"
    return text.replace("-", "−") if float(text.replace(",", "")) else text.lstrip("-")


def say_range(values: Iterable[float], decimals: int = 0) -> str:
    """Print the least and the largest, or the one."""
    ends = sorted(values)
    low, high = say(ends[0], decimals), say(ends[-1], decimals)
    return low if low == high else f"{low} to {high}"


def say_interval(figure: Arm | Target, decimals: int = 0, unit: str = "") -> str:
    """Print a figure with its interval: ``12 µs (−8 to 27)``."""
    value = say(figure.median if isinstance(figure, Arm) else figure.measured, decimals)
    if figure.ci95 is None or figure.ci95 == (None, None):
        return value + unit
    low, high = ("no bound" if end is None else say(end, decimals) for end in figure.ci95)
    return f"{value}{unit} ({low} to {high})"


def describe_loop(result: BenchmarkResult) -> tuple[str, str]:
    said = []
    for case in ("smallest step", "step 10 ms"):
        arms = {arm.arm: arm for arm in result.arms if (arm.case, arm.metric) == (case, "overhead_cpu_us_per_step")}
        again = arms["hand-written again"]
        low, high = again.ci95
        is_biased = low is not None and high is not None and not low <= 0 <= high
        peers = ", ".join(
            f"{name.capitalize()} {say(arms[name].median)}" for name in ("fabric", "accelerate", "lightning")
        )
        said.append(
            f"{case}: {say_interval(arms['fulltilt'], unit=' µs')}, with metrics, CSV and progress "
            f"{say_interval(arms['fulltilt with metrics, CSV and progress'])}; {peers}; the hand-written loop against "
            f"itself {say_interval(again)}{', though it should be 0' if is_biased else ''}"
        )
    return "CPU time that the training loop adds to a step of a hand-written one", "; ".join(said)


def describe_startup(result: BenchmarkResult) -> tuple[str, str]:
    ours, forkserver, fresh = (
        find_arm(result, "first steps done", arm, "seconds")
        for arm in ("zygote, running", "multiprocessing forkserver", "fresh python")
    )
    others = f"Python's own forkserver with the same modules loaded {say(forkserver.median, 3)}"
    measured = f"{say_interval(ours, 3, ' s')}; {others}; a fresh Python {say(fresh.median, 1)}"
    return "from asking for a trial to its first steps", measured


def describe_cli(result: BenchmarkResult) -> tuple[str, str]:
    return "`fulltilt --help`", say_interval(find_target(result, "fulltilt --help, s"), 3, " s")


def describe_plans(result: BenchmarkResult) -> tuple[str, str]:
    n_plans = say_range(arm.median for arm in result.arms if arm.metric == "plans_in_grid")
    n_same = sum(target.ci95 is None and target.measured == 1 for target in result.targets)
    said = [f"the same plan on {n_same} of {len(result.targets)} workloads"]
    said += [f"{target.name}: {say_interval(target, 2)}" for target in result.targets if target.ci95 is not None]
    return f"recommended plan against the fastest of the whole grid, {n_plans} plans each", "; ".join(said)


WHOLE = "end_to_end_trials"  # the metric of search_replay


def describe_replay(result: BenchmarkResult) -> tuple[str, str]:
    def find(arm: str, metric: str = "regret_pct", case: str = "336 points") -> Arm:
        return find_arm(result, case, arm, metric)

    tpe = (f"{say(find(arm).median, 2)} in {say(find(arm, WHOLE).median)}" for arm in ("tpe_24", "tpe_60"))
    recorded = sorted({arm.case for arm in result.arms if arm.case.startswith("recorded: ")})
    ours, largest = (
        say_range(find(arm, case=case).median for case in recorded) for arm in ("model_first", "largest_that_fits")
    )
    said = (
        f"{say_interval(find('model_first'), 2, ' %')} in {say(find('model_first', WHOLE).median)} whole runs",
        f"Optuna's TPE {', '.join(tpe)}",
        f"largest batch that fits {say(find('largest_that_fits').median)}",
        f"on {len(recorded)} recorded grids {ours} %, largest batch that fits {largest}",
    )
    claim = f"speed lost to the best of 336 plans, {find('model_first').n} simulated workloads, median"
    return claim, "; ".join(said)


def describe_repeat(result: BenchmarkResult) -> tuple[str, str]:
    n_searches, n_elsewhere = result.arms[0].n, result.targets[0].measured
    stalled = re.search(r"steps stalled for up to (\d+ %)", " ".join(result.notes))
    where = f" on a machine where steps stalled for up to {stalled[1]} of the time" if stalled else ""
    measured = f"{say(n_searches - n_elsewhere)} end at one plan or name it as a tie"
    return f"one search, repeated {n_searches} times{where}", measured


def describe_finders(result: BenchmarkResult) -> tuple[str, str]:
    ratios = [target for target in result.targets if "over that of" in target.name]
    models = {target.name.partition(":")[0] for target in ratios}
    unrun = sum(target.measured for target in result.targets if target.name.endswith("that it never ran"))
    said = [f"{say_range((target.measured for target in ratios), 2)} times, medians of {len(ratios)} comparisons"]
    for verdict, met in (("undecided", None), ("slower", False)):
        if those := [target for target in ratios if target.met is met]:
            peers = sorted({target.name.rpartition("over that of ")[2] for target in those})
            said.append(f"{len(those)} of them {verdict} ({'; '.join(peers)})")
    said.append(f"{say(unrun) if unrun else 'none'} of ours recommended without a run")
    claim = "a batch size under a memory limit: throughput of ours over that of Lightning's, Accelerate's and timm's"
    return f"{claim} finders, {len(models)} models", "; ".join(said)


def describe_memory(result: BenchmarkResult) -> tuple[str, str]:
    arm = find_arm(result, "all cases", "fake, corrected", "abs_error_pct")
    models = f" of {arm.n} models" if arm.clusters else ""
    median, p95 = (say_interval(find_target(result, f"{name} error, pct"), 2, " %") for name in ("median", "p95"))
    claim = f"predicted peak memory against the measured one, {len(arm.samples)} cases{models}"
    return claim, f"median error {median}; 95 of 100 within {p95}"


def describe_data(result: BenchmarkResult) -> tuple[str, str]:
    files, memory = (
        find_target(result, f"{case}: best of ours over best of DataLoader with torchvision v2")
        for case in ("JPEG files", "in memory")
    )
    ours = max(a.median for a in result.arms if a.case == "in memory" and a.arm.startswith("fulltilt"))
    whole = find_arm(result, "in memory", "torchvision, by batch", "samples_per_s").median
    return (
        "CIFAR-10 images against DataLoader with torchvision v2, other crops and flips for each",
        f"{say_interval(files, 1, ' times')} as many a second from JPEG files; {say_interval(memory)} from memory, "
        f"{say(ours)} images/s; torchvision on whole batches, another recipe with one draw a batch: {say(whole)}",
    )


def describe_bilm(result: BenchmarkResult) -> tuple[str, str]:
    adaptive = find_target(result, "fulltilt adaptive: words/s over the guide")
    full = find_arm(result, result.arms[0].case, "fulltilt full", "speedup_over_guide")
    race = find_target(result, "fulltilt adaptive: times as fast to the guide's perplexity")
    steps = next(arm.case for arm in result.arms if arm.metric.endswith("to_the_guides_perplexity")).rpartition(", ")[2]
    return (
        "words a second of a bidirectional LSTM on WikiText-2 against the guide's loop, its full softmax replaced by "
        "an adaptive one",
        f"{say_interval(adaptive, 1, ' times')}; with the full one {say_interval(full, 1)}; to the perplexity "
        f"that the guide's loop has after {steps}: {say_interval(race, 1, ' times')} as fast",
    )


def describe_hdf5(result: BenchmarkResult) -> tuple[str, str]:
    over_per_row, over_bound = (
        say_range((target.measured for target in result.targets if target.name.endswith(name)), decimals)
        for name, decimals in ((": stream over per_row", 0), (": ram over bound", 2))
    )
    return (
        "random rows of 5 KB out of an HDF5 file, three layouts, against a Dataset that reads row by row",
        f"medians {over_per_row} times as many a second; with rows of 5 or 40 KB in memory {over_bound} of the speed "
        "of a bare gather",
    )


def describe_retain(result: BenchmarkResult) -> tuple[str, str]:
    ours, other = (
        {arm.case: arm for arm in result.arms if (arm.arm, arm.metric) == (name, "times_as_fast")}
        for name in ("retain_freed_memory", "tcmalloc_minimal")
    )
    said = []
    for case, arm in ours.items():
        parts = [f"{case} {say_interval(arm, 2)}"]
        peak, plain = (find_arm(result, case, name, "rss_peak_gib").median for name in (arm.arm, "as torch has it"))
        if peak > 1.05 * plain:
            parts.append(f"peak of the process {say(100 * (peak / plain - 1))} % higher")
        if case in other:
            parts.append(f"tcmalloc in the C library's place {say(other[case].median, 2)}")
        said.append(", ".join(parts))
    return "`retain_freed_memory`: training on the CPU, times as fast as without it", "; ".join(said)


ROWS: Mapping[str, Describe] = {
    "loop_overhead-cpu": describe_loop,
    "trial_startup-cpu": describe_startup,
    "cli_start-cpu": describe_cli,
    "plan_quality-cpu": describe_plans,
    "search_replay-cpu": describe_replay,
    "search_repeat-cpu": describe_repeat,
    "batch_finders-cpu": describe_finders,
    "memory_prediction-cpu": describe_memory,
    "retain_memory-cpu": describe_retain,
    "data_path-cpu": describe_data,
    "bilm-cpu": describe_bilm,
    "hdf5_loader-cpu": describe_hdf5,
}
"""By the name of the result file, in the order of the table."""


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text("utf-8"), build_table()), "utf-8")
