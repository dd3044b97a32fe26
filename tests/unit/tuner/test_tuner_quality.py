"""Verdicts of ``--verify`` from planted learning curves."""

from __future__ import annotations

import pytest

from fulltilt.errors import TrainingError
from fulltilt.tuner.quality import judge

SETTINGS = {"speed.precision": "bf16"}


def make_document(arm, seed, qualities, *, step_s=10.0, metric="accuracy"):
    evaluations = [
        {"training_seconds": step_s * (i + 1), "metrics": {"loss": 1.0 - value, metric: value}}
        for i, value in enumerate(qualities)
    ]
    return {
        "arm": arm, "seed": seed, "folder": f"{arm}-{seed}", "evaluations": evaluations,
        "training_seconds": step_s * len(qualities), "samples_per_s": 100.0,
    }  # fmt: skip


def make_pairs(before, after, **options):
    """Curves of both arms, one pair a seed; the recommended one takes half as long for each evaluation."""
    documents = []
    for seed, (old, new) in enumerate(zip(before, after, strict=True)):
        documents += [make_document("as it was", seed, old, **options)]
        documents += [make_document("recommended", seed, new, step_s=5.0, **options)]
    return documents


def test_the_same_curves_in_half_the_time_learn_as_well():
    curves = [[0.5, 0.8, 0.9], [0.4, 0.8, 0.91], [0.5, 0.7, 0.88]]
    made = judge(make_pairs(curves, curves), SETTINGS)
    assert made.verdict == "learns as well"
    assert made.metric == "accuracy"
    assert made.quality_change_pct == 0
    assert made.time_saved_pct == pytest.approx(50.0)
    assert made.time_saved_ci95_pct == pytest.approx((50.0, 50.0))
    assert "50 % less" in made.text
    assert made.settings == SETTINGS


def test_a_plan_that_loses_quality_beyond_the_margin_learns_worse():
    made = judge(make_pairs([[0.90], [0.91], [0.89]], [[0.80], [0.815], [0.79]]), SETTINGS)
    assert made.verdict == "learns worse"
    assert made.quality_change_pct == pytest.approx(-100 * 0.295 / 2.7)
    assert made.quality_change_ci95_pct[1] < 0


def test_a_loss_within_the_margin_is_no_worse_learning():
    made = judge(make_pairs([[0.900], [0.910]], [[0.899], [0.909]]), SETTINGS)
    assert made.quality_change_ci95_pct[1] < 0
    assert made.verdict == "learns as well"


def test_seeds_that_disagree_are_too_noisy_to_tell():
    made = judge(make_pairs([[0.90], [0.80], [0.95]], [[0.80], [0.95], [0.85]]), SETTINGS)
    assert made.verdict == "too noisy to tell"
    assert "more pairs narrow the interval" in made.text


def test_a_falling_loss_is_better():
    """Metrics of the user's own point nobody knows where; then the validation loss decides."""
    worse, better = [[0.5], [0.51]], [[0.8], [0.81]]
    made = judge(make_pairs(worse, better, metric="their_own"), SETTINGS)
    assert (made.metric, made.is_rising) == ("loss", False)
    assert made.quality_change_pct > 50
    assert made.verdict == "learns as well"


def test_time_runs_until_both_of_a_pair_had_the_worse_ones_best_quality():
    before, after = [[0.5, 0.7, 0.8]] * 2, [[0.6, 0.75, 0.75]] * 2
    made = judge(make_pairs(before, after), SETTINGS)
    assert made.time_before_s == pytest.approx(30.0)  # 0.75 is first passed at its third evaluation
    assert made.time_after_s == pytest.approx(10.0)  # and here reached at the second


def test_training_without_an_evaluation_is_an_error_that_says_what_is_missing():
    documents = [*make_pairs([[0.9], [0.9]], [[0.9], [0.9]])[:-1], make_document("recommended", 1, [])]
    with pytest.raises(TrainingError, match=r"recommended-1 was trained without an evaluation.*validation set"):
        judge(documents, SETTINGS)


def test_arms_with_different_seeds_are_not_compared():
    documents = [*make_pairs([[0.9], [0.9]], [[0.9], [0.9]])[:-1], make_document("recommended", 7, [0.9])]
    with pytest.raises(ValueError, match="same seeds"):
        judge(documents, SETTINGS)
