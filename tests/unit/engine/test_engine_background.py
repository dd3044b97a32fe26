"""Checkpoints written beside training: equal content, one at a time, and what a full disk does."""

import itertools
import threading
import time

import pytest
import torch
from training_cases import Recorder, assert_equal_weights, build_config, read_step, read_weights, run_train

from fulltilt.engine.checkpoints import background, checkpoint
from fulltilt.engine.checkpoints.background import BackgroundWriter, HostCopies, mark_arrivals
from fulltilt.errors import StorageError
from fulltilt.records import CheckpointSaved, CheckpointStarted, StepsDone


def list_places(copy):
    return [value.data_ptr() for value in (*copy["model"].values(), *copy["sums"])]


def test_the_next_copy_of_the_same_shapes_takes_the_memory_of_the_one_before():
    """New memory cost page faults at every checkpoint, and training waited for them."""
    copies, weight = HostCopies(), torch.ones(5, 3)
    state = {"model": {"a": weight, "tied": weight.detach(), "turned": weight.t()}, "sums": [torch.zeros(2)]}
    state |= {"rng": [(weight * 2, "x", None)], "empty": torch.zeros(0)}
    first = copies.copy(state)
    places = list_places(first)
    weight.mul_(3)
    assert torch.equal(first["model"]["a"], torch.ones(5, 3)), "a copy does not follow what training does next"
    assert first["model"]["a"] is first["model"]["tied"]
    assert first["rng"][0][1:] == ("x", None)
    second = copies.copy(state)
    assert list_places(second) == places
    assert len(set(places)) == 3, "tensors that are one stay one, a view has its own"
    assert torch.equal(second["model"]["a"], torch.full((5, 3), 3.0))
    assert torch.equal(second["model"]["turned"], torch.full((3, 5), 3.0))
    parted = copies.copy({"model": {"a": weight, "tied": torch.zeros(5, 3)}})["model"]
    assert torch.equal(parted["a"], weight)
    assert torch.equal(parted["tied"], torch.zeros(5, 3)), "tensors that became two are copied apart"


@pytest.mark.parametrize("changed", [torch.full((2, 2), 7.0), torch.full((4,), 7, dtype=torch.int64)])
def test_a_tensor_of_another_layout_gets_memory_of_its_own(changed):
    copies = HostCopies()
    kept = copies.copy({"a": torch.ones(4), "b": torch.ones(3)})["b"]
    again = copies.copy({"a": changed, "b": torch.zeros(3)})
    assert torch.equal(again["a"], changed)
    assert again["a"].dtype == changed.dtype
    assert again["b"] is kept


class Held:
    """Stands in for the disk: a write ends when it is let go."""

    def __init__(self, monkeypatch):
        self.go, self.states = threading.Event(), []
        monkeypatch.setattr(background, "save_checkpoint", self.save)

    def save(self, folder, state):
        self.states.append(state)
        assert self.go.wait(600)
        return checkpoint.save_checkpoint(folder, state)


def test_one_write_at_a_time(tmp_path, monkeypatch):
    disk, writer = Held(monkeypatch), BackgroundWriter()
    writer.start(tmp_path, {"step": 1})
    assert writer.is_busy
    assert not writer.is_done
    with pytest.raises(RuntimeError, match="being written already"):
        writer.start(tmp_path, {"step": 2})
    disk.go.set()
    assert writer.collect().path == tmp_path / "checkpoint.pt"
    assert not writer.is_busy


def test_a_stall_begins_when_training_stopped_and_a_write_that_ended_by_itself_was_not_waited_for(tmp_path):
    writer = BackgroundWriter()
    (tmp_path / "file").touch()
    writer.start(tmp_path / "file", {"step": 1}, began_s=time.perf_counter() - 1000)
    while not writer.is_done:
        time.sleep(0.001)
    written = writer.collect()
    assert written.stall_s >= 1000
    assert written.waited_s == 0.0
    assert isinstance(written.error, StorageError), "an error of the thread comes with its collection"


def test_what_training_does_meanwhile_is_in_the_next_checkpoint_only(tmp_path, monkeypatch):
    weight, places, writer = torch.zeros(1000), [], BackgroundWriter()
    for value in (1.0, 2.0, 3.0):
        disk = Held(monkeypatch)
        weight.fill_(value)
        writer.start(tmp_path, {"weight": weight})
        weight.fill_(-value)
        disk.go.set()
        assert writer.collect().error is None
        places.append(disk.states[0]["weight"].data_ptr())
        saved = checkpoint.load_checkpoint(tmp_path).state["weight"]
        assert torch.equal(saved, torch.full((1000,), value))
    assert len(set(places)) == 1
    assert weight.data_ptr() not in places


def test_the_wait_for_a_slow_disk_is_no_training_time(tmp_path, monkeypatch):
    """The end of the checkpoint before was waited for by the clock of training."""

    def save(folder, state):
        time.sleep(0.2)  # the disk
        return checkpoint.save_checkpoint(folder, state)

    monkeypatch.setattr(background, "save_checkpoint", save)
    config = build_config(run__async_checkpoint=True, run__checkpoint_every="2 steps")
    result, recorder = run_train(tmp_path, config)
    still_s = [event.stall_s + event.waited_s for event in recorder.of(CheckpointSaved)]
    assert len(still_s) > 2
    assert 0 < sum(still_s) <= result.seconds - result.training_seconds


def test_a_run_with_checkpoints_beside_it_ends_as_one_without(tmp_path):
    every = {"run__checkpoint_every": "2 steps"}
    _, plain = run_train(tmp_path / "a", build_config(**every))
    config = build_config(run__async_checkpoint=True, **every)
    _, beside = run_train(tmp_path / "b", config)
    assert beside.list_figures() == plain.list_figures()
    assert_equal_weights(read_weights(tmp_path / "a"), read_weights(tmp_path / "b"))
    saved, started = beside.of(CheckpointSaved), beside.of(CheckpointStarted)
    assert [event.step for event in saved] == [event.step for event in started]
    assert all(event.stall_s > 0 for event in saved)
    assert [event.stall_s == event.seconds for event in plain.of(CheckpointSaved)] == [True] * len(saved)
    _, again = run_train(tmp_path / "b", config, resume=True)
    assert again.of(StepsDone) == []


def fill_disk(monkeypatch, *full_at):
    """Let the given writes find no space, counted from 1."""
    numbers, real = itertools.count(1), checkpoint.save_checkpoint

    def save(folder, state):
        if next(numbers) in full_at:
            raise StorageError(f"no space left for {folder / 'checkpoint.pt'}; free some")
        return real(folder, state)

    for module in (checkpoint, background):
        monkeypatch.setattr(module, "save_checkpoint", save)


@pytest.mark.parametrize("is_async", [False, True])
def test_on_a_full_disk_the_run_stops_or_goes_on_where_told_and_saves_again_later(tmp_path, monkeypatch, is_async):
    options = {"run__async_checkpoint": is_async, "run__checkpoint_every": "2 steps"}
    fill_disk(monkeypatch, 2)
    recorder = Recorder()
    with pytest.raises(StorageError, match=r"no checkpoint of step 4: no space .* the checkpoint of step 2 is kept"):
        run_train(tmp_path / "stop", build_config(**options), recorder)
    assert read_step(tmp_path / "stop") == 2
    assert recorder.events[-1].reason.startswith("failed: StorageError")
    monkeypatch.undo()
    fill_disk(monkeypatch, 2)
    result, recorder = run_train(tmp_path / "go", build_config(run__on_full_disk="continue", **options))
    assert result.reason == "finished"
    (warning,) = recorder.list_notes("training goes on")
    assert "no checkpoint of step 4" in warning
    assert 4 not in [event.step for event in recorder.of(CheckpointSaved)]
    assert read_step(tmp_path / "go") == 12


@pytest.mark.parametrize(("every", "n_saved", "kept"), [("1 epoch", 1, "step 6 is kept, --resume"), (None, 0, "no")])
def test_a_last_checkpoint_that_cannot_be_written_fails_the_run_anyhow(tmp_path, monkeypatch, every, n_saved, kept):
    fill_disk(monkeypatch, *range(n_saved + 1, 20))
    config, recorder = build_config(run__checkpoint_every=every, run__on_full_disk="continue"), Recorder()
    with pytest.raises(StorageError, match=f"no checkpoint of step 12: .*{kept}"):
        run_train(tmp_path, config, recorder)
    assert not recorder.list_notes("no checkpoint"), "nothing is said to go on"


def test_copies_of_a_gpu_are_waited_for_on_its_own_stream_whichever_is_current(monkeypatch):
    recorded = []

    class FakeEvent:
        def record(self, stream="the current device's"):
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    devices = [torch.device("cpu"), torch.device("cuda:1"), torch.device("cuda:3")]
    assert len(mark_arrivals(devices)) == 2
    assert recorded == ["stream of cuda:1", "stream of cuda:3"]
