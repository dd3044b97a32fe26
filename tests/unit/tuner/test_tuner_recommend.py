"""Picks follow their stated rules by the rows they are picked from."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tuner.tuner_cases import USER, make_row, pick_from, run_beside

from fulltilt.errors import NoPlanError
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.picks.picks import Pick, describe_changes

SMALL, MEDIUM, LARGE = {"batch_size": 16}, {"batch_size": 64}, {"batch_size": 256}


def make_rows(*rows):
    """Rows t1, t2, … of (samples/s, GiB, levers)."""
    return [make_row(i, rate, memory=memory, **levers) for i, (rate, memory, levers) in enumerate(rows, start=1)]


def test_each_pick_follows_its_own_rule():
    rows = make_rows((1000.0, 2.0, MEDIUM), (1500.0, 9.0, LARGE), (600.0, 1.0, SMALL))
    picks = pick_from([*rows, make_row(4, None, status="out_of_memory", batch_size=512)], limit_gib=10.0)
    assert [p.trial.id for p in (picks.throughput, picks.efficiency, picks.recommended)] == ["t2", "t3", "t1"]
    assert "8.00 GiB, 80 % of 10.00 GiB" in picks.recommended.rule
    on_gpu = [dataclasses.replace(row, memory_reserved_peak_gib=2.0) for row in rows]
    assert pick_from(on_gpu, limit_gib=10.0).recommended.trial.id == "t2", "there memory is what is reserved"


@pytest.mark.parametrize(
    ("rows", "chosen", "said"),
    [
        ([(1000.0, 9.5, {}), (900.0, 9.0, SMALL)], "t2", "no row has memory at most 8.00 GiB"),
        # not the least memory of all: another with a thousandth more of it is three times as fast
        ([(300.0, 9.00, SMALL), (900.0, 9.01, {"num_workers": 2}), (2000.0, 9.5, MEDIUM)],
         "t2", "least memory highest samples/s of 2 plans (9.00 GiB, and up to 2 % more)"),
        ([(2000.0, None, MEDIUM), (1000.0, 1.0, {})], "t2", "memory at most 8.00 GiB"),
        ([(2000.0, None, {})], "t1", "memory at most 8.00 GiB"),
    ],
)  # fmt: skip
def test_the_memory_limit_leaves_the_smallest_rows_and_those_below_it(rows, chosen, said):
    made = pick_from(make_rows(*rows), limit_gib=10.0)
    assert made.recommended.trial.id == chosen
    assert said in made.recommended.rule
    assert made.throughput.trial.samples_per_s == max(rate for rate, _, _ in rows)
    assert (made.efficiency is None) == all(memory is None for _, memory, _ in rows)
    assert made.memory is None or made.memory.trial.device_memory_peak_gib is not None


GROWS = "look for memory that grows from step to step, or give a larger --memory-limit"
SKIPPED = dataclasses.replace(
    make_row(9, None, status="skipped", pin_memory=True), reason="pin_memory=True: no accelerator; use pin_memory false"
)


def fail(number, reason, status="error"):
    return dataclasses.replace(make_row(number, None, status=status, batch_size=number), reason=reason)


@pytest.mark.parametrize(
    ("rows", "said", "remedy"),
    [
        ([fail(n, "DataError: a.h5 is cut; copy it again (log: l)") for n in (1, 2)], "2 error, 1 sk", "copy it again"),
        ([fail(1, "ValueError: shapes differ (log: r/logs/t1.log)")], "1 error", "the log of t1 says more"),
        ([fail(1, "rank 1: RuntimeError: expected 3; got 1 (log: l)")], "1 error", "the log of t1 says more"),
        ([fail(1, "no step in 30 s; raise limits.hang_timeout_s")], "1 error", "raise limits.hang_timeout_s"),
        ([], "no plan can run: 1 skipped", "use pin_memory false"),
        ([fail(1, "", "out_of_memory"), fail(2, "", "out_of_memory"), fail(3, "DataError: cut; copy it again")],
         "2 out_of_memory, 1 error", "try smaller batch sizes, or a larger --memory-limit"),
        # a model that leaks: "no plan can run" stood under rows with the speeds of plans that had run
        ([make_row(1, 100.0, batch_size=1), fail(1, "", "out_of_memory"), fail(2, "", "out_of_memory")],
         "no plan ran each time: 1 ended well and then failed: 2 out_of_memory", GROWS),
    ],
)  # fmt: skip
def test_where_no_plan_ran_the_failures_are_counted_and_the_most_common_one_has_its_remedy(rows, said, remedy):
    with pytest.raises(NoPlanError, match=said) as ended:
        pick_from([*rows, SKIPPED])
    assert ended.value.remedy == remedy
    assert "use pin_memory false" in str(ended.value)
    with pytest.raises(NoPlanError, match="ran no trial"):
        pick_from([])


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            *(st.floats(1.0, 1e6), st.floats(0.1, 20.0), st.sampled_from([8, 16, 32, 64, 128])),
            *(st.sampled_from([0, 1, 2, 4]), st.sampled_from(["ok", "ok", "ok", "error", "out_of_memory"])),
        ),
        min_size=1, max_size=12, unique_by=lambda item: (item[2], item[3]),
    )
)  # fmt: skip
def test_picks_are_rows_that_obey_their_rules(items):
    rows = [
        make_row(i, rate, memory=memory, batch_size=batch, num_workers=workers, status=status)
        for i, (rate, memory, batch, workers, status) in enumerate(items)
    ]
    fine = {row.id: row for row in rows if row.status == "ok"}
    if not fine:
        with pytest.raises(NoPlanError):
            pick_from(rows, limit_gib=10.0)
        return
    picks = pick_from(rows, limit_gib=10.0)
    best = max(row.samples_per_s for row in fine.values())
    assert picks.throughput.trial.samples_per_s >= 0.95 * best
    fast = [row for row in fine.values() if row.samples_per_s >= 0.9 * best]
    assert picks.memory.trial in fast
    assert picks.memory.trial.memory_rss_peak_gib <= 1.02 * min(row.memory_rss_peak_gib for row in fast)
    for made in (picks.throughput, picks.efficiency, picks.recommended, picks.memory):
        assert {made.trial.id, *made.tied_with} <= fine.keys()
    for row in map(fine.get, picks.throughput.tied_with):
        if row.samples_per_s >= picks.throughput.trial.samples_per_s:  # at most 1 % above it
            assert picks.throughput.trial.effective_batch_size <= row.effective_batch_size
    safe = [row.samples_per_s for row in fine.values() if row.memory_rss_peak_gib <= 8.0]
    if safe:
        assert picks.recommended.trial.memory_rss_peak_gib <= 8.0
        assert picks.recommended.trial.samples_per_s >= 0.95 * max(safe)


def test_the_row_of_a_repeated_plan_is_the_median_of_its_later_runs_or_one_that_failed():
    rows = [make_row(1, 1300.0, **MEDIUM), make_row(2, 1250.0), *run_beside(3, 1200.0, 1210.0, 1290.0, **MEDIUM)]
    parts = recommend.merge_repeats(rows)
    assert [[row.id for row in part] for part in parts] == [["t4", "t2"], ["t1", "t3", "t5"]]
    failed = make_row(2, None, status="out_of_memory", kind="repeat", **MEDIUM)
    rows = [make_row(1, 1300.0, **MEDIUM), failed, make_row(3, 900.0)]
    table, _ = recommend.merge_repeats(rows)
    assert [row.status for row in table] == ["out_of_memory", "ok"]
    assert pick_from(rows).recommended.trial.id == "t3"


def test_finalists_are_the_recommended_plan_and_those_that_may_be_as_fast():
    rates = {64: 1170.0, 128: 1200.0, 32: 1100.0}
    rows = [make_row(i, rate, batch_size=size) for i, (size, rate) in enumerate(rates.items())]
    rows.append(make_row(4, 1050.0, spread_pct=20.0, **SMALL))
    for n, sizes in ((3, [64, 128, 16]), (1, [128])):  # the interval of 16 reaches the first
        finalists = recommend.select_finalists(rows, limit_gib=None, n=n)
        assert [plan["batch_size"] for plan in finalists] == sizes
    assert recommend.select_finalists([], limit_gib=1.0) == []
    # rows above the limit are measured again too, where there are no others
    rows = [make_row(1, 900.0, memory=9.0, num_workers=2), make_row(2, 2000.0, memory=9.5, **MEDIUM)]
    finalists = recommend.select_finalists(rows, limit_gib=8.0)
    assert [plan["num_workers"] for plan in finalists] == [2]
    chosen = pick_from([*rows, *run_beside(3, 880.0, 880.0, memory=9.0, num_workers=2)], limit_gib=10.0).recommended
    assert chosen.runs_samples_per_s == (880.0, 880.0)


@pytest.mark.parametrize(
    ("levers", "recipe", "numerics"),
    [
        ({"batch_size": 128, "precision": "bf16"}, ("effective batch 32 → 128",), ("precision fp32 → bf16",)),
        ({"num_workers": 4}, (), ()),
        ({"placement": "ram"}, (), ()),
        ({"placement": "device"}, (), ()),
        ({"placement": "block_shuffled"}, ("placement stream → block_shuffled",), ()),
    ],
)
def test_changes_name_recipe_and_numerics(levers, recipe, numerics):
    assert describe_changes(USER, USER.replace(**levers)) == {"recipe": recipe, "numerics": numerics}
    changes = describe_changes(USER, USER.replace(batch_size=16, accumulate=2))
    assert changes["recipe"][0].startswith("micro-batch 32 → 16, effective batch as before")
    changes = describe_changes(USER.replace(placement="block_shuffled"), USER.replace(placement="ram"))
    assert changes["recipe"] == ("placement block_shuffled → ram",)


@pytest.mark.parametrize(
    ("rate", "rule", "is_free", "batch_size", "expected"),
    [
        (0.1, "sqrt", True, 128, ("sqrt", 0.2)),
        (0.1, "linear", True, 128, ("linear", 0.4)),
        (0.1, "none", True, 128, ("none", 0.1)),
        (0.1, "sqrt", False, 128, ("none", 0.1)),
        (0.1, "sqrt", True, 32, ("sqrt", 0.1)),
        (0.1, "sqrt", True, 8, ("sqrt", 0.05)),
        (None, "sqrt", True, 64, ("sqrt", None)),
    ],
)
def test_the_learning_rate_follows_only_a_batch_that_was_allowed_to_change(rate, rule, is_free, batch_size, expected):
    plan = USER.replace(batch_size=batch_size)
    made = recommend.plan_learning_rate(rate, user_plan=USER, plan=plan, rule=rule, is_batch_free=is_free)
    assert (made.rule, made.start, made.to) == (expected[0], rate, pytest.approx(expected[1]))


@pytest.mark.parametrize(
    ("runs", "chosen", "said"),
    [
        (make_rows((1000.0, 8.0, LARGE), (910.0, 3.0, MEDIUM), (890.0, 1.0, SMALL), (950.0, 5.0, {"threads": 1})),
         "t2", "least memory of 3 plans with at least 90 % of the best speed (1,000 samples/s, t1)"),
        # a median of runs that lay far apart stood above every mean, and left one row fast enough
        ([*run_beside(1, 515.0, 194.0, 528.0, memory=4.0, kind="baseline"),
          *run_beside(4, 440.0, 440.0, 440.0, memory=1.0, **MEDIUM)],
         "t5", "best confirmed speed (440 samples/s, the geometric mean of 3 runs, t5)"),
        (make_rows((950.0, 1.0, SMALL), (1000.0, 1.01, MEDIUM), (1040.0, 1.5, {"batch_size": 128})),
         "t2", "the fastest of 2 plans within 2 % of it"),
        # a row from a faster minute would make every confirmed one too slow
        ([*make_rows((2000.0, 9.0, LARGE)), *run_beside(2, 1000.0, memory=4.0, **MEDIUM),
          *run_beside(3, 950.0, memory=2.0, **SMALL)],
         "t3", "of the best confirmed speed (1,000 samples/s, t2)"),
        (make_rows((1000.0, 1.0, {}), (810.0, 1.0, {})),
         "t2", "of the best speed (900 samples/s, the geometric mean of 2 runs, t2)"),
    ],
)  # fmt: skip
def test_the_memory_pick_is_the_smallest_row_at_an_acceptable_speed(runs, chosen, said):
    made = pick_from(runs).memory
    assert made.trial.id == chosen
    assert said in made.rule


@pytest.mark.parametrize("kind", ["device", "loader", "memory"])
def test_a_probe_is_never_picked_nor_a_finalist_nor_in_the_table(kind):
    probe = make_row(1, 9000.0, memory=0.1, kind=kind, **MEDIUM)
    rows = [probe, make_row(2, 1000.0)]
    assert [[row.id for row in part] for part in recommend.merge_repeats(rows)] == [["t2"], []]
    assert recommend.find_confirmed(rows) == []
    assert [plan["batch_size"] for plan in recommend.select_finalists(rows, limit_gib=None)] == [32]
    picks = pick_from(rows)
    assert {made.trial.id for made in (picks.throughput, picks.efficiency, picks.recommended, picks.memory)} == {"t2"}
    with pytest.raises(NoPlanError):
        pick_from([probe])


def test_a_plan_is_judged_by_the_mean_of_its_runs_and_not_by_one_of_them():
    """Medians 1000 and 1010; means 1067 and 1007."""
    runs = [*run_beside(1, 990.0, 1000.0, 1220.0, **SMALL), *run_beside(4, 1000.0, 1010.0, 1011.0, **MEDIUM)]
    chosen = pick_from(runs).recommended
    assert chosen.trial.samples_per_s == 1000.0, "the row shown is that of the median run"
    assert chosen.runs_samples_per_s == (990.0, 1000.0, 1220.0)
    assert Pick.from_json(chosen.to_json()) == chosen
    assert chosen.to_json()["plan"]["batch_size"] == 16


@pytest.mark.parametrize("own", [None, make_row(2, 900.0), make_row(2, None, status="out_of_memory")])
def test_a_recommendation_says_where_nothing_is_known_against_the_settings_as_they_were(own):
    rule = pick_from([make_row(1, 1000.0, **MEDIUM), *([own] if own else [])]).recommended.rule
    assert ("the settings as they were did not run: nothing is known of how it compares" in rule) == (own is None)


def test_a_rule_names_the_rows_that_showed_more_than_the_pick():
    runs = [make_row(1, 1015.0, threads=1, memory=0.5), make_row(2, 985.0, threads=2)]
    runs += [*run_beside(10, 1000.0, 990.0, num_workers=2), *run_beside(20, 500.0, 505.0)]
    picks = pick_from(runs)
    for made in (picks.throughput, picks.recommended):
        assert (made.trial.plan["num_workers"], made.tied_with) == (2, ("t1", "t2"))
        assert made.rule.count("of them t1 showed more, but plans measured side by side go first") == 1
    many = [make_row(30 + i, 1012.0, threads=3 + i) for i in range(4)]
    assert "of them 5 showed more" in pick_from([*runs, *many]).throughput.rule
    runs[0] = make_row(1, 980.0, threads=1)
    assert "showed more" not in pick_from(runs).throughput.rule
    # by the figure that is compared
    runs = [make_row(1, 990.0, threads=1, memory=0.99), *run_beside(10, 1000.0, 1000.0, num_workers=2, memory=1.01)]
    picks = pick_from(runs)
    assert picks.efficiency.trial.plan["num_workers"] == 2
    assert "of them t1 showed more, but plans measured side by side go first" in picks.efficiency.rule
    assert "showed more" not in picks.throughput.rule
