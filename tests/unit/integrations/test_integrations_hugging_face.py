"""HuggingFaceBreakdown in the real Trainer: planted delays come back, and accelerate is as it was afterwards."""

import json

import pytest
from planted import BACKWARD_MS, BATCH_SIZE, DATA_MS, FORWARD_MS, UPDATE_MS, Rows, SlowModel, SlowSGD, assert_closes

from fulltilt.measure import FakeClock, HostClock

transformers = pytest.importorskip("transformers", exc_type=ImportError)
accelerate = pytest.importorskip("accelerate", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's packages

LOG_MS = 0.75


class SlowLog(transformers.TrainerCallback):
    def __init__(self, clock):
        self.slow_clock = clock

    def on_log(self, *args, **kwargs):
        self.slow_clock.advance(LOG_MS)

    def on_save(self, *args, **kwargs):
        self.slow_clock.advance(5_000)

    def on_prediction_step(self, *args, **kwargs):
        self.slow_clock.advance(10_000)


def run_trainer(tmp_path, clock, *, n_batches=12, breakdown_clock=None, model=None, **options):
    from fulltilt.integrations import HuggingFaceBreakdown

    model = model or SlowModel(clock)
    callback = HuggingFaceBreakdown(tmp_path / "b.json", clock=breakdown_clock or clock)
    values = {
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": BATCH_SIZE,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**values | options),
        train_dataset=Rows(clock, n_batches),
        eval_dataset=Rows(clock, 2),
        optimizers=(SlowSGD(model.parameters(), clock), None),
        callbacks=[SlowLog(clock), callback],
    )
    trainer.train()
    return callback


def compute_data_wait_ms(result, *, n_batches, n_micro=1):
    """A step's share. accelerate fetches a batch ahead: the first step waits for one more, the last for one less."""
    assert result.n_warmup_steps <= 1
    return DATA_MS * (n_batches - (n_micro + 1) * result.n_warmup_steps) / result.n_steps


def test_planted_delays_come_back(tmp_path, capsys):
    before = accelerate.Accelerator.backward
    callback = run_trainer(tmp_path, FakeClock())
    result = callback.result
    assert result.n_steps + result.n_warmup_steps == 24
    expected = {"data_wait": compute_data_wait_ms(result, n_batches=24), "forward": FORWARD_MS}
    # The Trainer zeroes gradients by the model, not by the optimizer.
    assert_closes(result, expected | {"backward": BACKWARD_MS, "optimizer": UPDATE_MS, "other": LOG_MS})
    assert json.loads((tmp_path / "b.json").read_text())["null_reasons"]["h2d"] == "nothing is copied to a device"
    assert f"where a step of transformers {transformers.__version__} goes" in capsys.readouterr().err
    assert accelerate.Accelerator.backward is before


def test_an_accumulation_window_is_one_step(tmp_path):
    callback = run_trainer(tmp_path, FakeClock(), n_batches=9, gradient_accumulation_steps=3, logging_strategy="no")
    expected = {"data_wait": compute_data_wait_ms(callback.result, n_batches=18, n_micro=3), "optimizer": UPDATE_MS}
    assert_closes(callback.result, expected | {"forward": 3 * FORWARD_MS, "backward": 3 * BACKWARD_MS, "other": 0.0})
    assert callback.result.n_steps + callback.result.n_warmup_steps == 6


def test_evaluation_and_checkpoints_are_left_out(tmp_path):
    every = {"logging_strategy": "no", "eval_strategy": "steps", "eval_steps": 4}
    callback = run_trainer(tmp_path, FakeClock(), save_strategy="steps", save_steps=3, **every)
    assert callback.result.step_ms < 50, "an evaluation takes 20 s here, a checkpoint 5 s"
    assert callback.result.phases_ms["backward"] == pytest.approx(BACKWARD_MS)
    assert callback.result.n_steps + callback.result.n_warmup_steps == 24


class Failing(SlowModel):
    n_left = 5

    def forward(self, inputs, labels):
        self.n_left -= 1
        if self.n_left < 0:
            raise ValueError("planted")
        return super().forward(inputs, labels)


def test_a_run_that_raised_leaves_accelerate_working_and_the_next_is_timed(tmp_path):
    clock = FakeClock()
    with pytest.raises(ValueError, match="planted"):
        run_trainer(tmp_path, clock, model=Failing(clock))
    callback = run_trainer(tmp_path, clock, logging_strategy="no")
    assert callback.result.phases_ms["forward"] == pytest.approx(FORWARD_MS)
    assert callback.result.phases_ms["backward"] == pytest.approx(BACKWARD_MS)


def test_on_a_real_clock_the_phases_close(tmp_path):
    result = run_trainer(tmp_path, FakeClock(), n_batches=20, breakdown_clock=HostClock()).result
    assert sum(ms or 0 for ms in result.phases_ms.values()) == pytest.approx(result.step_ms, rel=1e-6)
    assert min(result.phases_ms[name] for name in ("data_wait", "forward", "backward", "optimizer")) > 0
