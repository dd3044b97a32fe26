"""Turns a classifier into an encoder with a projector, for contrastive training.

Shapes: B batch, C channels, H height, W width, F features, D width of the projection.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fulltilt.errors import UsageError


class ContrastiveModel(nn.Module):
    """Gives projections (B, D) for the loss, and by ``encode`` the features (B, F) that are used afterwards."""

    def __init__(self, backbone: nn.Module, n_features: int, *, projector: int, hidden: int | None) -> None:
        super().__init__()
        hidden = hidden or n_features
        self.n_features, self.backbone = n_features, backbone
        self.projector = nn.Sequential(
            nn.Linear(n_features, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, projector),
        )

    def encode(self, x_BCHW: Tensor) -> Tensor:
        return self.backbone(x_BCHW)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.projector(self.backbone(x_BCHW))


def build_encoder(
    model: nn.Module, sample_shape: tuple[int, ...], *, projector: int, hidden: int | None = None
) -> ContrastiveModel:
    """Take the last linear layer off ``model``, which is changed, and put a projector on it.

    Args:
        sample_shape: (C, H, W) of one image, to check that features come out.

    Raises:
        UsageError: there is no such layer, or what it takes is not what the model gives without it.

    Cost: one forward of two samples.
    """
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    name, head = linear[-1] if linear else ("", None)
    if not name or head is None:
        raise UsageError(
            f"{type(model).__name__} has no linear layer at its end that a projector could replace; name a classifier, "
            "resnet18 or small_cnn for instance"
        )
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.Identity())
    shape = _compute_output_shape(model, sample_shape)
    if shape != (2, head.in_features):
        raise UsageError(
            f"without its last linear layer {name}, {type(model).__name__} gives {shape} for two images, expected "
            f"(2, {head.in_features}); name a model whose classifier is its last linear layer"
        )
    return ContrastiveModel(model, head.in_features, projector=projector, hidden=hidden)


@torch.no_grad()
def _compute_output_shape(model: nn.Module, sample_shape: tuple[int, ...]) -> tuple[int, ...]:
    was_training = model.training
    model.eval()  # running statistics stay as they are, and two samples are enough
    output = model(torch.zeros(2, *sample_shape))
    model.train(was_training)
    return tuple(output.shape) if isinstance(output, Tensor) else ()
