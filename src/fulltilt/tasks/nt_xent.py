"""Compute NT-Xent, the loss of SimCLR (Chen et al. 2020, arXiv 2002.05709, equation 1).

Shapes: B images, R = 2·B rows: two views of each image, D features. Rows 2·i and 2·i + 1 are the views of image i, so
that the rows of several batches, one after the other, are the rows of their joint batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fulltilt.errors import UsageError


class NtXent(nn.Module):
    """Computes for every view the cross entropy of finding its partner among all other views of the batch.

    Similarity is the cosine over ``temperature``, in float32 also under autocast: bf16 is too coarse for it. The mean
    runs over all 2·B views, both ways round; a batch of one image has no negatives and no gradient.

    Shape:
        outputs (2·B, D), targets are not looked at; returns a scalar.

    Device: does not synchronise. Memory: a few matrices of (2·B)² floats.
    """

    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        if not temperature > 0:
            raise UsageError(f"NT-Xent has temperature {temperature}; it must be above 0, 0.1 to 0.5 are usual")
        self.temperature = temperature

    def forward(self, outputs: Tensor, targets: object = None) -> Tensor:
        n_rows = len(outputs)
        if outputs.dim() != 2 or n_rows % 2:
            raise UsageError(
                f"NT-Xent needs one row a view, the two views of an image one after the other, and got a tensor of "
                f"shape {tuple(outputs.shape)}; take the task contrastive, which makes such batches"
            )
        with torch.autocast(outputs.device.type, enabled=False):
            wide = torch.promote_types(outputs.dtype, torch.float32)
            z_RD = functional.normalize(outputs.to(wide), dim=1)
            logits_RR = (z_RD @ z_RD.T) / self.temperature
            rows_R = torch.arange(n_rows, device=outputs.device)
            logits_RR = logits_RR.masked_fill(rows_R[:, None] == rows_R, float("-inf"))
            return functional.cross_entropy(logits_RR, rows_R ^ 1)
