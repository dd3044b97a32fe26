"""The arms of ``bilm``: the guide's loop trains what ours trains, whatever it is spared, on the same batches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from benchmarks import _bilm_arms, _bilm_costs, bilm
from benchmarks._bilm_arms import Size, Trained, open_windows, take_batches
from benchmarks._bilm_guide import AFTER, ALL_EACH_BATCH, BEFORE, COSTS, GuideModel, Habits, is_due

from fulltilt.data import build_loader

SIZE = Size(batch_size=3, seq_len=6, n_steps=5, n_rounds=2, n_val=4)
SMALL = {"depth": 2, "embedding": 8, "hidden": 9, "projection": 5}


def build_model(habits: Habits) -> GuideModel:
    torch.manual_seed(0)
    return GuideModel(SMALL, 30, habits).eval()


@pytest.fixture(autouse=True)
def _without_onednn(monkeypatch):
    """It warns that it has no LSTM with a projection; warnings are errors here."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    yield
    torch.backends.mkldnn.enabled = True


def test_packing_sequences_of_one_length_changes_nothing():
    inputs, targets = torch.randint(30, (2, 4, 6))
    lengths = torch.full((4,), 6)
    with torch.no_grad():
        packed, plain = (build_model(h)(inputs, targets, lengths) for h in (BEFORE, COSTS["packed sequences"].without))
    torch.testing.assert_close(packed, plain)


def test_both_directions_see_their_side_only():
    model, inputs, lengths = build_model(BEFORE), torch.randint(30, (1, 6)), torch.full((1,), 6)
    targets = torch.cat((inputs[:, 1:], torch.randint(30, (1, 1))), 1)
    changed_in, changed_out = inputs.clone(), targets.clone()
    changed_in[:, 3], changed_out[:, 2] = 29 - inputs[:, 3], 29 - inputs[:, 3]
    with torch.no_grad():
        before, after = model(inputs, targets, lengths), model(changed_in, changed_out, lengths)
    differs = [(b != a).any(-1).squeeze(0).tolist() for b, a in zip(before, after, strict=True)]
    assert differs == [[False] * 3 + [True] * 3, [True] * 3 + [False] * 3]


def test_every_cost_spares_one_thing_and_no_parameter():
    sizes = set()
    for name, cost in COSTS.items():
        changed = [f for f, value in vars(cost.without).items() if value != getattr(ALL_EACH_BATCH, f)]
        assert 1 <= len(changed) <= 2, name
        assert cost.how_often
        sizes.add(sum(p.numel() for p in build_model(cost.without).parameters()))
    assert len(sizes) == 1, "layers in one call have the same parameters"
    assert AFTER.packs
    assert AFTER.reads_every_step, "the guide's changes leave the true costs"
    assert [is_due(i, 3) for i in range(4)] == [True, False, False, True]
    assert not is_due(0, 0)


def test_batches_come_in_the_engines_order_over_epochs():
    windows, _ = open_windows(None, SIZE)
    short = type(windows)(
        type(
            "Stream",
            (),
            {"ids": windows.ids[:61], "vocabulary": windows.vocabulary, "source": "t", "tokenizer": "words"},
        ),
        6,
    )
    taken = [inputs for inputs, _ in take_batches(short, SIZE, seed=7)]
    loader = build_loader(short, batch_size=3, shuffle=True, drop_last=True, seed=7)
    expected = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        expected += [inputs for inputs, _ in loader]
    assert len(taken) == 5
    assert all(torch.equal(a, b) for a, b in zip(taken, expected, strict=False))


@pytest.fixture
def _small_model(monkeypatch):
    for module in (_bilm_arms, _bilm_costs):
        monkeypatch.setattr(module, "MODEL", SMALL)
    monkeypatch.setattr(_bilm_arms, "VOCAB_SIZE", 20_000)


@pytest.mark.usefixtures("_small_model")
def test_our_arm_trains_and_is_looked_at_on_the_way(tmp_path):
    options = {"softmax": "chunked"}
    found = _bilm_arms.train_ours(None, SIZE, "cpu", tmp_path, 0, options=options, evaluate_every=2)
    assert [there.n_words for there in found] == [n_steps * 3 * 6 for n_steps in (2, 4)]
    for earlier, later in itertools.pairwise(found):
        assert earlier.seconds < later.seconds
    assert all(1 < there.perplexity < 25_000 for there in found)


@pytest.mark.usefixtures("_small_model")
def test_the_guides_arm_trains_the_same_number_of_words(tmp_path):
    pytest.importorskip("pandas", reason="pandas is of the peers' environment")
    done = _bilm_arms.train_guide(None, SIZE, "cpu", tmp_path, 0, habits=BEFORE)
    assert done.n_words == 5 * 3 * 6
    assert 1 < done.perplexity < 25_000
    assert (tmp_path / "metrics.json").exists()


def build_trained(seconds, perplexity, n_words=100):
    return Trained(n_words=n_words, seconds=seconds, perplexity=perplexity)


def test_words_a_second_are_judged():
    guide, fast = [build_trained(100.0, 100.0)] * 6, [build_trained(20.0, 110.0)] * 6
    rows = {bilm.GUIDE: guide, bilm.GUIDE_AFTER: guide, **dict.fromkeys(bilm.OURS, fast)}
    arms, targets = bilm.describe_headline(rows, SIZE)
    assert [(target.name, target.met) for target in targets] == [
        (f"{n}: words/s over the guide", True) for n in bilm.JUDGED
    ]
    assert all("perplexity 1.100 times" in target.note for target in targets)
    speedups = [arm for arm in arms if arm.metric == "speedup_over_guide"]
    assert all(math.isclose(arm.median, 5.0) for arm in speedups)


def test_the_race_counts_to_the_first_look_at_a_perplexity_as_low_as_the_guides():
    way = [build_trained(5.0, 300.0, 50), build_trained(10.0, 200.0, 80), build_trained(12.0, 150.0, 100)]
    never = [build_trained(5.0, 300.0, 50), build_trained(10.0, 201.0, 100)]
    adaptive, sampled = bilm.JUDGED
    laps = [bilm.Lap(guide=build_trained(60.0, 200.0), ours={adaptive: way, sampled: never})] * 6
    arms, targets = bilm.describe_race(laps, SIZE)
    assert [(target.measured, target.met) for target in targets] == [(6.0, True), (0.0, False)]
    assert targets[0].note is None
    assert targets[1].note.startswith("6 of 6 trainings did not come there in as many words")
    words = {arm.arm: arm.median for arm in arms if arm.metric == "words_of_the_guide_over_words_to_it"}
    assert words == {adaptive: 1.25, sampled: 0.0}


def test_what_a_thing_costs_is_what_leaving_it_out_saves():
    rounds = [{_bilm_costs.EVERYTHING: (10.0, 12.0), _bilm_costs.AGAIN: (11.0, 11.0), "3 metrics": (7.0, 7.0)}] * 6
    arms = {arm.arm: arm.median for arm in _bilm_costs.describe_costs(rounds, ["3 metrics"], "a case")}
    assert arms == {_bilm_costs.EVERYTHING: 11.0, _bilm_costs.AGAIN: 0.0, "3 metrics": 4.0}


@pytest.mark.usefixtures("_small_model")
def test_on_a_cpu_each_cost_is_told_by_one_of_the_two_ways(tmp_path):
    pytest.importorskip("pandas", reason="pandas is of the peers' environment")
    arms = _bilm_costs.measure_costs(None, SIZE, "cpu", tmp_path)
    named = [arm.arm for arm in arms if arm.metric == _bilm_costs.METRIC and arm.arm != _bilm_costs.AGAIN]
    only_on_cuda = {"2 cuDNN deterministic", "5 empty_cache"}
    assert sorted(named) == sorted(set(COSTS) - only_on_cuda)
    assert next(arm for arm in arms if arm.arm == "1 DataFrame copied").median > 0
