"""LightningBreakdown in the real Trainer: planted delays come back, and nothing of the Trainer stays changed."""

import json
import logging

import pytest
from planted import (
    BACKWARD_MS,
    BATCH_SIZE,
    DATA_MS,
    FORWARD_MS,
    UPDATE_MS,
    ZERO_MS,
    Rows,
    SlowModel,
    SlowSGD,
    assert_closes,
)
from torch.utils.data import DataLoader

from fulltilt.measure import FakeClock, HostClock

lightning = pytest.importorskip("lightning.pytorch", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages

CALLBACK_MS = 0.75


class Module(lightning.LightningModule):
    def __init__(self, clock, *, is_manual=False, fail_at=None):
        super().__init__()
        self.model, self.slow_clock, self.fail_at = SlowModel(clock), clock, fail_at
        self.automatic_optimization = not is_manual

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fail_at:
            raise ValueError("planted")
        loss = self.model(**batch)["loss"]
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        for _ in range(2):  # as two networks would
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
        return None

    def validation_step(self, batch, batch_idx):
        self.slow_clock.advance(10_000)

    def configure_optimizers(self):
        return SlowSGD(self.parameters(), self.slow_clock)


class SlowCallback(lightning.Callback):
    def __init__(self, clock):
        self.slow_clock = clock

    def on_train_batch_end(self, *args):
        self.slow_clock.advance(CALLBACK_MS)


def fit(tmp_path, clock, *, breakdown_clock=None, n_batches=12, module=None, callbacks=(), **options):
    from fulltilt.integrations import LightningBreakdown

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback = LightningBreakdown(tmp_path / "b.json", clock=breakdown_clock or clock)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[callback, *callbacks],
        default_root_dir=tmp_path,
        **quiet | {"enable_checkpointing": False} | options,
    )
    loader = DataLoader(Rows(clock, n_batches), batch_size=BATCH_SIZE)
    trainer.fit(module or Module(clock), loader, DataLoader(Rows(clock, 2), batch_size=BATCH_SIZE))
    return callback, trainer


def test_planted_delays_come_back_and_validation_is_left_out(tmp_path, capsys):
    clock = FakeClock()
    callback, trainer = fit(tmp_path, clock, callbacks=[SlowCallback(clock)])
    assert (callback.result.n_steps, callback.result.n_warmup_steps) == (23, 1)
    expected = {"data_wait": DATA_MS, "forward": FORWARD_MS, "backward": BACKWARD_MS}
    # Between the last step of the first epoch and its validation the callback's time belongs to no step.
    other_ms = CALLBACK_MS * 22 / 23
    assert_closes(callback.result, expected | {"optimizer": UPDATE_MS + ZERO_MS, "other": other_ms})
    assert json.loads((tmp_path / "b.json").read_text())["phases_ms"]["forward"] == FORWARD_MS
    assert f"where a step of Lightning {lightning.__version__} goes" in capsys.readouterr().err
    assert "start" not in vars(trainer.profiler), "the profiler is its own again"
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


def test_an_accumulation_window_is_one_step(tmp_path):
    clock = FakeClock()
    callback, _ = fit(tmp_path, clock, n_batches=9, accumulate_grad_batches=3)
    expected = {"data_wait": 3 * DATA_MS, "forward": 3 * FORWARD_MS, "backward": 3 * BACKWARD_MS}
    assert_closes(callback.result, expected | {"optimizer": UPDATE_MS + ZERO_MS, "other": 0.0})
    assert callback.result.n_steps + callback.result.n_warmup_steps == 6


def test_manual_optimization_bills_each_update_to_the_optimizer(tmp_path):
    clock = FakeClock()
    callback, _ = fit(tmp_path, clock, module=Module(clock, is_manual=True))
    expected = {"data_wait": DATA_MS, "forward": FORWARD_MS, "backward": 2 * BACKWARD_MS}
    assert_closes(callback.result, expected | {"optimizer": 2 * UPDATE_MS, "other": 0.0})


def test_barebones_is_timed_too(tmp_path):
    clock = FakeClock()
    unset = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"))
    callback, _ = fit(tmp_path, clock, barebones=True, **unset)
    assert callback.result.phases_ms["data_wait"] == pytest.approx(DATA_MS)


def test_what_was_measured_before_an_error_is_kept(tmp_path):
    clock = FakeClock()
    with pytest.raises(ValueError, match="planted"):
        fit(tmp_path, clock, module=Module(clock, fail_at=6))
    document = json.loads((tmp_path / "b.json").read_text())
    assert document["n_steps"] + document["n_warmup_steps"] == 6


def test_on_a_real_clock_the_phases_close(tmp_path):
    """No planted delay: whatever the machine does, all of the wall time is billed."""
    callback, _ = fit(tmp_path, FakeClock(), breakdown_clock=HostClock())
    phases = callback.result.phases_ms
    assert sum(ms or 0 for ms in phases.values()) == pytest.approx(callback.result.step_ms, rel=1e-6)
    assert min(phases[name] for name in ("data_wait", "forward", "backward", "optimizer")) > 0
