"""``fulltilt export RUN_FOLDER OUT.safetensors``: write a training's weights, EMA weights by default, as one file."""

import argparse

from fulltilt.cli._shared import build_console, print_result, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN_FOLDER", help="the folder of a training")
    parser.add_argument("out", metavar="OUT.safetensors", help="the file to write")
    parser.add_argument(
        "--weights",
        choices=("ema", "model"),
        help="moving average or the weights as trained (default: the average where there is one)",
    )
    parser.add_argument("--json", metavar="F", help="write what was exported as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    from fulltilt.engine.checkpoints.export import export_weights
    from fulltilt.records import format_bytes

    export = export_weights(args.folder, args.out, weights=args.weights)
    write_json(args.json, export)
    console = build_console(to_stderr=args.json == "-")
    for note in export.notes:
        console.print(f"note: {note}")
    print_result(
        console,
        f"{export.path}: {export.n_tensors} tensors, {format_bytes(export.n_bytes)}, {export.weights} weights of "
        f"step {export.metadata['fulltilt.step']} ({export.checkpoint})",
    )
    for name, value in export.metadata.items() if args.verbose else ():
        console.print(f"  {name}: {value}")
    return 0
