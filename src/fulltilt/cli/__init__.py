"""The ``fulltilt`` program: one file a command, loaded only when it is called, so that ``--help`` answers at once.

A command module has ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code), or one ``run`` an action.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import importlib
import io
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from fulltilt._version import __version__
from fulltilt.cli._signals import Terminated, unwind_on_signals
from fulltilt.errors import (
    FulltiltError,
    StorageError,
    UsageError,
    describe_error,
    find_log,
    find_remedy,
    keep_traceback,
)

if TYPE_CHECKING:
    from fulltilt.cli._shared import JsonDestination

COMMANDS = {
    "init": "write a configuration to start from: an example, or one for your own code",
    "tune": "find the fastest safe settings for this model, this data and this machine",
    "train": "train from a configuration",
    "report": "learning curves of one training or several as one page",
    "export": "the weights of a training as a safetensors file",
    "contrastive": "pre-train without labels, then linear probe and clustering",
    "compare": "which of two configurations trains faster, measured; or what differs between two results",
    "check": "build everything, push one batch through, and go through the checklist",
    "machine": "what is there, with measured roofs",
    "monitor": "GPUs, cores, memory and disk, live",
    "levers": "the catalogue of performance levers",
    "schema": "the JSON Schema of the configuration",
    "doctor": "why a training script is slow, line by line, and what a fix is worth",
    "infer": "hold a model to targets of latency, memory, throughput and response",
    "lab": "a durable queue of experiments over the devices of this machine",
    "data": "make, inspect and repack data files",
    "completion": "what makes a shell complete commands and flags",
}
PLAIN_SIGNS = {
    **{"×": "x", "±": "+-", "µ": "u", "–": "-", "−": "-", "·": "-", "…": "...", "→": "->", "≤": "<=", "≥": ">="},
    **{"█": "#", "░": ".", "━": "-", "●": "o"},
}
"""Sign → what stands for it where a terminal's encoding lacks it."""
_FLAG = re.compile(r"-[^\d.]")  # and not -5s or -.5GiB, which are values
EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_BROKEN_PIPE = 130, 143, 141


class CommandParser(argparse.ArgumentParser):
    """Lets CONFIG and ``key=value`` words stand anywhere, also behind a flag that takes a list (``--num-workers 0 2``).

    argparse alone takes overrides only right after CONFIG, every word after a list flag for a value of the list, and
    the ``-5s`` of ``--budget -5s`` for a flag.
    """

    # typeshed declares three overloads, which one signature of Any covers
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        self._words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None:
            return super().parse_known_args(self._words, namespace)
        parsed, unknown = super().parse_known_args(self._put_flags_last(self._words), namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(self._find_unknown(unknown))}")
        return parsed, unknown

    def _find_unknown(self, unknown: Sequence[str]) -> list[str]:
        """Return the unknown words as they were typed, each flag with what looks like its value."""
        flags = [word for word in unknown if _FLAG.match(word)]
        return [
            word
            for before, word in itertools.pairwise(["", *self._words])
            if word in unknown or (before in flags and not _FLAG.match(word) and not _is_no_list_value(word))
        ]

    def _put_flags_last(self, words: list[str]) -> list[str]:
        """Return the words with flags and their values behind the others; ``--budget -5s`` becomes ``--budget=-5s``."""
        takes_overrides = any(action.dest == "overrides" for action in self._actions)
        end = words.index("--") if "--" in words else len(words)
        others: list[str] = []
        flags: list[str] = []
        action = None  # of the flag whose values are being read
        for word in words[:end]:
            if _FLAG.match(word):
                flags.append(word)
                action = self._find_action(word)
            elif action is None or action.nargs == 0 or (takes_overrides and action.nargs and _is_no_list_value(word)):
                others.append(word)
            elif action.nargs:
                flags.append(word)
            else:
                flags[-1] += f"={word}"
                action = None
        return [*others, *flags, *words[end:]]

    def _find_action(self, word: str) -> argparse.Action | None:
        """Return the action of a flag, which argparse lets users abbreviate."""
        known = self._option_string_actions
        if word in known or not self.allow_abbrev or not word.startswith("--"):
            return known.get(word)
        found = {action for name, action in known.items() if name.startswith(word)}
        return found.pop() if len(found) == 1 else None

    def error(self, message: str) -> NoReturn:
        """Tell wrong usage in argparse's words and, where ``--json`` names a place, in the document there."""
        place = _find_json(self._words)
        if place:
            command = next((word for word in (*self.prog.split(), *self._words) if word in COMMANDS), "")
            from fulltilt.cli._shared import JsonDestination

            _write_error(JsonDestination(place), command, message, 2, remedy=None)
        super().error(message)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the ``fulltilt`` program, and always end with SystemExit."""
    sys.exit(run_command(sys.argv[1:] if argv is None else list(argv)))


def run_command(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; argparse's own exits pass through as SystemExit."""
    _open_closed_streams()
    command = next((word for word in argv if not word.startswith("-")), None)
    args = build_parser(*([command] if command else [])).parse_args(argv)
    args.argv = argv
    if args.command is None:
        build_parser().print_help()
        return 2
    if getattr(args, "json", None):
        from fulltilt.cli._shared import JsonDestination

        args.json = JsonDestination(args.json)
    unwind_on_signals()
    _write_plain_signs()
    from fulltilt.cli import _shared

    try:
        try:
            os.getcwd()
        except FileNotFoundError:
            raise UsageError("the current folder is gone; cd to one that is there") from None
        if args.quiet and args.verbose:
            raise UsageError("--quiet and --verbose ask for opposites; give one")
        _shared.SPEECH.is_quiet = args.quiet
        if getattr(args, "json", None) and (obstacle := args.json.find_obstacle()):  # said before the work, not after
            raise UsageError(f"--json {args.json}: {obstacle}")
        is_document = getattr(args, "json", None) == "-"
        with contextlib.redirect_stdout(sys.stderr) if is_document else contextlib.nullcontext():  # the user's code
            code = args.run(args)  # may print
        sys.stdout.flush()  # while an error of it can still be told
        return code
    except FulltiltError as error:
        return _end(args, describe_error(error), error.exit_code, remedy=error.remedy, log=find_log(error))
    except (KeyboardInterrupt, Terminated) as interruption:
        is_terminated = isinstance(interruption, Terminated)
        kept = getattr(interruption, "__notes__", ())[:1]  # of the work, as the command noted it on its way out
        message = ": ".join(["terminated" if is_terminated else "interrupted", *kept])
        return _end(args, message, EXIT_TERMINATED if is_terminated else EXIT_INTERRUPTED, remedy=find_remedy(message))
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except SystemExit:
        raise
    except BaseException as error:  # process boundary, to whatever the user's code raises: the trace is a file
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room and run it again"
            _end(args, f"{error.strerror}; {remedy}", 1, remedy=remedy)
            _drop_stdout()
            return 1
        log = find_log(error) or keep_traceback(error)
        if not log:  # the disk is full
            traceback.print_exc()
        return _end(args, describe_error(error), 1, log=log)
    finally:
        _shared.SPEECH.is_quiet = False


def _end(args: argparse.Namespace, message: str, code: int, *, remedy: str | None = None, log: str = "") -> int:
    """Say why there is no result, on stderr and where ``--json`` leads unless the result is there already."""
    print(f"fulltilt {args.command}: {message}{log}", file=sys.stderr)
    destination = getattr(args, "json", None)
    if destination:
        _write_error(destination, args.command, message, code, remedy=remedy)
    return code


def _write_error(destination: JsonDestination, command: str, message: str, code: int, *, remedy: str | None) -> None:
    if destination.is_written or destination.find_obstacle():
        return
    if code == UsageError.exit_code and destination.is_file:  # nothing ran: a wrong flag must not cost a result
        return
    from fulltilt.cli._shared import write_json
    from fulltilt.records import VERSION

    document = {"version": VERSION, "command": command, "error": message, "remedy": remedy, "rc": code}
    try:
        write_json(destination, json.dumps(document, indent=1, ensure_ascii=False))
    except (StorageError, OSError) as error:  # the message is on stderr, and the exit code is that of the first error
        if (getattr(error, "strerror", None) or str(error)) not in message:  # that is what ended the work
            print(f"fulltilt {command}: --json {destination}: {error}", file=sys.stderr)


def _find_json(words: Sequence[str]) -> str | None:
    """Return the place that ``--json`` names, or None: what follows in ``--json --quick`` is a flag and no place."""
    words = [*itertools.takewhile(lambda word: word != "--", words), ""]
    places = [after for word, after in itertools.pairwise(words) if word == "--json"]
    places += [word.removeprefix("--json=") for word in words if word.startswith("--json=")]
    return next((place for place in reversed(places) if place == "-" or not place.startswith("-")), None)


def _is_no_list_value(word: str) -> bool:
    """Return whether a word is an override, a YAML file or ``module:object``, which no list has as a value."""
    return "=" in word or ":" in word or word.endswith((".yaml", ".yml"))


def _open_closed_streams() -> None:
    """Lead a closed standard stream nowhere, for good: a file of the work would get its number, and be written to."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115


def _write_plain_signs() -> None:
    """Have signs that stdout's or stderr's encoding lacks replaced, where Python would raise."""

    def replace(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return "".join(PLAIN_SIGNS.get(sign, "?") for sign in error.object[error.start : error.end]), error.end

    codecs.register_error("plain signs", replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain signs")


def _drop_stdout() -> None:
    """Lead stdout nowhere, since Python would complain again while closing one that nobody takes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser(*filled: str) -> argparse.ArgumentParser:
    """Build the parser that names every command, with the arguments of some alone: each costs the load of its file."""
    parser = CommandParser(
        prog="fulltilt", description="PyTorch training as fast as your own hardware allows, measured."
    )
    parser.add_argument("--version", action="version", version=f"fulltilt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary.capitalize() + ".", allow_abbrev=False)
        if name in filled:
            module = importlib.import_module(f"fulltilt.cli.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=getattr(module, "run", None))
            for leaf in list_leaves(sub):
                said = "the result in one sentence, warnings and errors alone"
                leaf.add_argument("--quiet", action="store_true", help=said)
                leaf.add_argument("--verbose", action="store_true", help="all details of the result")
    return parser


def list_leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers that have no actions below them, such as that of ``fulltilt data inspect``."""
    below = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for choices in below:
        for child in choices.values():
            yield from list_leaves(child)
