"""Picks follow their stated rules by the rows they are picked from."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.tuner.simulated_rows import USER, make_row, pick_from, run_beside

from fulltilt.errors import NoPlanError
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.picks.picks import Pick, describe_changes
from fulltilt.tuner.picks.recommend import pick


def test_each_pick_follows_its_own_rule():
    rows = [
        make_row(1, 1000.0, memory=2.0, batch_size=64),
        make_row(2, 1500.0, memory=9.0, batch_size=256),
        make_row(3, 600.0, memory=1.0, batch_size=16),
    ]
    picks = pick(rows, user_plan=USER, memory_limit_gib=10.0)
    assert picks.throughput.trial.id == "t2"
    assert picks.efficiency.trial.id == "t3"
    assert picks.recommended.trial.id == "t1"
    assert "8.00 GiB, 80 % of 10.00 GiB" in picks.recommended.rule


def test_only_rows_that_ran_are_picked():
    rows = [make_row(1, None, status="out_of_memory", batch_size=512), make_row(2, 5.0)]
    picks = pick(rows, user_plan=USER, memory_limit_gib=8.0)
    assert {picks.throughput.trial.id, picks.efficiency.trial.id, picks.recommended.trial.id} == {"t2"}


def test_when_every_row_is_above_the_limit_the_smallest_is_taken_and_said():
    rows = [make_row(1, 1000.0, memory=9.5), make_row(2, 900.0, memory=9.0, batch_size=16)]
    chosen = pick(rows, user_plan=USER, memory_limit_gib=10.0).recommended
    assert chosen.trial.id == "t2"
    assert chosen.rule.startswith("no row has memory at most 8.00 GiB")


def test_of_rows_above_the_limit_with_the_same_memory_the_fastest_is_taken():
    """The one with the least memory was, though another with a thousandth more of it was three times as fast."""
    rows = [
        make_row(1, 300.0, memory=9.00, batch_size=8),
        make_row(2, 900.0, memory=9.01, num_workers=2),
        make_row(3, 2000.0, memory=9.5, batch_size=64),
    ]
    chosen = pick(rows, user_plan=USER, memory_limit_gib=10.0).recommended
    assert chosen.trial.id == "t2"
    assert "least memory highest samples/s of 2 plans (9.00 GiB, and up to 2 % more)" in chosen.rule


def test_rows_above_the_limit_are_measured_again_too():
    """The recommended plan had run once where no row was below the limit."""
    rows = [make_row(1, 900.0, memory=9.0, num_workers=2), make_row(2, 2000.0, memory=9.5, batch_size=64)]
    finalists = recommend.select_finalists(rows, limit_gib=8.0)
    assert [plan["num_workers"] for plan in finalists] == [2]
    again = [make_row(i, 880.0, memory=9.0, num_workers=2, kind="repeat") for i in (3, 4)]
    table, _ = recommend.merge_repeats([*rows, *again])
    chosen = pick(table, user_plan=USER, memory_limit_gib=10.0, runs=[*rows, *again]).recommended
    assert chosen.runs_samples_per_s == (880.0, 880.0)


def test_a_row_without_a_memory_figure_is_not_called_safe():
    blind = dataclasses.replace(make_row(1, 2000.0, batch_size=64), memory_rss_peak_gib=None)
    picks = pick([blind, make_row(2, 1000.0)], user_plan=USER, memory_limit_gib=10.0)
    assert picks.recommended.trial.id == "t2"
    assert picks.throughput.trial.id == "t1"


def test_without_any_memory_figure_there_is_no_efficiency_pick():
    blind = dataclasses.replace(make_row(1, 2000.0), memory_rss_peak_gib=None)
    picks = pick([blind], user_plan=USER, memory_limit_gib=10.0)
    assert picks.efficiency is None
    assert picks.recommended.trial.id == "t1"


def test_on_a_gpu_memory_is_what_is_reserved():
    row = dataclasses.replace(make_row(1, 10.0, memory=30.0), memory_reserved_peak_gib=2.0)
    assert row.device_memory_peak_gib == 2.0


def test_no_plan_can_run_says_how_the_rows_ended():
    rows = [make_row(1, None, status="out_of_memory"), make_row(2, None, status="error", batch_size=16)]
    with pytest.raises(NoPlanError, match=r"1 out_of_memory, 1 error.*t1.*t2.*--memory-limit"):
        pick(rows, user_plan=USER, memory_limit_gib=None)
    with pytest.raises(NoPlanError, match="ran no trial"):
        pick([], user_plan=USER, memory_limit_gib=None)


@pytest.mark.parametrize(
    ("reasons", "remedy"),
    [
        (["DataError: a.h5 is cut; copy it again (log: r/logs/t1.log)"] * 2, "copy it again"),
        (["ValueError: shapes differ (log: r/logs/t1.log)"], "the log of t1 says more"),
        (["rank 1: RuntimeError: expected 3 channels; got 1 (log: r/logs/t1.log)"], "the log of t1 says more"),
        (["no step in 30 s; raise limits.hang_timeout_s"], "raise limits.hang_timeout_s"),
        ([], "use pin_memory false"),
    ],
)
def test_the_remedy_is_that_of_the_failure_most_rows_share_and_not_of_a_skipped_value(reasons, remedy):
    """A damaged data file was answered with "use pin_memory false", for the skipped row is named last."""
    rows = [make_row(n, None, status="error", num_workers=n) for n in range(1, len(reasons) + 1)]
    rows = [dataclasses.replace(row, reason=reason) for row, reason in zip(rows, reasons, strict=True)]
    skipped = make_row(9, None, status="skipped", pin_memory=True)
    rows.append(dataclasses.replace(skipped, reason="pin_memory=True: no accelerator; use pin_memory false"))
    with pytest.raises(NoPlanError) as ended:
        pick(rows, user_plan=USER, memory_limit_gib=None)
    assert ended.value.remedy == remedy
    assert str(ended.value).endswith("use pin_memory false")


def test_out_of_memory_that_most_rows_share_is_answered_with_its_remedy():
    rows = [make_row(n, None, status="out_of_memory", batch_size=n) for n in (1, 2)]
    rows.append(dataclasses.replace(make_row(3, None, status="error"), reason="DataError: cut; copy it again"))
    with pytest.raises(NoPlanError) as ended:
        pick(rows, user_plan=USER, memory_limit_gib=None)
    assert ended.value.remedy == "try smaller batch sizes, or a larger --memory-limit"


def test_plans_that_ran_once_and_then_failed_are_not_said_to_be_unable_to_run():
    """A model that leaks ended a search with "no plan can run", under rows with the speeds of plans that had run."""
    failed = [make_row(n, None, status="out_of_memory", batch_size=n) for n in (1, 2)]
    runs = [make_row(3, 100.0, batch_size=1), *failed]
    with pytest.raises(
        NoPlanError, match=r"no plan ran each time: 1 ended well and then failed: 2 out_of_memory"
    ) as ended:
        pick(failed, user_plan=USER, memory_limit_gib=None, runs=runs)
    assert ended.value.remedy == "look for memory that grows from step to step, or give a larger --memory-limit"


@given(
    st.lists(
        st.tuples(
            st.floats(1.0, 1e6),
            st.floats(0.1, 20.0),
            st.sampled_from([8, 16, 32, 64, 128]),
            st.sampled_from([0, 1, 2, 4]),
            st.sampled_from(["ok", "ok", "ok", "error", "out_of_memory"]),
        ),
        min_size=1,
        max_size=12,
        unique_by=lambda item: (item[2], item[3]),
    )
)
def test_picks_are_rows_that_obey_their_rules(items):
    rows = [
        make_row(i, rate, memory=memory, batch_size=batch, num_workers=workers, status=status)
        for i, (rate, memory, batch, workers, status) in enumerate(items)
    ]
    fine = [row for row in rows if row.status == "ok"]
    if not fine:
        with pytest.raises(NoPlanError):
            pick(rows, user_plan=USER, memory_limit_gib=10.0)
        return
    picks = pick(rows, user_plan=USER, memory_limit_gib=10.0)
    best = max(row.samples_per_s for row in fine)
    assert picks.throughput.trial.samples_per_s >= 0.95 * best
    ids = {row.id for row in fine}
    fast = [row for row in fine if row.samples_per_s >= 0.9 * best]
    least = min(row.memory_rss_peak_gib for row in fast)
    assert picks.memory.trial in fast
    assert picks.memory.trial.memory_rss_peak_gib <= 1.02 * least
    for made in (picks.throughput, picks.efficiency, picks.recommended, picks.memory):
        assert {made.trial.id, *made.tied_with} <= ids
        for other in made.tied_with:
            row = next(r for r in fine if r.id == other)
            if made is picks.throughput and row.samples_per_s >= made.trial.samples_per_s:  # at most 1 % above it
                assert made.trial.effective_batch_size <= row.effective_batch_size
    safe = [row for row in fine if row.memory_rss_peak_gib <= 8.0]
    if safe:
        assert picks.recommended.trial.memory_rss_peak_gib <= 8.0
        assert picks.recommended.trial.samples_per_s >= 0.95 * max(row.samples_per_s for row in safe)


def test_the_row_of_a_repeated_plan_is_the_median_of_its_later_runs():
    """The run that made it a finalist was chosen for being fast: it would lift the figure by its luck."""
    rows = [
        make_row(1, 1300.0, batch_size=64),
        make_row(2, 1250.0),
        make_row(3, 1200.0, kind="repeat", batch_size=64),
        make_row(4, 1210.0, kind="repeat", batch_size=64),
        make_row(5, 1290.0, kind="repeat", batch_size=64),
    ]
    table, repeats = recommend.merge_repeats(rows)
    assert [row.id for row in table] == ["t4", "t2"]
    assert [row.id for row in repeats] == ["t1", "t3", "t5"]


def test_a_plan_that_failed_once_is_not_picked():
    rows = [
        make_row(1, 1300.0, batch_size=64),
        make_row(2, None, status="out_of_memory", kind="repeat", batch_size=64),
        make_row(3, 900.0),
    ]
    table, _ = recommend.merge_repeats(rows)
    assert [row.status for row in table] == ["out_of_memory", "ok"]
    assert pick(table, user_plan=USER, memory_limit_gib=None).recommended.trial.id == "t3"


def test_finalists_are_the_recommended_plan_and_those_that_may_be_as_fast():
    rows = [
        make_row(1, 1170.0, batch_size=64),
        make_row(2, 1200.0, batch_size=128),
        make_row(3, 1100.0),
        make_row(4, 1050.0, batch_size=16, spread_pct=20.0),
    ]
    finalists = recommend.select_finalists(rows, limit_gib=None, n=3)
    assert [plan["batch_size"] for plan in finalists] == [64, 128, 16]  # the last one's interval reaches the first
    assert [plan["batch_size"] for plan in recommend.select_finalists(rows, limit_gib=None, n=1)] == [128]
    assert recommend.select_finalists([], limit_gib=1.0) == []


def test_changes_name_recipe_and_numerics():
    changes = describe_changes(USER, USER.replace(batch_size=128, precision="bf16", num_workers=4))
    assert changes["recipe"] == ("effective batch 32 → 128",)
    assert changes["numerics"] == ("precision fp32 → bf16",)
    kept = describe_changes(USER, USER.replace(batch_size=16, accumulate=2))
    assert kept["recipe"][0].startswith("micro-batch 32 → 16, effective batch as before")
    assert describe_changes(USER, USER) == {"recipe": (), "numerics": ()}


@pytest.mark.parametrize(
    ("before", "after", "recipe"),
    [
        ("stream", "ram", ()),
        ("memory_map", "device", ()),
        ("stream", "block_shuffled", ("placement stream → block_shuffled",)),
        ("block_shuffled", "ram", ("placement block_shuffled → ram",)),
    ],
)
def test_where_rows_lie_is_no_change_of_the_recipe_but_their_order_is(before, after, recipe):
    changes = describe_changes(USER.replace(placement=before), USER.replace(placement=after))
    assert changes == {"recipe": recipe, "numerics": ()}


@pytest.mark.parametrize(
    ("rule", "is_free", "batch_size", "expected"),
    [
        ("sqrt", True, 128, ("sqrt", 0.2)),
        ("linear", True, 128, ("linear", 0.4)),
        ("none", True, 128, ("none", 0.1)),
        ("sqrt", False, 128, ("none", 0.1)),
        ("sqrt", True, 32, ("sqrt", 0.1)),
        ("sqrt", True, 8, ("sqrt", 0.05)),
    ],
)
def test_the_learning_rate_follows_only_a_batch_that_was_allowed_to_change(rule, is_free, batch_size, expected):
    made = recommend.plan_learning_rate(
        0.1, user_plan=USER, plan=USER.replace(batch_size=batch_size), rule=rule, is_batch_free=is_free
    )
    assert made.rule == expected[0]
    assert math.isclose(made.to, expected[1])
    assert made.start == 0.1


def test_a_learning_rate_that_is_not_known_stays_unknown():
    made = recommend.plan_learning_rate(
        None, user_plan=USER, plan=USER.replace(batch_size=64), rule="sqrt", is_batch_free=True
    )
    assert (made.start, made.to) == (None, None)


def test_a_pick_survives_its_json():
    made = pick([make_row(1, 10.0, precision="bf16")], user_plan=USER, memory_limit_gib=4.0).recommended
    assert Pick.from_json(made.to_json()) == made
    assert made.to_json()["plan"]["precision"] == "bf16"


def test_the_memory_pick_is_the_smallest_row_that_is_fast_enough():
    rows = [
        make_row(1, 1000.0, memory=8.0, batch_size=256),
        make_row(2, 910.0, memory=3.0, batch_size=64),
        make_row(3, 890.0, memory=1.0, batch_size=16),
        make_row(4, 950.0, memory=5.0, batch_size=128),
    ]
    chosen = pick(rows, user_plan=USER, memory_limit_gib=None).memory
    assert chosen.trial.id == "t2"
    assert chosen.rule.startswith("least memory of 3 plans with at least 90 % of the best speed (1,000 samples/s, t1)")


def test_the_speed_that_the_memory_pick_is_held_against_is_the_mean_of_the_runs_side_by_side():
    """A median of runs that lay far apart stood above every mean, and left one row fast enough."""
    noisy = [make_row(n, rate, memory=4.0, kind="baseline") for n, rate in ((1, 515.0), (2, 194.0), (3, 528.0))]
    steady = [make_row(n, 440.0, memory=1.0, kind="repeat", batch_size=64) for n in (4, 5, 6)]
    table = [noisy[0], steady[0]]
    picks = pick(table, user_plan=USER, memory_limit_gib=10.0, runs=[*noisy, *steady])
    assert picks.memory.trial.id == "t4"
    assert "best confirmed speed (440 samples/s, the geometric mean of 3 runs, t4)" in picks.memory.rule


def test_of_rows_with_the_same_memory_the_faster_is_the_memory_pick():
    rows = [
        make_row(1, 950.0, memory=1.0, batch_size=16),
        make_row(2, 1000.0, memory=1.01, batch_size=64),
        make_row(3, 1040.0, memory=1.5, batch_size=128),
    ]
    chosen = pick(rows, user_plan=USER, memory_limit_gib=None).memory
    assert chosen.trial.id == "t2"
    assert "the fastest of 2 plans within 2 % of it" in chosen.rule


def test_acceptable_speed_is_a_share_of_the_best_confirmed_one():
    """A row from a faster minute would make every confirmed one too slow."""
    rows = [
        make_row(1, 2000.0, memory=9.0, batch_size=256),
        make_row(2, 1000.0, memory=4.0, kind="repeat", batch_size=64),
        make_row(3, 950.0, memory=2.0, kind="repeat", batch_size=16),
    ]
    chosen = pick(rows, user_plan=USER, memory_limit_gib=None).memory
    assert chosen.trial.id == "t3"
    assert "of the best confirmed speed (1,000 samples/s, t2)" in chosen.rule


def test_without_any_memory_figure_there_is_no_memory_pick():
    blind = dataclasses.replace(make_row(1, 2000.0), memory_rss_peak_gib=None)
    assert pick([blind], user_plan=USER, memory_limit_gib=None).memory is None


@pytest.mark.parametrize("kind", ["device", "loader", "memory"])
def test_a_probe_is_never_picked_nor_a_finalist_nor_in_the_table(kind):
    probe = make_row(1, 9000.0, memory=0.1, kind=kind, batch_size=64)
    rows = [probe, make_row(2, 1000.0)]
    assert [[row.id for row in part] for part in recommend.merge_repeats(rows)] == [["t2"], []]
    assert recommend.find_confirmed(rows) == []
    assert [plan["batch_size"] for plan in recommend.select_finalists(rows, limit_gib=None)] == [32]
    picks = pick(rows, user_plan=USER, memory_limit_gib=None)
    assert {made.trial.id for made in (picks.throughput, picks.efficiency, picks.recommended, picks.memory)} == {"t2"}
    with pytest.raises(NoPlanError):
        pick([probe], user_plan=USER, memory_limit_gib=None)


def test_a_plan_is_judged_by_the_mean_of_its_runs_and_not_by_one_of_them():
    """Medians 1000 and 1010; means 1067 and 1007."""
    first = [make_row(1 + i, rate, kind="repeat", batch_size=16) for i, rate in enumerate((990.0, 1000.0, 1220.0))]
    second = [make_row(4 + i, rate, kind="repeat", batch_size=64) for i, rate in enumerate((1000.0, 1010.0, 1011.0))]
    table, _ = recommend.merge_repeats([*first, *second])
    chosen = pick(table, user_plan=USER, memory_limit_gib=None, runs=[*first, *second]).recommended
    assert chosen.trial.plan["batch_size"] == 16
    assert chosen.trial.samples_per_s == 1000.0, "the row shown is that of the median run"
    assert chosen.runs_samples_per_s == (990.0, 1000.0, 1220.0)
    assert Pick.from_json(chosen.to_json()) == chosen


def test_a_recommendation_says_where_nothing_is_known_against_the_settings_as_they_were():
    other = make_row(1, 1000.0, batch_size=64)
    said = "the settings as they were did not run: nothing is known of how it compares with them"
    assert said in pick([other], user_plan=USER, memory_limit_gib=None).recommended.rule
    for own in (make_row(2, 900.0), make_row(2, None, status="out_of_memory")):
        assert said not in pick([other, own], user_plan=USER, memory_limit_gib=None).recommended.rule


def test_a_rule_names_the_rows_that_showed_more_than_the_pick():
    """``highest samples/s of 3 plans`` was said above a table in which another plan stood higher."""
    runs = [make_row(1, 1015.0, threads=1, memory=0.5), make_row(2, 985.0, threads=2)]
    runs += [run_beside(10 + i, rate, num_workers=2) for i, rate in enumerate((1000.0, 990.0))]
    runs += [run_beside(20 + i, rate) for i, rate in enumerate((500.0, 505.0))]
    picks = pick_from(runs)
    for made in (picks.throughput, picks.recommended):
        assert (made.trial.plan["num_workers"], made.tied_with) == (2, ("t1", "t2"))
        assert made.rule.count("of them t1 showed more, but plans measured side by side go first") == 1
    many = [make_row(30 + i, 1012.0, threads=3 + i) for i in range(4)]
    assert "of them 5 showed more" in pick_from([*runs, *many]).throughput.rule
    runs[0] = make_row(1, 980.0, threads=1)
    assert "showed more" not in pick_from(runs).throughput.rule


def test_showing_more_is_by_the_figure_that_is_compared():
    runs = [make_row(1, 990.0, threads=1, memory=0.99)]
    runs += [run_beside(10 + i, 1000.0, num_workers=2, memory=1.01) for i in range(2)]
    picks = pick_from(runs)
    assert picks.efficiency.trial.plan["num_workers"] == 2
    assert "of them t1 showed more, but plans measured side by side go first" in picks.efficiency.rule
    assert "showed more" not in picks.throughput.rule


def test_the_speed_that_the_memory_pick_is_held_against_is_named_for_what_it_is_where_nothing_ran_side_by_side():
    """A mean of two runs stood there without a word, 10 % off the row that was named with it."""
    first, again = make_row(1, 1000.0), make_row(2, 810.0)
    made = recommend.pick([first], user_plan=USER, memory_limit_gib=None, runs=[first, again]).memory
    assert "of the best speed (900 samples/s, the geometric mean of 2 runs, t1)" in made.rule
