"""``fulltilt data prepare-text``: text files as token ids with a vocabulary."""

from __future__ import annotations

import argparse
import sys

from fulltilt.cli._shared import build_console, check_at_least, show_progress
from fulltilt.errors import UsageError


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


def run_prepare_text(args: argparse.Namespace) -> int:
    check_at_least(args, "--vocabulary", 2)
    if not 0 <= args.val_share < 1:
        raise UsageError(f"--val-share {args.val_share:g} is not a share: 0 or more, and below 1")
    from fulltilt.data import prepare_text

    with show_progress("counting words, then writing them") as progress:
        done = prepare_text(
            args.files,
            args.folder,
            vocab_size=args.vocabulary,
            val_share=args.val_share,
            val_file=args.val,
            tokenizer=args.tokenizer,
            force=args.force,
            progress=progress,
        )
    build_console().print(
        f"{done.folder}: {done.n_train:,} tokens for training, {done.n_val:,} for validation, as {done.dtype}; "
        f"a vocabulary of {done.n_words:,} with <unk>, {done.n_distinct:,} distinct words in the training text, "
        f"{done.unknown_pct:.2f} % of it is <unk>",
        markup=False,
        soft_wrap=True,
    )
    if not done.n_val:
        print(
            "note: no word is left for validation: training from it needs a larger --val-share, or --val",
            file=sys.stderr,
        )
    return 0
