"""Resolves a dataset's path: expands ``~`` and starts relative paths at a base folder."""

from pathlib import Path


def resolve_path(path: str | Path, base_dir: str | None) -> Path:
    """Expand ``~``; start a relative path at ``base_dir``, or at the working directory without one."""
    return Path(base_dir or ".") / Path(path).expanduser()
