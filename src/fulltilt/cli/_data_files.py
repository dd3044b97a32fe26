"""``fulltilt data make | make-stl10 | repack | prepare-text``: write data files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._shared import build_console, check_at_least, print_result, show_progress
from fulltilt.errors import UsageError
from fulltilt.records import format_bytes

if TYPE_CHECKING:
    from fulltilt.data.tables.hdf5_repack import Repacked


def add_make(actions: argparse._SubParsersAction) -> None:
    make = actions.add_parser(
        "make",
        help="write an HDF5 file in the layout of guide 001",
        description="Write an HDF5 file of synthetic events: input (N, 2, S), label (N, 6), xpmt/ypmt/zpmt (S,).",
    )
    make.add_argument("path", metavar="FILE", help="the file to write, for instance data/events.h5")
    make.add_argument("--n-samples", type=int, default=4096, metavar="N", help="events (default 4096)")
    make.add_argument("--n-sensors", type=int, default=5160, metavar="S", help="sensors (default 5160, the guide's)")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--with-info", action="store_true", help="also write info (N, 9)")
    make.add_argument("--force", action="store_true", help="replace a file that is there")
    make.set_defaults(run=_run_make)


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
    make.set_defaults(run=_run_make_stl10)


def add_repack(actions: argparse._SubParsersAction) -> None:
    repack = actions.add_parser(
        "repack",
        help="write an HDF5 file again with its rows laid out for training",
        description=(
            "Write the samples of an HDF5 file as one array each (or in chunks of whole rows), keep everything else, "
            "and read every row back before the new file takes its name."
        ),
    )
    repack.add_argument("source", metavar="IN", help="the HDF5 file to read")
    repack.add_argument("target", metavar="OUT", help="the file to write")
    repack.add_argument(
        "--dataset",
        nargs="+",
        default=[],
        metavar="NAME",
        help="lay these out too (default: the datasets with as many rows as the largest)",
    )
    repack.add_argument("--chunk-rows", type=int, metavar="N", help="rows of the largest dataset in a chunk")
    repack.add_argument(
        "--compression", choices=["none", "lzf", "gzip"], default="none", help="of the new file (default none)"
    )
    repack.add_argument("--force", action="store_true", help="replace a file that is there")
    repack.set_defaults(run=_run_repack)


def add_prepare_text(actions: argparse._SubParsersAction) -> None:
    prepare = actions.add_parser(
        "prepare-text",
        help="write text files as token ids, with a vocabulary by frequency",
        description=(
            "Count the words of text files, keep the most frequent, and write the ids of all words into a folder that "
            "data.path of a language model names. Every line ends with <eos>, every word left out is <unk>."
        ),
    )
    prepare.add_argument("files", nargs="+", metavar="FILE", help="text files in UTF-8, in order")
    prepare.add_argument("folder", metavar="OUT", help="the folder to write")
    prepare.add_argument(
        "--vocabulary", type=int, default=50_000, metavar="N", help="words at most, <unk> included (default 50000)"
    )
    share = prepare.add_mutually_exclusive_group()
    share.add_argument("--val-share", type=float, default=0.1, metavar="P", help="the last part of the text (0.1)")
    share.add_argument("--val", metavar="FILE", help="a file of its own for validation")
    prepare.add_argument(
        "--tokenizer",
        choices=["whitespace", "words"],
        default="whitespace",
        help="whitespace: the text is tokenised already (default); words: part words from punctuation",
    )
    prepare.add_argument("--force", action="store_true", help="replace what was prepared in the folder before")
    prepare.set_defaults(run=_run_prepare_text)


def _write(write: Callable[..., Any], args: argparse.Namespace, title: str, *names: str, **renamed: str) -> Any:
    """Call ``write`` with the arguments of these names, and of other names on the command line, and show progress."""
    flags = dict(zip(names, names, strict=True)) | renamed | {"force": "force"}
    with show_progress(title) as progress:
        return write(**{name: getattr(args, flag) for name, flag in flags.items()}, progress=progress)


def _run_make(args: argparse.Namespace) -> int:
    check_at_least(args, "--n-samples", 1)
    check_at_least(args, "--n-sensors", 1)
    from fulltilt.data import make_sensor_hdf5

    names = ("path", "n_samples", "n_sensors", "seed", "with_info")
    _write(make_sensor_hdf5, args, f"writing {args.path}", *names)
    print_result(
        build_console(),
        f"{args.path}: {args.n_samples:,} synthetic events of {args.n_sensors:,} sensors, "
        f"{format_bytes(Path(args.path).stat().st_size)}",
        soft_wrap=True,
    )
    return 0


def _run_make_stl10(args: argparse.Namespace) -> int:
    for flag in ("--size", "--labelled", "--limit"):
        check_at_least(args, flag, 1)
    from fulltilt.data import make_stl10

    names = ("source", "target", "size", "limit")
    made = _write(make_stl10, args, f"writing {args.target}", *names, n_labelled="labelled")
    n_bytes = sum(path.stat().st_size for path in Path(args.target).glob("*.bin"))
    print_result(
        build_console(),
        f"{args.target}: {made.n_train:,} labelled, {made.n_unlabeled:,} unlabelled and {made.n_test:,} test images of "
        f"{made.side} × {made.side}, {len(made.classes)} classes, {format_bytes(n_bytes)}",
    )
    return 0


def _run_repack(args: argparse.Namespace) -> int:
    check_at_least(args, "--chunk-rows", 1)
    from fulltilt.data import repack_hdf5

    title, names = f"writing {args.target}, then reading it back", ("source", "target", "chunk_rows", "compression")
    done = _write(repack_hdf5, args, title, *names, datasets="dataset")
    print_result(
        build_console(),
        f"{args.target}: {_describe_rows(done)}, {format_bytes(done.target_bytes)} "
        f"({args.source}: {format_bytes(done.source_bytes)}); every row was read back and is equal "
        f"(BLAKE2b {done.checksum}), {done.seconds:.1f} s",
        soft_wrap=True,
    )
    return 0


def _describe_rows(done: Repacked) -> str:
    """Return ``800 rows of input, label; 200 rows of test``."""
    by_rows: dict[int, list[str]] = {}
    for name, n_rows in zip(done.datasets, done.n_rows, strict=True):
        by_rows.setdefault(n_rows, []).append(name)
    return "; ".join(f"{n_rows:,} rows of {', '.join(names)}" for n_rows, names in by_rows.items())


def _run_prepare_text(args: argparse.Namespace) -> int:
    check_at_least(args, "--vocabulary", 2)
    if not 0 <= args.val_share < 1:
        raise UsageError(f"--val-share {args.val_share:g} is not a share: 0 or more, and below 1")
    from fulltilt.data import prepare_text

    title, names = "counting words, then writing them", ("files", "folder", "val_share", "tokenizer")
    done = _write(prepare_text, args, title, *names, vocab_size="vocabulary", val_file="val")
    print_result(
        build_console(),
        f"{done.folder}: {done.n_train:,} tokens for training, {done.n_val:,} for validation, as {done.dtype}; "
        f"a vocabulary of {done.n_words:,} with <unk>, {done.n_distinct:,} distinct words in the training text, "
        f"{done.unknown_pct:.2f} % of it is <unk>",
        soft_wrap=True,
    )
    if not done.n_val:
        note = "note: no word is left for validation: training from it needs a larger --val-share, or --val"
        build_console(to_stderr=True).print(note, soft_wrap=True)
    return 0
