"""The contrastive task: what its encoder, its views and its evaluation are made of."""

import pytest
import torch
from torch import nn

from fulltilt.errors import ConfigError, UsageError
from fulltilt.tasks import build_model
from fulltilt.tasks.contrastive import NeighbourAssessment, TwoViews, build_contrastive, explain_negatives
from fulltilt.tasks.encoder import build_encoder

SHAPE = (3, 16, 16)


class Images:
    """Images of one brightness a class, as an evaluation sees them."""

    sample_shape = SHAPE

    def __init__(self, targets):
        self.targets = torch.tensor(targets)

    def __len__(self):
        return len(self.targets)

    def get_batch(self, rows):
        targets = self.targets[torch.as_tensor(rows)]
        return (targets.float() + 1)[:, None, None, None].expand(-1, *SHAPE) / 10, targets


def build_cnn():
    return build_model("small_cnn(width=4, n_classes=7, in_channels=3)")


@pytest.mark.parametrize(
    ("name", "n_features"),
    [
        ("small_cnn(width=4, n_classes=1000, in_channels=3)", 16),
        ("resnet18(n_classes=1000, image_size=16)", 512),
        ("torchvision:mobilenet_v3_small", 1024),
        ("timm:convnext_atto", 320),
    ],
)
def test_the_head_of_any_classifier_becomes_a_projector(name, n_features):
    encoder, images = build_encoder(build_model(name), (3, 32, 32), projector=24), torch.randn(2, 3, 32, 32)
    assert encoder.training
    assert all(m.num_batches_tracked == 0 for m in encoder.modules() if isinstance(m, nn.BatchNorm2d))
    encoder.eval()
    assert encoder.encode(images).shape == (2, encoder.n_features) == (2, n_features)
    assert encoder(images).shape == (2, 24)
    assert all(1000 not in p.shape for p in encoder.parameters()), "the old head is gone"


class Tail(nn.Module):
    """Its last linear layer is not at its end."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(12, 5)

    def forward(self, x):
        return torch.cat([self.gate(x.flatten(1)), x.flatten(1)], dim=1)


@pytest.mark.parametrize(
    ("model", "said"), [(Tail(), "without its last linear layer gate"), (nn.Flatten(), "no linear")]
)
def test_a_model_whose_head_cannot_be_found_is_refused(model, said):
    with pytest.raises(UsageError, match=said):
        build_encoder(model, (3, 2, 2), projector=4)


def shift(images, generator):
    """A pipeline: each image brighter by an amount of its own."""
    return images.float() + torch.rand(len(images), 1, 1, 1, generator=generator)


def test_views_of_an_image_follow_each_other_and_have_draws_of_their_own():
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(-1, *SHAPE) * 10
    rows, targets = TwoViews(lambda: shift)((images, torch.arange(5)), torch.Generator().manual_seed(1))
    assert targets.tolist() == list(range(5))
    added = (rows - images.repeat_interleave(2, dim=0))[:, 0, 0, 0]
    assert ((added >= 0) & (added < 1)).all(), "row 2i and 2i + 1 are of image i"
    assert len(set(added.tolist())) == 10


def test_views_keep_the_memory_format_and_batches_of_another_form_are_refused():
    images = torch.zeros(4, *SHAPE, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    rows, _ = TwoViews(lambda: shift)((images, torch.zeros(4)), torch.Generator())
    assert rows.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(UsageError, match="images, targets"):
        TwoViews(lambda: shift)({"x": 1}, torch.Generator())


def test_neighbours_are_found_among_labelled_images_only():
    known, unknown = [0, 1, 2] * 4, [-1] * 20
    assessment = NeighbourAssessment(lambda: (Images(known + unknown), Images([0, 1, 2])), limit=None)
    encoder = build_encoder(build_cnn(), SHAPE, projector=4).eval()
    encoder.encode = lambda images: nn.functional.one_hot((images[:, 0, 0, 0] * 10).round().long(), 5).float()
    assert assessment(encoder, torch.device("cpu")) == {"knn_accuracy": 1.0}
    assert "12 nearest of 12 labelled training images (of 12)" in assessment.explain()
    assert "3 validation images (of 3)" in assessment.explain()
    small = NeighbourAssessment(lambda: (Images(known), Images([0, 1, 2])), limit=2).explain()
    assert "2 nearest of 2 labelled training images (of 12)" in small


def test_without_labels_there_is_no_figure_and_that_is_said():
    assessment = NeighbourAssessment(lambda: (Images([-1] * 4), Images([0, 1])), limit=None)
    encoder = build_encoder(build_cnn(), SHAPE, projector=4).eval()
    assert assessment(encoder, torch.device("cpu")) == {}
    assert "no labelled images" in assessment.explain()


def test_exact_batch_is_what_couples_the_samples():
    given = {"model": build_cnn, "train": lambda: Images([0]), "views": lambda: shift}
    assert build_contrastive(**given).couples_samples
    plain = build_contrastive(**given, exact_batch=False)
    assert not plain.couples_samples
    assert plain.compares_samples, "its loss is not that of one device over several"
    assert "254 negatives per anchor; accumulate 4" in plain.explain(128, 4)[0]
    assert "adds no negatives" in plain.explain(128, 4)[0]
    assert build_contrastive(**given, projector=9, hidden=11).model().projector[0].out_features == 11


@pytest.mark.parametrize(("accumulate", "exact"), [(1, True), (4, False)])
def test_a_batch_without_negatives_is_refused(accumulate, exact):
    with pytest.raises(ConfigError, match="no negatives"):
        explain_negatives(1, accumulate, exact=exact)
    for size, accumulate, exact, negatives in ((1, 4, True, "6"), (128, 4, True, "1,022"), (128, 1, True, "254")):
        assert f"{negatives} negatives per anchor" in explain_negatives(size, accumulate, exact=exact)
