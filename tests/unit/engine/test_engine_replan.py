"""Out of memory in a run: what it goes on with, that nothing is skipped, and that the losses are those of the plan."""

import time

import pytest
import torch
from torch import nn
from training_cases import (
    N_CLASSES,
    N_FEATURES,
    Points,
    PointStream,
    Recorder,
    build_config,
    build_workload,
    read_weights,
    run_train,
)

from fulltilt.engine.loop import session
from fulltilt.engine.loop.replan import MAX_REPLANS
from fulltilt.engine.loop.sizes import LastStep
from fulltilt.errors import DeviceMemoryError
from fulltilt.records import EpochDone, Evaluated, Noted, Replanned, RunEnded, RunStarted, StepsDone


class Card(nn.Module):
    """A layer in front of a model that has no room for more than ``n_rows``, from training call ``from_call`` on."""

    def __init__(self, n_rows, from_call=0, in_evaluation=False):
        super().__init__()
        self.n_rows, self.from_call, self.in_evaluation, self.n_calls = n_rows, from_call, in_evaluation, 0

    def forward(self, x):
        self.n_calls += self.training
        if self.training != self.in_evaluation and self.n_calls > self.from_call and len(x) > self.n_rows:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(x)} rows.")
        return x


def build_plain(**changes):
    """A workload that draws nothing at random once it is built, so that micro-batches of any size come to the same."""
    values = {"model": lambda: build_model(), "dataset": lambda: Points(noise=0), "prepare": None}
    sgd = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9)}
    return build_workload(**(values | sgd | changes))


def build_model(*front):
    return nn.Sequential(*front, nn.Linear(N_FEATURES, 16), nn.Tanh(), nn.Linear(16, N_CLASSES))


def build_norm_model(*front):
    return nn.Sequential(
        nn.Linear(N_FEATURES, 16), nn.BatchNorm1d(16, momentum=0.5), *front, nn.ReLU(), nn.Linear(16, N_CLASSES)
    )


def list_steps(recorder):
    """Every logged interval that still counts: a later attempt that starts again at a step replaces what came after."""
    kept = []
    for event in recorder.events:
        if isinstance(event, RunStarted):
            kept = [row for row in kept if row[0] <= event.first_step]
        if isinstance(event, StepsDone):
            kept.append((event.step, event.n_samples, event.loss))
    return kept


def assert_same_losses(recorder, whole):
    mine, theirs = list_steps(recorder), list_steps(whole)
    assert [row[:2] for row in mine] == [row[:2] for row in theirs]
    torch.testing.assert_close([row[2] for row in mine], [row[2] for row in theirs], rtol=1e-4, atol=1e-6)


def list_sizes(recorder):
    return [(e.step, e.n_steps_lost, e.batch_size, e.accumulate, e.val_batch_size) for e in recorder.of(Replanned)]


def test_at_the_first_step_the_run_becomes_the_one_with_smaller_micro_batches(tmp_path):
    config = build_config(run__log_every_n_steps=1)
    cut = build_config(data__batch_size=4, speed__accumulate=4, run__log_every_n_steps=1)
    expected, plain = run_train(tmp_path / "cut", cut, workload=build_plain())
    _, whole = run_train(tmp_path / "whole", config, workload=build_plain())
    workload = build_plain(model=lambda: build_model(Card(4)))
    result, recorder = run_train(tmp_path / "replanned", config, workload=workload)
    assert list_sizes(recorder) == [(0, 0, 8, 2, None), (0, 0, 4, 4, None)]
    assert list_steps(recorder) == list_steps(plain)
    assert result.metrics == expected.metrics
    assert_same_losses(recorder, whole)


def test_in_the_middle_of_a_window_the_last_whole_step_is_what_it_goes_on_from(tmp_path):
    """The second micro-batch of step 3 fails: BatchNorm has seen the first one, which must not count."""
    config = build_config(data__batch_size=16, speed__accumulate=2, run__log_every_n_steps=1, run__epochs=3)
    workload = build_plain(model=lambda: build_norm_model(Card(8, from_call=5)))
    result, recorder = run_train(tmp_path / "replanned", config, workload=workload)
    assert list_sizes(recorder) == [(2, 0, 8, 4, None)]

    folder = tmp_path / "by hand"
    _, by_hand = run_train(folder, config, workload=build_plain(model=build_norm_model), max_steps=2)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    state["sizes"] = {"batch_size": 8, "accumulate": 4, "val_batch_size": None}
    torch.save(state, folder / "checkpoint.pt")
    expected, _ = run_train(folder, config, by_hand, workload=build_plain(model=build_norm_model), resume=True)
    assert list_steps(recorder) == list_steps(by_hand)
    assert result.metrics == expected.metrics
    mine, theirs = read_weights(tmp_path / "replanned").values(), read_weights(folder).values()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_training_metrics_leave_the_dropped_window_out(tmp_path):
    config = build_config(data__batch_size=16, speed__accumulate=2, run__epochs=1)
    _, whole = run_train(tmp_path / "whole", config, workload=build_plain(), training_metrics=True)
    workload = build_plain(model=lambda: build_model(Card(8, from_call=3)))
    _, recorder = run_train(tmp_path / "replanned", config, workload=workload, training_metrics=True)
    assert recorder.of(EpochDone)[0].metrics == pytest.approx(whole.of(EpochDone)[0].metrics)


class FailsInUpdate(torch.optim.SGD):
    """Runs out of memory once, when half of the parameters hold new values."""

    n_left = 5

    def step(self, closure=None):
        FailsInUpdate.n_left -= 1
        if FailsInUpdate.n_left == 0:
            self.param_groups[0]["params"][0].data.add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        return super().step(closure)


@pytest.mark.parametrize(("checkpoint_every", "goes_on_from"), [("2 steps", 4), (None, 0)])
def test_an_interrupted_update_goes_back_to_the_newest_checkpoint_and_says_so(tmp_path, checkpoint_every, goes_on_from):
    config = build_config(run__checkpoint_every=checkpoint_every, run__log_every_n_steps=1)
    FailsInUpdate.n_left = 6
    workload = build_plain(optimizer=lambda parameters: FailsInUpdate(parameters, lr=0.2, momentum=0.9))
    result, recorder = run_train(tmp_path / "a", config, workload=workload)
    assert list_sizes(recorder) == [(goes_on_from, 5 - goes_on_from, 8, 2, None)]
    assert any(f"{5 - goes_on_from} steps since the newest checkpoint are trained again" in n for n in result.notes)
    _, whole = run_train(tmp_path / "b", build_config(run__log_every_n_steps=1), workload=build_plain())
    assert_same_losses(recorder, whole)


def test_an_evaluation_without_room_halves_its_own_batches_only(tmp_path):
    config = build_config(data__val_batch_size=31, run__log_every_n_steps=1)
    expected, plain = run_train(tmp_path / "a", config, workload=build_plain())
    workload = build_plain(model=lambda: build_model(Card(10, from_call=-1, in_evaluation=True)))
    result, recorder = run_train(tmp_path / "b", config, workload=workload)
    assert list_sizes(recorder) == [(6, 0, 16, 1, 15), (6, 0, 16, 1, 7)]
    assert list_steps(recorder) == list_steps(plain)
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert [e.step for e in recorder.of(Evaluated)] == [6, 12]


def test_the_note_says_what_happened_what_changes_and_what_stays(tmp_path):
    workload = build_plain(model=lambda: build_norm_model(Card(8)))
    result, recorder = run_train(tmp_path, workload=workload)
    (note,) = [note.message for note in recorder.of(Noted) if "out of memory" in note.message]
    assert "after step 0 with batch_size 16 × accumulate 1 (CUDA out of memory. Tried to allocate 16 rows.)" in note
    assert "batch_size 8 × accumulate 2 from now on, the effective batch stays 16" in note
    assert "BatchNorm sees 8 samples at a time instead of 16" in note
    assert note in result.notes
    assert [e.attempt for e in recorder.of(RunStarted)] == [0, 1]
    assert [e.reason for e in recorder.of(RunEnded)] == ["finished"]


def test_at_a_micro_batch_of_one_the_run_ends_and_says_what_else_would_help(tmp_path):
    recorder = Recorder()
    workload = build_plain(model=lambda: build_model(Card(0)))
    with pytest.raises(DeviceMemoryError, match=r"batch_size 1 .* there is no smaller batch .* bf16") as caught:
        run_train(tmp_path, recorder=recorder, workload=workload)
    assert [size[2:4] for size in list_sizes(recorder)] == [(8, 2), (4, 4), (2, 8), (1, 16)]
    assert recorder.events[-1].reason == f"failed: DeviceMemoryError: {caught.value}"


def test_replans_are_counted(tmp_path):
    """420 has many divisors: 60, 42, 30, 21, 15, 10, 7, 5 and then 3."""
    recorder = Recorder()
    config = build_config(data__batch_size=84, speed__accumulate=5, optim__warmup=0)
    workload = build_plain(model=lambda: build_model(Card(0)), dataset=lambda: Points(n_samples=420, noise=0))
    with pytest.raises(DeviceMemoryError, match=f"after {MAX_REPLANS} replans"):
        run_train(tmp_path, config, recorder, workload=workload)
    assert len(recorder.of(Replanned)) == MAX_REPLANS
    assert all(e.batch_size * e.accumulate == 420 for e in recorder.of(Replanned))


def test_a_resumed_run_keeps_the_sizes_it_had_come_to(tmp_path):
    workload = build_plain(model=lambda: build_model(Card(8)))
    run_train(tmp_path, workload=workload, max_steps=4)
    result, recorder = run_train(tmp_path, workload=workload, resume=True)
    assert recorder.of(Replanned) == []
    assert recorder.events[0].plan["batch_size"] == 8
    assert any("batch_size 8 × accumulate 2: memory ran out earlier" in note for note in result.notes)
    assert result.step == 12


@pytest.mark.parametrize("n_samples", [90, 104])
def test_dropping_the_last_batch_drops_the_same_samples_after_a_replan(tmp_path, n_samples):
    """104 = 6 × 16 + 8: batches of 8 would make a seventh step of what was dropped."""
    config = build_config(data__drop_last=True, run__log_every_n_steps=1)
    plain = {"dataset": lambda: Points(n_samples=n_samples, noise=0)}
    _, whole = run_train(tmp_path / "a", config, workload=build_plain(**plain))
    workload = build_plain(model=lambda: build_model(Card(8)), **plain)
    _, recorder = run_train(tmp_path / "b", config, workload=workload)
    assert_same_losses(recorder, whole)
    assert [e.lr for e in recorder.of(StepsDone)] == [e.lr for e in whole.of(StepsDone)]


def test_a_stream_goes_on_at_the_same_sample(tmp_path):
    config = build_config(optim__schedule="constant", optim__warmup=0, run__log_every_n_steps=1)
    stream = {"dataset": lambda: PointStream(noise=0)}
    _, whole = run_train(tmp_path / "a", config, workload=build_plain(**stream))
    workload = build_plain(model=lambda: build_model(Card(8, from_call=3)), **stream)
    _, recorder = run_train(tmp_path / "b", config, workload=workload)
    assert list_sizes(recorder) == [(3, 0, 8, 2, None)]
    assert_same_losses(recorder, whole)


def test_a_stream_that_drops_its_last_batch_is_not_cut_anew(tmp_path):
    config = build_config(optim__schedule="constant", optim__warmup=0, data__drop_last=True)
    workload = build_plain(model=lambda: build_model(Card(8)), dataset=lambda: PointStream(noise=0))
    with pytest.raises(DeviceMemoryError, match=r"does not replan by itself: a stream .* or batch_size 8"):
        run_train(tmp_path, config, workload=workload)


def test_a_loss_that_compares_samples_keeps_the_whole_window_as_its_batch(tmp_path):
    """Plain micro-batches of 8 would compare 8 samples with each other instead of 16."""

    def repel(outputs, targets):
        return (outputs @ outputs.T).softmax(1).diagonal().log().neg().mean()

    config = build_config(run__log_every_n_steps=1, run__epochs=1)
    coupled = {"loss": repel, "couples_samples": True, "metrics": {}, "validation": None}
    _, whole = run_train(tmp_path / "a", config, workload=build_plain(**coupled))
    workload = build_plain(model=lambda: build_model(Card(8)), **coupled)
    _, recorder = run_train(tmp_path / "b", config, workload=workload)
    assert list_sizes(recorder) == [(0, 0, 8, 2, None)]
    assert_same_losses(recorder, whole)


def fail(error):
    def raise_it(*args):
        raise error

    return raise_it


NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 rows.")
NO_HOST_ROOM = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 8 bytes")


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ({"loss": fail(ValueError("shapes differ"))}, ValueError, "shapes differ"),
        ({"model": fail(NO_HOST_ROOM)}, DeviceMemoryError, "before the first step"),
        # The workload reads its samples by itself: no batch size of the run changes what it needs.
        (
            {"assess": fail(NO_ROOM)},
            DeviceMemoryError,
            r"assessment of points \(workload.assess\), which no batch size",
        ),
    ],
)
def test_what_smaller_batches_do_not_help_ends_the_run(tmp_path, parts, error, words):
    recorder = Recorder()
    with pytest.raises(error, match=words):
        run_train(tmp_path, recorder=recorder, workload=build_plain(**parts))
    assert recorder.of(Replanned) == []


@pytest.mark.parametrize("changes", [{"optim__ema": 0.9}, {"run__async_checkpoint": True}])
def test_the_average_of_the_weights_and_checkpoints_beside_training_go_on_after_a_replan(tmp_path, changes):
    config = build_config(run__log_every_n_steps=1, run__checkpoint_every="2 steps", **changes)
    expected, whole = run_train(tmp_path / "whole", config, workload=build_plain())
    workload = build_plain(model=lambda: build_model(Card(8, from_call=5)))
    result, recorder = run_train(tmp_path / "replanned", config, workload=workload)
    assert [size[:4] for size in list_sizes(recorder)] == [(5, 0, 8, 2)]
    assert [row[:2] for row in list_steps(recorder)] == [row[:2] for row in list_steps(whole)]
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-4)
    mine, theirs = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("replanned", "whole"))
    assert mine["progress"]["step"] == theirs["progress"]["step"] == 12
    if "optim__ema" in changes:
        assert mine["average"]["n_updates"] == theirs["average"]["n_updates"] == 12


def test_a_session_that_cannot_be_opened_again_ends_the_run_for_its_listeners(tmp_path):
    def build():
        if (tmp_path / "checkpoint.pt").exists():
            raise RuntimeError("no model the second time")
        return build_model(Card(8))

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="no model the second time"):
        run_train(tmp_path, recorder=recorder, workload=build_plain(model=build))
    assert len(recorder.of(Replanned)) == 1
    (ended,) = recorder.of(RunEnded)
    assert (ended.reason, ended.step) == ("failed: RuntimeError: no model the second time", 0)


def test_an_interval_that_a_replan_cuts_has_the_seconds_of_both_parts(tmp_path):
    class Slow(nn.Identity):
        def forward(self, x):
            time.sleep(0.05 * self.training)
            return x

    config = build_config(run__log_every_n_steps=6, run__epochs=1, run__checkpoint_every=None)
    workload = build_plain(model=lambda: build_model(Card(8, from_call=5), Slow()))
    _, recorder = run_train(tmp_path, config, workload=workload)
    assert len(recorder.of(Replanned)) == 1
    (interval,) = recorder.of(StepsDone)
    assert interval.n_samples == 90
    assert interval.seconds > 6 * 0.05


def test_nothing_is_kept_where_no_replan_can_follow(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(session, "LastStep", lambda model: kept.append(model is not None) or LastStep(model))
    norm = build_plain(model=build_norm_model)
    for name in ("stop", "replan"):
        run_train(tmp_path / name, build_config(run__on_out_of_memory=name), workload=norm, max_steps=1)
    assert kept == [False, True]
