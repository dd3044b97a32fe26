"""Verdicts of ``--verify`` from planted learning curves, and what is read of its trainings."""

import json

import pytest

from fulltilt.errors import StorageError, TrainingError
from fulltilt.records import decode, dumps
from fulltilt.tuner.answer import verify
from fulltilt.tuner.answer.quality import Verification, judge

SETTINGS = {"speed.precision": "bf16"}


def make_document(arm, seed, qualities, *, step_s=10.0, metric="accuracy"):
    evaluations = [
        {"epoch": i + 1, "training_seconds": step_s * (i + 1), "metrics": {"loss": 1.0 - value, metric: value}}
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


@pytest.mark.parametrize(
    ("before", "after", "verdict", "change_pct"),
    [
        ([[0.5, 0.8, 0.9], [0.4, 0.8, 0.91]], [[0.5, 0.8, 0.9], [0.4, 0.8, 0.91]], "learns as well", 0.0),
        ([[0.90], [0.91], [0.89]], [[0.80], [0.815], [0.79]], "learns worse", -100 * 0.295 / 2.7),
        ([[0.900], [0.910]], [[0.899], [0.909]], "learns as well", -100 * 0.002 / 1.81),  # within the margin
        ([[0.90], [0.80], [0.95]], [[0.80], [0.95], [0.85]], "too noisy to tell", -100 * 0.05 / 2.65),
    ],
)
def test_the_verdict_follows_from_the_pairs(before, after, verdict, change_pct):
    made = judge(make_pairs(before, after), SETTINGS)
    assert (made.verdict, made.metric, made.settings) == (verdict, "accuracy", SETTINGS)
    assert made.quality_change_pct == pytest.approx(change_pct)
    assert made.quality_change_ci95_pct[0] <= change_pct + 1e-9
    assert ("more pairs narrow the interval" in made.text) == (verdict == "too noisy to tell")


def test_a_falling_loss_is_better():
    """Metrics of the user's own point nobody knows where; then the validation loss decides."""
    worse, better = [[0.5], [0.51]], [[0.8], [0.81]]
    made = judge(make_pairs(worse, better, metric="their_own"), SETTINGS)
    assert (made.metric, made.is_rising) == ("loss", False)
    assert made.quality_change_pct > 50
    assert made.verdict == "learns as well"


def test_time_runs_until_both_of_a_pair_had_the_worse_ones_best_quality():
    curves = [[0.5, 0.8, 0.9], [0.4, 0.8, 0.91], [0.5, 0.7, 0.88]]
    made = judge(make_pairs(curves, curves), SETTINGS)
    assert (made.time_saved_pct, *made.time_saved_ci95_pct) == pytest.approx((50.0, 50.0, 50.0))
    assert "50 % less" in made.text
    before, after = [[0.5, 0.7, 0.8]] * 2, [[0.6, 0.75, 0.75]] * 2
    made = judge(make_pairs(before, after), SETTINGS)
    assert made.time_before_s == pytest.approx(30.0)  # 0.75 is first passed at its third evaluation
    assert made.time_after_s == pytest.approx(10.0)  # and here reached at the second


def diverge(documents, arm, seed, *metrics, at=-1):
    """One evaluation of a run came to NaN, and went through JSON as ``fulltilt train`` writes it."""
    for document in documents:
        if (document["arm"], document["seed"]) == (arm, seed):
            document["evaluations"][at]["metrics"].update(dict.fromkeys(metrics, float("nan")))
    return json.loads(dumps(documents))


@pytest.mark.parametrize("metrics", [("loss",), ("accuracy",), ("loss", "accuracy")])
@pytest.mark.parametrize("after", [0.9, 0.99])
def test_a_recommended_run_that_diverged_learns_worse_whatever_the_others_do(after, metrics):
    documents = make_pairs([[0.5, 0.9]] * 3, [[0.5, after]] * 3)
    made = judge(diverge(documents, "recommended", 1, *metrics), SETTINGS)
    assert made.verdict == "learns worse"
    assert "1 of 3 trainings with the recommended settings diverged (seed 1)" in made.text
    assert "recommended-1" in made.text
    assert made.quality_before == pytest.approx(0.9)
    nulls = {name for name in Verification.__slots__ if getattr(made, name) is None}
    assert {"quality_after", "quality_change_pct", "time_saved_pct"} <= nulls
    assert set(made.null_reasons) == nulls | {"runs.quality"}
    assert [run.quality for run in made.runs if run.arm == "recommended"] == [after, None, after]
    assert decode(Verification, json.loads(dumps(made))) == made


def test_settings_that_diverge_as_they_were_or_were_not_evaluated_leave_nothing_to_compare_with():
    documents = diverge(make_pairs([[0.9]] * 2, [[0.9]] * 2), "as it was", 0, "loss")
    said = r"1 of 2 trainings .*as they were diverged \(seed 0\).*as it was-0.*optim\.lr"
    with pytest.raises(TrainingError, match=said):
        judge(diverge(documents, "recommended", 1, "loss"), SETTINGS)
    documents = [*make_pairs([[0.9], [0.9]], [[0.9], [0.9]])[:-1], make_document("recommended", 1, [])]
    with pytest.raises(TrainingError, match=r"recommended-1 was trained without an evaluation.*validation set"):
        judge(documents, SETTINGS)


def test_an_evaluation_without_a_number_in_between_reaches_no_quality():
    documents = make_pairs([[0.5, 0.8, 0.9]] * 2, [[0.95, 0.8, 0.9]] * 2)
    for seed in (0, 1):
        documents = diverge(documents, "recommended", seed, "loss", "accuracy", at=0)
    made = judge(documents, SETTINGS)
    assert (made.verdict, made.time_after_s) == ("learns as well", pytest.approx(15.0))


def test_pairs_that_came_out_equal_are_called_so_with_the_epochs_they_trained():
    documents = make_pairs([[0.5, 0.9], [0.6, 0.8]], [[0.5, 0.9], [0.6, 0.8]])
    assert judge(documents, SETTINGS).text.startswith(
        "learns as well: accuracy on the validation set after 2 epochs 0.85 → 0.85, both trainings of every pair came "
        "out equal (a loss of 1 % is allowed); "
    )
    documents[0]["evaluations"][-1]["metrics"]["accuracy"] = 0.91
    changed = judge(documents, SETTINGS).text
    assert "equal" not in changed
    assert "0.855 → 0.85, -0.58 % (" in changed
    documents = [run | {"n_validation_samples": 360} for run in make_pairs([[0.9], [0.91]], [[0.9], [0.91]])]
    assert ": accuracy on the validation set of 360 samples after 1 epoch 0.905" in judge(documents, SETTINGS).text


def test_a_plan_that_takes_longer_is_not_said_to_take_less():
    names = {"as it was": "recommended", "recommended": "as it was"}
    documents = [run | {"arm": names[run["arm"]]} for run in make_pairs([[0.5, 0.9]] * 2, [[0.5, 0.9]] * 2)]
    assert "10 s → 20 s, 100 % more (100 to 100 %)" in judge(documents, SETTINGS).text


def test_a_diverged_run_counts_its_steps_once_and_reads_a_rate_that_is_none(tmp_path):
    """A run that went on after a kill took the steps behind its checkpoint again."""
    evaluated = [{"event": "Evaluated", "step": step, "training_seconds": float(step)} for step in (2, 4)]
    steps = [{"event": "StepsDone", "step": step, "samples_per_s": rate} for step, rate in ((2, 10.0), (4, 30.0))]
    lines = [
        {"event": "RunStarted", "step": 0}, *steps, *evaluated,
        {"event": "RunStarted", "first_step": 2, "step": 2}, {**steps[1], "samples_per_s": None}, evaluated[1],
        {"event": "RunEnded", "step": 4, "reason": "failed: NonFiniteLossError: the loss of step 5 is nan"},
    ]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = verify._read_divergence(tmp_path)
    assert [event["step"] for event in read["evaluations"]] == [2, 4]
    assert (read["samples_per_s"], read["training_seconds"]) == (10.0, 4.0)


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path):
    (tmp_path / "verify").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        verify.run_verification(["none.yaml"], {"data.num_workers": 2}, folder=tmp_path / "verify", seed=1, n_pairs=2)
