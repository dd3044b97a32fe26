"""Out of memory in a run: what it goes on with, that nothing is skipped, and that the losses are those of the plan."""

import itertools
import os
import signal
import threading
import time
import types

import parallel_cases
import pytest
import torch
import training_cases as cases
from parallel_cases import build_plain_workload, build_sgd
from torch import nn
from training_cases import CONSTANT, Points, PointStream, Recorder, build_config, build_cpu_run, fail, run_train

from fulltilt.engine.announce import Announcer
from fulltilt.engine.loop import progress, session
from fulltilt.engine.loop.launch import plan_after_crash, plan_again, train_in_ranks
from fulltilt.engine.loop.replan import MAX_REPLANS, RankReplanError
from fulltilt.engine.loop.session import Restart
from fulltilt.engine.loop.sizes import LastStep, Sizes, find_obstacle, plan_sizes
from fulltilt.engine.ranks.causes import Cause
from fulltilt.engine.ranks.process import describe_failure
from fulltilt.engine.ranks.world import World
from fulltilt.errors import ConfigError, DeviceMemoryError
from fulltilt.records import CheckpointSaved, EpochDone, Evaluated, Replanned, RunEnded, RunStarted, StepsDone


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


def build_model(*front):
    return nn.Sequential(*front, nn.Linear(cases.N_FEATURES, 16), nn.Tanh(), nn.Linear(16, cases.N_CLASSES))


def build_norm_model(*front):
    norm = nn.BatchNorm1d(16, momentum=0.5)
    return nn.Sequential(nn.Linear(cases.N_FEATURES, 16), norm, *front, nn.ReLU(), nn.Linear(16, cases.N_CLASSES))


def run(folder, config=None, recorder=None, *, card=(10**6,), model=build_model, parts=None, **options):
    """Train, on a card if one is given; nothing is drawn at random, so micro-batches of any size come to the same."""
    values = {"model": lambda: model(Card(*card)), "dataset": lambda: Points(noise=0), "prepare": None}
    values |= {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9)}
    return run_train(folder, config, recorder, workload=cases.build_workload(**(values | (parts or {}))), **options)


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
    expected, plain = run(tmp_path / "cut", cut)
    _, whole = run(tmp_path / "whole", config)
    result, recorder = run(tmp_path / "replanned", config, card=(4,))
    assert list_sizes(recorder) == [(0, 0, 8, 2, None), (0, 0, 4, 4, None)]
    assert list_steps(recorder) == list_steps(plain)
    assert result.metrics == expected.metrics
    assert_same_losses(recorder, whole)


def test_in_the_middle_of_a_window_the_last_whole_step_is_what_it_goes_on_from(tmp_path):
    """The second micro-batch of step 3 fails: BatchNorm has seen the first one, which must not count."""
    config = build_config(data__batch_size=16, speed__accumulate=2, run__log_every_n_steps=1, run__epochs=3)
    options = {"model": build_norm_model, "training_metrics": True}
    result, recorder = run(tmp_path / "replanned", config, card=(8, 5), **options)
    assert list_sizes(recorder) == [(2, 0, 8, 4, None)]
    (note,) = recorder.list_notes("out of memory")
    assert "after step 2 with batch_size 16 × accumulate 2 (CUDA out of memory. Tried to allocate 10 rows.)" in note
    assert "batch_size 8 × accumulate 4 from now on, the effective batch stays 32" in note
    assert "BatchNorm sees 8 samples at a time instead of 16" in note
    assert note in result.notes
    assert [e.attempt for e in recorder.of(RunStarted)] == [0, 1]
    assert [e.reason for e in recorder.of(RunEnded)] == ["finished"]

    folder = tmp_path / "by hand"
    _, by_hand = run(folder, config, max_steps=2, **options)
    sizes = {"batch_size": 8, "accumulate": 4, "val_batch_size": None}
    torch.save(cases.read_state(folder) | {"sizes": sizes}, folder / "checkpoint.pt")
    expected, _ = run(folder, config, by_hand, resume=True, **options)
    assert list_steps(recorder) == list_steps(by_hand)
    assert [e.metrics for e in recorder.of(EpochDone)] == [e.metrics for e in by_hand.of(EpochDone)]
    assert result.metrics == expected.metrics
    cases.assert_equal_weights(cases.read_weights(tmp_path / "replanned"), cases.read_weights(folder))


@pytest.mark.parametrize(("checkpoint_every", "goes_on_from"), [("2 steps", 4), (None, 0)])
def test_an_interrupted_update_goes_back_to_the_newest_checkpoint_and_says_so(tmp_path, checkpoint_every, goes_on_from):
    n_updates = 0

    class FailsInUpdate(torch.optim.SGD):
        """Runs out of memory once, when half of the parameters hold new values."""

        def step(self, closure=None):
            nonlocal n_updates
            n_updates += 1
            if n_updates == 6:
                self.param_groups[0]["params"][0].data.add_(1.0)
                raise NO_ROOM
            return super().step(closure)

    config = build_config(run__checkpoint_every=checkpoint_every, run__log_every_n_steps=1)
    optimizer = {"optimizer": lambda parameters: FailsInUpdate(parameters, lr=0.2, momentum=0.9)}
    result, recorder = run(tmp_path / "a", config, parts=optimizer)
    assert list_sizes(recorder) == [(goes_on_from, 5 - goes_on_from, 8, 2, None)]
    assert any(f"{5 - goes_on_from} steps since the newest checkpoint are trained again" in n for n in result.notes)
    _, whole = run(tmp_path / "b", build_config(run__log_every_n_steps=1))
    assert_same_losses(recorder, whole)


def test_an_evaluation_without_room_halves_its_own_batches_only(tmp_path):
    config = build_config(data__val_batch_size=31, run__log_every_n_steps=1)
    expected, plain = run(tmp_path / "a", config)
    result, recorder = run(tmp_path / "b", config, card=(10, -1, True))
    assert list_sizes(recorder) == [(6, 0, 16, 1, 15), (6, 0, 16, 1, 7)]
    assert list_steps(recorder) == list_steps(plain)
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
    assert [e.step for e in recorder.of(Evaluated)] == [6, 12]


class Reader:
    """An assessment that has room for ``n_rows`` samples at a time."""

    def __init__(self, n_rows, batch_size=256):
        self.n_rows, self.batch_size = n_rows, batch_size

    def __call__(self, model, device):
        if self.batch_size > self.n_rows:
            raise NO_ROOM
        return {"read_at_a_time": float(self.batch_size)}


def test_an_assessment_without_room_reads_fewer_samples_at_a_time(tmp_path):
    config = build_config(run__epochs=1)
    result, recorder = run(tmp_path, config, parts={"assess": Reader(80), "validation": None, "metrics": {}})
    assert list_sizes(recorder) == [(6, 0, 16, 1, 16)]
    assert result.metrics == {"read_at_a_time": 16.0}
    assert any("in an evaluation" in note and "batches hold 16 samples from now on" in note for note in result.notes)


@pytest.mark.parametrize(
    ("card", "reader", "val_batch_size", "expected"),
    [
        ((16, -1, True), (8, 4), 31, (15, 4.0)),  # the evaluation halves its batch, which is more than the assessment's
        ((31, -1, True), (8, 16), 15, (7, 7.0)),  # the assessment had the validation batch already
        ((31, -1, True), (16, 60), None, (16, 16.0)),  # half of the assessment's is more than a validation batch
        ((31, -1, True), (5, 10), None, (5, 5.0)),
    ],
)
def test_no_batch_grows_where_one_size_is_for_evaluation_and_assessment(
    tmp_path, card, reader, val_batch_size, expected
):
    config = build_config(run__epochs=1, data__val_batch_size=val_batch_size)
    result, recorder = run(tmp_path, config, card=card, parts={"assess": Reader(*reader)})
    assert (list_sizes(recorder)[-1][-1], result.metrics["read_at_a_time"]) == expected
    assert len(list_sizes(recorder)) == 1


def test_what_was_said_at_the_start_is_not_said_again_after_a_replan(tmp_path):
    parts = {"explain": lambda batch_size, accumulate: ["as ever", f"{batch_size} at a time"]}
    result, recorder = run(tmp_path, card=(8,), parts=parts)
    assert len(recorder.of(RunStarted)) == 2
    notes = recorder.list_notes()
    assert [notes.count(note) for note in ("as ever", "16 at a time", "8 at a time")] == [1, 1, 1]
    assert result.notes.count("as ever") == 1


def test_at_a_micro_batch_of_one_the_run_ends_and_says_what_else_would_help(tmp_path):
    recorder = Recorder()
    with pytest.raises(DeviceMemoryError, match=r"batch_size 1 .* there is no smaller batch .* bf16") as caught:
        run(tmp_path, None, recorder, card=(0,))
    assert [size[2:4] for size in list_sizes(recorder)] == [(8, 2), (4, 4), (2, 8), (1, 16)]
    assert recorder.events[-1].reason == f"failed: DeviceMemoryError: {caught.value}"


def test_nothing_is_advised_that_is_in_force(tmp_path):
    def say(name, card=(8,), build=build_model, **changes):
        config = build_config(run__on_out_of_memory="stop", **changes)
        with pytest.raises(DeviceMemoryError) as caught:
            run(tmp_path / name, config, card=card, model=build)
        return str(caught.value)

    assert "try activation_checkpointing, with" in say("fp32")
    assert "precision bf16 or a smaller model" in say("fp32-again")
    said = say("bf16", speed__precision="bf16")
    assert said.endswith("; or, as another run in another folder, a smaller model")
    assert "use a smaller model or another device" in say("stream", build=fail(NO_HOST_ROOM))
    assert "use data.placement stream, a smaller" in say("auto", build=fail(NO_HOST_ROOM), data__placement="auto")


def test_replans_are_counted(tmp_path):
    """420 has many divisors: 60, 42, 30, 21, 15, 10, 7, 5 and then 3."""
    recorder = Recorder()
    config = build_config(data__batch_size=84, speed__accumulate=5, optim__warmup=0)
    with pytest.raises(DeviceMemoryError, match=f"after {MAX_REPLANS} replans"):
        run(tmp_path, config, recorder, card=(0,), parts={"dataset": lambda: Points(n_samples=420, noise=0)})
    assert len(recorder.of(Replanned)) == MAX_REPLANS
    assert all(e.batch_size * e.accumulate == 420 for e in recorder.of(Replanned))


def test_a_resumed_run_keeps_the_sizes_it_had_come_to(tmp_path):
    run(tmp_path, card=(8,), max_steps=4)
    result, recorder = run(tmp_path, card=(8,), resume=True)
    assert recorder.of(Replanned) == []
    assert recorder.events[0].plan["batch_size"] == 8
    assert any("batch_size 8 × accumulate 2: memory ran out earlier" in note for note in result.notes)
    assert result.step == 12


def repel(outputs, targets):
    """Plain micro-batches of 8 would compare 8 samples with each other instead of 16."""
    return (outputs @ outputs.T).softmax(1).diagonal().log().neg().mean()


STREAM = {"dataset": lambda: PointStream(noise=0)}
DROP_LAST = {"data__drop_last": True}


@pytest.mark.parametrize(
    ("changes", "parts", "n_steps"),
    [
        (DROP_LAST, {}, 0),
        # 104 = 6 × 16 + 8: batches of 8 would make a seventh step of what was dropped.
        (DROP_LAST, {"dataset": lambda: Points(n_samples=104, noise=0)}, 0),
        (CONSTANT, STREAM, 3),
        ({"run__epochs": 1}, {"loss": repel, "couples_samples": True, "metrics": {}, "validation": None}, 0),
    ],
    ids=["90 samples without the last batch", "104 samples without the last batch", "a stream", "a coupled loss"],
)
def test_after_a_replan_every_step_is_of_the_same_samples(tmp_path, changes, parts, n_steps):
    config = build_config(run__log_every_n_steps=1, **changes)
    _, whole = run(tmp_path / "a", config, parts=parts)
    _, recorder = run(tmp_path / "b", config, card=(8, n_steps), parts=parts)
    assert list_sizes(recorder) == [(n_steps, 0, 8, 2, None)]
    assert_same_losses(recorder, whole)
    assert [e.lr for e in recorder.of(StepsDone)] == [e.lr for e in whole.of(StepsDone)]


STOP = {"run__on_out_of_memory": "stop"}
NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 rows.")
NO_HOST_ROOM = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 8 bytes")


@pytest.mark.parametrize(
    ("changes", "parts", "error", "words"),
    [
        ({}, {"loss": fail(ValueError("shapes differ"))}, ValueError, "shapes differ"),
        ({}, {"model": fail(NO_HOST_ROOM)}, DeviceMemoryError, "before the first step"),
        ({}, {"model": fail(MemoryError())}, DeviceMemoryError, r"building model and data \(MemoryError\)"),
        (STOP, {"loss": fail(NO_ROOM)}, DeviceMemoryError, "memory=replan goes on with batch_size 8 × accumulate 2"),
        # The workload reads its samples by itself: no batch size of the run changes what it needs.
        ({}, {"assess": fail(NO_ROOM)}, DeviceMemoryError, r"points \(workload.assess\), which no batch size"),
        # A stream cannot be cut anew where its last batch is dropped.
        (CONSTANT | DROP_LAST, STREAM | {"loss": fail(NO_ROOM)}, DeviceMemoryError, "a stream .* or batch_size 8"),
    ],
)
def test_what_smaller_batches_do_not_help_ends_the_run(tmp_path, changes, parts, error, words):
    recorder = Recorder()
    with pytest.raises(error, match=words):
        run(tmp_path, build_config(**changes), recorder, parts=parts)
    assert recorder.of(Replanned) == []


@pytest.mark.parametrize("changes", [{"optim__ema": 0.9}, {"run__async_checkpoint": True}])
def test_the_average_of_the_weights_and_checkpoints_beside_training_go_on_after_a_replan(tmp_path, changes):
    config = build_config(run__log_every_n_steps=1, run__checkpoint_every="2 steps", **changes)
    expected, whole = run(tmp_path / "whole", config)
    result, recorder = run(tmp_path / "replanned", config, card=(8, 5))
    assert [size[:4] for size in list_sizes(recorder)] == [(5, 0, 8, 2)]
    assert [row[:2] for row in list_steps(recorder)] == [row[:2] for row in list_steps(whole)]
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-4)
    mine, theirs = (cases.read_state(tmp_path / name) for name in ("replanned", "whole"))
    assert mine["progress"]["step"] == theirs["progress"]["step"] == 12
    if "optim__ema" in changes:
        assert mine["average"]["n_updates"] == theirs["average"]["n_updates"] == 12


def test_a_session_that_cannot_be_opened_again_ends_the_run_for_its_listeners(tmp_path):
    def build(card):
        if (tmp_path / "checkpoint.pt").exists():
            raise RuntimeError("no model the second time")
        return build_model(card)

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="no model the second time"):
        run(tmp_path, None, recorder, card=(8,), model=build)
    assert len(recorder.of(Replanned)) == 1
    (ended,) = recorder.of(RunEnded)
    assert (ended.reason, ended.step) == ("failed: RuntimeError: no model the second time", 0)


def test_an_interval_that_a_replan_cuts_has_the_seconds_of_both_parts(tmp_path):
    class Slow(nn.Identity):
        def forward(self, x):
            time.sleep(0.05 * self.training)
            return x

    config = build_config(run__log_every_n_steps=6, run__epochs=1, run__checkpoint_every=None)
    _, recorder = run(tmp_path, config, card=(8, 5), model=lambda card: build_model(card, Slow()))
    assert len(recorder.of(Replanned)) == 1
    (interval,) = recorder.of(StepsDone)
    assert interval.n_samples == 90
    assert interval.seconds > 6 * 0.05


def test_the_time_of_an_attempt_that_failed_is_no_time_of_the_steps_that_count(tmp_path, monkeypatch):
    """6 samples/s were told of a run whose steps took half of the time"""
    now = 0.0

    class Timed(Card):
        def forward(self, x):
            nonlocal now
            now += self.training
            try:
                return super().forward(x)
            except torch.OutOfMemoryError:
                now += 100
                raise

    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: now))
    result, recorder = run(tmp_path, model=lambda card: build_model(Timed(8, 5)))
    assert [size[:4] for size in list_sizes(recorder)] == [(5, 0, 8, 2)]
    n_micro_steps = 5 + 2 + 12  # before, of the step that was taken again, of the second epoch
    assert result.training_seconds == sum(e.seconds for e in recorder.of(EpochDone)) == n_micro_steps


def test_nothing_is_kept_where_no_replan_can_follow(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(session, "LastStep", lambda model: kept.append(model is not None) or LastStep(model))
    for name in ("stop", "replan"):
        run(tmp_path / name, build_config(run__on_out_of_memory=name), model=build_norm_model, max_steps=1)
    assert kept == [False, True]


class Refused(Card):
    """A layer that a library refuses, as oneDNN does without memory."""

    def forward(self, x):
        try:
            return super().forward(x)
        except torch.OutOfMemoryError:
            raise RuntimeError("could not create a primitive") from None


def list_starts(recorder):
    return [(e.pid == os.getpid(), e.attempt, e.first_step, e.plan["batch_size"]) for e in recorder.of(RunStarted)]


@pytest.mark.slow
@pytest.mark.timeout(300)  # two processes that load torch
def test_a_process_that_a_library_refused_memory_is_left_for_a_fresh_one(tmp_path):
    """oneDNN failed, or crashed, at the smaller batch too"""
    config = build_config(run__log_every_n_steps=1)
    _, whole = run(tmp_path / "whole", config)
    options = {"model": lambda card: build_model(Refused(4, 5))}
    result, recorder = run(tmp_path / "replanned", config, **options)
    # Each process builds the layer anew, which lets five calls of its own pass.
    assert list_starts(recorder) == [(True, 0, 0, 16), (False, 1, 5, 8), (False, 2, 7, 4)]
    assert_same_losses(recorder, whole)
    assert [e.reason for e in recorder.of(RunEnded)] == ["finished"]
    assert len([note for note in result.notes if "(could not create a primitive)" in note]) == 2


def test_a_workload_that_cannot_be_sent_goes_on_in_the_same_process(tmp_path):
    lock = threading.Lock()

    def loss(outputs, targets):
        with lock:
            return nn.functional.cross_entropy(outputs, targets)

    cards = itertools.chain([Refused(8, 5), Refused(4)], itertools.repeat(nn.Identity()))
    result, recorder = run(tmp_path, model=lambda card: build_model(next(cards)), parts={"loss": loss})
    assert list_starts(recorder) == [(True, 0, 0, 16), (True, 1, 5, 8), (True, 2, 5, 4)]
    assert result.step == 12
    (note,) = recorder.list_notes("goes on in this process")
    assert "as the workload cannot be sent to another one (TypeError: cannot pickle '_thread.lock' object)" in note
    assert result.notes.count(note) == 1


@pytest.mark.parametrize(
    ("exit_code", "changes", "sizes"),
    [
        (-signal.SIGSEGV, {}, (4, 4, 4)),
        (-signal.SIGSEGV, {"sizes": Sizes(batch_size=8, accumulate=2, val_batch_size=31)}, (4, 4, 15)),
        (-signal.SIGSEGV, {"sizes": Sizes(batch_size=1, accumulate=16, val_batch_size=None)}, None),
        (-signal.SIGSEGV, {"n_replans": MAX_REPLANS}, None),
        (-signal.SIGKILL, {}, None),
        (1, {}, None),
        (None, {}, None),
    ],
)
def test_a_crash_of_the_process_that_went_on_is_answered_as_want_of_memory(exit_code, changes, sizes):
    values = {"sizes": Sizes(batch_size=8, accumulate=2, val_batch_size=None), "n_replans": 1}
    after = Restart(reason="out of memory", attempt=1, started_s=0.0, step=5, **(values | changes))
    cause = Cause(rank=0, kind="died", text="rank 0 was killed by SIGSEGV", exit_code=exit_code)
    recorder = Recorder()
    again = plan_after_crash(cause, after, 7, 7, Announcer([recorder]))
    if sizes is None:
        assert (again, recorder.events) == (None, [])
        return
    restart, (replanned,) = again["after"], recorder.of(Replanned)
    assert (restart.n_replans, restart.attempt, restart.step) == (2, 2, 7)
    for told in (restart.sizes, replanned):
        assert (told.batch_size, told.accumulate, told.val_batch_size) == sizes
    assert (
        "the checkpoint of step 7 with batch_size 4 × accumulate 4, the effective batch stays 16"
        in (recorder.list_notes()[0])
    )


def test_a_crash_says_how_many_steps_are_trained_again(tmp_path, monkeypatch):
    sizes = Sizes(batch_size=8, accumulate=2, val_batch_size=None)
    after = Restart(sizes=sizes, reason="", n_replans=1, attempt=1, started_s=0.0, step=0)
    cause = Cause(rank=0, kind="died", text="rank 0 was killed by SIGSEGV", exit_code=-signal.SIGSEGV)
    config = build_config(run__log_every_n_steps=1, run__checkpoint_every="4 steps")

    def crash(body, given, *, announcer, plan_again, **options):
        _, told = run_train(tmp_path, config, max_steps=6)
        for event in told.events:
            if not isinstance(event, CheckpointSaved) or event.step < 6:
                announcer.hand_on(event)
        plan_again(cause)
        raise KeyboardInterrupt

    recorder = Recorder()
    monkeypatch.setattr("fulltilt.engine.ranks.group.run_ranks", crash)
    with pytest.raises(KeyboardInterrupt):
        train_in_ranks(print, config, [recorder], {"device": "cpu", "after": after})
    (replanned,) = recorder.of(Replanned)
    assert (replanned.step, replanned.n_steps_lost) == (4, 2)
    assert recorder.events[-1].message.endswith("the effective batch stays 16, 2 steps or more are trained again")


CHANGES = {"run__checkpoint_every": "3 steps", "run__log_every_n_steps": 1, "data__batch_size": 16}


@pytest.mark.slow
@pytest.mark.timeout(900)  # processes that load torch: minutes on a machine that is busy
def test_all_ranks_go_on_from_the_newest_checkpoint_with_the_same_effective_batch(tmp_path):
    """rank 1 runs out of memory in step 6; the checkpoint is of step 3"""
    workload = build_plain_workload(model=parallel_cases.build_on_card, optimizer=build_sgd)
    config = build_config(run__n_ranks=2, **CHANGES)
    expected, whole = run_train(tmp_path / "one", build_config(**CHANGES), workload=workload)
    result, recorder = run_train(tmp_path / "two", config, workload=workload)

    assert list_sizes(recorder) == [(3, 2, 8, 2, None)]
    (note,) = recorder.list_notes("out of memory")
    assert note in result.notes
    assert note.startswith("rank 1: out of memory in a step after step 5 with batch_size 16 × accumulate 1")
    assert "batch_size 8 × accumulate 2 from now on, the effective batch stays 16" in note
    assert note.endswith("all ranks start again from the checkpoint of step 3, 2 steps are trained again")

    mine, theirs = list_steps(recorder), list_steps(whole)
    assert [row[:2] for row in mine] == [row[:2] for row in theirs]
    assert [row[2] for row in mine] == pytest.approx([row[2] for row in theirs], rel=2e-5, abs=2e-5)
    assert sum(n_samples for _, n_samples, _ in mine) == 2 * parallel_cases.N_SAMPLES
    assert result.metrics == pytest.approx(expected.metrics, rel=2e-5)
    assert result.step == expected.step == 12

    starts = recorder.of(RunStarted)
    assert [(start.attempt, start.first_step, start.n_ranks) for start in starts] == [(0, 0, 2), (1, 3, 2)]
    assert [event.reason for event in recorder.of(RunEnded)] == ["finished"]
    assert max(e.step for e in recorder.events[: recorder.events.index(starts[1])] if isinstance(e, StepsDone)) <= 5


def fail_with(error, rank=1):
    return Cause(rank=rank, kind="failed", text="", failure=describe_failure(error))


FROM_NOTHING = "from the first step, there being no checkpoint, 5 steps are trained again"


@pytest.mark.parametrize(
    ("step", "first_step", "n_lost", "words"),
    [
        (5, 0, 5, FROM_NOTHING),
        (6, 6, 0, "from the checkpoint of step 6"),  # it failed before the first rank had told where it started
    ],
)
def test_the_ranks_start_again_from_the_checkpoint_if_there_is_one(step, first_step, n_lost, words):
    sizes = Sizes(batch_size=8, accumulate=2, val_batch_size=None)
    restart = Restart(sizes=sizes, reason="out of memory in a step", n_replans=3, attempt=4, started_s=0.0, step=step)
    given = {"restart": restart, "first_step": first_step}
    recorder = Recorder()
    after = plan_again(fail_with(RankReplanError("smaller", **given)), 0, Announcer([recorder]))["after"]
    assert (after.sizes.batch_size, after.n_replans, after.attempt, after.step) == (8, 3, 4, first_step)
    (replanned,) = recorder.of(Replanned)
    assert (replanned.step, replanned.n_steps_lost) == (first_step, n_lost)
    assert recorder.events[-1].message.endswith(f"all ranks start again {words}")


@pytest.mark.parametrize("error", [ConfigError("lr is -1"), MemoryError("no room"), RankReplanError("no plan")])
def test_nothing_else_is_a_reason_to_start_again(error):
    assert plan_again(fail_with(error), 0, Announcer(())) is None


def test_a_micro_batch_gives_every_rank_a_sample_and_torchrun_is_not_replaced():
    with build_cpu_run(build_config(data__batch_size=6), prepare=None) as run:
        sizes = {}
        for n_ranks in (1, 2, 4):
            run.world = World(n_ranks=n_ranks)
            sizes[n_ranks] = plan_sizes(run, None)
        assert [sizes[1].batch_size, sizes[2].batch_size, sizes[4]] == [3, 3, None]
        assert "torchrun" in find_obstacle(run)
