"""``fulltilt init``: write a configuration to start from, of an example or of the user's own code."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._shared import build_console, is_import_path, print_result
from fulltilt.errors import UsageError, format_nearest
from fulltilt.records.run_folder import write_atomic

if TYPE_CHECKING:
    from fulltilt.config import Config
    from fulltilt.tasks import Workload

EXAMPLES = Path(__file__).parents[1] / "examples"
SUFFIX = ".yaml"
DEFAULT = "fulltilt's default"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", metavar="NAME|module:object", help="an example, or a Workload of yours")
    parser.add_argument("--data-path", metavar="P", help="where the data lies: for a Workload whose function takes it")
    parser.add_argument("--out", metavar="FILE", help="the file to write (default NAME.yaml)")


def run(args: argparse.Namespace) -> int:
    console, examples = build_console(is_screen=True), list_examples()
    if args.source is None:
        print_result(
            console, "fulltilt init NAME writes one of these, fulltilt init module:object one for a Workload of yours:"
        )
        for name, path in examples.items():
            if "/" not in name:
                console.print(f"  {name:<26}{read_title(path)}")
        console.print("  and presets/…, guides/…: " + ", ".join(name for name in examples if "/" in name))
        return 0
    if not is_import_path(args.source) and args.source not in examples:
        unknown, module = f"no example is named {args.source}", args.source.removesuffix(".py")
        if Path(f"{module}.py").is_file():
            raise UsageError(f"{unknown}; {module}.py is code: name an object in it, {module}:NAME")
        raise UsageError(f"{unknown}; {format_nearest(args.source, examples)}, or module:object")
    name = args.source.partition("(")[0].replace(":", "_").rpartition("/")[2]
    target = Path(args.out or name + SUFFIX)
    if target.exists():
        raise UsageError(f"{target} is there already; name another with --out")
    typed, place = shlex.quote(str(target)), target.absolute()  # code that is imported may change the working folder
    if is_import_path(args.source):
        text = describe_own(args.source, typed, args.data_path)
    elif args.data_path:
        raise UsageError(f"--data-path is for a Workload of yours; an example takes it as fulltilt check {typed} does")
    else:
        text = read_example(args.source, typed)
    write_atomic(place, text)
    # The first of the commands at its head that is given no other file, which would not be there.
    first = re.search(rf"fulltilt \w+ (?:(?!\{SUFFIX}).)*?{re.escape(typed)}.*?(?=  |$)", text, re.M)
    assert first is not None
    print_result(console, f"{target} is written. Next: {first[0]}", soft_wrap=True)
    return 0


def list_examples() -> dict[str, Path]:
    """Return the name of each configuration that comes with the package → its file."""
    paths = sorted(EXAMPLES.rglob(f"*{SUFFIX}"), key=lambda path: (len(path.parts), path))
    return {str(path.relative_to(EXAMPLES).with_suffix("")): path for path in paths}


def read_title(path: Path) -> str:
    """Return the first sentence of the comment at the head of a configuration."""
    head = path.read_text("utf-8").splitlines()[0].removeprefix("# ")
    return head.partition(": ")[0].partition(". ")[0].rstrip(".")


def read_example(name: str, typed: str) -> str:
    """Return an example for use outside a clone: paths become ``data``, and its own name the one in a shell."""
    text = re.sub(r"(\.\./)+data\b", "data", (EXAMPLES / f"{name}{SUFFIX}").read_text("utf-8"))
    return re.sub(r"configs/([\w/-]+)\.yaml", lambda found: typed if found[1] == name else f"{found[1]}.yaml", text)


def describe_own(source: str, typed: str, data_path: str | None = None) -> str:
    """Write a configuration of ``module:object`` that says what was found in it, and what is fulltilt's default.

    Args:
        typed: Its file, as a shell takes it.

    Raises:
        ConfigError: there is no such object, or it is no Workload and returns none.
    """
    from fulltilt.config import config_for_object
    from fulltilt.config.rewriting import format_yaml
    from fulltilt.engine.build.assemble import build_workload, name_origins

    path = format_yaml(str(Path(data_path).resolve())) if data_path else None
    config = config_for_object(source, [f"data.path={path}"] if path else [])
    workload = build_workload(config)
    is_own = name_origins(config, workload)["optimizer"] == "the workload's own code"
    return "\n".join(
        [*_list_head(format_yaml(source), typed, workload), *_list_settings(config, workload, path, is_own=is_own), ""]
    )


def _list_head(source: str, typed: str, workload: Workload) -> Iterator[str]:
    yield f"# How {source} is trained. What is not written here is at its default: fulltilt schema."
    yield "#"
    for command in ("check", "tune", "train"):
        yield f"#   fulltilt {command} {typed}"
    yield f"task: {source}   # {', '.join(_list_findings(workload))}"
    yield ""


def _list_findings(workload: Workload) -> Iterator[str]:
    dataset: Any = workload.dataset()
    if hasattr(dataset, "__len__"):
        yield f"{len(dataset):,} samples"
    yield f"{sum(parameter.numel() for parameter in workload.model().parameters()):,} parameters"
    yield "with a validation set" if workload.validation else "no validation set: quality goes unseen"


def _list_settings(config: Config, workload: Workload, path: str | None, *, is_own: bool) -> Iterator[str]:
    yield "data:"
    if path:
        yield f"  path: {path}"
    yield f"  batch_size: {config.data.batch_size}   # {DEFAULT}: write yours; tune keeps it without --free-batch"
    yield f"  num_workers: {config.data.num_workers}"
    yield ""
    if is_own:
        assert workload.optimizer is not None
        optimizer = workload.optimizer(workload.model().parameters())
        yield f"# The optimizer is the code's own: {type(optimizer).__name__}, lr {optimizer.param_groups[0]['lr']:g}."
    yield "optim:"
    if not is_own:
        yield f"  optimizer: {config.optim.optimizer}   # {DEFAULT}: write yours, such as sgd(momentum=0.9)"
        yield f"  lr: {config.optim.lr:g}   # {DEFAULT}"
    yield f"  schedule: {config.optim.schedule}   # or cosine"
    yield ""
    yield "run:"
    yield f"  epochs: {config.run.epochs}   # {DEFAULT}"
    yield f"  seed: {config.run.seed}"
