"""Picks follow their stated rules by the rows they are picked from."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tuner.tuner_cases import USER, make_row, pick_from

from fulltilt.errors import NoPlanError
from fulltilt.tuner.answer.picks import Pick

SMALL, MEDIUM, LARGE = {"batch_size": 16}, {"batch_size": 64}, {"batch_size": 256}


def make_rows(*rows):
    """Rows t1, t2, … of (samples/s, GiB, levers)."""
    return [make_row(i, rate, memory=memory, **levers) for i, (rate, memory, levers) in enumerate(rows, start=1)]


def test_each_pick_follows_its_own_rule():
    rows = make_rows((1000.0, 2.0, MEDIUM), (1500.0, 9.0, LARGE), (600.0, 1.0, SMALL))
    picks = pick_from([*rows, make_row(4, None, status="out_of_memory", batch_size=512)], limit_gib=10.0)
    assert [p.trial.id for p in (picks.throughput, picks.efficiency, picks.recommended)] == ["t2", "t3", "t1"]
    assert "memory at most 8.00 GiB, 80 % of 10.00 GiB" in picks.recommended.rule
    assert "of 3 plans that ran" in picks.throughput.rule
    on_gpu = [dataclasses.replace(row, memory_reserved_peak_gib=2.0) for row in rows]
    assert pick_from(on_gpu, limit_gib=10.0).recommended.trial.id == "t2", "there memory is what is reserved"


@pytest.mark.parametrize(
    ("rows", "chosen", "said"),
    [
        # the settings as they were did not run
        ([(1000.0, 9.5, MEDIUM), (900.0, 9.0, SMALL)], "t2", "no plan has memory at most 8.00 GiB"),
        # not the least memory of all: another with a thousandth more of it is three times as fast
        ([(300.0, 9.00, SMALL), (900.0, 9.01, {"num_workers": 2}), (2000.0, 9.5, MEDIUM)],
         "t2", "no plan has memory at most 8.00 GiB, 80 % of 10.00 GiB; this one is of those with the least"),
        ([(2000.0, None, MEDIUM), (1000.0, 1.0, SMALL)], "t2", "; memory at most 8.00 GiB"),
        ([(2000.0, None, MEDIUM)], "t1", "memory at most 8.00 GiB"),
        # they ran, and stay: the limit is for what is changed
        ([(2000.0, 9.0, {}), (1000.0, 1.0, SMALL)], "t1", "turns that decide; other plans have memory at most 8.00"),
        ([(2000.0, 9.0, {}), (1000.0, 9.5, SMALL)], "t1", "turns that decide; no plan has memory at most 8.00 GiB"),
    ],
)  # fmt: skip
def test_the_memory_limit_leaves_the_smallest_rows_and_those_below_it(rows, chosen, said):
    made = pick_from(make_rows(*rows), limit_gib=10.0)
    assert made.recommended.trial.id == chosen
    assert said in made.recommended.rule
    assert made.throughput.trial.samples_per_s == max(rate for rate, _, _ in rows)
    assert (made.efficiency is None) == all(memory is None for _, memory, _ in rows)
    assert made.memory is None or made.memory.trial.device_memory_peak_gib is not None


def test_without_a_known_memory_no_limit_is_applied_and_that_is_said():
    made = pick_from(make_rows((2000.0, 900.0, MEDIUM))).recommended
    assert made.rule.endswith("the memory of the device is not known, so no limit was applied")


@pytest.mark.parametrize(
    ("own", "other", "recommended", "proven", "unproven"),
    [
        (1000.0, 1200.0, "t2", True, None),
        (1000.0, 1000.0, "t1", None, "t2"),
        (1000.0, 900.0, "t1", None, "t2"),
    ],
)
def test_what_took_turns_is_recommended_by_what_these_showed_and_not_by_its_run(
    own, other, recommended, proven, unproven
):
    rows = [make_row(1, 500.0), make_row(2, 5000.0, num_workers=2)]
    plan = rows[1].plan
    picks = pick_from(rows, {USER: own, plan: other}, best=plan)
    chosen = picks.recommended
    assert (chosen.trial.id, chosen.proven) == (recommended, proven)
    assert (picks.unproven and picks.unproven.trial.id) == unproven
    assert picks.best.trial.id == "t2"
    assert picks.best.gain.gain_pct == pytest.approx(100 * (other / own - 1))
    for made in (chosen, picks.best):
        assert Pick.from_json(made.to_json()) == made
        assert made.to_json()["plan"] == dict(made.trial.plan)
    tied = {"t1", "t2"} - {chosen.trial.id} if own == other else set()
    assert {*chosen.tied_with} == tied


def test_a_single_group_has_no_interval_and_so_tells_no_gain():
    """Its infinite bounds could not be read back from the JSON document."""
    rows = [make_row(1, 500.0), make_row(2, 5000.0, num_workers=2)]
    picks = pick_from(rows, {USER: 1000.0, rows[1].plan: 1200.0}, n_groups=1)
    assert (picks.recommended.trial.id, picks.unproven.trial.id) == ("t1", "t2")
    assert (picks.unproven.gain, picks.unproven.proven) == (None, False)


def test_the_fastest_is_picked_by_the_turns_where_there_were_any():
    lucky, steady = make_row(1, 9000.0, num_workers=1), make_row(2, 1300.0, num_workers=2)
    rates = {USER: 1000.0, lucky.plan: 1100.0, steady.plan: 1300.0}
    picks = pick_from([lucky, steady, make_row(3, 1000.0), make_row(4, 8000.0, **SMALL)], rates, best=steady.plan)
    assert picks.throughput.trial.id == "t2"


def test_only_the_recommended_pick_is_called_proven():
    """The fastest was, beside a recommendation that said that no other plan is proven faster."""
    raced, left = make_row(1, 1300.0, num_workers=1), make_row(2, 1300.0, num_workers=2)
    rates = {USER: 1000.0, raced.plan: 1300.0, left.plan: 1000.0}
    picks = pick_from([raced, left, make_row(3, 1000.0)], rates, best=left.plan)
    assert (picks.recommended.trial.plan, picks.throughput.trial) == (USER, raced)
    assert (picks.throughput.gain.verdict, picks.throughput.proven) == ("faster", None)
    assert "no other plan is proven faster in the turns that decide" in picks.recommended.rule


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
    assert picks.throughput.trial.samples_per_s == best
    fast = [row for row in fine.values() if row.samples_per_s >= 0.9 * best]
    assert picks.memory.trial in fast
    assert picks.memory.trial.memory_rss_peak_gib <= 1.02 * min(row.memory_rss_peak_gib for row in fast)
    for made in (picks.throughput, picks.efficiency, picks.recommended, picks.memory):
        assert {made.trial.id, *made.tied_with} <= fine.keys()
    safe = [row.samples_per_s for row in fine.values() if row.memory_rss_peak_gib <= 8.0]
    if any(row.plan == USER for row in fine.values()):
        assert picks.recommended.trial.plan == USER, "without turns nothing is proven"
    elif safe:
        assert picks.recommended.trial.memory_rss_peak_gib <= 8.0
        assert picks.recommended.trial.samples_per_s == max(safe)


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([(1000.0, 8.0, LARGE), (910.0, 3.0, MEDIUM), (890.0, 1.0, SMALL), (950.0, 5.0, {"threads": 1})], "t2"),
        ([(950.0, 1.0, SMALL), (1000.0, 1.01, MEDIUM), (1040.0, 1.5, {"batch_size": 128})], "t2"),
        ([(950.0, None, SMALL), (1000.0, 4.0, MEDIUM)], "t2"),
    ],
)  # fmt: skip
def test_the_memory_pick_is_the_smallest_row_at_an_acceptable_speed_and_of_those_as_small_the_fastest(rows, chosen):
    made = pick_from(make_rows(*rows)).memory
    assert made.trial.id == chosen
    assert "at least 90 % of the best speed" in made.rule


@pytest.mark.parametrize("own", [None, make_row(2, 900.0), make_row(2, None, status="out_of_memory")])
def test_a_recommendation_says_where_nothing_is_known_against_the_settings_as_they_were(own):
    chosen = pick_from([make_row(1, 1000.0, **MEDIUM), *([own] if own else [])]).recommended
    has_run = own is not None and own.status == "ok"
    assert chosen.trial.id == ("t2" if has_run else "t1")
    assert ("the settings as they were did not: nothing says what it gains" in chosen.rule) == (not has_run)
    assert chosen.proven is None
