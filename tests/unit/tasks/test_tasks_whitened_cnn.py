"""The first layer whitens what the model will really get, and stays as it is; the rest learns."""

from pathlib import Path

import pytest
import torch
from cifar10_files import write_cifar10
from torch import nn
from torch.nn import functional

from fulltilt.config import load_config
from fulltilt.engine import build_workload
from fulltilt.tasks import MODELS, build_model
from fulltilt.tasks.models.whitened_cnn import PATCH_PX, compute_whitening

RECIPE = Path(__file__).parents[3] / "recipes" / "cifar10-speed.yaml"


def draw_images(n_images):
    """Smooth images, whose neighbouring pixels are alike: what whitening is for."""
    noise = torch.randn(n_images, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    return functional.avg_pool2d(noise, 3, stride=1, padding=1) + 0.1 * noise


def test_outputs_on_patches_are_uncorrelated_and_of_variance_one():
    images_BCHW = draw_images(200)
    filters = compute_whitening(images_BCHW, PATCH_PX)
    assert filters.shape == (24, 3, 2, 2)
    out_PN = functional.conv2d(images_BCHW, filters[:12]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(torch.cov(out_PN), torch.eye(12), rtol=0.02, atol=0.02)
    raw_PN = functional.unfold(images_BCHW, PATCH_PX).transpose(0, 1).flatten(1)
    assert torch.corrcoef(raw_PN)[0, 1] > 0.5, "they were correlated before"
    assert torch.equal(filters[12:], -filters[:12])


def test_the_first_layer_is_frozen_only_where_there_were_images_to_see():
    seeing, blind = (build_model("whitened_cnn(width=0.1)", draw_images=draw) for draw in (draw_images, None))
    assert seeing.whiten.weight.requires_grad is False
    assert seeing.whiten.bias.requires_grad is True
    assert blind.whiten.weight.requires_grad is True


def test_size_shape_and_gradients():
    with torch.device("meta"):
        assert sum(p.numel() for p in MODELS["whitened_cnn"]().parameters()) == 1_972_792
    model = MODELS["whitened_cnn"](n_classes=7, width=0.1, draw_images=draw_images)
    logits = model(torch.randn(4, 3, 16, 16))
    assert logits.shape == (4, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("call", ["resnet18(num_classes=5)", "resnet18(n_classes=5)", "whitened_cnn(num_classes=5)"])
def test_both_spellings_of_the_number_of_classes(call):
    model = build_model(call, n_classes=7)
    assert (model.fc if hasattr(model, "fc") else model.head).out_features == 5


def test_the_recipe_builds_whitened_by_its_own_data_and_learns(tmp_path):
    write_cifar10(tmp_path, 16)
    workload = build_workload(load_config(RECIPE, [f"data.path={tmp_path}", "model=whitened_cnn(width=0.1)"]))
    torch.manual_seed(0)
    model, data = workload.model(), workload.dataset()
    torch.manual_seed(0)
    images_BCHW = data.get_batch(list(range(80)))[0]
    torch.testing.assert_close(model.whiten.weight, compute_whitening(images_BCHW, PATCH_PX), rtol=1e-4, atol=1e-4)
    optimizer = workload.optimizer([p for p in model.parameters() if p.requires_grad])
    inputs, targets = data.get_batch(list(range(40)))
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = workload.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
