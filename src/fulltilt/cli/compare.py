"""``fulltilt compare A B``: print what differs between two results, and which figures by more than their spread."""

import argparse

from fulltilt.cli._shared import build_console, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Two results of different workloads (another model, data set or device; of two searches another optimizer, "
        "too) are put side by side without differences in percent, and those of two machines without a verdict; the "
        "first lines say so. Two trainings may differ in their recipe, optimizer included: their training time to the "
        "quality that both reached says which is better. Refused with exit code 2 are two kinds of result, two "
        "benchmarks, another version of the format, and a file that is not whole. A and B are geometric means of a "
        "plan's runs side by side, as in the choice of tune, whose tables show the median run; of a training's folder "
        "they are means over its epochs."
    )
    parser.add_argument("a", metavar="A", help="a result: what --json wrote, a benchmark's file, or a run folder")
    parser.add_argument("b", metavar="B", help="another one of the same kind")
    parser.add_argument("--json", metavar="F", help="write the comparison as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    from fulltilt.report import compare_text as words
    from fulltilt.report.compare import compare_sides
    from fulltilt.report.compare_sides import read_side

    document = compare_sides(read_side(args.a), read_side(args.b))
    write_json(args.json, document)
    console = build_console(to_stderr=args.json == "-")
    for line in words.describe_sides(document):
        console.print(line)
    if refusal := document["refusal"]:
        console.print(f"\nThese two cannot be held against each other: {refusal}.", style="bold yellow")
    console.print("\nWhat differs", style="bold")
    for line in words.describe_differences(document):
        console.print(f"  {line}")
    console.print("\nFigures", style="bold", end="")
    console.print(f" ({words.describe_statistics(document)})")
    console.print(words.build_figures_table(document))
    console.print()
    for line in words.describe_remarks(document):
        console.print(f"· {line}")
    return 0
