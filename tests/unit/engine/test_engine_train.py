"""The training loop: what it says, what it leaves behind, and that stopping and going on changes nothing."""

import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import (
    N_SAMPLES,
    Points,
    PointStream,
    Recorder,
    build_config,
    build_workload,
    read_weights,
    run_train,
)

from fulltilt.engine import interrupt
from fulltilt.engine.announce import describe_resume
from fulltilt.errors import (
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    NonFiniteLossError,
    RunFolderError,
    StorageError,
    UsageError,
)
from fulltilt.records import (
    CheckpointSaved,
    CheckpointStarted,
    EpochDone,
    Evaluated,
    Noted,
    RunEnded,
    RunStarted,
    StepsDone,
)


def assert_equal_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_a_run_learns_and_tells_what_it_did(tmp_path):
    result, recorder = run_train(tmp_path, build_config(run__epochs=8, run__log_every_n_steps=1))
    assert (result.reason, result.epoch, result.step) == ("finished", 8, 8 * 6)
    assert result.metrics["accuracy"] > 0.8
    started, ended = recorder.events[0], recorder.events[-1]
    assert isinstance(started, RunStarted)
    assert (started.n_samples, started.steps_per_epoch, started.n_epochs) == (N_SAMPLES, 6, 8)
    assert isinstance(ended, RunEnded)
    assert ended.reason == "finished"
    assert ended.metrics == result.metrics
    assert [e.epoch for e in recorder.of(EpochDone)] == list(range(8))
    assert recorder.of(EpochDone)[-1].loss == result.loss < recorder.of(EpochDone)[0].loss / 2
    assert sum(e.n_samples for e in recorder.of(StepsDone)) == 8 * N_SAMPLES
    total = sum(e.loss * e.n_samples for e in recorder.of(StepsDone) if e.epoch == 0)
    assert recorder.of(EpochDone)[0].loss == pytest.approx(total / N_SAMPLES, rel=1e-12), "the mean over its samples"


STREAM = {"optim__schedule": "constant", "optim__warmup": 0}
RESUME_CASES = {
    "in the middle of an epoch": {},
    "at the ends of epochs": {"run__epochs": 3},
    "of a stream": STREAM,
    "between two log lines": {"run__log_every_n_steps": 4},
    "with accumulation": {"data__batch_size": 8, "speed__accumulate": 3, "run__epochs": 3},
    "with workers": {"data__num_workers": 2},
    "with persistent workers": {"data__num_workers": 1, "data__persistent_workers": True},
    "in bf16": {"speed__precision": "bf16"},
    "in fp16 with a scaler": {"speed__precision": "fp16"},
    "without the last short batch": {"data__drop_last": True},
    "with onecycle": {"optim__schedule": "onecycle", "optim__warmup": 0},
    "evaluating by steps": {"run__evaluate_every": "5 steps", "run__checkpoint_every": "3 steps"},
}


@pytest.mark.parametrize("case", RESUME_CASES)
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(tmp_path, case):
    config = build_config(**RESUME_CASES[case])
    workload = build_workload(dataset=PointStream if case == "of a stream" else Points)
    whole, expected = run_train(tmp_path / "whole", config, workload=workload)
    recorder = Recorder()
    for n_before, last_step in enumerate((6, 12) if "ends" in case else (3, 5)):  # the second process stops as well
        options = {"max_steps": last_step, "resume": n_before > 0}
        run_train(tmp_path / "parts", config, recorder, workload=workload, **options)
    torch.manual_seed(999)
    parts, _ = run_train(tmp_path / "parts", config, recorder, workload=workload, resume=True)
    assert recorder.list_figures() == expected.list_figures()
    assert parts.metrics == whole.metrics
    assert parts.loss == whole.loss
    assert parts.step == whole.step
    assert_equal_weights(read_weights(tmp_path / "parts"), read_weights(tmp_path / "whole"))


def test_a_streamed_dataset_needs_a_length_for_a_schedule(tmp_path):
    with pytest.raises(ConfigError, match="max_steps"):
        run_train(tmp_path, workload=build_workload(dataset=PointStream))


def test_a_finished_run_resumes_to_the_same_result(tmp_path):
    first, _ = run_train(tmp_path)
    again, recorder = run_train(tmp_path, resume=True)
    assert (again.reason, again.metrics, again.loss, again.step) == ("finished", first.metrics, first.loss, first.step)
    assert recorder.of(StepsDone) == []
    assert any("nothing is left to train; --epochs" in note for note in again.notes)


def test_a_resumed_run_says_what_it_goes_on_from():
    few, same, more = (describe_resume(60, 3, n_epochs) for n_epochs in (2, 3, 5))
    assert "the checkpoint is at step 60, after 3 epochs, more than the 2 asked for: nothing is left to train" in few
    assert "as many as the 3 asked for: nothing is left to train; --epochs 4 trains one more" in same
    assert more == "going on from step 60, in epoch 4 of 5"


def test_a_truncated_checkpoint_gives_way_to_the_one_before_and_the_run_ends_the_same(tmp_path):
    config = build_config(run__checkpoint_every="2 steps")
    _, expected = run_train(tmp_path / "whole", config)
    _, recorder = run_train(tmp_path / "parts", config, max_steps=5)
    os.truncate(tmp_path / "parts" / "checkpoint.pt", 3000)
    again = Recorder()
    result, _ = run_train(tmp_path / "parts", config, again, resume=True)
    assert again.events[0].first_step == 4
    assert any("going on from checkpoint.previous.pt" in note for note in result.notes)
    assert any("going on from step 4, in epoch 1 of" in note for note in result.notes)
    kept = [event for event in recorder.events if getattr(event, "step", 0) <= 4]
    recorder.events = kept + again.events
    assert recorder.list_figures() == expected.list_figures()


def test_more_epochs_with_other_levers_of_speed_go_on_from_the_checkpoint_and_so_does_training_time(tmp_path):
    config = {"optim__schedule": "constant", "optim__warmup": 0}
    first, _ = run_train(tmp_path / "a", build_config(run__epochs=1, **config))
    longer, _ = run_train(tmp_path / "a", build_config(**config), resume=True, epochs=3)
    straight, _ = run_train(tmp_path / "b", build_config(run__epochs=3, **config))
    assert longer.metrics == straight.metrics
    assert longer.training_seconds > first.training_seconds
    assert [e.step for e in longer.evaluations] == [6, 12, 18]
    assert longer.evaluations[0] == first.evaluations[0]
    with_workers = build_config(data__num_workers=1, **config)
    assert run_train(tmp_path / "a", with_workers, resume=True, epochs=4)[0].step == 24


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
    with pytest.raises(RunFolderError, match=words):
        run_train(tmp_path, build_config(**changes), workload=build_workload(dataset=dataset), resume=resume)


def test_resume_without_a_checkpoint_starts_and_says_so(tmp_path):
    result, recorder = run_train(tmp_path, resume=True)
    assert result.reason == "finished"
    assert any("no checkpoint" in note.message for note in recorder.of(Noted))
    assert any("no checkpoint" in note for note in result.notes)


class ExplodesAt:
    """A loss that is not finite from one call on."""

    def __init__(self, call, value=float("nan")):
        self.call, self.value, self.n_calls = call, value, 0

    def __call__(self, outputs, targets):
        self.n_calls += outputs.requires_grad
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss * self.value if self.n_calls >= self.call else loss


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(tmp_path, value):
    config = build_config(run__checkpoint_every="2 steps")
    with pytest.raises(NonFiniteLossError) as caught:
        run_train(tmp_path, config, workload=build_workload(loss=ExplodesAt(6, value)))
    assert f"the loss is {value} in step 6 (" in str(caught.value)
    assert "checkpoint of step 4 is kept" in str(caught.value)
    assert "optim.clip_norm" in str(caught.value)
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
    with pytest.raises(
        NonFiniteLossError, match=r"after step 4 1 of \d+ parameters hold NaN or infinity, first 0\.weight"
    ):
        run_train(tmp_path, config, workload=build_workload(optimizer=lambda ps: Diverges(ps, lr=0.1)))
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]["step"] == 2


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


def test_ctrl_c_saves_after_the_step_and_the_rest_follows_on_resume(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    _, expected = run_train(tmp_path / "whole")
    recorder = SignalAt(StepsDone)
    with pytest.raises(KeyboardInterrupt):
        run_train(tmp_path / "parts", recorder=recorder)
    assert signal.getsignal(signal.SIGINT) is before
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


class InterruptingPoints(Points):
    """A validation set whose first reading of sample 20 raises Ctrl-C."""

    def __init__(self, once):
        super().__init__(n_samples=31, noise=0)
        self.once = once

    def __getitem__(self, index):
        if index == 20 and self.once:
            self.once.pop()
            signal.raise_signal(signal.SIGINT)
        return super().__getitem__(index)


def test_ctrl_c_in_an_evaluation_leaves_it_for_the_resumed_run(tmp_path):
    _, expected = run_train(tmp_path / "whole")
    once, recorder = [True], Recorder()
    workload = build_workload(validation=lambda: InterruptingPoints(once))
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


class FullDisk:
    def __init__(self):
        self.n_events = 0

    def __call__(self, event):
        self.n_events += 1
        raise StorageError("steps.csv cannot be written: No space left on device")


def test_a_listener_without_space_is_named_once_and_training_goes_on(tmp_path):
    from fulltilt.engine.loop.train import train

    full, recorder = FullDisk(), Recorder()
    result = train(build_config(), out_dir=tmp_path, listeners=[full, recorder], workload=build_workload())
    assert result.reason == "finished"
    warnings = [note.message for note in recorder.of(Noted) if note.level == "warning"]
    assert len(warnings) == 2
    assert "FullDisk could not store RunStarted (steps.csv cannot be written: No space left on device)" in warnings[0]
    assert f"failed to store events {full.n_events - 2} times" in warnings[1]


def test_a_checkpoint_is_told_before_it_is_written(tmp_path):
    """What a listener holds back of earlier steps would be lost in a kill between the two."""
    steps_on_disk, seen = [], []

    class Watch(Recorder):
        def __call__(self, event):
            if isinstance(event, StepsDone):
                seen.append(event.step)
            if isinstance(event, CheckpointStarted):
                found = tmp_path / "checkpoint.pt"
                on_disk = torch.load(found, weights_only=True)["progress"]["step"] if found.exists() else 0
                steps_on_disk.append((on_disk, event.step, seen[-1]))

    run_train(tmp_path, build_config(run__checkpoint_every="4 steps"), recorder=Watch())
    assert steps_on_disk == [(0, 4, 4), (4, 8, 8), (8, 12, 12), (12, 12, 12)]  # the last holds the evaluation


def test_a_bug_in_a_listener_or_the_model_ends_the_run_and_the_others_hear_why(tmp_path):
    from fulltilt.engine.loop.train import train

    def broken(event):
        if isinstance(event, EpochDone):
            raise ValueError("no such column")

    recorder = Recorder()
    with pytest.raises(ValueError, match="no such column"):
        train(build_config(), out_dir=tmp_path, listeners=[recorder, broken], workload=build_workload())
    assert recorder.events[-1].reason == "failed: ValueError: no such column"

    class Broken(nn.Linear):
        def forward(self, x):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run_train(tmp_path / "model", recorder=recorder, workload=build_workload(model=lambda: Broken(6, 3)))
    assert recorder.events[-1].reason.startswith("failed: RuntimeError: mat1")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        MemoryError(),
    ],
)
def test_out_of_memory_comes_with_its_remedy(tmp_path, error):
    class Hungry(nn.Linear):
        def forward(self, x):
            raise error

    config = build_config(run__on_out_of_memory="stop")
    with pytest.raises(DeviceMemoryError, match=r"on_out_of_memory=replan goes on with batch_size 8 × accumulate 2"):
        run_train(tmp_path, config, workload=build_workload(model=lambda: Hungry(6, 3)))


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


class CountReads(TorchDispatchMode):
    """Counts operators that make the host wait for the value of a float; whole numbers are the loader's own."""

    def __init__(self):
        super().__init__()
        self.n_reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        reads = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        if function in reads and args[0].is_floating_point():
            self.n_reads += 1
        return function(*args, **(kwargs or {}))


def test_the_number_of_steps_does_not_change_the_number_of_host_reads(tmp_path):
    counts = []
    workload = build_workload(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), prepare=None)
    for epochs in (1, 3):
        config = build_config(
            run__epochs=epochs, run__log_every_n_steps=1000, run__evaluate_every=None, run__checkpoint_every=None
        )
        with CountReads() as counter:
            run_train(tmp_path / str(epochs), config, workload=workload)
        counts.append(counter.n_reads)
    assert counts[0] == counts[1]
    with CountReads() as counter:
        float(torch.ones(3).sum())
    assert counter.n_reads == 1


def test_an_interval_is_told_one_interval_late(tmp_path):
    drawn, seen = [], []

    class Counted(Points):
        def __getitem__(self, index):
            drawn.append(index)
            return super().__getitem__(index)

    class Watch(Recorder):
        def __call__(self, event):
            if isinstance(event, StepsDone):
                seen.append((event.step, len(drawn)))

    run_train(tmp_path, recorder=Watch(), workload=build_workload(dataset=Counted), max_steps=5)
    assert seen[0] == (2, 4 * 16)


def test_evaluation_falls_on_its_steps_and_never_means_never(tmp_path):
    _, recorder = run_train(tmp_path / "steps", build_config(run__evaluate_every="5 steps"))
    assert [e.step for e in recorder.of(Evaluated)] == [5, 10, 12]
    result, recorder = run_train(tmp_path, build_config(run__evaluate_every=None, run__checkpoint_every=None))
    assert recorder.of(Evaluated) == []
    assert result.metrics == {}
    assert [e.step for e in recorder.of(CheckpointSaved)] == [12]  # the weights are what training was for
    result, _ = run_train(tmp_path / "unseen", workload=build_workload(validation=None))
    assert (result.reason, result.metrics) == ("finished", {})


@pytest.mark.parametrize("options", [{"epochs": 0}, {"max_steps": 0}, {"max_steps": -3}])
def test_lengths_below_one_are_refused(tmp_path, options):
    with pytest.raises(UsageError, match="at least 1"):
        run_train(tmp_path, **options)


@pytest.mark.parametrize(
    ("config", "device", "error", "words"),
    [
        ({"run__device": [90, 91]}, None, DeviceError, r"device cuda:\d+ is not there"),
        ({}, "cuda:7", DeviceError, "cuda:7"),
        (
            {"run__device": [0, 1], "run__n_ranks": 3},
            None,
            ConfigError,
            r"n_ranks is 3, .* 2 devices \(cuda:0, cuda:1\)",
        ),
    ],
)
def test_devices_that_are_not_there_or_too_few_start_nothing(tmp_path, config, device, error, words):
    with pytest.raises(error, match=words):
        run_train(tmp_path / "run", build_config(**config), device=device)
    assert not (tmp_path / "run").exists()


def test_two_runs_cannot_share_a_folder(tmp_path):
    class Nested(Recorder):
        def __call__(self, event):
            if isinstance(event, RunStarted):
                run_train(tmp_path)

    with pytest.raises(RunFolderError, match="in use"):
        run_train(tmp_path, recorder=Nested())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_run_on_a_gpu_resumes_to_the_same_losses(tmp_path):
    config = build_config(run__device="cuda", speed__precision="fp16", data__pin_memory=True)
    _, expected = run_train(tmp_path / "whole", config)
    _, recorder = run_train(tmp_path / "parts", config, max_steps=5)
    run_train(tmp_path / "parts", config, recorder, resume=True)
    found, wanted = ([e.loss for e in r.of(StepsDone)] for r in (recorder, expected))
    assert found == pytest.approx(wanted, rel=1e-3)
