"""What a plan changes of the user's, and the learning rate that follows it."""

import pytest
from tests.unit.tuner.tuner_cases import USER

from fulltilt.levers import list_changed
from fulltilt.tuner.picks.changes import changes_learning, describe_changes, plan_learning_rate


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
    plan = USER.replace(**levers)
    assert describe_changes(USER, plan) == {"recipe": recipe, "numerics": numerics}
    assert changes_learning(USER, plan) == bool(recipe or numerics)


def test_another_micro_batch_of_the_same_effective_batch_and_a_recipe_that_is_left_are_changes_too():
    changes = describe_changes(USER, USER.replace(batch_size=16, accumulate=2))
    assert changes["recipe"][0].startswith("micro-batch 32 → 16, effective batch as before")
    changes = describe_changes(USER.replace(placement="block_shuffled"), USER.replace(placement="ram"))
    assert changes["recipe"] == ("placement block_shuffled → ram",)


def test_each_change_is_listed_by_itself_and_the_two_of_the_batch_as_one():
    plan = USER.replace(batch_size=16, accumulate=2, num_workers=4, threads=1)
    assert [{*names} for names in list_changed(USER, plan)] == [
        {"batch_size", "accumulate"},
        {"threads"},
        {"num_workers"},
    ]
    assert list_changed(USER, USER.replace(batch_size=16)) == [("batch_size",)]
    assert list_changed(USER, USER) == []


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
    made = plan_learning_rate(rate, user_plan=USER, plan=plan, rule=rule, is_batch_free=is_free)
    assert (made.rule, made.start, made.to) == (expected[0], rate, pytest.approx(expected[1]))
