"""``WandbLog``: settings and curves of a run for Weights & Biases; offline unless somebody is logged in."""

import contextlib
import netrc
import os
import secrets
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fulltilt.listeners import _tracked
from fulltilt.listeners._tracked import WithFigures, import_package, list_scalars, list_settings
from fulltilt.records import Event, RunEnded, RunStarted

PROJECT = "fulltilt"


class WandbLog:
    """Writes settings and scalars over optimizer steps.

    ``WANDB_MODE`` decides whether anything leaves the machine; without it, a login does (``WANDB_API_KEY``, or
    ``wandb login`` before). Offline the run lies in ``folder/wandb/offline-run-…`` until ``wandb sync`` sends it, and a
    resumed run is another such folder under the same id. A run that starts again without having ended (``Replanned``)
    goes on where it is, with the settings of its start; W&B leaves out steps that it has already. ``WANDB_PROJECT`` and
    ``WANDB_ENTITY`` are honoured.

    Args:
        folder: Of the run; W&B makes its folder ``wandb`` there.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        self._wandb = import_package("wandb", logger="wandb", extra="wandb")
        self._run: Any = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run = self._run or self._start(event)
        elif self._run is None:
            return
        elif isinstance(event, RunEnded):
            run, self._run = self._run, None
            with self._storage_errors("end the run", "its last figures may be missing there"):
                run.summary["reason"] = event.reason
                run.finish(exit_code=1 if event.reason.startswith("failed") else 0)
        elif isinstance(event, WithFigures):
            with self._storage_errors("take a row", "it is missing there"):
                self._run.log(list_scalars(event), step=event.step)

    def _start(self, event: RunStarted) -> Any:
        mode = os.environ.get("WANDB_MODE") or ("online" if has_login(self._wandb) else "offline")
        if mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline is offline, for its crash reports too
        own = self.path / "wandb"
        with self._storage_errors("start", "nothing of this run is logged there"):
            own.mkdir(parents=True, exist_ok=True)
            known_id = _tracked.read_run_id(own, first_step=event.first_step)
            run_id = known_id or secrets.token_hex(4)
            run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=event.name,
                id=run_id,
                dir=str(self.path),
                mode=mode,
                config=list_settings(event),
                resume="allow" if mode == "online" and known_id else None,
                reinit="create_new",
                settings=self._wandb.Settings(silent=True, console="off"),  # the terminal is the progress bar's
            )
            _tracked.write_run_id(own, run_id)
        return run

    def _storage_errors(self, what: str, lost: str) -> AbstractContextManager[None]:
        return _tracked.storage_errors(self._wandb.Error, f"W&B could not {what}", lost)


def has_login(wandb: Any) -> bool:
    """Tell whether W&B finds somebody's key without asking: in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(wandb.setup().settings.base_url).hostname or ""
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if host in netrc.netrc(path).hosts:
                return True
    return False
