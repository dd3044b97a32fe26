"""``MlflowLog``: settings and curves of a run for MLflow, in a file of the run's folder or on a tracking server."""

import logging
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fulltilt.listeners import _tracked
from fulltilt.listeners._held import HeldEvents
from fulltilt.listeners._tracked import WithFigures, import_package, list_scalars, list_settings
from fulltilt.records import Event, RunEnded, RunStarted

EXPERIMENT = "fulltilt"
N_METRICS_PER_CALL, N_PARAMS_PER_CALL = 1000, 100  # MLflow refuses more in one call
MAX_PARAM_LENGTH = 6000
STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}  # anything else failed


class MlflowLog:
    """Writes parameters and metrics over optimizer steps.

    Without a tracking server the store is ``mlflow.db`` (SQLite) in ``folder``, and nothing leaves the machine:
    ``mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db``. A resumed run goes on in the run of the start; steps
    that are taken again after a crash stand there twice, since MLflow takes nothing back. So does one that starts again
    without having ended (``Replanned``), with the parameters of its start.

    Logging intervals are stored once a second (``_held.py``). What a server does not take is kept and sent with what
    comes next.

    Attributes:
        tracking_uri: Of the store; ``MLFLOW_TRACKING_URI`` where that is set, else the file in ``folder``.
        run_id: MLflow's name of the run; None before it began.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder).resolve()
        local = f"sqlite:///{self.path}/mlflow.db"
        self.tracking_uri = os.environ.get("MLFLOW_TRACKING_URI") or local
        self._is_local = self.tracking_uri == local
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it reports to a server from a thread otherwise
        self._mlflow = import_package("mlflow", logger="mlflow", extra="mlflow")
        # mlflow-skinny installs without it and fails at its first write
        import_package("sqlalchemy", logger="mlflow", extra="mlflow")
        for name in ("mlflow.store.db.utils", "alembic"):  # they tell every table they make, through the progress bar
            logging.getLogger(name).setLevel(logging.WARNING)
        self._held = HeldEvents()
        self._client: Any = None
        self._unsent: list[Any] = []
        self._is_open = False
        self.run_id: str | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted) and not self._is_open:
            self._start(event)
        if self.run_id is None or not (due := self._held.add(event)):
            return
        self._unsent += [metric for held in due for metric in self._list_metrics(held)]
        while self._unsent:
            part = self._unsent[:N_METRICS_PER_CALL]
            with self._storage_errors(f"{len(self._unsent)} figures wait"):
                self._client.log_batch(self.run_id, metrics=part)
            del self._unsent[: len(part)]
        if isinstance(event, RunEnded):
            self._is_open = False
            with self._storage_errors("the run stays open there"):
                self._client.set_tag(self.run_id, "fulltilt.reason", event.reason)
                status = STATUS.get(event.reason, "FAILED")
                self._client.set_terminated(self.run_id, status, _to_ms(event.time_s))

    def _start(self, event: RunStarted) -> None:
        self.run_id = None
        with self._storage_errors("nothing of this run is logged there"):
            self.path.mkdir(parents=True, exist_ok=True)
            self._client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
            if run_id := _tracked.read_run_id(self.path, first_step=event.first_step):
                self._client.update_run(run_id, status="RUNNING")
            else:
                _tracked.write_run_id(self.path, run_id := self._create_run(event))
            self.run_id = run_id
        self._is_open = True

    def _create_run(self, event: RunStarted) -> str:
        entities = self._mlflow.entities
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        place = f"{self.path.as_uri()}/artifacts" if self._is_local else None
        experiment = found.experiment_id if found else self._client.create_experiment(name, artifact_location=place)
        run = self._client.create_run(experiment, start_time=_to_ms(event.time_s), run_name=event.name)
        settings = list_settings(event).items()
        params = [entities.Param(_clean(key), str(value)[:MAX_PARAM_LENGTH]) for key, value in settings]
        for start in range(0, len(params), N_PARAMS_PER_CALL):
            self._client.log_batch(run.info.run_id, params=params[start : start + N_PARAMS_PER_CALL])
        self._client.set_tag(run.info.run_id, "fulltilt.out_dir", event.out_dir)
        return run.info.run_id

    def _list_metrics(self, event: Event) -> list[Any]:
        if not isinstance(event, WithFigures):
            return []
        return [
            self._mlflow.entities.Metric(_clean(name), value, _to_ms(event.time_s), event.step)
            for name, value in list_scalars(event).items()
        ]

    def _storage_errors(self, lost: str) -> AbstractContextManager[None]:
        kind = self._mlflow.exceptions.MlflowException
        return _tracked.storage_errors(kind, f"{self.tracking_uri} cannot be written", lost)


def _clean(name: str) -> str:
    """Replace what MLflow does not allow in a name: all but letters, digits, ``_ - . : /`` and spaces."""
    return re.sub(r"[^\w\-.: /]", "_", name)


def _to_ms(time_s: float) -> int:
    return round(1000 * time_s)
