"""What is named as a tie of a pick, and which of the tied plans is taken."""

from __future__ import annotations

import dataclasses

import pytest
from tests.unit.tuner.simulated_rows import USER, make_row, pick_from, run_beside

from fulltilt.tuner.picks import recommend
from fulltilt.tuner.picks.picks import keeps_recipe
from fulltilt.tuner.picks.recommend import pick


def test_a_tie_goes_to_the_smaller_batch_and_names_the_others():
    rows = [make_row(1, 1010.0, batch_size=256), make_row(2, 1000.0, batch_size=64), make_row(3, 900.0, batch_size=16)]
    chosen = pick(rows, user_plan=USER, memory_limit_gib=None).throughput
    assert (chosen.trial.id, chosen.tied_with) == ("t2", ("t1",))
    assert "tied with 1 other" in chosen.rule


def test_a_tie_within_one_batch_goes_to_the_simpler_plan():
    rows = [make_row(1, 1010.0, num_workers=2, precision="bf16"), make_row(2, 1000.0, num_workers=2), make_row(3, 1.0)]
    assert pick(rows, user_plan=USER, memory_limit_gib=None).recommended.trial.id == "t2"


def test_a_gap_beyond_the_noise_is_no_tie():
    rows = [make_row(1, 1100.0, batch_size=256), make_row(2, 1000.0, batch_size=64)]
    chosen = pick(rows, user_plan=USER, memory_limit_gib=None).throughput
    assert (chosen.trial.id, chosen.tied_with) == ("t1", ())


def test_a_row_of_a_faster_minute_does_not_win_against_those_measured_again():
    """The machine slowed down after the first rows: only what was measured side by side is compared."""
    rows = [
        make_row(1, 1800.0, batch_size=64),
        make_row(2, 1200.0, kind="repeat", batch_size=32),
        make_row(3, 1100.0, kind="repeat", batch_size=16),
    ]
    recommended = pick(rows, user_plan=rows[0].plan, memory_limit_gib=8.0).recommended
    assert recommended.trial.id == "t2"
    assert "2 plans measured side by side, of 3 that ran" in recommended.rule


def test_a_plan_above_the_memory_limit_is_not_counted_among_those_compared():
    rows = [
        make_row(1, 1900.0, kind="repeat", memory=7.0),  # as the settings were: beside the pick, faster, too large
        make_row(2, 1200.0, kind="repeat", batch_size=16),
        make_row(3, 1000.0, batch_size=8),
    ]
    recommended = pick(rows, user_plan=USER, memory_limit_gib=8.0).recommended
    assert recommended.trial.id == "t2"
    assert recommended.rule.startswith("highest mean samples/s of 1 plan measured side by side, of 2 that ran")


def test_plans_that_ran_once_and_may_be_as_fast_are_ties_of_the_recommended_one():
    """Searches that ended at different plans named none of each other's: what was no finalist was never a tie."""
    once = [
        make_row(1, 985.0, batch_size=64, spread_pct=1.0),
        make_row(2, 1900.0, batch_size=128, spread_pct=1.0),
        make_row(3, 800.0, batch_size=8, spread_pct=1.0),
        make_row(4, 600.0, batch_size=256, spread_pct=80.0),
    ]
    first = [make_row(10 + i, rate, kind="repeat", batch_size=32) for i, rate in enumerate((995.0, 1005.0))]
    second = [make_row(20 + i, rate, kind="repeat", batch_size=16) for i, rate in enumerate((895.0, 905.0))]
    runs = [*once, *first, *second]
    table, _ = recommend.merge_repeats(runs)
    chosen = pick(table, user_plan=USER, memory_limit_gib=None, runs=runs).recommended
    assert chosen.trial.plan["batch_size"] == 32
    assert chosen.tied_with == ("t2", "t1", "t4"), "faster by its one run, as fast, and too noisy to tell"
    assert "3 plans that ran earlier, not beside it, did not come out clearly slower" in chosen.rule


@pytest.mark.parametrize(("then", "ties"), [(800.0, ("t2",)), (995.0, ())])
def test_what_a_finalist_ran_at_before_its_rounds_says_how_far_an_earlier_plan_is_from_it(then, ties):
    """Rounds that agreed to 1 % were made in a faster minute: the plan they were held against had run in a slow one."""
    once = [
        make_row(1, then, batch_size=32, spread_pct=1.0),
        make_row(2, 850.0, batch_size=64, spread_pct=1.0),
    ]
    rounds = [make_row(10 + i, rate, kind="repeat", batch_size=32) for i, rate in enumerate((995.0, 1005.0))]
    table, _ = recommend.merge_repeats([*once, *rounds])
    chosen = pick(table, user_plan=USER, memory_limit_gib=None, runs=[*once, *rounds]).recommended
    assert chosen.trial.plan["batch_size"] == 32
    assert chosen.tied_with == ties


def test_a_plan_of_an_earlier_comparison_is_a_tie_by_all_its_runs():
    early = [
        dataclasses.replace(make_row(i, rate, kind="repeat", batch_size=64), comparison="first")
        for i, rate in enumerate((*[700.0] * 7, 1000.0), start=1)
    ]
    late = [make_row(10 + i, rate, kind="repeat", batch_size=32) for i, rate in enumerate((995.0, 1005.0))]
    late = [dataclasses.replace(row, comparison="second") for row in late]
    table, _ = recommend.merge_repeats([*early, *late])
    assert pick(table, user_plan=USER, memory_limit_gib=None, runs=[*early, *late]).recommended.tied_with == ()
    early = [dataclasses.replace(row, samples_per_s=1000.0) for row in early]
    table, _ = recommend.merge_repeats([*early, *late])
    assert len(pick(table, user_plan=USER, memory_limit_gib=None, runs=[*early, *late]).recommended.tied_with) == 1


def test_a_plan_above_the_limit_is_no_tie():
    rows = [make_row(1, 1000.0, kind="repeat", memory=1.0), make_row(2, 1000.0, memory=9.0, batch_size=64)]
    assert pick(rows, user_plan=USER, memory_limit_gib=10.0).recommended.tied_with == ()


def test_a_gap_that_runs_cannot_tell_from_none_is_named_a_tie_and_the_faster_mean_is_taken():
    """The simpler plan was once taken across up to 3 %, which cost more than all other errors of the pick."""
    small = [make_row(i, rate, kind="repeat", batch_size=16) for i, rate in enumerate((985.0, 995.0))]
    large = [make_row(10 + i, rate, kind="repeat", batch_size=64) for i, rate in enumerate((1000.0, 1010.0))]
    table, _ = recommend.merge_repeats([*small, *large])
    chosen = pick(table, user_plan=USER, memory_limit_gib=None, runs=[*small, *large]).recommended
    assert chosen.trial.plan["batch_size"] == 64
    assert chosen.tied_with == tuple(row.id for row in table if row.plan["batch_size"] == 16)
    assert "tied with 1 other, which these runs cannot tell from the fastest" in chosen.rule


def test_on_a_noisy_machine_a_wide_gap_is_a_tie_too():
    """The search of a busy machine ended at one plan or at another, 10 % apart, and was sure of it each time."""
    small = [make_row(i, rate, kind="repeat", batch_size=16) for i, rate in enumerate((700.0, 1100.0))]
    large = [make_row(10 + i, rate, kind="repeat", batch_size=64) for i, rate in enumerate((1200.0, 800.0))]
    table, _ = recommend.merge_repeats([*small, *large])
    chosen = pick(table, user_plan=USER, memory_limit_gib=None, runs=[*small, *large]).recommended
    assert chosen.trial.plan["batch_size"] == 64
    assert len(chosen.tied_with) == 1


def test_every_pick_names_what_it_cannot_be_told_from_by_the_same_rule():
    """The pick of the throughput once tied by intervals inside runs, the recommended one by runs side by side."""
    rows = [
        make_row(1, 1000.0, kind="repeat", batch_size=64, spread_pct=0.1),
        make_row(2, 980.0, kind="repeat", spread_pct=0.1),
        make_row(3, 500.0, spread_pct=0.1, batch_size=8),
    ]
    picks = pick(rows, user_plan=rows[0].plan, memory_limit_gib=None)
    for made in (picks.throughput, picks.efficiency, picks.memory, picks.recommended):
        assert (made.trial.id, made.tied_with) == ("t1", ("t2",))


def test_a_noisy_run_ties_by_its_own_error_and_makes_no_others_tie():
    rows = [
        make_row(1, 1000.0, batch_size=64, spread_pct=0.1),
        make_row(2, 900.0, spread_pct=0.1),
        make_row(3, 850.0, spread_pct=30.0, batch_size=8),
    ]
    assert pick(rows, user_plan=USER, memory_limit_gib=None).throughput.tied_with == ("t3",)


def test_an_interval_that_reaches_below_0_is_a_large_error_and_not_the_usual_one():
    """The noisiest runs of all, more than 100 % to either side, counted as runs known to 1 %."""
    rows = [make_row(1, 1000.0, batch_size=64, spread_pct=0.1), make_row(2, 600.0, spread_pct=150.0)]
    assert pick(rows, user_plan=USER, memory_limit_gib=None).throughput.tied_with == ("t2",)


def test_of_means_within_one_per_cent_the_smaller_batch_is_taken():
    small = [make_row(i, 992.0, kind="repeat", batch_size=16) for i in range(20)]
    large = [make_row(100 + i, 1000.0, kind="repeat", batch_size=64) for i in range(20)]
    table, _ = recommend.merge_repeats([*small, *large])
    chosen = pick(table, user_plan=USER, memory_limit_gib=None, runs=[*small, *large]).recommended
    assert chosen.trial.plan["batch_size"] == 16


def test_more_runs_side_by_side_tell_smaller_differences_apart():
    def choose(n_runs):
        small = [make_row(i, 980.0, kind="repeat", batch_size=16) for i in range(n_runs)]
        large = [make_row(100 + i, 1000.0, kind="repeat", batch_size=64) for i in range(n_runs)]
        table, _ = recommend.merge_repeats([*small, *large])
        return pick(table, user_plan=USER, memory_limit_gib=None, runs=[*small, *large]).recommended

    assert choose(1).tied_with, "a run's error is taken to be 1 % where nothing else is known"
    assert choose(20).trial.plan["batch_size"] == 64
    assert not choose(20).tied_with


@pytest.mark.parametrize("kind", ["end_to_end", "repeat"])
def test_inside_a_tie_the_recipe_stays_as_it_was(kind):
    """Named batch sizes free the effective batch: 16 instead of 32 was recommended for nothing, and so was 64."""
    own, workers = make_row(1, 1000.0, kind=kind), make_row(2, 990.0, kind=kind, num_workers=2)
    small, large = make_row(3, 1001.0, kind=kind, batch_size=16), make_row(4, 1012.0, kind=kind, batch_size=64)
    picks = pick([own, workers, small, large], user_plan=USER, memory_limit_gib=None)
    assert picks.recommended.trial is own
    assert set(picks.recommended.tied_with) == {"t2", "t3", "t4"}
    said = (
        "t4 changes the recipe (effective batch 32 → 64) and is not proven faster: the settings as they were are taken"
    )
    assert said in picks.recommended.rule
    assert picks.throughput.trial is large, "what is the fastest is another question"
    without = pick([make_row(1, 500.0, kind=kind), workers, small, large], user_plan=USER, memory_limit_gib=None)
    assert without.recommended.trial is workers
    assert "a plan that keeps the recipe is taken instead" in without.recommended.rule


@pytest.mark.parametrize(("rate", "chosen"), [(1020.0, "t1"), (1100.0, "t2")])
def test_the_recipe_is_worth_three_per_cent_of_speed_and_not_ten_that_noise_leaves_open(rate, chosen):
    """On a noisy machine nothing is proven: however wide the tie, the recipe once won it at a loss of a quarter."""
    rows = [make_row(1, 1000.0, spread_pct=80.0), make_row(2, rate, batch_size=64, spread_pct=80.0)]
    runs = [dataclasses.replace(row, samples_per_s=row.samples_per_s * by) for row in rows for by in (0.8, 1.25)]
    runs = [dataclasses.replace(run, kind="repeat", id=f"r{i}") for i, run in enumerate(runs)]
    picked = recommend.pick(rows, user_plan=USER, memory_limit_gib=None, runs=runs).recommended
    assert len(picked.tied_with) == 1
    assert picked.trial.id == chosen


def test_a_plan_that_is_proven_faster_may_change_the_recipe():
    rows = [make_row(1, 1000.0), make_row(2, 1200.0, batch_size=64)]
    chosen = pick(rows, user_plan=USER, memory_limit_gib=None).recommended
    assert chosen.trial.id == "t2"
    assert "recipe" not in chosen.rule


def test_a_micro_batch_keeps_the_recipe_and_an_order_of_the_rows_does_not():
    assert keeps_recipe(USER, USER.replace(batch_size=16, accumulate=2, num_workers=4, precision="bf16"))
    assert not keeps_recipe(USER, USER.replace(batch_size=16))
    assert not keeps_recipe(USER, USER.replace(placement="block_shuffled"))


def test_a_lucky_single_run_does_not_win_against_the_mean_of_runs_side_by_side():
    """17,273 of a plan that ran once was "the highest throughput" above a plan with runs of 18,443, 15,951, 18,202."""
    runs = [
        make_row(9, 18443.0, threads=1, num_workers=2),
        make_row(11, 17273.0, threads=1),
        run_beside(13, 15951.0, threads=1, num_workers=2),
        run_beside(14, 6465.0),
        run_beside(15, 5759.0),
        run_beside(16, 18202.0, threads=1, num_workers=2),
    ]
    picks = pick_from(runs)
    for made in (picks.throughput, picks.efficiency, picks.memory, picks.recommended):
        assert (made.trial.id, made.tied_with) == ("t13", ("t11",))
        assert made.runs_samples_per_s == (15951.0, 18202.0)
        assert "1 plan that ran earlier, not beside it, did not come out clearly slower" in made.rule
    for made in (picks.throughput, picks.recommended):
        assert made.rule.startswith("highest mean samples/s of 2 plans measured side by side, of 3 that ran")
    assert "samples/s per GiB of 2 plans measured side by side, of 3 with a memory figure" in picks.efficiency.rule
    assert "the only one measured side by side, of 2 within 2 % of it" in picks.memory.rule, "the slow one is too slow"
    assert "did not come out clearly slower per GiB" in picks.efficiency.rule


def test_two_picks_of_one_plan_for_its_speed_name_the_same_ties():
    """The ties of the highest throughput were with a lucky single run, those of the recommended plan with rounds."""
    runs = [
        make_row(1, 1150.0, batch_size=64),
        make_row(2, 920.0, batch_size=128),
        *(run_beside(10 + i, rate, num_workers=2) for i, rate in enumerate((960.0, 1040.0))),
        *(run_beside(20 + i, rate) for i, rate in enumerate((900.0, 980.0))),
    ]
    picks = pick_from(runs)
    assert picks.throughput.trial.id == picks.recommended.trial.id
    assert picks.throughput.tied_with == picks.recommended.tied_with
    assert "t2" in picks.throughput.tied_with


def test_a_single_run_that_is_clearly_faster_still_has_the_highest_throughput():
    runs = [make_row(1, 2000.0, batch_size=256, memory=9.0), run_beside(2, 1000.0, num_workers=2), run_beside(3, 900.0)]
    made = pick_from([*runs, run_beside(4, 1001.0, num_workers=2), run_beside(5, 901.0)]).throughput
    assert (made.trial.id, made.tied_with) == ("t1", ())


def test_one_round_after_runs_that_lay_far_apart_leaves_ties():
    """14,309 had no tie after one round, though the same plan had run at 5,598 before it and another at 4,631."""
    fast, slow = {"threads": 1, "num_workers": 2}, {"threads": 1, "num_workers": 1}
    earlier = [make_row(1, 5739.0, **slow), make_row(9, 5598.0, **fast), make_row(10, 4631.0, threads=1)]
    rounds = [run_beside(15, 14309.0, **fast), run_beside(16, 5802.0, **slow), run_beside(17, 114.0)]
    picks = pick_from([*earlier, *rounds])
    for made in (picks.recommended, picks.throughput):
        assert made.trial.id == "t15"
        assert set(made.tied_with) == {"t16", "t10"}
    steady = [dataclasses.replace(earlier[1], samples_per_s=14300.0), earlier[0], earlier[2]]
    assert pick_from([*steady, *rounds]).recommended.tied_with == ()


def test_a_tie_is_explained_in_one_plain_sentence():
    rows = [make_row(1, 1005.0, batch_size=256), make_row(2, 1000.0, batch_size=64)]
    assert pick(rows, user_plan=USER, memory_limit_gib=None).throughput.rule == (
        "highest samples/s of 2 plans that ran; tied with 1 other, which these runs cannot tell from the fastest; of "
        "plans within 1 % of the fastest the one with the smallest batch is taken, and of those the simplest"
    )


def test_keeping_the_recipe_does_not_reach_further_down_than_one_per_cent_of_the_fastest_of_all():
    """The window of plans that keep the recipe began at the fastest of them: "the fastest" was 1.2 % away, and a plan
    that keeps the recipe was said to change it, by ()."""
    fast, simple = make_row(1, 1000.0, batch_size=64), make_row(3, 988.0, num_workers=1)
    close = make_row(2, 995.0, num_workers=4)
    made = pick([fast, close, simple], user_plan=USER, memory_limit_gib=None).recommended
    assert (made.trial.id, made.tied_with) == ("t2", ("t1", "t3"))
    assert "recipe" not in made.rule
    made = pick([fast, simple], user_plan=USER, memory_limit_gib=None).recommended
    assert made.trial.id == "t3", "where no plan that keeps the recipe is that close, they compete among themselves"
    assert "t1 changes the recipe (effective batch 32 → 64) and is not proven faster" in made.rule
