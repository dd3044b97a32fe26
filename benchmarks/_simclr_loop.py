"""A SimCLR training loop as most people write it, the parts of it that ``simclr`` measures, and its data path at best.

One image at a time through torchvision's transforms on PIL images, twice; a batch of two tensors; the views one after
the other through the model; NT-Xent by a mask. Written for this benchmark after the pattern of the tutorials. Beside it
the views as torchvision's own guide makes them fast: v2 on uint8 tensors, floats at the end, in data workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler

from fulltilt.tasks.vision import import_torchvision


class TwoCrops(Dataset):
    """Two views of an image, made when it is asked for."""

    def __init__(self, images_NCHW: Tensor, side: int):
        self._images = images_NCHW.permute(0, 2, 3, 1).contiguous().numpy()
        self._transform = build_transform(side)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = Image.fromarray(self._images[index])
        return self._transform(image), self._transform(image)


def build_transform(side: int) -> Callable[[Image.Image], Tensor]:
    """The steps of ``simclr.VIEWS`` in torchvision's words."""
    import_torchvision()
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(side, scale=(0.2, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.4, 0.4, 0.4),
            transforms.RandomGrayscale(0.2),
            transforms.ToTensor(),
        ]
    )


def build_plain_loader(images_NCHW: Tensor, side: int, batch_size: int) -> DataLoader:
    return DataLoader(TwoCrops(images_NCHW, side), batch_size=batch_size, shuffle=True, drop_last=True)


class TwoViews(Dataset):
    """As ``TwoCrops``, with v2 on tensors of bytes."""

    def __init__(self, images_NCHW: Tensor, side: int):
        self._images_NCHW = images_NCHW
        self._transform = build_v2_transform(side)

    def __len__(self) -> int:
        return len(self._images_NCHW)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image_CHW = self._images_NCHW[index]
        return self._transform(image_CHW), self._transform(image_CHW)


def build_v2_transform(side: int) -> Callable[[Tensor], Tensor]:
    """The steps of ``simclr.VIEWS`` in the order of the v2 guide.

    Source: https://docs.pytorch.org/vision/stable/transforms.html, "Performance considerations"
    """
    import_torchvision()
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(side, scale=(0.2, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4),
            v2.RandomGrayscale(0.2),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )


def build_v2_loader(images_NCHW: Tensor, side: int, batch_size: int, *, n_batches: int, n_workers: int) -> DataLoader:
    """One pass makes ``n_batches`` and no more: workers that ran ahead would work while another arm is timed."""
    dataset = TwoViews(images_NCHW, side)
    sampler = RandomSampler(dataset, num_samples=n_batches * batch_size)
    return DataLoader(dataset, batch_size, sampler=sampler, num_workers=n_workers, persistent_workers=n_workers > 0)


def run_plain_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    n_steps: int,
    *,
    device: str = "cpu",
    precision: str = "fp32",
) -> list[float]:
    """Optimizer steps over one batch each; the loss is read at every step, as is usual."""
    losses = []
    for _ in range(n_steps):
        first, second = next(batches)
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            features = model(torch.cat([first, second]).to(device))
            loss = compute_loss(features, temperature=0.2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compute_loss(features: Tensor, *, temperature: float) -> Tensor:
    """NT-Xent of the views [first of all, second of all]."""
    n = len(features) // 2
    features = functional.normalize(features, dim=1)
    similarity = features @ features.T / temperature
    similarity = similarity.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=features.device), float("-inf"))
    labels = torch.cat([torch.arange(n) + n, torch.arange(n)]).to(features.device)
    return functional.cross_entropy(similarity, labels)
