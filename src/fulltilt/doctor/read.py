"""Read training scripts as text and find the lines that may cost time. Nothing is run."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from fulltilt.doctor.calls import build_files
from fulltilt.doctor.finding import Finding
from fulltilt.doctor.hot_loop import HotLoop, find_hot_loops, reach_steps
from fulltilt.doctor.rules import RULES
from fulltilt.doctor.sample_path import reach_samples
from fulltilt.doctor.source import Source, read_source
from fulltilt.errors import UsageError, name_file


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The files that were read and what the rules found in them.

    Attributes:
        files: Paths, relative to the current folder if below it.
        n_lines: Lines of all files together.
        hot_loops: The loops that take training steps.
        unread: Files that could not be read, with line and reason.
    """

    files: list[str]
    n_lines: int
    hot_loops: list[HotLoop]
    findings: list[Finding]
    unread: list[str]


def read_scripts(paths: Sequence[str]) -> Reading:
    """Read files and folders of files as one program.

    Raises:
        UsageError: a path does not exist or holds no Python file, or no file could be read.
    """
    sources: list[Source] = []
    unread: list[str] = []
    for file in dict.fromkeys(file for path in paths for file in _list_files(Path(path))):
        path = name_file(file)
        try:
            sources.append(read_source(file, path))
        except SyntaxError as error:
            unread.append(f"{path}:{error.lineno or 1}: {error.msg}")
        except (ValueError, RecursionError, MemoryError, OSError) as error:
            unread.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    if not sources:
        raise UsageError(f"{unread[0]}; name a file that Python can parse")
    files = build_files(sources)
    hot_loops = find_hot_loops(files)
    for hot in hot_loops:
        reach_steps(files, hot)
    reach_samples(files)
    found: list[Finding] = []
    for source in sources:
        try:
            found += [finding for rule in RULES for finding in rule.read(source)]
        except RecursionError:
            unread.append(f"{source.path}: nested too deep to be judged")
    by_place = {(finding.file, finding.line, finding.rule): finding for finding in reversed(found)}
    return Reading(
        files=[source.path for source in sources],
        n_lines=sum(len(source.lines) for source in sources),
        hot_loops=hot_loops,
        findings=[by_place[place] for place in sorted(by_place)],
        unread=unread,
    )


def _list_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path.resolve()]
    if not path.is_dir():
        raise UsageError(f"{path} is not there; name a Python file or a folder of them")
    files = sorted(_walk(path.resolve()))
    if not files:
        raise UsageError(f"{path} holds no Python file; name the training script or its folder")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, without hidden folders, virtual environments and installed packages."""
    for where, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in ("site-packages", "__pycache__")
            and not (Path(where) / name / "pyvenv.cfg").exists()
        ]
        yield from (Path(where) / name for name in names if name.endswith(".py"))
