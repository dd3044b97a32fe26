"""``fulltilt data make-stl10``: other images in STL-10's binary format."""

from __future__ import annotations

import argparse
from pathlib import Path

from fulltilt.cli._shared import build_console, check_at_least, show_progress
from fulltilt.records import format_bytes


def add_make_stl10(actions: argparse._SubParsersAction) -> None:
    make = actions.add_parser(
        "make-stl10",
        help="write CIFAR-10, or a folder of images, in STL-10's binary format",
        description=(
            "Write images as train_X.bin, train_y.bin, test_X.bin, test_y.bin, class_names.txt and, with --labelled, "
            "unlabeled_X.bin: the format of STL-10, mapped by `dataset: stl10`."
        ),
    )
    make.add_argument("source", metavar="SRC", help="CIFAR-10 in any of its forms, or a folder of class folders")
    make.add_argument("target", metavar="OUT", help="the folder to write")
    make.add_argument("--size", type=int, default=96, metavar="PX", help="pixels along an edge (default 96, STL-10's)")
    make.add_argument("--labelled", type=int, metavar="N", help="training images that keep their label (default all)")
    make.add_argument("--limit", type=int, metavar="N", help="training images at most, and a fifth of it test images")
    make.add_argument("--force", action="store_true", help="replace files that are there")


def run_make_stl10(args: argparse.Namespace) -> int:
    for flag in ("--size", "--labelled", "--limit"):
        check_at_least(args, flag, 1)
    from fulltilt.data import make_stl10

    with show_progress(f"writing {args.target}") as progress:
        made = make_stl10(
            args.source,
            args.target,
            size=args.size,
            n_labelled=args.labelled,
            limit=args.limit,
            force=args.force,
            progress=progress,
        )
    n_bytes = sum(path.stat().st_size for path in Path(args.target).glob("*.bin"))
    build_console().print(
        f"{args.target}: {made.n_train:,} labelled, {made.n_unlabeled:,} unlabelled and {made.n_test:,} test images of "
        f"{made.side} × {made.side}, {len(made.classes)} classes, {format_bytes(n_bytes)}",
        markup=False,
    )
    return 0
