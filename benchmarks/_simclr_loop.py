"""A SimCLR training loop as most people write it, and its data path as torchvision's guide makes it fast.

The loop: one image at a time through torchvision's transforms on PIL images, twice; a batch of two tensors; NT-Xent by
a mask. Written for this benchmark after the pattern of the tutorials. Beside it v2 on uint8 tensors, floats at the end,
in data workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler

from fulltilt.tasks.vision import import_torchvision


class TwoViews(Dataset):
    """Two views of an image, made when it is asked for."""

    def __init__(self, images: Any, transform: Callable[[Any], Tensor], *, read: Callable[[Any], Any] = lambda x: x):
        self._images, self._transform, self._read = images, transform, read

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._read(self._images[index])
        return self._transform(image), self._transform(image)


def build_plain_loader(images_NCHW: Tensor, side: int, batch_size: int) -> DataLoader:
    """Build the loader of the loop: the steps of ``simclr.VIEWS`` in torchvision's words, on PIL images."""
    import_torchvision()
    from torchvision import transforms

    images = images_NCHW.permute(0, 2, 3, 1).contiguous().numpy()
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(side, scale=(0.2, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.4, 0.4, 0.4),
            transforms.RandomGrayscale(0.2),
            transforms.ToTensor(),
        ]
    )
    dataset = TwoViews(images, transform, read=Image.fromarray)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)


def build_v2_loader(images_NCHW: Tensor, side: int, batch_size: int, *, n_batches: int, n_workers: int) -> DataLoader:
    """Build a loader of the same views in the order of the v2 guide.

    One pass makes ``n_batches`` and no more: workers that ran ahead would work while another arm is timed.

    Source: https://docs.pytorch.org/vision/stable/transforms.html, "Performance considerations"
    """
    import_torchvision()
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(side, scale=(0.2, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4),
            v2.RandomGrayscale(0.2),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    dataset = TwoViews(images_NCHW, transform)
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
    """Take optimizer steps over one batch each; the loss is read at every step, as is usual."""
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
    """Compute NT-Xent of the views [first of all, second of all]."""
    n = len(features) // 2
    features = functional.normalize(features, dim=1)
    similarity = features @ features.T / temperature
    similarity = similarity.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=features.device), float("-inf"))
    labels = torch.cat([torch.arange(n) + n, torch.arange(n)]).to(features.device)
    return functional.cross_entropy(similarity, labels)
