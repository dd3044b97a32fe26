"""``fulltilt compare A B``: hold two results against each other, or train two configurations in turns and measure."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._shared import build_console, is_import_path, note_interruption, print_result, write_json
from fulltilt.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from fulltilt.config import Config
    from fulltilt.stats import Comparison

SUFFIXES = (".yaml", ".yml")
N_DIFFERENCES, N_FIGURES = 10, 8  # that are shown: with what stands around them they fit it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Two configurations are trained in short turns until it is decided which is faster; B may be key=value words "
        "instead, which change A. Two results are read: those of different workloads (another model, data set or "
        "device; of two searches another optimizer, too) are put side by side without differences in percent, and "
        "those of two machines without a verdict. Two trainings may differ in their recipe, optimizer included: their "
        "training time to the quality that both reached says which is better. Refused with exit code 2 are two kinds "
        "of result, two benchmarks, another version of the format, and a file that is not whole."
    )
    add = parser.add_argument
    add("a", metavar="A", help="a configuration (YAML file or module:object); or a result: a file, or a run folder")
    add("b", nargs="+", metavar="B", help="another one of the same kind, or key=value words that change A")
    add("--device", metavar="auto|cuda|cpu", help="device to train on (run.device of the configurations)")
    add(
        "--budget",
        metavar="60s",
        help="wall time of the turns (default 60s), four groups at least; less where that decides",
    )
    add("--json", metavar="F", help="write the comparison as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    if is_configuration(args.a):
        return compare_measured(args)
    if len(args.b) > 1 or is_configuration(args.b[0]) or is_setting(args.b[0]):
        raise UsageError(
            f"{args.a} is a result, and {' '.join(args.b)} is none; give two results or two configurations"
        )
    if flags := [flag for flag, value in (("--device", args.device), ("--budget", args.budget)) if value is not None]:
        raise UsageError(f"{' and '.join(flags)} are for configurations, which are measured now; {args.a} is a result")
    return compare_results(args)


def is_configuration(source: str) -> bool:
    """Return whether ``source`` names something to train, as opposed to a result."""
    return Path(source).suffix.lower() in SUFFIXES or is_import_path(source)


def is_setting(word: str) -> bool:
    """Return whether a word changes a setting: ``key=value``, where no file has that name."""
    return "=" in word and not is_configuration(word) and not Path(word).exists()


def compare_measured(args: argparse.Namespace) -> int:
    """Train both in turns, and say which is faster."""
    from fulltilt.config import parse_duration_s
    from fulltilt.records import encode
    from fulltilt.report.gain import format_gain, say_gain
    from fulltilt.stats.alternation import LEAST_GROUPS
    from fulltilt.tuner.comparing import LIMIT_S, compare_configs

    (a, b), names = _read_configs(args)
    limit_s = LIMIT_S if args.budget is None else parse_duration_s(args.budget)
    console = build_console(to_stderr=args.json == "-", is_screen=True)
    errors = build_console(to_stderr=True)
    kept = "nothing was measured yet"
    with note_interruption(lambda: kept), console.status("starting both") as status:
        begin_s = time.monotonic()

        def tell(known: Comparison) -> None:
            nonlocal kept
            if known.n_groups > 1:
                kept = f"{say_gain(encode(known), 'B', 'A')}, by the {known.n_groups} groups so far"
            so_far = f"B {format_gain(known.gain_pct)}" if known.n_groups > 1 else "measuring"
            if known.n_groups >= LEAST_GROUPS:  # before, an interval says nothing
                so_far += f" ({' to '.join(map(format_gain, known.ci_pct))})"
            took = f"{time.monotonic() - begin_s:.0f} of at most {limit_s:.0f} s"
            status.update(f"{known.n_groups} groups of fresh processes, {took}: {so_far}")
            if not console.is_terminal:
                errors.print(f"group {known.n_groups}: {so_far}")

        result = compare_configs(a, b, names=names, limit_s=limit_s, on_group=tell)
    document = encode(result)
    print_comparison(console, document, is_verbose=args.verbose)
    write_json(args.json, document)
    return 0


def _read_configs(args: argparse.Namespace) -> tuple[tuple[Config, Config], tuple[str, str]]:
    from fulltilt.config import config_for_object, load_config

    device = [f"run.device={args.device}"] if args.device else []

    def load(source: str, words: list[str]) -> Config:
        read = config_for_object if is_import_path(source) else load_config
        return read(source, [*words, *device])

    first = args.b[0]
    is_change = is_setting(first)
    if not is_change and not is_configuration(first):
        raise UsageError(f"{args.a} is a configuration, and {first} is none; give another one, or key=value words")
    source, words = (args.a, args.b) if is_change else (first, args.b[1:])
    names = args.a, " ".join(args.b)
    return (load(args.a, []), load(source, words)), names


def print_comparison(console: Console, document: Mapping[str, Any], *, is_verbose: bool) -> None:
    """Print the sentence, both speeds as bars, and what differs, a line each unless all is asked for."""
    from fulltilt.records import format_rate
    from fulltilt.report.gain import draw_bar, say_gain
    from fulltilt.report.table import format_value
    from fulltilt.report.verdict import describe_noise

    a, b, comparison = document["a"], document["b"], document["comparison"]
    fit: Any = {} if is_verbose else {"no_wrap": True, "overflow": "ellipsis"}
    how = "groups of fresh processes that took turns" if document["takes_turns"] else "rounds of whole processes"
    took = f"{comparison['n_groups']} {how}, {document['seconds']:.0f} s"
    sentence = f"{say_gain(comparison, 'B', 'A')}; {took}."
    print_result(console, sentence[0].upper() + sentence[1:], style="bold")
    rate = a["samples_per_s"]
    reach = [rate * (1 + pct / 100) for pct in comparison["ci_pct"]]
    scale = max(rate, b["samples_per_s"], *(end for end in reach if end < 10 * rate))
    for key, side, interval in (("A", a, ()), ("B", b, reach)):
        shown = side["samples_per_s"]
        figure = f"{draw_bar(shown, scale, interval)}  {format_rate(shown):>9} samples/s"
        console.print(f"{key}  {figure}  {side['name']}", **fit)
    if {"task", "model", "data.dataset"} & {*document["differences"]}:
        console.print("not the same training: only samples/s are compared")
    if not document["differences"]:
        console.print("   no setting differs: this is how far the same training is from itself", style="dim")
    lines = [f"   {k}: {format_value(x)} → {format_value(y)}" for k, (x, y) in document["differences"].items()]
    if not is_verbose and len(lines) > N_DIFFERENCES + 1:
        lines[N_DIFFERENCES:] = [f"   and {len(lines) - N_DIFFERENCES} settings more: --verbose"]
    for line in lines:
        console.print(line, style="dim", **fit)
    if comparison["verdict"] == "undecided":
        console.print("next: a longer --budget, or a quieter machine")
    for line in describe_noise(document):
        console.print(line)


def compare_results(args: argparse.Namespace) -> int:
    """Print how two results came out, which figures differ by more than their spread, and what else does."""
    from rich.text import Text

    from fulltilt.report import compare_text as words
    from fulltilt.report.compare import compare_sides
    from fulltilt.report.compare_sides import read_side
    from fulltilt.report.verdict import N_LINES

    document = compare_sides(read_side(args.a), read_side(args.b[0]))
    write_json(args.json, document)
    console = build_console(to_stderr=args.json == "-", is_screen=not args.verbose)
    sentence = words.describe_result(document)
    print_result(console, sentence, style="bold yellow" if document["refusal"] else "bold")
    with console.capture() as rest:
        for line in words.describe_sides(document):
            console.print(line)
        console.print(f"Figures ({words.describe_statistics(document)})")
        console.print(words.build_figures_table(document, n_rows=None if args.verbose else N_FIGURES))
        console.print("What differs", style="bold")
        for line in words.describe_differences(document):
            console.print(f"  {line}")
        for line in words.describe_remarks(document):
            console.print(f"· {line}")
    lines, room = rest.get().splitlines(), N_LINES - len(Text(sentence).wrap(console, console.width))
    if not args.verbose and len(lines) > room:
        lines[room - 1 :] = [f"{len(lines) - room + 1} lines more: --verbose"]
    console.print(Text.from_ansi("\n".join(lines)))
    return 0
