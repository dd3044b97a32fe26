"""Proofs and breakdowns from made-up rows whose truth is known (synthetic: they test the sums, and measure nothing)."""

import numpy as np
import pytest

from fulltilt.attach.inside.blocks import N_WARM_UP, PRESENT, REMOVED, Blocks
from fulltilt.attach.inside.spans import KINDS
from fulltilt.doctor.breakdown import compute_breakdown_pct
from fulltilt.doctor.observation import COLUMNS, Observation
from fulltilt.doctor.proof import compute_proof
from fulltilt.stats import compute_proportion_interval

EPOCH_STEPS = 57


def make_observation(n_steps, *, saved_share, noise, seed, drift=0.0, edge_ns=0):
    """Steps of 10 ms of which the site takes ``saved_share``, in the places that Blocks gives them."""
    rng, blocks, rows = np.random.default_rng(seed), Blocks(), []
    blocks._random.seed(seed)
    blocks.start()
    for step in range(n_steps):
        is_edge = step % EPOCH_STEPS == 0
        wall = 1e7 * (1 + drift * step / n_steps) * np.exp(noise * rng.standard_normal())
        wall = wall * (1 - saved_share if blocks.arm == REMOVED else 1) + edge_ns * is_edge
        claimed = [int(wall * share) for share in (0.4, 0.2, 0.2, 0.05, 0.01, 0.1)]
        place = [blocks.round, blocks.block, blocks.arm, int(blocks.is_timed)]
        rows.append([int(wall), *claimed, int(is_edge), *place])
        blocks.plan_step(is_edge)
    return Observation(rows=np.array(rows, dtype=np.int64), n_steps=n_steps)


def test_the_interval_holds_the_truth_under_drift_and_across_epochs():
    n, hits = 200, 0
    for seed in range(n):
        proof = compute_proof(make_observation(420, saved_share=0.2, noise=0.15, seed=seed, drift=1.0, edge_ns=10**9))
        low, high = proof.gain_ci95_pct
        hits += low <= 20 <= high
    assert compute_proportion_interval(hits, n, confidence=0.99)[1] >= 0.95, f"{hits} of {n}"


def test_what_saves_nothing_is_hardly_ever_an_act():
    n = 200
    acts = sum(compute_proof(make_observation(420, saved_share=0.0, noise=0.15, seed=seed)).is_act for seed in range(n))
    assert compute_proportion_interval(acts, n, confidence=0.99)[0] <= 0.025, f"{acts} of {n}"


def test_a_large_gain_is_proved_and_a_run_that_ends_early_proves_nothing():
    assert compute_proof(make_observation(60, saved_share=0.3, noise=0.01, seed=1)) is None
    proof = compute_proof(make_observation(420, saved_share=0.3, noise=0.1, seed=1))
    assert proof.is_act
    assert proof.gain_pct == pytest.approx(30, abs=6)
    assert proof.a_a_ci95_pct[0] < 0 < proof.a_a_ci95_pct[1]


def test_a_site_that_differs_from_itself_silences_the_proof():
    found = make_observation(420, saved_share=0.3, noise=0.01, seed=1)
    again = (found.get("round") % 3 == 0) & (found.get("arm") != PRESENT)
    found.rows[again, 0] *= 2
    proof = compute_proof(found)
    assert not proof.is_quiet
    assert not proof.is_act


def test_shares_add_up_to_100_and_leave_out_what_is_no_plain_step():
    found = make_observation(420, saved_share=0.5, noise=0.0, seed=1, edge_ns=10**10)
    shares = compute_breakdown_pct(found)
    assert list(shares) == [*KINDS, "unknown"]
    assert sum(shares.values()) == pytest.approx(100)
    assert shares["unknown"] == pytest.approx(4, abs=0.01)
    plain = found.plain
    assert plain.get("wall").max() == pytest.approx(1e7, rel=1e-6)  # no edge
    assert (plain.get("arm") != REMOVED).all()
    assert len(plain.rows) <= len(found.rows) - N_WARM_UP
    assert found.rows.shape[1] == len(COLUMNS)
