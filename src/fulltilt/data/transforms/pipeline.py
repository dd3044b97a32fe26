"""Build pipelines of image transforms from text: ``random_crop(32, padding=4) | random_flip | normalize``."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fulltilt.config import build_component, parse_pipeline
from fulltilt.data.collate import fast_collate
from fulltilt.data.transforms import colors, steps
from fulltilt.data.transforms.colors import to_unit_float
from fulltilt.data.transforms.rand_augment import RandAugment
from fulltilt.data.transforms.steps import Step, draw_uniform, to_snake_case
from fulltilt.errors import DataError

TRANSFORMS: Mapping[str, type[Step]] = {
    to_snake_case(step.__name__): step
    for step in (
        *(steps.CenterCrop, steps.Cutout, steps.RandomCrop, steps.RandomErasing, steps.RandomFlip),
        *(steps.RandomResizedCrop, steps.Resize, colors.ColorJitter, colors.GaussianBlur, colors.Grayscale),
        *(colors.Normalize, colors.RandomGrayscale, colors.Solarize, colors.ToFloat, RandAugment),
    )
}
"""Steps by the names that the configuration uses."""

Transform = str | Callable[[Tensor], Tensor] | None
"""What a dataset builder takes: the text of a pipeline, or a callable on one sample."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Apply steps in order to images (C, H, W) or (B, C, H, W) on any device; return floats."""

    steps: tuple[Step, ...] = ()

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        single = images.dim() == 3
        x_BCHW = images[None] if single else images
        x_BCHW = self.apply(x_BCHW, self.draw(x_BCHW, generator))
        return x_BCHW[0] if single else x_BCHW

    def draw(self, x_BCHW: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw all random numbers (B, D) of a batch in one call of the generator, on its device."""
        return draw_uniform(len(x_BCHW), sum(step.n_draws for step in self.steps), generator, x_BCHW.device)

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        """Transform the batch by the numbers drawn before: a pure function that can be compiled."""
        return to_unit_float(self.apply_steps(x_BCHW, u_BD)).contiguous()

    def apply_steps(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        """Apply the steps alone: a uint8 result stays uint8."""
        columns = u_BD.split([step.n_draws for step in self.steps], dim=1) if self.steps else ()
        for step, u_Bd in zip(self.steps, columns, strict=True):
            x_BCHW = step.apply(x_BCHW, u_Bd)
        return x_BCHW

    def join(self, images: Sequence[Tensor], generator: torch.Generator | None) -> Tensor:
        """Apply the steps to images (C, H, W) of any size and collate the results.

        The random numbers are those of the batch: sizes decide only whether the steps run on all images at once.
        """
        u_BD = draw_uniform(len(images), sum(step.n_draws for step in self.steps), generator, images[0].device)
        if len({image.shape for image in images}) == 1:
            return self.apply_steps(fast_collate(images), u_BD)
        return fast_collate(
            [self.apply_steps(image[None], u_D[None])[0] for image, u_D in zip(images, u_BD, strict=True)]
        )

    @property
    def own_steps(self) -> tuple[str, ...]:
        """Return the names of the steps that call a user's function on one image."""
        return tuple(step.name for step in self.steps if isinstance(step, PerImage))

    def split_at_size(self) -> tuple["Pipeline", "Pipeline"]:
        """Split after the first step that gives all images one size; without one, after the last user function."""
        own = [i + 1 for i, step in enumerate(self.steps) if isinstance(step, PerImage)]
        n_first = next((i + 1 for i, step in enumerate(self.steps) if step.sizes), max(own, default=0))
        return Pipeline(self.steps[:n_first]), Pipeline(self.steps[n_first:])


@dataclasses.dataclass(frozen=True)
class PerImage(Step):
    """Apply a user's callable to one image after the other."""

    function: Callable[[Tensor], Tensor]

    def apply(self, x_BCHW: Tensor, u_BD: Tensor) -> Tensor:
        return torch.stack([self.function(image_CHW) for image_CHW in x_BCHW])

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)


@dataclasses.dataclass(frozen=True)
class Raw:
    """Replaces a dataset's transform that runs later: images leave as read, but for the steps of ``sizing``.

    Attributes:
        sizing: The steps that each image still needs so that a batch has one shape.
    """

    sizing: Pipeline = Pipeline()


def build_pipeline(
    spec: str | None,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    base_dir: str | None = None,
) -> Pipeline | None:
    """Build the pipeline that ``spec`` describes; None for no text.

    Args:
        spec: Steps joined by ``|``: names of ``TRANSFORMS``, or ``module:function`` returning a callable on an image.
        mean: What ``normalize`` uses where the text names none; ``std`` likewise.
        base_dir: Where ``module:function`` is looked up first.

    Raises:
        ConfigError: An unknown name or argument, or one outside of its range.
        DataError: Arguments that do not go together.
    """
    if spec is None or not spec.strip():
        return None
    built = []
    for call in parse_pipeline(spec):
        known = {"mean": mean, "std": std} if call.name == "normalize" else {}
        step = build_component(call, TRANSFORMS, kind="transform", where="data.transform", base_dir=base_dir, **known)
        built.append(PerImage(step) if ":" in call.name else step)
    return Pipeline(tuple(built))


def resolve_transform(
    transform: Transform, *, mean: Any = None, std: Any = None, base_dir: str | None = None
) -> Callable | None:
    """Return a transform as a callable: build it where it is text, and return anything else as it is."""
    if isinstance(transform, str):
        return build_pipeline(transform, mean=mean, std=std, base_dir=base_dir)
    return transform


def apply_transform(transform: Callable | Raw | None, images_BCHW: Tensor, generator: torch.Generator | None) -> Tensor:
    """Transform a batch: a Pipeline takes it whole, any other callable image by image."""
    if transform is None:
        return to_unit_float(images_BCHW)
    if isinstance(transform, Raw):
        return transform.sizing.apply_steps(images_BCHW, transform.sizing.draw(images_BCHW, generator))
    if isinstance(transform, Pipeline):
        check_images(images_BCHW)
        return transform(images_BCHW, generator)
    return to_unit_float(torch.stack([transform(image) for image in images_BCHW]))


def join_images(
    transform: Callable | Raw | None, images: Sequence[Tensor], generator: torch.Generator | None
) -> Tensor:
    """Transform and collate images (C, H, W), one by one only as long as they differ in size."""
    if isinstance(transform, Raw):
        return transform.sizing.join(images, generator)
    if transform is None or isinstance(transform, Pipeline):
        sizing, rest = (transform or Pipeline()).split_at_size()
        return rest(sizing.join(images, generator), generator)
    return fast_collate([to_unit_float(transform(image)) for image in images])


def check_images(images_BCHW: Tensor) -> None:
    """Raise DataError unless the tensor has the four dimensions of a batch of images."""
    if images_BCHW.dim() != 4:
        raise DataError(
            f"data.transform works on images (C, H, W), and an input here has shape {tuple(images_BCHW.shape[1:])};"
            f" leave it out, or give a callable of your own"
        )


def read_sample_shape(read_sample: Callable[[], Tensor]) -> tuple[int, ...]:
    """Return the shape of a transformed sample without changing the state of the global generator."""
    with torch.random.fork_rng(devices=[]):
        return tuple(read_sample().shape)
