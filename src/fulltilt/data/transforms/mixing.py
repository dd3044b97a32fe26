"""Mixup and CutMix mix each image of a batch with another one, and its class with the other's.

Both compute ``image × w + partner × (1 − w)`` with weights per pixel; an image's share in the target is the mean of its
weights. Mixup has one weight for the whole image, CutMix 0 inside a box and 1 outside of it.

Legend of shape suffixes: B batch, C channels, H height, W width, K classes.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional

from fulltilt.config import build_component, parse_pipeline
from fulltilt.data.transforms.windows import mark_boxes
from fulltilt.errors import DataError

Alpha = Annotated[float, Ge(0.01)]  # below it both Gamma variates behind a share may be 0 even in double precision


@dataclasses.dataclass(frozen=True)
class MixWeights(abc.ABC):
    """Draws weights whose mean follows Beta(alpha, alpha); for CutMix only before the border cuts its box."""

    alpha: Alpha

    @abc.abstractmethod
    def draw(self, x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
        """Draw each image's own weight, against its partner's: per pixel (B, 1, H, W) or one (B, 1, 1, 1)."""


@dataclasses.dataclass(frozen=True)
class Mixup(MixWeights):
    """Gives each image one weight for all of its pixels.

    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization, 2017; each image has a weight of its own.
    """

    alpha: Alpha = 0.2

    def draw(self, x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
        return draw_beta(self.alpha, len(x_BCHW), generator)[:, None, None, None]


@dataclasses.dataclass(frozen=True)
class CutMix(MixWeights):
    """Gives each image a box that its partner fills: weight 0 inside, 1 outside.

    Source: Yun et al., CutMix: Regularization Strategy to Train Strong Classifiers, 2019; each image has a box.
    """

    alpha: Alpha = 1.0

    def draw(self, x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = x_BCHW.shape
        side_B = (1 - draw_beta(self.alpha, n, generator)).sqrt()
        heights_B, widths_B = (side_B * height).long(), (side_B * width).long()
        centers_BD = torch.rand(n, 2, generator=generator, device=x_BCHW.device)
        tops_B = (centers_BD[:, 0] * height).long() - heights_B // 2
        lefts_B = (centers_BD[:, 1] * width).long() - widths_B // 2
        return 1 - mark_boxes(x_BCHW, tops_B, lefts_B, heights_B, widths_B).float()


@dataclasses.dataclass(frozen=True)
class Mix:
    """Mixes a batch; each image takes one of the ``ways`` at random. ``n_classes`` is K."""

    ways: tuple[MixWeights, ...]
    n_classes: int

    def __call__(self, batch: tuple[Any, Any], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Mix float images (B, C, H, W) and classes (B,); return the images and shares (B, K) of the classes.

        Device: draws, gathers and blends there; does not synchronise.
        """
        x_BCHW, targets_B = batch
        _check_batch(x_BCHW, targets_B)
        weights = self._draw_weights(x_BCHW, generator)
        partners_B = torch.randperm(len(x_BCHW), generator=generator, device=x_BCHW.device)
        shares_BK = functional.one_hot(targets_B, self.n_classes).to(x_BCHW.dtype)
        own_B1 = weights.mean((1, 2, 3))[:, None]
        return (
            torch.lerp(x_BCHW[partners_B], x_BCHW, weights.expand_as(x_BCHW)),
            torch.lerp(shares_BK[partners_B], shares_BK, own_B1.expand_as(shares_BK)),
        )

    def _draw_weights(self, x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
        drawn = [way.draw(x_BCHW, generator) for way in self.ways]
        weights = drawn[0]
        if len(drawn) > 1:
            ways_B = torch.randint(len(drawn), (len(x_BCHW),), generator=generator, device=x_BCHW.device)
            for place, other in enumerate(drawn[1:], start=1):
                weights = torch.where((ways_B == place)[:, None, None, None], other, weights)
        return weights


MIXES: Mapping[str, Callable[..., MixWeights]] = {"cutmix": CutMix, "mixup": Mixup}


def build_mix(spec: str | None, dataset: Any) -> Mix | None:
    """Build a Mix from ``spec``: with ``mixup(alpha=0.2) | cutmix`` each image gets one at random; None gives None.

    Raises:
        ConfigError: An unknown name or argument, or one out of range.
        DataError: Targets that are no classes.
    """
    if spec is None:
        return None
    ways = tuple(build_component(call, MIXES, kind="mix", where="data.mix") for call in parse_pipeline(spec))
    n_classes = getattr(dataset, "n_classes", None)
    if n_classes is None:
        raise DataError(
            f"data.mix mixes the classes of images, and {type(dataset).__name__} tells no n_classes; leave data.mix "
            "out, or give the dataset that attribute"
        )
    return Mix(ways, int(n_classes))


def draw_beta(alpha: float, n: int, generator: torch.Generator) -> Tensor:
    """Draw (n,) from Beta(alpha, alpha) on the generator's device: the first of two Gamma variates over their sum."""
    # In single precision a variate of a small shape is often 0, and two of them have no ratio.
    shapes_2N = torch.full((2, n), alpha, device=generator.device, dtype=torch.float64)
    # torch.distributions takes no generator; this is what it calls.
    gammas_2N = torch._standard_gamma(shapes_2N, generator=generator)
    return (gammas_2N[0] / gammas_2N.sum(0)).float()


def _check_batch(x: Any, targets: Any) -> None:
    is_fit = isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()
    if is_fit and isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point():
        return
    both = (x, targets)
    shapes = ", ".join(f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else type(v).__name__ for v in both)
    raise DataError(
        f"data.mix takes float images (B, C, H, W) and classes (B,), and a batch holds {shapes}; leave data.mix out"
    )
