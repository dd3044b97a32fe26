"""What is named as a tie of a pick, and which of the tied plans is taken."""

import pytest
from tests.unit.tuner.tuner_cases import USER, make_row, pick_from, run_beside

from fulltilt.tuner.picks.picks import keeps_recipe

TINY, SMALL, MEDIUM, LARGE = ({"batch_size": size} for size in (8, 16, 64, 256))


QUIET = make_row(1, 1000.0, spread_pct=0.1, **MEDIUM)
ONCE = [make_row(1, 985.0, spread_pct=1.0, **MEDIUM), make_row(2, 1900.0, spread_pct=1.0, batch_size=128),
        make_row(3, 800.0, spread_pct=1.0, **TINY), make_row(4, 600.0, spread_pct=80.0, **LARGE)]  # fmt: skip
OWN = run_beside(10, 995.0, 1005.0)


def run_before(own_rate):
    return [make_row(1, own_rate, spread_pct=1.0), make_row(2, 850.0, spread_pct=1.0, **MEDIUM)]


def run_earlier(rate):
    return run_beside(1, *[rate] * 7, 1000.0, comparison="earlier", **MEDIUM)


def lie_far_apart(rate):
    return [*run_beside(1, 800.0, 1250.0, spread_pct=80.0), *run_beside(3, 0.8 * rate, 1.25 * rate, **MEDIUM)]


@pytest.mark.parametrize(
    ("name", "runs", "chosen", "ties"),
    [
        # the smaller batch, and the simpler plan
        ("throughput", [make_row(1, 1010.0, **LARGE), make_row(2, 1000.0, **MEDIUM), make_row(3, 900.0)], "t2", "t1"),
        ("throughput", [make_row(1, 1010.0, precision="bf16"), make_row(2, 1000.0)], "t2", "t1"),
        ("throughput", [make_row(1, 1100.0, **LARGE), make_row(2, 1000.0, **MEDIUM)], "t1", ""),
        # a noisy run ties by its own error and makes no others tie
        ("throughput", [QUIET, make_row(2, 900.0, spread_pct=0.1), make_row(3, 850.0, spread_pct=30.0, **TINY)],
         "t1", "t3"),
        ("throughput", [QUIET, make_row(2, 600.0, spread_pct=150.0)], "t1", "t2"),
        # a single run that is clearly faster than those side by side
        ("throughput", [make_row(1, 2000.0, memory=9.0, **LARGE), *run_beside(2, 1000.0, 1001.0)], "t1", ""),
        ("throughput", [*run_beside(10, 985.0, 995.0, **SMALL), *run_beside(20, 1000.0, 1010.0)], "t20", "t10"),
        # on a noisy machine a gap of 10 % is a tie too
        ("throughput", [*run_beside(10, 700.0, 1100.0, **SMALL), *run_beside(20, 1200.0, 800.0)], "t21", "t10"),
        # of means within 1 % the smaller batch
        ("throughput", [*run_beside(10, *[992.0] * 20, **SMALL), *run_beside(50, *[1000.0] * 20)], "t19", "t59"),
        # a run's error is taken to be 1 % where nothing else is known, and more runs tell smaller gaps apart
        ("throughput", [*run_beside(10, 980.0, **SMALL), *run_beside(20, 1000.0)], "t20", "t10"),
        ("throughput", [*run_beside(10, *[980.0] * 20, **SMALL), *run_beside(50, *[1000.0] * 20)], "t59", ""),
        # plans that ran once: faster by that run, as fast, and too noisy to tell
        ("recommended", [*ONCE, *OWN, *run_beside(20, 895.0, 905.0, **SMALL)], "t10", "t2 t1 t4"),
        # what a finalist ran at before its rounds says how far an earlier plan is from it
        ("recommended", [*run_before(800.0), *OWN], "t10", "t2"),
        ("recommended", [*run_before(995.0), *OWN], "t10", ""),
        # a plan of an earlier comparison, by all its runs
        ("recommended", [*run_earlier(700.0), *OWN], "t10", ""),
        ("recommended", [*run_earlier(1000.0), *OWN], "t10", "t4"),
        # what is too large is no tie
        ("recommended", [*run_beside(1, 1000.0), make_row(2, 1000.0, memory=9.0, **MEDIUM)], "t1", ""),
        # the recipe is worth 3 % of speed, and not 10 that noise leaves open
        ("recommended", lie_far_apart(1020.0), "t1", "t3"),
        ("recommended", lie_far_apart(1100.0), "t3", "t1"),
    ],
)  # fmt: skip
def test_a_gap_that_runs_cannot_tell_from_none_is_a_tie_and_below_one_per_cent_the_smaller_and_simpler_is_taken(
    name, runs, chosen, ties
):
    made = getattr(pick_from(runs, limit_gib=10.0 if name == "recommended" else None), name)
    assert (made.trial.id, " ".join(made.tied_with)) == (chosen, ties)
    said = "; tied with 1 other, which these runs cannot tell from the fastest; of plans within 1 % of the fastest the "
    said += "one with the smallest batch is taken, and of those the simplest"
    if name == "throughput":
        assert (said in made.rule) == bool(ties)


def test_only_plans_below_the_limit_that_ran_side_by_side_are_compared_and_counted():
    slowed_down = [make_row(1, 1800.0, **MEDIUM), *run_beside(2, 1200.0), *run_beside(3, 1100.0, **SMALL)]
    too_large = [*run_beside(1, 1900.0, memory=7.0), *run_beside(2, 1200.0, **SMALL), make_row(3, 1000.0, **TINY)]
    for rows, said in ((slowed_down, "2 plans measured side by side, of 3"), (too_large, "1 plan measured side by")):
        recommended = pick_from(rows, limit_gib=8.0).recommended
        assert recommended.trial.id == "t2"
        assert recommended.rule.startswith(f"highest mean samples/s of {said}")


def test_every_pick_names_what_it_cannot_be_told_from_by_the_same_rule():
    rows = [*run_beside(1, 1000.0, spread_pct=0.1, **MEDIUM), *run_beside(2, 980.0, spread_pct=0.1)]
    picks = pick_from([*rows, make_row(3, 500.0, spread_pct=0.1, **TINY)], user_plan=rows[0].plan)
    for made in (picks.throughput, picks.efficiency, picks.memory, picks.recommended):
        assert (made.trial.id, made.tied_with) == ("t1", ("t2",))
    once = [make_row(1, 1150.0, **MEDIUM), make_row(2, 920.0, batch_size=128)]
    picks = pick_from([*once, *run_beside(10, 960.0, 1040.0, num_workers=2), *run_beside(20, 900.0, 980.0)])
    assert picks.throughput.trial.id == picks.recommended.trial.id
    assert "t2" in picks.throughput.tied_with == picks.recommended.tied_with


@pytest.mark.parametrize("kind", ["end_to_end", "repeat"])
def test_inside_a_tie_the_recipe_stays_as_it_was(kind):
    runs = {1: (1000.0, {}), 2: (990.0, {"num_workers": 2}), 3: (1001.0, SMALL), 4: (1012.0, MEDIUM)}
    own, *others = (make_row(n, rate, kind=kind, **levers) for n, (rate, levers) in runs.items())
    picks = pick_from([own, *others])
    assert picks.recommended.trial is own
    assert set(picks.recommended.tied_with) == {"t2", "t3", "t4"}
    said = "t4 changes the recipe (effective batch 32 → 64) and is not proven faster: the settings as they were are"
    assert said in picks.recommended.rule
    assert picks.throughput.trial.id == "t4", "what is the fastest is another question"
    without = pick_from([make_row(1, 500.0, kind=kind), *others]).recommended
    assert without.trial.id == "t2"
    assert "a plan that keeps the recipe is taken instead" in without.rule
    proven = pick_from([own, make_row(2, 1200.0, kind=kind, **MEDIUM)]).recommended
    assert (proven.trial.id, "recipe" in proven.rule) == ("t2", False), "what is proven faster may change it"
    assert keeps_recipe(USER, USER.replace(batch_size=16, accumulate=2, num_workers=4, precision="bf16"))
    assert not keeps_recipe(USER, USER.replace(batch_size=16))
    assert not keeps_recipe(USER, USER.replace(placement="block_shuffled"))


def test_keeping_the_recipe_does_not_reach_further_down_than_one_per_cent_of_the_fastest_of_all():
    fast, close = make_row(1, 1000.0, **MEDIUM), make_row(2, 995.0, num_workers=4)
    simple = make_row(3, 988.0, num_workers=1)
    made = pick_from([fast, close, simple]).recommended
    assert (made.trial.id, made.tied_with) == ("t2", ("t1", "t3"))
    assert "recipe" not in made.rule
    made = pick_from([fast, simple]).recommended
    assert made.trial.id == "t3", "where no plan that keeps the recipe is that close, they compete among themselves"
    assert "t1 changes the recipe (effective batch 32 → 64) and is not proven faster" in made.rule


def test_a_lucky_single_run_does_not_win_against_the_mean_of_runs_side_by_side():
    runs = [make_row(9, 18443.0, threads=1, num_workers=2), make_row(11, 17273.0, threads=1)]
    runs += run_beside(13, 15951.0, 18202.0, threads=1, num_workers=2) + run_beside(15, 6465.0, 5759.0)
    picks = pick_from(runs)
    for made in (picks.throughput, picks.efficiency, picks.memory, picks.recommended):
        assert (made.trial.id, made.tied_with, made.runs_samples_per_s) == ("t13", ("t11",), (15951.0, 18202.0))
        assert "1 plan that ran earlier, not beside it, did not come out clearly slower" in made.rule
    for made in (picks.throughput, picks.recommended):
        assert made.rule.startswith("highest mean samples/s of 2 plans measured side by side, of 3 that ran")
    assert "samples/s per GiB of 2 plans measured side by side, of 3 with a memory figure" in picks.efficiency.rule
    assert "the only one measured side by side, of 2 within 2 % of it" in picks.memory.rule, "the slow one is too slow"
    assert "did not come out clearly slower per GiB" in picks.efficiency.rule


def test_one_round_after_runs_that_lay_far_apart_leaves_ties():
    fast, slow = {"threads": 1, "num_workers": 2}, {"threads": 1, "num_workers": 1}
    rounds = [*run_beside(15, 14309.0, **fast), *run_beside(16, 5802.0, **slow), *run_beside(17, 114.0)]
    others = [make_row(1, 5739.0, **slow), make_row(10, 4631.0, threads=1)]
    picks = pick_from([make_row(9, 5598.0, **fast), *others, *rounds])
    for made in (picks.recommended, picks.throughput):
        assert (made.trial.id, {*made.tied_with}) == ("t15", {"t16", "t10"})
    steady = make_row(9, 14300.0, **fast)
    assert pick_from([steady, *others, *rounds]).recommended.tied_with == ()
