"""What came of a search, in words: gain, savings, what the runs could tell apart, the epoch."""

import copy

import pytest
from tests.unit.report.report_documents import BUSY, DOCUMENT, PICK, ROWS, Page, build_row, with_runs, with_savings

from fulltilt.report.html import build_tune_html
from fulltilt.report.outcome import (
    describe_epoch,
    describe_gain,
    describe_outcome,
    describe_resolution,
    describe_savings,
)
from fulltilt.report.summary import describe_marks, describe_pick
from fulltilt.report.table import BUSY_MARK


def test_a_gain_within_the_noise_or_of_the_baseline_itself_is_not_claimed():
    document = DOCUMENT | {"baseline": build_row("t1", samples_per_s=1400.0)}
    assert describe_gain(document).startswith("1.07 × the throughput")
    noisy = document | {"search": DOCUMENT["search"] | {"noise_pct": 8.0}}
    assert describe_gain(noisy) == "no difference from the settings as they were: runs of one plan lay 8 % apart"
    assert describe_gain(DOCUMENT | {"baseline": PICK}) is None


def test_savings_are_said_in_hours_of_this_run():
    run, payback = describe_savings(with_savings())
    assert run.startswith("this run, 30 epochs of 50,000 samples: 3 h 10 min → 2 h 02 min; 35.8 % (31.6 to 39.5 %;")
    assert payback == (
        "the search took 4 min 00 s and has paid for itself after 7 min 11 s of training (6 min 10 s to 8 min 40 s)"
    )
    lines = describe_savings(with_savings(before_s=60.0, after_s=40.0, saved_s=20.0))
    assert lines[1].endswith("longer than this run, which saves 20 s")


@pytest.mark.parametrize(
    ("verdict", "gain", "ci95", "n_undecided", "words"),
    [
        ("same plan", None, None, 0, "no gain: the settings as they were are the recommended ones"),
        # ``no gain`` was said where all other plans were undecided
        ("same plan", None, None, 2, "are recommended, and 2 other plans left undecided"),
        ("no gain", 0.2, [-0.9, 1.3], 0, "no gain over the settings"),
        ("no gain", 30.0, [-9.0, 50.0], 0, "no gain that this search could prove"),
        ("slower", -8.0, [-9.0, -7.0], 0, "slower than the settings"),
        # ``no gain …: 76.3 % of the training time`` read as if the training took 76 % of its time
        ("no gain", 76.3, [-22.0, 95.4], 0, "76.3 % less training time was measured (saved: -22.0 to 95.4 %, an inter"),
        ("no gain", -0.4, [-1.5, 0.7], 0, "0.4 % more training time was measured (saved: -1.5 to 0.7 %, an interval t"),
        ("no gain", -0.01, [-1.5, 1.4], 0, "the same training time was measured (saved: -1.5 to 1.4 %"),
    ],
)
def test_what_is_no_gain_is_not_called_one(verdict, gain, ci95, n_undecided, words):
    document = with_savings(verdict=verdict, gain_pct=gain, gain_ci95_pct=ci95, payback_s=None, payback_s_ci95=None)
    document["search"] = document["search"] | {"n_undecided": n_undecided}
    (line,) = describe_savings(document)
    assert words in line
    assert (describe_gain(document | {"baseline": ROWS[0]}) is None) == (verdict != "slower")


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "no gain", "gain_pct": 0.2, "gain_ci95_pct": [-0.9, 1.3]},
        {"verdict": "no gain", "gain_pct": 30.0, "gain_ci95_pct": [-9.0, 90.0]},
        {"verdict": "slower", "gain_pct": -8.0, "gain_ci95_pct": [-9.0, -7.0], "payback_s": None},
        {},
    ],
)
def test_a_verdict_that_rests_on_a_busy_machine_says_on_which_rows(changes):
    line = describe_savings(with_runs("t1", "t5", **changes))[0]
    assert "; of the 4 runs compared, 2 are a busy machine's (t1, t5)" in line
    assert line.count("search again on a quiet machine, with --out and a new folder") == 1
    busy = " ".join(describe_savings(with_runs("t1", "t2", "t4", "t5", **changes)))
    assert "; all 4 runs compared are a busy machine's" in busy
    assert "busy" not in " ".join(describe_savings(with_runs(**changes))), "t6 had no partner"


def set_rates(document, **rates):
    """The document with other samples/s in these rows."""
    document = copy.deepcopy(document)
    for row in (*document["trials"], *document["repeats"]):
        row["samples_per_s"] = rates.get(row["id"], row["samples_per_s"])
    return document


def test_a_multiple_is_the_quotient_of_the_figures_beside_it():
    assert describe_gain(set_rates(with_runs(), t1=500.0, t4=2000.0, t2=4000.0, t5=9000.0)) == (
        "6.00 × the throughput of the settings as they were, by the geometric mean of 2 runs each side by side: "
        "1,000 → 6,000 samples/s (before: batch_size 32, num_workers 0)"
    )
    alone = with_runs() | {"savings": None, "null_reasons": {"savings": "they ran once"}}
    assert "1.50 × the throughput of the settings as they were, by their rows in the table: " in describe_gain(alone)


def test_what_was_decided_is_said_before_the_picks():
    document = with_runs("t1", verdict="no gain", gain_pct=30.0, gain_ci95_pct=[-9.0, 50.0])
    assert describe_outcome(document)[0].startswith("no gain that this search could prove")
    html = build_tune_html(document)
    assert html.index("no gain that this search could prove") < html.index("Recommended for training")
    faster = describe_outcome(with_runs())
    assert faster[0].startswith("this run, 30 epochs")
    assert faster[1] == describe_gain(with_runs())


def test_a_saving_of_a_busy_machine_is_no_promise_for_a_quiet_one():
    document = set_rates(with_runs("t1", "t5", gain_pct=99.1124, gain_ci95_pct=[98.5, 99.5]), t2=1e5, t5=126900.0)
    (line,) = describe_savings(document)
    assert line.startswith("on a machine as busy as this one was, which is no claim for a quiet one: this run")
    assert "saved" not in line
    gain = describe_gain(document)
    assert gain.startswith("about 113 × * the throughput of the settings as they were, by the geometric mean of 2 runs")
    assert describe_gain(with_runs("t1")).startswith("about 1.5 × *")
    assert describe_gain(with_runs()).startswith("1.50 × the throughput")
    assert len(describe_savings(with_runs())) == 2


@pytest.mark.parametrize(
    ("saved", "ci95", "said"),
    [
        (34.0, [-250.0, 99.2], "did not confirm it: 34 % less training time to the same quality (saved: -250 to 99 %,"),
        (34.0, [2.0, 20.0], "(saved: 2 to 20 %, an interval apart from the search's)"),
        (34.0, [30.0, 50.0], None),
        (-12.0, [-30.0, -2.0], "did not confirm it: 12 % more training time to the same quality (saved: -30 to -2 %"),
        (-0.3, [-9.0, 8.0], "did not confirm it: the same training time to the same quality (saved: -9 to 8 %"),
        (1.0, [-0.2, 2.0], "(saved: 0 to 2 %, an interval that holds 0)"),
        (60.0, [55.0, 65.0], "saved more than the search says: 60 % less training time to the same quality "),
    ],
)
def test_what_verify_measured_is_said_beside_the_saving_where_the_two_differ(saved, ci95, said):
    made = {"time_saved_pct": saved, "time_saved_ci95_pct": ci95, "n_pairs": 2}
    line = describe_savings(with_savings() | {"verification": made})[0]
    assert ("--verify's trainings of 2 pairs " in line) == (said is not None)
    assert (said or "35.8 %") in line


EPOCH, NOISY_EPOCH = DOCUMENT["epoch_seconds"], {"estimate": 0.19, "ci95": [0.00037, 101.0]}
MEAN_OF_2 = "the geometric mean of its 2 runs side by side"


@pytest.mark.parametrize(
    ("runs", "epoch", "said"),
    [
        ([], EPOCH, "1.2 s (1.1 s to 1.3 s)"),
        ([1500.0, 1600.0], EPOCH, f"1.2 s (1.1 s to 1.3 s), by {MEAN_OF_2}"),
        ([], NOISY_EPOCH, "0.19 s, and its steps differ too much for an interval"),
        ([1.0, 9.0], NOISY_EPOCH, f"0.19 s, by {MEAN_OF_2}, which differ too much for an interval"),
    ],
)
def test_an_epoch_names_the_runs_it_is_the_mean_of_and_how_far_it_is_known(runs, epoch, said):
    picks = {"recommended": PICK | {"runs_samples_per_s": runs}}
    assert describe_epoch(DOCUMENT | {"epoch_seconds": epoch, "picks": picks}) == f"one epoch takes about {said}"


def test_figures_of_a_busy_machine_are_marked_also_for_runs_that_an_epoch_is_the_mean_of():
    busy = DOCUMENT | {"picks": {"recommended": PICK | BUSY}}
    assert describe_pick(PICK | BUSY, ROWS)[1] == "1,500 ± 2.0 % * samples/s"
    assert "1,500 ± 2.0 % *" in Page(build_tune_html(busy)).text
    assert describe_epoch(busy) == "one epoch takes about 1.2 s * (1.1 s to 1.3 s)"
    rates = [1500.0, 1600.0]
    repeats = [ROWS[1] | BUSY | {"id": f"t{5 + i}", "samples_per_s": rate} for i, rate in enumerate((1600.0, 1700.0))]
    document = DOCUMENT | {"picks": {"recommended": PICK | {"runs_samples_per_s": rates}}}
    assert BUSY_MARK in describe_epoch(document | {"repeats": repeats})
    assert BUSY_MARK not in describe_epoch(document | {"repeats": repeats[1:]}), "not of this mean"


def test_a_gain_that_is_marked_for_a_repeat_has_its_legend():
    document = with_runs("t5")
    assert BUSY_MARK in describe_gain(document)
    legend = describe_marks(document)
    assert legend.startswith("* a busy machine's figure (1 compared run outside the table):")
    assert legend in Page(build_tune_html(document)).text
    assert describe_marks(with_runs("t1")).startswith("* a busy machine's figure (1 row)")  # also the baseline
    all_busy = describe_marks(with_runs("t1", "t2", "t4", "t5"))
    assert all_busy.startswith("* a busy machine's figure (2 rows, 2 compared runs outside the table):")
    assert describe_marks(with_runs()) is None  # t6 is busy, and no figure of it is shown


def test_savings_that_are_not_known_give_the_reason_and_a_ratio_of_too_few_runs_says_so():
    document = DOCUMENT | {"savings": None, "null_reasons": {"savings": "it was not run"}}
    assert describe_savings(document) == ["time saved: not known, it was not run"]
    assert describe_savings(DOCUMENT) == []
    assert describe_gain(document | {"baseline": ROWS[0]}).endswith(", in too few runs to tell it from chance")
    assert "chance" not in describe_gain(with_savings() | {"baseline": ROWS[0]})


@pytest.mark.parametrize(
    ("detectable_pct", "said"),
    [
        *[
            (pct, f"plans that differ by {gap} are told apart by these runs in 80 of 100 cases")
            for pct, gap in ((0.42, "0.4 %"), (9.94, "9.9 %"), (9.96, "10 %"), (100, "100 %"), (110, "a factor of 2.1"))
        ],
        (67_720.0, "these runs tell no plans apart: runs of one plan differ too much"),
    ],
)
def test_what_the_runs_could_have_told_apart_is_said_with_what_they_did_not(detectable_pct, said):
    document = DOCUMENT | {"search": DOCUMENT["search"] | {"detectable_pct": detectable_pct, "n_undecided": 1}}
    assert describe_resolution(document) == f"{said}; 1 of 1 other plan left undecided"
    assert said in build_tune_html(document)
    assert describe_resolution(DOCUMENT) is None, "nothing ran side by side"
