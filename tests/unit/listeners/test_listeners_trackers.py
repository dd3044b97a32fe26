"""MLflow and W&B: what their own files hold is what the events said. Skipped by name where they are not installed."""

import importlib.util
import json
import os
import struct
import sys
import threading
import types
import typing

import listener_events as events
import pytest
from listener_events import tell

from fulltilt.config.model import LoggerName
from fulltilt.errors import StorageError, UsageError
from fulltilt.listeners import LOGGERS, CsvLog, MlflowLog, TensorBoardLog, WandbLog, build_loggers
from fulltilt.listeners.wandb_log import has_login
from fulltilt.records import Noted, RunEnded

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages


def started(**changes):
    config = {"optim": {"lr": 0.002, "clip_norm": None}, "task": "classification"}
    return events.started(plan={"precision": "bf16"}, config=config, time_s=1000.0, **changes)


def steps_done(step, loss):
    figures = {"lr": 0.1 / step, "samples_per_s": 128.0 + step, "time_s": 1000.0 + step}
    return events.steps_done(step, loss, phases_ms={"forward": 2.5, "h2d": None}, **figures)


EPOCH = events.epoch_done(step=2, loss=0.375, metrics={"accuracy": 0.5})
EVALUATED = events.evaluated(step=2, metrics={"loss": 0.25, "top-5 @ k": 0.75})
NOTED = Noted(message="a note is no figure")
EVENTS = (started(), steps_done(1, 0.5), NOTED, steps_done(2, 0.25), EPOCH, EVALUATED)
EXPECTED = {
    "train/loss": [(1, 0.5), (2, 0.25)],
    "train/lr": [(1, 0.1), (2, 0.05)],
    "train/samples_per_s": [(1, 129.0), (2, 130.0)],
    "phases_ms/forward": [(1, 2.5), (2, 2.5)],
    "epoch/loss": [(2, 0.375)],
    "epoch/accuracy": [(2, 0.5)],
    "val/loss": [(2, 0.25)],
}


def ended(reason="finished"):
    return RunEnded(reason=reason, step=2, seconds=1.0, metrics={}, time_s=1010.0)


def read_mlflow(log):
    """Parameters, metric → [(step, value)] and status, by MLflow's own client."""
    client = pytest.importorskip("mlflow").MlflowClient(tracking_uri=log.tracking_uri)
    run = client.get_run(log.run_id)
    history = {name: client.get_metric_history(log.run_id, name) for name in run.data.metrics}
    return run, {name: [(m.step, m.value) for m in points] for name, points in history.items()}


def test_mlflow_holds_the_events_and_a_resumed_run_goes_on_in_it(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log = tell(MlflowLog(tmp_path / "mlflow"), *EVENTS, ended("interrupted"))
    run, figures = read_mlflow(log)
    assert figures == EXPECTED | {"val/top-5 _ k": [(2, 0.75)]}
    assert run.data.params["optim.lr"] == "0.002"
    assert run.data.params["plan.precision"] == "bf16"
    assert "optim.clip_norm" not in run.data.params, "null says nothing"
    assert (run.info.run_name, run.info.status, run.info.start_time) == ("digits", "KILLED", 1_000_000)

    resumed = tell(MlflowLog(tmp_path / "mlflow"), started(first_step=2), steps_done(3, 0.125), ended())
    assert resumed.run_id == log.run_id
    run, figures = read_mlflow(resumed)
    assert figures["train/loss"] == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert run.info.status == "FINISHED"
    assert list(tmp_path.iterdir()) == [tmp_path / "mlflow"], "nothing is written elsewhere"


def read_wandb_records(path):
    """Records of a ``.wandb`` file: LevelDB's log format, blocks of 32 KiB, after a header of 7 bytes."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = pb.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def read_wandb(folder):
    """Settings, name → [(step, value)] and exit code of the only offline run in ``folder``."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    config, figures, exit_code = {}, {}, None
    for record in read_wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            values = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            for name, value in values.items():
                if not name.startswith("_"):
                    figures.setdefault(name, []).append((values["_step"], value))
        elif kind == "exit":
            exit_code = record.exit.exit_code
    return config, figures, exit_code


def test_wandb_without_a_login_holds_the_events_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "run"
    tell(WandbLog(folder), *EVENTS, ended("failed: ValueError: x"))
    wandb.teardown()
    config, figures, exit_code = read_wandb(folder)
    assert figures == EXPECTED | {"val/top-5 @ k": [(2, 0.75)]}
    assert config["optim.lr"] == 0.002
    assert exit_code == 1
    (tmp_path / "netrc").write_text("machine elsewhere.example login a password b\n")
    assert not has_login(wandb)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert has_login(wandb)
    wandb.teardown()


@pytest.mark.parametrize("name", ["mlflow", "wandb", "tensorboard"])
def test_a_missing_package_is_named_with_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    extra = "track" if name == "tensorboard" else name
    with pytest.raises(UsageError, match=rf"pip install 'fulltilt\[{extra}\]'"):
        build_loggers([name], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_configuration_names_the_loggers_there_are(tmp_path):
    pytest.importorskip("torch.utils.tensorboard")
    assert set(typing.get_args(LoggerName)) == set(LOGGERS)
    csv_log, board = build_loggers(["csv", "tensorboard", "csv"], tmp_path)
    assert isinstance(csv_log, CsvLog)
    assert isinstance(board, TensorBoardLog)


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_leaves_no_thread_behind(tmp_path):
    before = threading.active_count()
    MlflowLog(tmp_path)
    assert threading.active_count() == before


class FakeTracker:
    """W&B and MLflow as far as the loggers call them; remembers the runs it was asked for."""

    # W&B, module and run
    Error = ValueError
    Settings = dict

    def __init__(self):
        self.runs, self.rows, self.ends, self.summary, self.is_up = [], [], [], {}, True

    def init(self, **options):
        self.runs.append(options)
        return self

    def log(self, scalars, *, step):
        self._answer()
        self.rows.append(step)

    def finish(self, *, exit_code):
        self._answer()
        self.ends.append(exit_code)

    # MLflow, module and client
    class exceptions:  # noqa: N801
        MlflowException = ValueError

    class entities:  # noqa: N801
        Param = Metric = staticmethod(lambda *values: values)

    def MlflowClient(self, tracking_uri):  # noqa: N802
        return self

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id="1")

    def create_run(self, *args, **options):
        self.runs.append(options)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"r{len(self.runs)}"))

    def log_batch(self, run_id, metrics=(), params=()):
        self._answer()
        self.rows += sorted({step for *_, step in metrics})

    def set_tag(self, *args):
        pass

    def set_terminated(self, run_id, status, time_ms):
        self.ends.append(status)

    def _answer(self):
        if not self.is_up:
            raise self.Error("the server is gone")


def build_faked(kind, folder, monkeypatch):
    fake = FakeTracker()
    for name in ("wandb", "mlflow", "sqlalchemy"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return kind(folder), fake


@pytest.mark.parametrize("kind", [WandbLog, MlflowLog])
@pytest.mark.parametrize("first_step", [0, 1])
def test_a_run_that_replans_stays_one_run(kind, first_step, tmp_path, monkeypatch):
    """Memory ran out: a second RunStarted, without a RunEnded before it."""
    log, fake = build_faked(kind, tmp_path, monkeypatch)
    tell(log, started(), steps_done(1, 0.5), started(first_step=first_step), steps_done(2, 0.25), EPOCH, ended())
    assert (len(fake.runs), len(fake.ends)) == (1, 1)
    assert set(fake.rows) == {1, 2}
    log(started())
    assert len(fake.runs) == 2


def test_what_wandb_does_not_take_is_a_storage_error(tmp_path, monkeypatch):
    log, fake = build_faked(WandbLog, tmp_path, monkeypatch)
    log(started())
    fake.is_up = False
    with pytest.raises(StorageError, match="W&B could not take a row: the server is gone; it is missing there"):
        log(EPOCH)
    with pytest.raises(StorageError, match="W&B could not end the run"):
        log(ended())
    log(EPOCH)  # after its end nothing is asked of it


def test_what_mlflow_does_not_take_is_told_and_sent_later(tmp_path, monkeypatch):
    """The server goes away in the middle of a run: training hears a StorageError, and no figure is lost."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://nowhere.invalid")
    log, fake = build_faked(MlflowLog, tmp_path, monkeypatch)
    log(started())
    fake.is_up = False
    with pytest.raises(StorageError, match=r"http://nowhere\.invalid cannot be written: the server is gone; 2 figures"):
        log(EPOCH)
    assert fake.rows == []
    fake.is_up = True
    log(ended())
    assert (fake.rows, fake.ends) == ([2], ["FINISHED"])
