"""``fulltilt``: one file a command, loaded only when it is called, so that ``--help`` needs none of them.

A command module has ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code).
"""

from __future__ import annotations

import argparse
import errno
import importlib
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from fulltilt._version import __version__
from fulltilt.cli._signals import Terminated, unwind_on_signals
from fulltilt.errors import FulltiltError, StorageError, UsageError, find_remedy, strip_control_codes

if TYPE_CHECKING:
    from fulltilt.cli._shared import JsonDestination

COMMANDS = {
    "tune": "find the fastest safe settings for this model, this data and this machine",
    "train": "train from a configuration",
    "report": "learning curves of one training or several as one page",
    "export": "the weights of a training as a safetensors file",
    "contrastive": "pre-train without labels, then linear probe and clustering",
    "compare": "two results of one kind: what differs, and by how much",
    "check": "build everything, push one batch through, and go through the checklist",
    "machine": "what is there, with measured roofs",
    "levers": "the catalogue of performance levers",
    "schema": "the JSON Schema of the configuration",
    "doctor": "why a training script is slow, line by line, and what a fix is worth",
    "infer": "hold a model to targets of latency, memory, throughput and response",
    "lab": "a grid of experiments over the devices of this machine",
    "data": "make, inspect and repack data files",
}
_NEGATIVE = re.compile(r"-\.?\d")
EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_BROKEN_PIPE = 130, 143, 141


class CommandParser(argparse.ArgumentParser):
    """Lets a configuration and ``key=value`` words follow a flag that takes a list, such as ``--num-workers 0 2``.

    argparse alone takes every word up to the next flag for a value of the list. It also takes the ``-5s`` of
    ``--budget -5s`` for a flag; here it is a value, which the check of the budget refuses in its own words.
    """

    def __init__(self, *args: Any, **options: Any):
        self._list_flags: set[str] = set()
        self._value_flags: set[str] = set()
        self._takes_overrides = False
        self._words: list[str] = []
        super().__init__(*args, **options)
        self.set_defaults(parser=self)  # the innermost one, of the command that is named, overrides the others

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        if options.get("nargs") == "+":
            self._list_flags.update(name for name in names if name.startswith("-"))
        self._takes_overrides |= "overrides" in names
        if "nargs" not in options and options.get("action", "store") == "store":
            self._value_flags.update(name for name in names if name.startswith("-"))
        return super().add_argument(*names, **options)

    # typeshed declares three overloads, which one signature of Any covers
    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        self._words = words = self._join_negative(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._free_words(words) if self._takes_overrides else words, namespace)

    def _join_negative(self, words: Sequence[str]) -> list[str]:
        """``--budget -5s`` as ``--budget=-5s``."""
        joined: list[str] = []
        for word in words:
            if joined and "--" not in joined and joined[-1] in self._value_flags and _NEGATIVE.match(word):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def error(self, message: str) -> NoReturn:
        """Wrong usage: argparse's words and its exit, and the document where the words name a place for it."""
        place = _find_json(self._words)
        if place:
            command = next((word for word in (*self.prog.split(), *self._words) if word in COMMANDS), "")
            from fulltilt.cli._shared import JsonDestination

            _write_error(JsonDestination(place), command, message, 2, remedy=None)
        super().error(message)

    def _free_words(self, words: Sequence[str]) -> list[str]:
        """The same words with every list at the end, and in the lists only what can be a value of one."""
        end = words.index("--") if "--" in words else len(words)
        others: list[str] = []
        lists: list[str] = []
        is_in_list = False
        for word in words[:end]:
            if word.startswith("--"):
                is_in_list = word in self._list_flags
            (lists if is_in_list and not _is_no_list_value(word) else others).append(word)
        return [*others, *lists, *words[end:]]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the ``fulltilt`` program. Always ends with SystemExit."""
    sys.exit(run_command(sys.argv[1:] if argv is None else list(argv)))


def run_command(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; argparse's own exits pass through as SystemExit."""
    command = next((word for word in argv if not word.startswith("-")), None)
    args = parse_arguments(build_parser(command), argv)
    if args.command is None:
        build_parser(None).print_help()
        return 2
    if getattr(args, "json", None):
        from fulltilt.cli._shared import JsonDestination

        args.json = JsonDestination(args.json)
    unwind_on_signals()
    try:
        _check_json(args)
        code = args.run(args)
        sys.stdout.flush()  # while an error of it can still be told
        return code
    except FulltiltError as error:
        return _end(args, strip_control_codes(str(error)), error.exit_code, remedy=error.remedy)
    except KeyboardInterrupt as interruption:
        return _end_interrupted(args, "interrupted", interruption, EXIT_INTERRUPTED)
    except Terminated as interruption:
        return _end_interrupted(args, "terminated", interruption, EXIT_TERMINATED)
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:  # process boundary: most come from the user's own model or data, so the trace stays
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room and run it again"
            _end(args, f"{error.strerror}; {remedy}", 1, remedy=remedy)
            _drop_stdout()
            return 1
        traceback.print_exc()
        return _end(args, f"{type(error).__name__}: {error}", 1)


def _end(args: argparse.Namespace, message: str, code: int, *, remedy: str | None = None) -> int:
    """Say on stderr why there is no result, and where ``--json`` leads, unless the result is there already."""
    print(f"fulltilt {args.command}: {message}", file=sys.stderr)
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
        print(f"fulltilt {command}: --json {destination}: {error}", file=sys.stderr)


def _find_json(words: Sequence[str]) -> str | None:
    """The place that ``--json`` names; None where there is none: what follows ``--json --quick`` is a flag."""
    words = [*itertools.takewhile(lambda word: word != "--", words), ""]
    places = [after for word, after in itertools.pairwise(words) if word == "--json"]
    places += [word.removeprefix("--json=") for word in words if word.startswith("--json=")]
    return next((place for place in reversed(places) if place == "-" or not place.startswith("-")), None)


def _is_no_list_value(word: str) -> bool:
    """An override, a YAML file or ``module:object``: none of the lists has values that look like one."""
    return "=" in word or ":" in word or word.endswith((".yaml", ".yml"))


def _end_interrupted(args: argparse.Namespace, how: str, interruption: BaseException, code: int) -> int:
    """With what is kept of the work, as the command noted it on its way out."""
    message = ": ".join([how, *getattr(interruption, "__notes__", ())[:1]])
    return _end(args, message, code, remedy=find_remedy(message))


def _drop_stdout() -> None:
    """Where nobody takes our stdout, Python would complain again while closing it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse, and let ``key=value`` words stand anywhere: argparse alone takes them only right after CONFIG."""
    args, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if len(overrides) != len(rest) or (rest and not hasattr(args, "overrides")):
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += overrides
    return args


def _check_json(args: argparse.Namespace) -> None:
    """Said before the work, not after it."""
    target = getattr(args, "json", None)
    obstacle = target.find_obstacle() if target else None
    if obstacle:
        raise UsageError(f"--json {target}: {obstacle}")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser with every command named and, of them all, only ``command`` loaded."""
    parser = CommandParser(
        prog="fulltilt", description="PyTorch training as fast as your own hardware allows, measured."
    )
    parser.add_argument("--version", action="version", version=f"fulltilt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary.capitalize() + ".", allow_abbrev=False)
        if name == command:
            module = importlib.import_module(f"fulltilt.cli.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser
