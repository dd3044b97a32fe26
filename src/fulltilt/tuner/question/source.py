"""Turn what a user hands to ``tune`` into what a trial process can build."""

from __future__ import annotations

import base64
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.config import Config, config_from_values, load_config
from fulltilt.config.loading import flatten, nest
from fulltilt.errors import UsageError
from fulltilt.records import WorkloadSource
from fulltilt.tuner.question.code_digest import digest_modules, digest_workload

if TYPE_CHECKING:
    from fulltilt.tasks import Workload


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TuneTarget:
    """A workload to tune, in the form that a trial process can build."""

    config: Config
    source: WorkloadSource
    name: str
    code: Mapping[str, str]  # digests of the user's own code as far as it is found; a change of it makes old rows stale

    def name_source(self) -> str:
        """Name what was searched as a command line names it; empty for an object that has no name there."""
        return self.config.source or (self.config.task if ":" in self.config.task else "")


def resolve_target(
    target: Config | Workload | str | os.PathLike[str], settings: Mapping[str, Any] | None = None
) -> TuneTarget:
    """Accept a configuration, its file, ``module:object``, or a Workload.

    Args:
        settings: Dotted keys that win over the configuration: ``{"data.batch_size": 64}``.

    Raises:
        UsageError: it is none of these, or would not read ``data.path``. ConfigError: the configuration cannot be used.
    """
    config, name, pickled, own = _read_target(target)
    if settings:
        values = nest({**flatten(config.to_values()), **settings})
        provenance = config.provenance | dict.fromkeys(settings, "settings")
        config = config_from_values(values, base_dir=config.base_dir, provenance=provenance)
    if pickled is not None and config.data.path is not None:
        raise UsageError(
            f"{config.data.path!r} would not be read: {name} is a Workload that is built already; leave it out, or "
            "have a function of a module build it, def workload(path): return Workload(…)"
        )
    source = WorkloadSource(
        config=config.to_values(),
        base_dir=config.base_dir,
        provenance=config.provenance,
        import_paths=find_import_paths(config.base_dir),
        pickled=pickled,
    )
    code = digest_modules(config, source.import_paths) | own
    return TuneTarget(config=config, source=source, name=config.run.name or name, code=code)


def _read_target(target: Any) -> tuple[Config, str, str | None, dict[str, str]]:
    """Return the configuration, name, pickled workload and digests of the pickled workload's code."""
    if isinstance(target, Config):
        return target, target.run_name, None, {}
    if isinstance(target, str | os.PathLike):
        text = os.fspath(target)
        if ":" in text and not Path(text).exists():
            config = _build_config(task=text)
            return config, config.run_name, None, {}
        config = load_config(text)
        return config, config.run_name, None, {}
    if all(hasattr(target, name) for name in ("model", "dataset", "loss")):
        path, name = find_import_path(target), getattr(target, "name", "workload")
        if path is not None:
            return _build_config(task=path), name, None, {}
        return _build_config(), name, pickle_workload(target), digest_workload(target)
    raise UsageError(
        f"tune takes a Config, a Workload, a configuration file or 'module:object', not {type(target).__name__}"
    )


def _build_config(**values: str) -> Config:
    return config_from_values(values, base_dir=str(Path.cwd()))


def find_import_path(workload: Any) -> str | None:
    """Find ``module:name`` under which a trial can import this very object; None when it has no such name."""
    for module_name, module in list(sys.modules.items()):
        names = {module_name, getattr(module, "__name__", None)}  # __mp_main__ is __main__ under another key
        if "__main__" in names or getattr(module, "__file__", None) is None:
            continue
        # Lazy modules run code on attribute access; their own dictionary does not.
        for name, value in list(vars(module).items()):
            if value is workload:
                return f"{module_name}:{name}"
    return None


def pickle_workload(workload: Any) -> str:
    """Pickle a workload as base64 text; functions of a notebook or of ``__main__`` travel by value.

    Raises:
        UsageError: it holds something that cannot be pickled.
    """
    import cloudpickle

    try:
        return base64.b64encode(cloudpickle.dumps(workload)).decode()
    except Exception as error:  # process boundary: reducers of user objects may raise anything
        raise UsageError(
            f"the workload cannot be sent to a trial process ({type(error).__name__}: {error}); put it into a module "
            "and give 'module:object', and build what cannot be pickled inside its functions"
        ) from error


def find_import_paths(base_dir: str) -> tuple[str, ...]:
    """List the search paths that a trial needs: the base and what is not the interpreter's own."""
    own = [str(Path(prefix).resolve()) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)]
    paths = [base_dir, str(Path.cwd())]
    for entry in sys.path:
        path = Path(entry or ".").resolve()
        if path.is_dir() and not any(path.is_relative_to(prefix) for prefix in own):
            paths.append(str(path))
    return tuple(dict.fromkeys(paths))
