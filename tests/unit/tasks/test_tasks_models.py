from importlib.util import find_spec

import pytest
import torch
from torch import nn

from fulltilt.errors import ConfigError
from fulltilt.tasks import MODELS, build_model
from fulltilt.tasks.vision import import_torchvision

SMALL = {
    "small_cnn": ({"n_classes": 7, "in_channels": 2, "width": 4}, (3, 2, 8, 8)),
    "mlp": ({"n_features": 12, "n_outputs": 7, "hidden": 8, "depth": 2}, (3, 3, 2, 2)),
    "wideresnet": ({"n_classes": 7, "depth": 10, "width": 1}, (3, 3, 16, 16)),
    "resnet18": ({"n_classes": 7, "image_size": 16}, (3, 3, 16, 16)),
    "resnet50": ({"n_classes": 7, "in_channels": 1}, (3, 1, 32, 32)),
    "whitened_cnn": ({"n_classes": 7, "width": 0.1}, (3, 3, 16, 16)),
}


@pytest.mark.parametrize(
    ("call", "n_parameters"),
    [
        ("wideresnet(depth=28, width=10, n_classes=10)", 36_479_194),  # 36.5 M in the paper, table 5
        ("wideresnet(depth=28, width=2, n_classes=10)", 1_467_610),
        ("resnet18(n_classes=1000)", 11_689_512),  # torchvision's model pages
        ("resnet34(n_classes=1000)", 21_797_672),
        ("resnet50(n_classes=1000)", 25_557_032),
        ("resnet101(n_classes=1000)", 44_549_160),
        ("resnet152(n_classes=1000)", 60_192_808),
        ("small_cnn(n_classes=10, in_channels=1)", 94_186),
        ("mlp(n_features=64, n_outputs=10)", 64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10),
        ("mlp(n_features=64, n_outputs=10, depth=0)", 650),
        ("whitened_cnn", 1_972_792),
    ],
)
def test_parameter_counts(call, n_parameters):
    with torch.device("meta"):
        assert sum(p.numel() for p in build_model(call).parameters()) == n_parameters


@pytest.mark.parametrize("name", sorted(SMALL))
def test_output_shape_and_gradients_of_every_parameter(name):
    torch.manual_seed(0)
    arguments, shape = SMALL[name]
    model = MODELS[name](**arguments)
    logits = model(torch.randn(shape))
    assert logits.shape == (3, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 3, 6])).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed (extra: vision)")
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnets_compute_what_torchvision_computes(name):
    torchvision = import_torchvision()
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, name)(num_classes=7).double().eval()
    ours = MODELS[name](n_classes=7).double().eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({"image_size": 32}, 8),
        ({"image_size": 224}, 2),
        ({}, 2),
        ({"image_size": 32, "small_images": False}, 2),
        ({"small_images": True}, 8),
    ],
)
def test_the_stem_keeps_the_resolution_of_a_small_image_unless_told_otherwise(arguments, size):
    model, seen = MODELS["resnet18"](n_classes=2, **arguments).eval(), []
    model.layer4.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))
    model(torch.zeros(1, 3, 64, 64))
    assert seen == [size]


def test_wideresnet_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model, x = MODELS["wideresnet"](depth=10, width=1, dropout=0.5), torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(("depth", "remedy"), [(27, "depth 22 or 28"), (12, "depth 10 or 16")])
def test_a_depth_that_makes_no_wideresnet_names_the_next_ones(depth, remedy):
    with pytest.raises(ConfigError, match=f"depth {depth} is not 6 n.*{remedy}"):
        build_model(f"wideresnet(depth={depth})")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("widresnet", ["unknown model 'widresnet'", "wideresnet"]),
        ("small_cnn(width=0)", ["width=0"]),
        ("json:loads(s='3')", ["json:loads", "returned int", "nn.Module"]),
    ],
)
def test_a_call_that_builds_no_model_is_explained(call, words):
    with pytest.raises(ConfigError) as raised:
        build_model(call)
    assert [word for word in words if word not in str(raised.value)] == []


def test_facts_reach_a_model_where_the_call_leaves_them_open(tmp_path):
    model = build_model("small_cnn(width=4)", n_classes=3, in_channels=2, image_size=8, n_features=128)
    assert model(torch.zeros(1, 2, 8, 8)).shape == (1, 3)
    assert build_model("small_cnn(n_classes=5)", n_classes=3, in_channels=1)(torch.zeros(1, 1, 8, 8)).shape == (1, 5)
    (tmp_path / "their_models_for_zoo_test.py").write_text(
        "from torch import nn\ndef build(width: int = 2, n_classes: int = 1):\n    return nn.Linear(width, n_classes)\n"
    )
    model = build_model("their_models_for_zoo_test:build(width=3)", base_dir=str(tmp_path), n_classes=4)
    assert (model.in_features, model.out_features) == (3, 4)
