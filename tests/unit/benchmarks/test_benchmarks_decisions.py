"""The benchmark of decisions: the truth of a comparison, replay that counts no step twice, recordings."""

import dataclasses
import math

import numpy as np
import pytest
from benchmarks import decisions
from benchmarks._deciders import DECIDERS, OURS, PROCESS_STEPS, Outcome, decide_between_processes
from benchmarks._noise import RECORDINGS, NoiseModel, Stream, Stretch, read_recordings

QUIET = NoiseModel(jitter_pct=0.1, drift_pct=0.0, slow_share=0.0)


@pytest.mark.parametrize("name", DECIDERS)
def test_every_decider_sees_a_gap_on_a_quiet_machine(name):
    for factor, verdict in ((1.05, "slower"), (1 / 1.05, "faster")):
        steps = QUIET.simulate(DECIDERS[name].max_steps, np.random.default_rng(0))
        outcome = DECIDERS[name].run(Stream(steps), factor)
        assert outcome.verdict == verdict
        assert outcome.n_steps <= DECIDERS[name].max_steps


def test_only_ours_says_that_it_cannot_tell():
    noise = NoiseModel(jitter_pct=60.0, correlation=0.9)
    outcome = DECIDERS[OURS].run(Stream(noise.simulate(DECIDERS[OURS].max_steps, np.random.default_rng(1))), 1.02)
    assert outcome.verdict == "too_noisy"
    assert outcome.detectable_pct > 2


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, "slower"), (1 / 1.2, "faster"), (1.0, "tie")])
def test_finalists_are_decided_by_the_rounds_and_the_rule_of_the_search(factor, verdict):
    outcome = decide_between_processes(QUIET, factor, np.random.default_rng(0))
    assert outcome.verdict == verdict
    assert outcome.n_steps == 2 * 3 * PROCESS_STEPS, "two rounds of both and the user's plan do on a quiet machine"
    if verdict != "tie":
        assert outcome.takes_b == (verdict == "faster")


def test_gaps_go_either_way_and_none_is_none():
    factors = [decisions.choose_factor(gap_pct, number) for gap_pct, number in ((5.0, 0), (5.0, 1), (0.0, 7))]
    assert factors == pytest.approx([1.05, 1 / 1.05, 1.0])


@pytest.mark.parametrize(
    ("factor", "verdict", "is_right", "calls_difference"),
    [
        (1.0, "tie", True, False),
        (1.0, "slower", False, True),
        (1.02, "slower", True, True),
        (1.02, "faster", False, True),
        (1 / 1.02, "faster", True, True),
        (1.02, "tie", False, False),
        (1.02, "too_noisy", False, False),
    ],
)
def test_a_verdict_is_held_against_the_truth(factor, verdict, is_right, calls_difference):
    found = decisions.Comparison(factor=factor, outcome=Outcome(verdict=verdict, n_steps=1))
    assert (found.is_right, found.calls_difference) == (is_right, calls_difference)


def test_a_stream_gives_every_step_once_and_no_more_than_it_has():
    stream = Stream(np.arange(10.0))
    assert [*stream.take(4), *stream.take(6)] == list(range(10))
    with pytest.raises(ValueError, match="1 steps asked for, 0 are left"):
        stream.take(1)


def test_replay_keeps_to_the_steps_of_each_process():
    """Two processes of 50 steps hold two comparisons of 20 each: none reaches over the end of its process."""
    stretches = [Stretch(step_us=(us,) * 50, seconds=1.0, cpu_pressure_pct=2.0) for us in (100, 200)]
    found = list(decisions.replay(stretches, "faster mean", 5.0))
    assert [comparison.is_right for comparison in found] == [True] * 4


def test_busy_processes_are_told_apart_by_pressure_and_not_by_speed():
    recording = read_recordings("cpu")[0]
    calm, busy, unread = (
        Stretch(step_us=(us,), seconds=1.0, cpu_pressure_pct=pct) for us, pct in ((900, 50.0), (100, 51.0), (5, None))
    )
    recordings = [dataclasses.replace(recording, stretches=(stretch,)) for stretch in (busy, calm, unread)]
    groups = decisions.group_stretches(recordings)
    assert groups == {"recorded, busy machine": [busy], "recorded": [calm, unread]}


def test_simulated_noise_has_what_its_model_says():
    rng = np.random.default_rng(0)
    noise = NoiseModel(jitter_pct=2.0, correlation=0.8, drift_pct=0.0, slow_share=0.1, slow_factor=2.0)
    steps = np.concatenate([noise.simulate(4000, rng) for _ in range(5)])
    slow = steps > 1.6
    assert slow.mean() == pytest.approx(0.1, abs=0.02)
    jitter = np.log(np.where(slow, steps / 2, steps))
    assert jitter.std() == pytest.approx(0.02, rel=0.1)
    assert np.corrcoef(jitter[1:], jitter[:-1])[0, 1] == pytest.approx(0.8, abs=0.05)
    ramp = NoiseModel(jitter_pct=0.0, drift_pct=0.0, slow_share=0.0, ramp_pct=3.0).simulate(400, rng)
    assert ramp[0] == pytest.approx(math.exp(0.03))
    assert ramp[-1] == pytest.approx(1.0, abs=1e-4)


def test_the_noise_misleads_welch_as_the_survey_says():
    """16 to 33 % false differences on 40 + 40 steps: the simulation is no easier than what it stands for."""
    found = list(decisions.simulate(decisions.CALIBRATED, "Welch", 0.0, 400))
    assert 0.16 <= sum(comparison.calls_difference for comparison in found) / len(found) <= 0.33


def test_shares_are_judged_by_all_comparisons():
    hits = [True] * 90 + [False] * 10
    target = decisions.judge_share("case, gap 2 %", 2.0, hits)
    assert (target.measured, target.limit, target.met) == (90.0, 88.0, None)
    assert target.ci95[0] < 88 < target.ci95[1]
    assert decisions.judge_share("case", 5.0, hits).met is False
    assert decisions.judge_share("case", 0.0, [False] * 1000).met is True


def test_batches_hold_every_comparison_once():
    batches = decisions.split_batches(list(range(137)))
    assert [value for batch in batches for value in batch] == list(range(137))
    assert len(batches) == 13
    assert decisions.split_batches([1, 2, 3]) == [[1, 2, 3]]


def test_a_cell_reports_shares_and_its_target():
    found = [
        decisions.Comparison(factor=1.02, outcome=Outcome(verdict=verdict, n_steps=100, detectable_pct=1.0))
        for verdict in ["slower"] * 6 + ["faster"] * 2 + ["tie"] + ["too_noisy"]
    ]
    arms, targets = [], []
    decisions.report_comparisons("case", OURS, 2.0, found, arms, targets)
    assert {arm.metric: arm.median for arm in arms} == {
        "found_pct": 60.0,
        "wrong_way_pct": 20.0,
        "tie_pct": 10.0,
        "too_noisy_pct": 10.0,
        "steps_per_comparison": 100.0,
        "detectable_pct": 1.0,
    }
    assert [(target.name, target.measured) for target in targets] == [("case, gap 2 %: found, %", 60.0)]


def test_the_recordings_in_the_repository_hold_enough_to_decide():
    recordings = read_recordings("cpu")
    assert recordings
    for recording in recordings:
        assert (RECORDINGS / f"noise-{recording.name}-{recording.conditions}-cpu.json").exists()
        assert all(step > 0 for stretch in recording.stretches for step in stretch.step_us)
        assert any(len(stretch.step_us) >= DECIDERS[OURS].max_steps for stretch in recording.stretches)
