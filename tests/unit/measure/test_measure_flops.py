"""Counts against formulas worked out by hand: 2 FLOPs per multiply-add."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fulltilt.measure.flops import bears_compute, count_flops


def test_linear_forward_and_backward():
    layer, x_BI = nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    forward = 2 * 16 * 32 * 48
    assert count_flops(lambda: layer(x_BI)).total == forward
    whole = count_flops(lambda: layer(x_BI).sum().backward())
    assert whole.total == 3 * forward
    assert whole.coverage_pct == 100.0
    assert whole.uncovered == {}


def test_input_without_gradient_saves_a_third():
    layer, x_BI = nn.Linear(32, 48), torch.randn(16, 32)
    assert count_flops(lambda: layer(x_BI).sum().backward()).total == 2 * 2 * 16 * 32 * 48


def test_convolution():
    layer, x_BCHW = nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 10, 10)
    assert count_flops(lambda: layer(x_BCHW)).total == 2 * (2 * 8 * 10 * 10) * (3 * 3 * 3)


def test_attention_on_a_cpu_counts():
    q_BHTD = torch.randn(2, 4, 16, 8, requires_grad=True)
    forward = 2 * (2 * 2 * 4 * 16 * 16 * 8)
    counted = count_flops(lambda: nn.functional.scaled_dot_product_attention(q_BHTD, q_BHTD, q_BHTD))
    assert (counted.total, counted.coverage_pct) == (forward, 100.0)
    whole = count_flops(lambda: nn.functional.scaled_dot_product_attention(q_BHTD, q_BHTD, q_BHTD).sum().backward())
    assert whole.total > 2 * forward
    assert whole.coverage_pct == 100.0


def test_matrix_times_vector_counts():
    a_MN, x_N = torch.randn(20, 30), torch.randn(30)
    assert count_flops(lambda: a_MN @ x_N).total == 2 * 20 * 30
    assert count_flops(lambda: torch.dot(x_N, x_N)).total == 2 * 30


def test_recurrent_network_is_uncovered_and_not_free():
    layer, x_TBI = nn.LSTM(8, 16), torch.randn(5, 3, 8)
    flops = count_flops(lambda: layer(x_TBI)[0].sum().backward())
    assert flops.uncovered
    assert flops.coverage_pct < 100.0


def test_coverage_is_a_share_of_calls():
    lstm, head, x_TBI = nn.LSTM(8, 16), nn.Linear(16, 4), torch.randn(5, 3, 8)
    with torch.no_grad():
        flops = count_flops(lambda: head(lstm(x_TBI)[0]))
    n_uncovered = sum(flops.uncovered.values())
    assert flops.total == 2 * 5 * 3 * 16 * 4
    assert flops.coverage_pct == pytest.approx(100 / (1 + n_uncovered))


def test_whole_step_with_optimizer_and_norms_is_covered():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    x_BCHW, y_B = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_BCHW), y_B).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    flops = count_flops(step)
    assert flops.uncovered == {}
    assert flops.total > 0


def test_recomputation_by_checkpointing_counts_as_often_as_it_runs():
    layer, x_BI = nn.Linear(32, 32), torch.randn(16, 32, requires_grad=True)
    forward = 2 * 16 * 32 * 32

    def step() -> None:
        checkpoint(lambda x: layer(x).relu(), x_BI, use_reentrant=False).sum().backward()

    assert count_flops(step).total == 4 * forward


def test_autocast_counts_the_same():
    layer, x_BI = nn.Linear(32, 48), torch.randn(16, 32)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            layer(x_BI)

    assert count_flops(run).total == 2 * 16 * 32 * 48


def test_operator_of_a_stranger_is_uncovered():
    @torch.library.custom_op("fulltilt_test::mystery", mutates_args=())
    def mystery(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    flops = count_flops(lambda: mystery(torch.ones(3)))
    assert flops.uncovered == {"fulltilt_test.mystery": 1}
    assert flops.coverage_pct == 0.0


def test_nothing_to_count_has_no_coverage():
    flops = count_flops(lambda: torch.ones(3).relu().sum())
    assert (flops.total, flops.coverage_pct, flops.uncovered) == (0, None, {})


def test_body_that_raises_leaves_no_counter_behind():
    with pytest.raises(ZeroDivisionError):
        count_flops(lambda: 1 / 0)
    again = count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    assert again.total == 2 * 2 * 3 * 4


@pytest.mark.parametrize(
    ("operator", "bears"),
    [
        ("aten.mkldnn_rnn_layer", True),
        ("aten._cudnn_rnn_backward", True),
        ("aten._thnn_fused_lstm_cell", True),
        ("aten.slow_conv3d_forward", True),
        ("aten._cdist_forward", True),
        ("aten.linalg_inv_ex", True),
        ("aten._fft_r2c", True),
        ("aten._transformer_encoder_layer_fwd", True),
        ("aten._addmm_activation", True),
        ("aten.add", False),
        ("aten.addcmul", False),
        ("aten.linalg_vector_norm", False),
        ("prims.convert_element_type", False),
        ("aten.native_layer_norm", False),
        ("aten.upsample_bilinear2d", False),
        ("aten.embedding", False),
        ("aten.rsub", False),
        ("aten.linspace", False),
        ("aten._unsafe_view", False),
        ("mylib.scan", True),
    ],
)
def test_which_operators_bear_compute(operator, bears):
    assert bears_compute(operator) is bears
