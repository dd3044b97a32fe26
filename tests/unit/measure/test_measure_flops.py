"""Counts against formulas worked out by hand: 2 FLOPs per multiply-add."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fulltilt.measure.flops import bears_compute, count_flops


@torch.autocast("cpu", torch.bfloat16)
def compute_in_bf16():
    nn.Linear(32, 48)(torch.randn(16, 32))


def checkpoint_linear():
    layer, x_BI = nn.Linear(32, 32), torch.randn(16, 32, requires_grad=True)
    checkpoint(lambda x: layer(x).relu(), x_BI, use_reentrant=False).sum().backward()


@pytest.mark.parametrize(
    ("run", "total"),
    [
        (lambda: nn.Linear(32, 48)(torch.randn(16, 32)).sum().backward(), 2 * 2 * 16 * 32 * 48),
        (lambda: nn.Conv2d(3, 8, 3, padding=1)(torch.randn(2, 3, 10, 10)), 2 * (2 * 8 * 10 * 10) * (3 * 3 * 3)),
        (lambda: torch.randn(20, 30) @ torch.randn(30), 2 * 20 * 30),
        (lambda: torch.addmv(torch.ones(20), torch.randn(20, 30), torch.ones(30)), 2 * 20 * 30),
        (lambda: torch.dot(torch.ones(30), torch.ones(30)), 2 * 30),
        (compute_in_bf16, 2 * 16 * 32 * 48),
        (checkpoint_linear, 4 * 2 * 16 * 32 * 32),  # recomputation counts as often as it runs
    ],
    ids=["input without grad", "convolution", "matrix times vector", "addmv", "dot", "autocast", "recomputation"],
)
def test_totals(run, total):
    assert count_flops(run).total == total


def attend(q_BHTD):
    return nn.functional.scaled_dot_product_attention(q_BHTD, q_BHTD, q_BHTD)


@pytest.mark.parametrize(
    ("layer", "shape", "forward", "most_factor"),
    [
        (nn.Linear(32, 48), (16, 32), 2 * 16 * 32 * 48, 3.0),
        (attend, (2, 4, 16, 8), 2 * (2 * 2 * 4 * 16 * 16 * 8), 4.0),
    ],
    ids=["linear", "attention on a CPU"],
)
def test_forward_and_backward_are_covered(layer, shape, forward, most_factor):
    x = torch.randn(shape, requires_grad=True)
    counted, whole = count_flops(lambda: layer(x)), count_flops(lambda: layer(x).sum().backward())
    assert counted.total == forward
    assert 3 * forward <= whole.total <= most_factor * forward
    assert (counted.coverage_pct, whole.coverage_pct, whole.uncovered) == (100.0, 100.0, {})


def test_a_recurrent_network_is_uncovered_and_coverage_is_a_share_of_calls():
    lstm, head, x_TBI = nn.LSTM(8, 16), nn.Linear(16, 4), torch.randn(5, 3, 8)
    with torch.no_grad():
        flops = count_flops(lambda: head(lstm(x_TBI)[0]))
    n_uncovered = sum(flops.uncovered.values())
    assert flops.total == 2 * 5 * 3 * 16 * 4
    assert n_uncovered > 0
    assert flops.coverage_pct == pytest.approx(100 / (1 + n_uncovered))
    assert count_flops(lambda: lstm(x_TBI)[0].sum().backward()).uncovered


def test_whole_step_with_optimizer_and_norms_is_covered():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    x_BCHW, y_B = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_BCHW), y_B).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    flops = count_flops(step)
    assert flops.uncovered == {}
    assert flops.total > 0


def test_operator_of_a_stranger_is_uncovered_and_nothing_to_count_has_no_coverage():
    @torch.library.custom_op("fulltilt_test::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    flops = count_flops(lambda: mystery(torch.ones(3)))
    assert (flops.coverage_pct, flops.uncovered) == (0.0, {"fulltilt_test.mystery": 1})
    flops = count_flops(lambda: torch.ones(3).relu().sum())
    assert (flops.total, flops.coverage_pct, flops.uncovered) == (0, None, {})


def test_body_that_raises_leaves_no_counter_behind():
    with pytest.raises(ZeroDivisionError):
        count_flops(lambda: 1 / 0)
    again = count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    assert again.total == 2 * 2 * 3 * 4


def test_which_operators_bear_compute():
    bearing = (
        "aten.mkldnn_rnn_layer aten._cudnn_rnn_backward aten._thnn_fused_lstm_cell aten.slow_conv3d_forward "
        "aten._cdist_forward aten.linalg_inv_ex aten._fft_r2c aten._transformer_encoder_layer_fwd "
        "aten._addmm_activation mylib.scan"
    )
    others = (
        "aten.add aten.addcmul aten.linalg_vector_norm prims.convert_element_type aten.native_layer_norm "
        "aten.upsample_bilinear2d aten.embedding aten.rsub aten.linspace aten._unsafe_view"
    )
    assert [name for name in bearing.split() if not bears_compute(name)] == []
    assert [name for name in others.split() if bears_compute(name)] == []
