"""What a verification refuses before it trains anything."""

from __future__ import annotations

import pytest

from fulltilt.tuner.verify import run_verification


@pytest.mark.parametrize(
    ("settings", "n_pairs", "words"),
    [({"data.num_workers": 2}, 1, "at least 2"), ({}, 2, "nothing to compare")],
)
def test_a_comparison_that_cannot_say_anything_is_refused(settings, n_pairs, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        run_verification(["none.yaml"], settings, folder=tmp_path / "verify", seed=1, n_pairs=n_pairs)
    assert not (tmp_path / "verify").exists()
