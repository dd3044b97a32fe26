"""The training loop: what it says, what it leaves behind, and that stopping and going on changes nothing."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from training_cases import (
    CONSTANT,
    N_SAMPLES,
    Points,
    PointStream,
    Recorder,
    assert_equal_weights,
    build_config,
    build_workload,
    fail,
    read_state,
    read_step,
    read_weights,
    run_train,
)

from fulltilt import errors
from fulltilt.engine import interrupt
from fulltilt.engine.announce import describe_resume
from fulltilt.engine.build.optimizers import OPTIMIZERS
from fulltilt.engine.checkpoints.files import NEWEST
from fulltilt.records import CheckpointSaved, CheckpointStarted, EpochDone, Evaluated, RunEnded, RunStarted, StepsDone
from fulltilt.records.run_folder import hold_folder


def test_a_run_learns_and_tells_what_it_did(tmp_path):
    config = build_config(run__epochs=8, run__log_every_n_steps=1)
    result, recorder = run_train(tmp_path, config, resume=True)
    assert (result.reason, result.epoch, result.step) == ("finished", 8, 8 * 6)
    assert result.metrics["accuracy"] > 0.8
    started, ended = recorder.events[0], recorder.events[-1]
    assert isinstance(started, RunStarted)
    assert (started.n_samples, started.steps_per_epoch, started.n_epochs) == (N_SAMPLES, 6, 8)
    assert isinstance(ended, RunEnded)
    assert ended.reason == "finished"
    assert ended.metrics == result.metrics
    assert [e.epoch for e in recorder.of(EpochDone)] == list(range(1, 9))
    assert recorder.of(EpochDone)[-1].loss == result.loss < recorder.of(EpochDone)[0].loss / 2
    assert sum(e.n_samples for e in recorder.of(StepsDone)) == 8 * N_SAMPLES
    total = sum(e.loss * e.n_samples for e in recorder.of(StepsDone) if e.epoch == 1)
    assert recorder.of(EpochDone)[0].loss == pytest.approx(total / N_SAMPLES, rel=1e-12), "the mean over its samples"
    (told,) = recorder.list_notes("no checkpoint")
    assert told in result.notes
    again, after = run_train(tmp_path, config, resume=True)
    assert (again.reason, again.metrics, again.loss) == (result.reason, result.metrics, result.loss)
    assert (again.step, after.of(StepsDone)) == (result.step, [])
    assert any("nothing is left to train; --epochs" in note for note in again.notes)


RESUME_CASES = {
    "in the middle of an epoch": {},
    "at the ends of epochs": {"run__epochs": 3},
    "of a stream": CONSTANT,
    "of a stream in its second epoch": CONSTANT,
    "of a stream in a worker, in its second epoch": {
        **CONSTANT,
        "data__num_workers": 1,
        "data__persistent_workers": True,
    },
    "between two log lines": {"run__log_every_n_steps": 4},
    "with accumulation": {"data__batch_size": 8, "speed__accumulate": 3, "run__epochs": 3},
    "with workers": {"data__num_workers": 2},
    "with persistent workers": {"data__num_workers": 1, "data__persistent_workers": True},
    "in bf16": {"speed__precision": "bf16"},
    "in fp16 with a scaler": {"speed__precision": "fp16"},
    "without the last short batch": {"data__drop_last": True},
    "with onecycle": {"optim__schedule": "onecycle", "optim__warmup": 0},
    "evaluating by steps": {"run__evaluate_every": "5 steps", "run__checkpoint_every": "3 steps"},
    "with an average of the weights and a scaler": {"optim__ema": 0.9, "speed__precision": "fp16"},
    "with muon and a scaler": {"speed__precision": "fp16"},
    "with checkpoints beside training": {"run__async_checkpoint": True, "run__checkpoint_every": "2 steps"},
}


class ShuffledStream(PointStream):
    """Draws its order as it begins, and noise at each sample."""

    def __iter__(self):
        points = Points()
        return (points[i] for i in torch.randperm(N_SAMPLES).tolist())


class EpochStream(PointStream):
    """Its order follows the epoch that it is told."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        points, generator = Points(), torch.Generator().manual_seed(self.epoch)
        return (points[i] for i in torch.randperm(N_SAMPLES, generator=generator).tolist())


STREAMS = {
    "of a stream": PointStream,
    "of a stream in its second epoch": ShuffledStream,
    "of a stream in a worker, in its second epoch": EpochStream,
}


@pytest.mark.parametrize("case", RESUME_CASES)
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(tmp_path, case):
    config = build_config(**RESUME_CASES[case])
    optimizer = {"optimizer": OPTIMIZERS["muon"]} if "muon" in case else {}
    workload = build_workload(dataset=STREAMS.get(case, Points), **optimizer)
    whole, expected = run_train(tmp_path / "whole", config, workload=workload)
    recorder = Recorder()
    for n_before, last_step in enumerate(
        (6, 12) if "ends" in case else (8, 9) if "second" in case else (3, 5)
    ):  # the second process stops as well
        options = {"max_steps": last_step, "resume": n_before > 0}
        run_train(tmp_path / "parts", config, recorder, workload=workload, **options)
    torch.manual_seed(999)
    parts, _ = run_train(tmp_path / "parts", config, recorder, workload=workload, resume=True)
    assert recorder.list_figures() == expected.list_figures()
    assert (parts.metrics, parts.loss, parts.step) == (whole.metrics, whole.loss, whole.step)
    mine, theirs = (read_state(tmp_path / name) for name in ("parts", "whole"))
    assert_equal_weights(mine["model"], theirs["model"])
    if "average" in case:
        torch.testing.assert_close(mine["average"], theirs["average"], rtol=0, atol=0)


@pytest.mark.parametrize("stream", [PointStream, ShuffledStream])
def test_a_stream_goes_on_bit_for_bit_from_the_end_of_an_epoch(tmp_path, stream):
    config, workload, recorder = build_config(**CONSTANT), build_workload(dataset=stream), Recorder()
    _, expected = run_train(tmp_path / "whole", config, workload=workload)
    run_train(tmp_path / "parts", config, recorder, workload=workload, epochs=1)
    torch.manual_seed(999)
    run_train(tmp_path / "parts", config, recorder, workload=workload, resume=True)
    assert recorder.list_figures() == expected.list_figures()


def test_a_checkpoint_without_the_generators_of_the_epochs_beginning_still_loads(tmp_path):
    config, workload = build_config(**CONSTANT), build_workload(dataset=PointStream)
    run_train(tmp_path, config, workload=workload, max_steps=8)
    state = read_state(tmp_path)
    assert state["rng"].pop("epoch")
    torch.save(state, tmp_path / "checkpoint.pt")
    assert run_train(tmp_path, config, workload=workload, resume=True)[0].reason == "finished"


def test_a_streamed_dataset_needs_a_length_for_a_schedule(tmp_path):
    remedy = (
        r"use schedule constant without warm-up, or in Python train\(…, max_steps=N\) of fulltilt\.engine\.loop\.train"
    )
    with pytest.raises(errors.ConfigError, match=remedy):
        run_train(tmp_path, workload=build_workload(dataset=PointStream))
    assert run_train(tmp_path, workload=build_workload(dataset=PointStream), max_steps=3)[0].step == 3


class OnceOnly(PointStream):
    def __init__(self):
        super().__init__()
        self.rest = super().__iter__()

    def __iter__(self):
        return self.rest


def test_a_stream_that_can_be_read_once_says_so_in_the_second_epoch(tmp_path):
    """It ended in an error of our own, or trained nothing."""
    with pytest.raises(errors.DataError, match="points yielded no batch in epoch 2; it must yield samples anew"):
        run_train(tmp_path, build_config(**CONSTANT), workload=build_workload(dataset=OnceOnly))


def test_a_relative_folder_stays_where_it_was_asked_for(tmp_path, monkeypatch):
    def build_elsewhere():
        monkeypatch.chdir("/")
        return Points()

    monkeypatch.chdir(tmp_path)
    result, _ = run_train("own", workload=build_workload(dataset=build_elsewhere))
    assert (tmp_path / "own" / "checkpoint.pt").is_file()
    assert result.out_dir == str(tmp_path / "own")


def test_a_resumed_run_says_what_it_goes_on_from():
    few, same, more = (describe_resume(60, 3, n_epochs) for n_epochs in (2, 3, 5))
    assert "the checkpoint is at step 60, after 3 epochs, more than the 2 asked for: nothing is left to train" in few
    assert "as many as the 3 asked for: nothing is left to train; --epochs 4 trains one more" in same
    assert more == "going on from step 60, in epoch 4 of 5"


def put_another_model(path):
    state = torch.load(path, weights_only=True)
    state["model"]["0.weight"] = torch.zeros(4, 4)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, 3000), "checkpoint.pt cannot be read"),
        (put_another_model, "0.weight (4, 4) instead of (16, 6)"),
    ],
)
def test_a_checkpoint_that_does_not_do_gives_way_to_the_one_before_and_the_run_ends_the_same(tmp_path, damage, words):
    config = build_config(run__checkpoint_every="2 steps")
    _, expected = run_train(tmp_path / "whole", config)
    _, recorder = run_train(tmp_path / "parts", config, max_steps=5)
    damage(tmp_path / "parts" / NEWEST)
    _, again = run_train(tmp_path / "parts", config, resume=True)
    assert again.events[0].first_step == 4
    (told,) = again.list_notes("going on from checkpoint.previous.pt")
    assert words in told
    assert again.list_notes("going on from step 4, in epoch 1 of")
    assert (tmp_path / "parts" / "checkpoint.damaged.pt").exists()
    kept = [event for event in recorder.events if getattr(event, "step", 0) <= 4]
    recorder.events = kept + again.events
    assert recorder.list_figures() == expected.list_figures()


def test_when_both_checkpoints_are_of_another_model_the_newest_is_named(tmp_path):
    run_train(tmp_path, max_steps=8)
    for path in tmp_path.glob("checkpoint*.pt"):
        put_another_model(path)
    with pytest.raises(errors.RunFolderError, match=rf"/{NEWEST} is of another model"):
        run_train(tmp_path, resume=True)
    assert (tmp_path / NEWEST).exists()


def test_more_epochs_with_other_levers_of_speed_go_on_from_the_checkpoint_and_so_does_training_time(tmp_path):
    first, _ = run_train(tmp_path / "a", build_config(run__epochs=1, **CONSTANT))
    longer, _ = run_train(tmp_path / "a", build_config(**CONSTANT), resume=True, epochs=3)
    straight, _ = run_train(tmp_path / "b", build_config(run__epochs=3, **CONSTANT))
    assert longer.metrics == straight.metrics
    assert longer.training_seconds > first.training_seconds
    assert [(e.epoch, e.step) for e in longer.evaluations] == [(1, 6), (2, 12), (3, 18)]
    assert longer.evaluations[0] == first.evaluations[0]
    stored = read_state(tmp_path / "a")["evaluations"]
    assert [each["epoch"] for each in stored] == [0, 1, 2], "as earlier versions write and read them"
    with_workers = build_config(data__num_workers=1, **CONSTANT)
    assert run_train(tmp_path / "a", with_workers, resume=True, epochs=4)[0].step == 24


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "schedule cosine spans all 4 now, so the learning rate goes on at "),
        (CONSTANT, "schedule constant does not depend on that, its learning rates stay"),
    ],
)
def test_a_resumed_run_of_another_length_says_what_becomes_of_the_learning_rate(tmp_path, changes, words):
    config = build_config(run__log_every_n_steps=1, **changes)
    _, before = run_train(tmp_path, config)
    result, after = run_train(tmp_path, config, resume=True, epochs=4, max_steps=14)
    (note,) = (note for note in result.notes if note.startswith("the run has 4 epochs, 2 when it was saved: "))
    assert words in note
    lrs = after.of(StepsDone)[0].lr, before.of(StepsDone)[-1].lr
    assert changes or f"goes on at {lrs[0]:.3g} where it stood at {lrs[1]:.3g}; another folder" in note
    assert not run_train(tmp_path, config, resume=True, epochs=4)[1].list_notes("when it was saved")


@pytest.mark.parametrize(
    ("changes", "dataset", "resume", "words"),
    [
        ({}, Points, False, "--resume"),
        ({"data__batch_size": 32}, Points, True, "changed: data"),
        ({}, lambda: Points(n_samples=80), True, "90 samples, the training set has 80"),
    ],
)
def test_a_folder_of_another_run_is_refused_with_the_difference(tmp_path, changes, dataset, resume, words):
    run_train(tmp_path, max_steps=2)
    with pytest.raises(errors.RunFolderError, match=words):
        run_train(tmp_path, build_config(**changes), workload=build_workload(dataset=dataset), resume=resume)


def test_data_are_read_before_a_refusal_only_where_another_folder_would_be_tried(tmp_path):
    """A refusal came after minutes of reading, or not at all."""
    run_train(tmp_path, max_steps=2)
    broken = build_workload(dataset=fail(KeyError("no data today")))
    with pytest.raises(errors.RunFolderError, match="go on with --resume"):
        run_train(tmp_path, workload=broken)
    with hold_folder(tmp_path), pytest.raises(errors.RunFolderError, match="in use by process"):
        run_train(tmp_path, workload=broken)
    with pytest.raises(KeyError, match="no data today"):
        run_train(tmp_path, build_config(data__batch_size=32), workload=broken)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(tmp_path, value):
    n_calls = 0

    def explode(outputs, targets):
        nonlocal n_calls
        n_calls += outputs.requires_grad
        return nn.functional.cross_entropy(outputs, targets) * (value if n_calls >= 6 else 1)

    config = build_config(run__checkpoint_every="2 steps")
    words = rf"the loss is {value} in step 6 \(.*all .* are finite.*the checkpoint of step 4 is kept.*optim.clip_norm"
    with pytest.raises(errors.NonFiniteLossError, match=words):
        run_train(tmp_path, config, workload=build_workload(loss=explode))
    assert all(torch.isfinite(v).all() for v in read_weights(tmp_path).values())
    whole, _ = run_train(tmp_path / "whole", config)
    resumed, _ = run_train(tmp_path, config, resume=True)
    assert resumed.metrics == whole.metrics


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    """The loss of the last step is finite, its gradient is not: only the weights show it."""

    class Diverges(torch.optim.SGD):
        n = 0

        def step(self, closure=None):
            super().step(closure)
            self.n += 1
            if self.n == 4:
                self.param_groups[0]["params"][0].data[0] = float("nan")

    config = build_config(run__checkpoint_every="2 steps", run__log_every_n_steps=100)
    words = r"after step 4 1 of \d+ parameters hold NaN or infinity, first 0\.weight"
    with pytest.raises(errors.NonFiniteLossError, match=words):
        run_train(tmp_path, config, workload=build_workload(optimizer=lambda ps: Diverges(ps, lr=0.1)))
    assert read_step(tmp_path) == 2


class SignalAt(Recorder):
    """Raises a signal in the training process when a certain event comes."""

    def __init__(self, kind, signal_number=signal.SIGINT, n_times=1):
        super().__init__()
        self.kind, self.signal_number, self.n_times = kind, signal_number, n_times

    def __call__(self, event):
        super().__call__(event)
        if isinstance(event, self.kind):
            for _ in range(self.n_times):
                signal.raise_signal(self.signal_number)
            self.n_times = 0


def test_ctrl_c_saves_after_the_step_and_the_rest_follows_on_resume(tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    _, expected = run_train(tmp_path / "whole")
    recorder = SignalAt(StepsDone)
    with pytest.raises(KeyboardInterrupt):
        run_train(tmp_path / "parts", recorder=recorder)
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().err == f"{interrupt.SAID}\n"
    assert recorder.events[-1].reason == "interrupted"
    saved = recorder.of(CheckpointSaved)[-1].step
    assert 0 < saved < 12
    run_train(tmp_path / "parts", recorder=recorder, resume=True)
    assert recorder.list_figures() == expected.list_figures()


def test_sigterm_saves_and_reaches_the_programs_own_handler(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        result, _ = run_train(tmp_path, recorder=SignalAt(StepsDone, signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert result.reason == "interrupted"
    assert (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize(("echo_s", "n_saved"), [(0.0, 0), (3600.0, 1)])
def test_a_second_ctrl_c_stops_at_once_unless_it_is_an_echo_of_the_first(tmp_path, monkeypatch, echo_s, n_saved):
    """``timeout`` signals the process, and then the group that it is in: one wish to stop"""
    monkeypatch.setattr(interrupt, "ECHO_S", echo_s)
    recorder = SignalAt(StepsDone, n_times=2)
    with pytest.raises(KeyboardInterrupt):
        run_train(tmp_path, recorder=recorder)
    assert len(recorder.of(CheckpointSaved)) == n_saved
    assert recorder.events[-1].reason == "interrupted"


def start_with_signals(code):
    """A process that runs ``code`` where signals are caught, and says when it is about to."""
    code = (
        "import hashlib, os, signal\nfrom fulltilt.engine.interrupt import catch_signals\n"
        f"with catch_signals(said='heard') as stop:\n    print('ready', flush=True)\n    {code}"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


def test_inside_an_operator_the_first_signal_is_answered_and_the_third_one_ends_the_process():
    """Three signals did nothing for 11 s, and one took 281 s, without a word."""
    process = start_with_signals("hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)")  # minutes, like an operator
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == "heard\n"
    for _ in range(2):
        time.sleep(2 * interrupt.ECHO_S)
        process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (128 + signal.SIGTERM, "")


def test_signals_of_a_forked_process_are_not_answered():
    process = start_with_signals("os.fork() or (signal.raise_signal(signal.SIGINT), os._exit(0)); os.wait()")
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


def test_an_evaluation_that_fails_costs_nothing_of_the_training(tmp_path):
    """The epoch before it was lost."""
    broken = build_workload(assess=fail(ValueError("planted")))
    with pytest.raises(ValueError, match="planted"):
        run_train(tmp_path / "a", workload=broken)
    assert read_step(tmp_path / "a") == 6
    mended = build_workload(assess=lambda model, device: {"fine": 1.0})
    result, recorder = run_train(tmp_path / "a", workload=mended, resume=True)
    whole, _ = run_train(tmp_path / "b", workload=mended)
    assert [each.epoch for each in recorder.of(Evaluated)] == [1, 2], "the first one is made up for"
    assert result.metrics == whole.metrics
    assert_equal_weights(read_weights(tmp_path / "a"), read_weights(tmp_path / "b"))


def test_ctrl_c_in_an_evaluation_leaves_it_for_the_resumed_run(tmp_path):
    once, recorder = [True], Recorder()

    class Interrupting(Points):
        def __getitem__(self, index):
            if index == 20 and once:
                once.pop()
                signal.raise_signal(signal.SIGINT)
            return super().__getitem__(index)

    _, expected = run_train(tmp_path / "whole")
    workload = build_workload(validation=lambda: Interrupting(n_samples=31, noise=0))
    with pytest.raises(KeyboardInterrupt):
        run_train(tmp_path / "parts", recorder=recorder, workload=workload)
    assert recorder.of(Evaluated) == []
    run_train(tmp_path / "parts", recorder=recorder, workload=workload, resume=True)
    assert recorder.list_figures() == expected.list_figures()


def test_outside_the_main_thread_a_run_goes_without_signals(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(run_train(tmp_path)[0]))
    thread.start()
    thread.join()
    assert results[0].reason == "finished"


class FullDisk(Recorder):
    def __call__(self, event):
        super().__call__(event)
        raise errors.StorageError("steps.csv cannot be written: No space left on device")


def test_a_listener_without_space_is_named_once_and_training_goes_on(tmp_path):
    full = FullDisk()
    result, recorder = run_train(tmp_path, listeners=[full])
    assert result.reason == "finished"
    first, last = recorder.list_notes("store")
    assert "FullDisk could not store RunStarted (steps.csv cannot be written: No space left on device)" in first
    assert f"failed to store events {len(full.events) - 2} times" in last


def test_a_screen_that_nobody_reads_any_more_is_no_loss(tmp_path):
    def print_to_head(event):
        raise BrokenPipeError

    result, recorder = run_train(tmp_path, listeners=[print_to_head])
    assert result.reason == "finished"
    assert recorder.list_notes("store") == []


def test_a_checkpoint_is_told_before_it_is_written(tmp_path):
    """What a listener holds back of earlier steps would be lost in a kill between the two."""
    recorder, seen = Recorder(), []

    def watch(event):
        if isinstance(event, CheckpointStarted):
            on_disk = read_step(tmp_path) if (tmp_path / NEWEST).exists() else 0
            seen.append((on_disk, event.step, recorder.of(StepsDone)[-1].step))

    run_train(tmp_path, build_config(run__checkpoint_every="4 steps"), recorder, listeners=[watch])
    assert seen == [(0, 4, 4), (4, 8, 8), (8, 12, 12), (12, 12, 12)]  # the last holds the evaluation


def test_a_bug_in_a_listener_or_the_workload_ends_the_run_and_the_others_hear_why(tmp_path):
    def broken(event):
        if isinstance(event, EpochDone):
            raise ValueError("no such column")

    recorder = Recorder()
    with pytest.raises(ValueError, match="no such column"):
        run_train(tmp_path, recorder=recorder, listeners=[broken])
    assert recorder.events[-1].reason == "failed: ValueError: no such column"
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run_train(tmp_path / "loss", None, recorder, workload=build_workload(loss=fail(RuntimeError("mat1 and mat2"))))
    assert recorder.events[-1].reason.startswith("failed: RuntimeError: mat1")


def test_times_of_training_leave_evaluation_and_checkpoints_out(tmp_path):
    result, recorder = run_train(tmp_path, build_config(run__checkpoint_every="2 steps"))
    beside = sum(e.seconds for e in recorder.of(Evaluated)) + sum(e.seconds for e in recorder.of(CheckpointSaved))
    assert 0 < result.training_seconds <= result.seconds - beside
    assert sum(e.seconds for e in recorder.of(EpochDone)) == pytest.approx(result.training_seconds, rel=0.05)
    times = [e.training_seconds for e in recorder.of(Evaluated)]
    assert times == sorted(times)


def test_training_metrics_come_when_asked_for(tmp_path):
    _, silent = run_train(tmp_path / "a")
    _, asked = run_train(tmp_path / "b", training_metrics=True)
    assert silent.of(EpochDone)[-1].metrics == {}
    assert 0.3 < asked.of(EpochDone)[-1].metrics["accuracy"] <= 1.0
    assert [e.loss for e in asked.of(StepsDone)] == [e.loss for e in silent.of(StepsDone)]
    # A run that went on with training metrics in the middle of an epoch showed half of its accuracy.
    run_train(tmp_path / "c", max_steps=3)  # of 6
    _, later = run_train(tmp_path / "c", resume=True, training_metrics=True)
    assert later.of(EpochDone)[0].metrics == {}
    assert 0.3 < later.of(EpochDone)[1].metrics["accuracy"] <= 1.0
    assert [event.loss for event in later.of(EpochDone)] == [event.loss for event in silent.of(EpochDone)]


def test_an_interval_is_told_one_interval_late(tmp_path):
    batches, seen = [], []

    def count(batch, generator):
        batches.append(batch)
        return batch

    def watch(event):
        if isinstance(event, StepsDone):
            seen.append((event.step, len(batches)))

    run_train(tmp_path, listeners=[watch], workload=build_workload(prepare=count), max_steps=5)
    assert seen[0] == (2, 4)


def test_evaluation_falls_on_its_steps_and_never_means_never(tmp_path):
    _, recorder = run_train(tmp_path / "steps", build_config(run__evaluate_every="5 steps"))
    assert [e.step for e in recorder.of(Evaluated)] == [5, 10, 12]
    result, recorder = run_train(tmp_path, build_config(run__evaluate_every=None, run__checkpoint_every=None))
    assert recorder.of(Evaluated) == []
    assert result.metrics == {}
    assert [e.step for e in recorder.of(CheckpointSaved)] == [12]  # the weights are what training was for
    result, _ = run_train(tmp_path / "unseen", workload=build_workload(validation=None))
    assert (result.reason, result.metrics) == ("finished", {})


TOO_FEW = {"run__device": [0, 1], "run__n_ranks": 3}


@pytest.mark.parametrize(
    ("config", "options", "error", "words"),
    [
        ({}, {"epochs": 0}, errors.UsageError, "at least 1"),
        ({}, {"max_steps": 0}, errors.UsageError, "at least 1"),
        ({}, {"max_steps": -3}, errors.UsageError, "at least 1"),
        ({"run__device": [90, 91]}, {}, errors.DeviceError, r"device cuda:\d+ is not there"),
        ({}, {"device": "cuda:7"}, errors.DeviceError, "cuda:7"),
        (TOO_FEW, {}, errors.ConfigError, r"n_ranks is 3, .* 2 devices \(cuda:0, cuda:1\)"),
    ],
)
def test_lengths_below_one_and_devices_that_are_not_there_or_too_few_start_nothing(
    tmp_path, config, options, error, words
):
    with pytest.raises(error, match=words):
        run_train(tmp_path / "run", build_config(**config), **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_run_on_a_gpu_resumes_to_the_same_losses(tmp_path):
    config = build_config(run__device="cuda", speed__precision="fp16", data__pin_memory=True)
    _, expected = run_train(tmp_path / "whole", config)
    _, recorder = run_train(tmp_path / "parts", config, max_steps=5)
    run_train(tmp_path / "parts", config, recorder, resume=True)
    found, wanted = ([e.loss for e in r.of(StepsDone)] for r in (recorder, expected))
    assert found == pytest.approx(wanted, rel=1e-3)
