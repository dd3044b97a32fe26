"""NT-Xent against its definition, written out as loops."""

import math

import pytest
import torch

from fulltilt.errors import UsageError
from fulltilt.tasks.losses import NtXent


def compute_by_loops(rows, temperature):
    """Equation 1 of the paper for every ordered pair of views of an image, and their mean."""
    vectors = [[value / math.hypot(*row) for value in row] for row in rows.tolist()]

    def similarity(i, j):
        return sum(a * b for a, b in zip(vectors[i], vectors[j], strict=True)) / temperature

    losses = []
    for i in range(len(vectors)):
        partner = i + 1 if i % 2 == 0 else i - 1
        others = [math.exp(similarity(i, k)) for k in range(len(vectors)) if k != i]
        losses.append(-math.log(math.exp(similarity(i, partner)) / sum(others)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("n_images", [1, 2, 7])
def test_it_is_the_loop(n_images, temperature):
    rows = torch.randn(2 * n_images, 5, generator=torch.Generator().manual_seed(n_images), dtype=torch.float64)
    loss = NtXent(temperature)(rows, None)
    assert loss.item() == pytest.approx(compute_by_loops(rows, temperature), rel=1e-12, abs=1e-12)


def test_the_order_of_images_and_of_the_two_views_does_not_matter():
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = rows[torch.tensor([5, 4, 0, 1, 7, 6, 2, 3])]
    torch.testing.assert_close(NtXent(0.2)(rows), NtXent(0.2)(other), rtol=1e-12, atol=0)


def test_it_is_finite_where_exponentials_overflow():
    rows = torch.tensor([[1e9, 0.0], [1e9, 1.0], [-1e9, 0.0], [-1e9, 1.0]], requires_grad=True)
    loss = NtXent(temperature=0.001)(rows)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert rows.grad.isfinite().all()


def test_it_computes_in_float32_under_autocast():
    rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = NtXent(0.05)(rows)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, NtXent(0.05)(rows), rtol=0, atol=0)


def test_one_image_has_no_negatives_and_no_gradient():
    rows = torch.randn(2, 3, requires_grad=True)
    NtXent()(rows).backward()
    assert torch.equal(rows.grad, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("temperature", "shape", "said"),
    [*((0.5, shape, "one row a view") for shape in ((3, 4), (4,), (4, 2, 2))), (0.0, (4, 2), "above 0")],
)
def test_other_shapes_and_a_temperature_of_zero_are_refused(temperature, shape, said):
    with pytest.raises(UsageError, match=said):
        NtXent(temperature)(torch.zeros(shape))
