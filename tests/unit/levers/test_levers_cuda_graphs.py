"""Calls are filled up to few shapes; what a graph would replay is called instead, since there is no GPU."""

import pytest
import torch

from fulltilt.levers.inference.cuda_graphs import Recorded, list_shapes, round_shape


def call_instead(self, places):
    """Stands in for ``Recorded._capture``: a replay calls the function."""
    outputs = tuple(self._forward(*places))

    def replay():
        for mine, new in zip(outputs, self._forward(*places), strict=True):
            mine.copy_(new)

    return replay, outputs


@pytest.fixture
def recorded(monkeypatch):
    """Sums words over their length, 9 is padding, and adds an input without a length."""
    monkeypatch.setattr(Recorded, "_capture", call_instead)

    def forward(words_BT, other_B2):
        is_word_BT = words_BT != 9
        return (words_BT * is_word_BT).sum(1) + other_B2[:, 0], words_BT

    return Recorded(forward, [9.0, None], max_length=70)


def test_shapes_are_few_and_hold_every_batch_up_to_them():
    shapes = list_shapes(5, 70)
    assert shapes == [(n, length) for n in (8, 4, 2, 1) for length in (70, 64, 32)]
    assert {round_shape(n, length, 70) for n in range(1, 9) for length in range(1, 71)} == set(shapes)
    assert list_shapes(1, 1) == [(1, 1)]
    assert round_shape(1, 90, 70) == (1, 90), "what nobody declared is recorded as it is"


@pytest.mark.parametrize("max_tokens", [70, 140, 300])
def test_shapes_that_no_batch_within_the_limit_rounds_to_are_left_out(max_tokens):
    sizes = [(n, length) for n in range(1, 65) for length in range(1, 71) if n == 1 or n * length <= max_tokens]
    assert set(list_shapes(64, 70, max_tokens)) == {round_shape(n, length, 70) for n, length in sizes}


def test_answers_are_those_of_the_function_for_any_batch_and_nothing_is_recorded_anew(recorded):
    draws = torch.Generator().manual_seed(0)
    for shape in list_shapes(8, 70):
        recorded.record(shape, torch.ones(1, 40, dtype=torch.long), torch.ones(1, 2, dtype=torch.long))
    known = len(recorded.known)
    for n, length in ((8, 70), (3, 5), (1, 2), (5, 33), (3, 70), (8, 1)):
        words_BT = torch.randint(0, 9, (n, length), generator=draws)
        other_B2 = torch.randint(0, 9, (n, 2), generator=draws)
        sums_B, seen_BT = recorded(words_BT, other_B2)
        assert sums_B.tolist() == (words_BT.sum(1) + other_B2[:, 0]).tolist(), (n, length)
        assert seen_BT.shape[0] == n
        assert (seen_BT[:, length:] == 9).all(), "what an earlier call left there is padding again"
    assert len(recorded.known) == known == 12
