"""Define arguments and helpers that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._signals import Terminated
from fulltilt.errors import ConfigError, UsageError, name_file, strip_control_codes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from fulltilt.config import Config


PLAIN_WIDTH = 200  # of output that goes to a file or a pipe, where nothing tells a width
SCREEN_WIDTH = 100  # of what a command says last there
LINE_EVERY_S = 10.0  # of progress there
REDRAW_S = 0.1  # of a progress bar on a terminal


SPEECH = argparse.Namespace(is_quiet=False)
"""How much the command that runs says; ``run_command`` sets it from ``--quiet``."""


class JsonDestination(str):
    """Names the file that ``--json`` writes, or stdout as ``-``. It takes one document a run."""

    is_written = False

    def __init__(self, place: str):
        self.stdout = sys.stdout  # while a command runs, what it prints goes to stderr
        self.path = Path(str(place)).absolute()  # code of the model or the data may change the working folder

    def find_obstacle(self) -> str | None:
        """Return why no document can be written there, with the remedy; None where one can."""
        if self != "-" and self.path.is_dir():
            return f"it is a folder; name a file, such as {Path(self) / 'result.json'}"
        if self != "-" and not self.path.resolve().parent.is_dir():
            return f"there is no folder {Path(self).parent}; make it first"
        if self == "-":
            return None
        from fulltilt.records.run_folder import find_other_content

        obstacle = find_other_content(self.path, b"{", b"[")
        return f"it {obstacle}" if obstacle else None

    @property
    def is_file(self) -> bool:
        """Return whether an earlier document lies there."""
        return self != "-" and self.path.is_file()


def add_config_arguments(parser: argparse.ArgumentParser, *, metavar: str = "CONFIG") -> None:
    """Add the configuration, positional or (as the guides have it) behind ``--config``, and ``key=value`` words."""
    parser.add_argument("config", nargs="?", metavar=metavar, help="YAML file, or module:object with a Workload")
    parser.add_argument("--config", dest="config_flag", metavar="CONFIG", help="the same, spelled as a flag")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")


def add_workload_arguments(parser: argparse.ArgumentParser, *, metavar: str = "CONFIG") -> None:
    """Add the configuration, and the flags that say where its data lie and which device it uses."""
    add_config_arguments(parser, metavar=metavar)
    parser.add_argument("--data-path", metavar="P", help="where the data lies (data.path of the configuration)")
    parser.add_argument("--device", metavar="auto|cuda|cpu", help="device to use (run.device of the configuration)")


def add_memory_limit_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-limit",
        metavar="12GiB",
        help="what a process of the run may use of its device, more is out of memory: imitates a smaller one",
    )


def describe_default_out(command: str) -> str:
    """Say where a command writes that is not told where, for its help."""
    return f"default runs/{command}/NAME, or NAME-2 and so on where that holds another run"


def read_config(args: argparse.Namespace) -> Config:
    """Load the configuration that ``args`` names, with its ``key=value`` words and flags on top."""
    from fulltilt.config import config_for_object, load_config

    source = resolve_config_argument(args)
    words: list[str] = list(args.overrides)
    if args.data_path:
        words.append(f"data.path={json.dumps(str(Path(args.data_path).resolve()))}")
    if args.device:
        words.append(f"run.device={args.device}")
    if getattr(args, "epochs", None) is not None:
        words.append(f"run.epochs={args.epochs}")
    try:
        return config_for_object(source, words) if is_import_path(source) else load_config(source, words)
    except ConfigError as error:
        _find_more_problems(error)
        raise


def _find_more_problems(error: ConfigError) -> None:
    """Raise one error of the refused values and of the wrong components beside them."""
    from fulltilt.config.reading import raise_problems

    if (rest := error.rest) is None:
        return
    from fulltilt.engine.build.assemble import find_problems

    # What is missing may be what was refused, and a path is judged by its dataset.
    given = {key for key, place in rest.provenance.items() if place != "default"}
    given -= {"data.path"} if "data.dataset" not in given and ":" not in rest.task else set()
    try:
        more = find_problems(rest)
    except (Exception, SystemExit):  # of a module or loss of the user's own, which is asked again with right values
        return
    raise_problems([*(error.problems or (error,)), *(problem for problem in more if problem.key in given)])


def read_config_to_train(args: argparse.Namespace) -> Config:
    """Load the configuration, and set what its levers want in the environment of a process that loads torch later."""
    from fulltilt.config import plan_of
    from fulltilt.levers import list_environment, set_before_torch

    config = read_config(args)
    set_before_torch(list_environment(plan_of(config)))
    return config


def list_train_words(args: argparse.Namespace, source: str) -> list[str]:
    """Return the ``fulltilt train`` arguments that reproduce the configuration in ``args``."""
    flags = {"--data-path": args.data_path, "--device": args.device}
    given = [word for flag, value in flags.items() if value for word in (flag, value)]
    return [source, *args.overrides, *given]


def read_config_and_words(args: argparse.Namespace) -> tuple[Config, list[str]]:
    """Load the configuration, and list the ``fulltilt train`` arguments that train its model as quietly."""
    args.config, args.config_flag = resolve_config_argument(args), None
    return read_config(args), [*list_train_words(args, args.config), *(["--quiet"] if args.quiet else [])]


def resolve_config_argument(args: argparse.Namespace) -> str:
    """Return the configuration that ``args`` name; raise a UsageError for none, or two different ones."""
    positional, flag = args.config, args.config_flag
    if flag and positional and "=" in positional:
        args.overrides.insert(0, positional)  # with --config, the first word is an override already
        positional = None
    if positional and flag and positional != flag:
        raise UsageError(f"two configurations were given, {positional} and --config {flag}; give one")
    source = positional or flag
    if not source:
        raise UsageError("no configuration was given; name a YAML file or module:object")
    return source


def check_at_least(args: argparse.Namespace, flag: str, smallest: int) -> None:
    """Raise a UsageError where the number behind ``flag`` is given, and below ``smallest``."""
    value = getattr(args, flag.removeprefix("--").replace("-", "_"))
    if value is not None and value < smallest:
        raise UsageError(f"{flag} {value} must be {smallest} or more")


def read_memory_limit_bytes(args: argparse.Namespace) -> int | None:
    """Return ``--memory-limit`` in bytes, None where it was not given; raise a UsageError where it is no size."""
    from fulltilt.config import parse_bytes

    if args.memory_limit is None:
        return None
    try:
        return parse_bytes(args.memory_limit)
    except ConfigError as error:
        raise UsageError(f"--memory-limit {error}") from None


def is_import_path(source: str) -> bool:
    """Return whether ``source`` is ``my_module:workload``, as opposed to a file."""
    return ":" in source and not Path(source).exists()


def build_console(*, to_stderr: bool = False, is_screen: bool = False) -> Console:
    """Build a rich console that prints square brackets literally, and with ``--quiet`` only what ``print_result`` does.

    No text that it prints steers the terminal, whoever wrote it. With ``--json -`` stdout belongs to the document, so
    people read stderr.

    Args:
        is_screen: It prints what a command says last, which fits a screen in a file too.
    """
    from rich.console import Console

    class PipeConsole(Console):
        """rich alone ends the program with exit code 1 where the reader of a pipe is gone."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(strip_control_codes(text), **options)

        def on_broken_pipe(self) -> None:
            self.quiet = True  # what is still said on the way out has no reader either
            raise BrokenPipeError

    console = PipeConsole(stderr=to_stderr, highlight=False, markup=False, quiet=SPEECH.is_quiet)
    if not console.is_terminal:
        console.width = SCREEN_WIDTH if is_screen else PLAIN_WIDTH
    return console


def print_result(console: Console, sentence: str, *, style: str | None = None, soft_wrap: bool = False) -> None:
    """Print the result's sentence, which is what ``--quiet`` leaves, on one line then."""
    is_quiet, console.quiet = console.quiet, False
    console.print(sentence, style=style, soft_wrap=soft_wrap or is_quiet)
    console.quiet = is_quiet


def warn(messages: Iterable[str]) -> None:
    """Print what is said on stderr with ``--quiet`` too, a line each."""
    console = build_console(to_stderr=True)
    for message in messages:
        print_result(console, f"note: {message}", soft_wrap=True)


@contextlib.contextmanager
def note_interruption(describe_kept: Callable[[], str]) -> Iterator[None]:
    """Let an interruption of the block say what is kept of the work."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as interruption:
        interruption.add_note(describe_kept())
        raise


def describe_saved(folders: list[Path]) -> str:
    """Return what ``--resume`` would go on from; loads no torch, as an interrupted start ends at once."""
    from fulltilt.engine.checkpoints.files import find_checkpoint

    kept = "nothing was saved yet" if folders else "training had not begun"
    for folder in filter(find_checkpoint, folders):
        kept = f"saved in {name_file(folder)}; --resume goes on from the newest checkpoint"
    return kept


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[Callable[..., None]]:
    """Yield a function that reports progress (done, total) on stderr, as a bar or as occasional lines.

    A third argument names the part of the work.
    No thread draws: a data worker that is forked must not inherit a held lock.
    """
    from rich.progress import Progress

    console = build_console(to_stderr=True)
    bar = Progress(console=console, auto_refresh=False, transient=True)
    task = bar.add_task(title, total=None)
    began_s = drawn_s = time.monotonic()

    def tell(done: int, total: int, part: str = "") -> None:
        nonlocal drawn_s
        text = f"{title} ({part})" if part else title
        now_s, is_end = time.monotonic(), done >= total
        if console.is_terminal:
            bar.update(task, description=text, completed=done, total=total)
            if is_end:
                bar.stop()
            elif now_s - drawn_s >= REDRAW_S:
                drawn_s = now_s
                bar.start()
                bar.refresh()
        elif total and now_s - drawn_s >= LINE_EVERY_S:
            drawn_s = now_s
            console.print(f"{text}: {100 * done / total:.0f} % after {now_s - began_s:.0f} s", soft_wrap=True)

    try:
        yield tell
    finally:
        if console.is_terminal:
            bar.stop()


def write_json(destination: str | None, document: object) -> None:
    """Write a document, or its JSON text, to a file or to stdout (``-``); nothing where there is no destination."""
    if not destination:
        return
    from fulltilt.records import dumps
    from fulltilt.records.run_folder import write_atomic

    text = document if isinstance(document, str) else dumps(document, indent=1)
    text = text if text.endswith("\n") else text + "\n"
    if destination == "-":
        stdout = destination.stdout if isinstance(destination, JsonDestination) else sys.stdout
        stdout.flush()
        stdout.buffer.write(text.encode(errors="backslashreplace"))  # JSON is UTF-8, whatever the terminal takes
        stdout.buffer.flush()
    else:
        write_atomic(destination.path if isinstance(destination, JsonDestination) else Path(destination), text)
    if isinstance(destination, JsonDestination):
        destination.is_written = True
