"""Out of memory on one of several ranks: all start again with smaller micro-batches, and train as one process does."""

import parallel_cases
import pytest
from parallel_cases import N_SAMPLES, build_plain_workload, build_sgd
from test_engine_replan import list_sizes, list_steps
from training_cases import Recorder, build_config, build_cpu_run, run_train

from fulltilt.engine.announce import Announcer
from fulltilt.engine.loop.launch import plan_again
from fulltilt.engine.loop.replan import RankReplanError
from fulltilt.engine.loop.session import Restart
from fulltilt.engine.loop.sizes import Sizes, find_obstacle, plan_sizes
from fulltilt.engine.ranks.causes import Cause
from fulltilt.engine.ranks.process import describe_failure
from fulltilt.engine.ranks.world import World
from fulltilt.errors import ConfigError
from fulltilt.records import Replanned, RunEnded, RunStarted, StepsDone

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
    assert sum(n_samples for _, n_samples, _ in mine) == 2 * N_SAMPLES
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
