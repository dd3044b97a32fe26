"""Language models that write on: each word of a window is predicted from those before it.

Shapes: B batch, T words of a window, V words of the vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset

from fulltilt.tasks.language_metrics import MAX_EXPONENT
from fulltilt.tasks.losses import Loss
from fulltilt.tasks.workload import Workload


def build_generation(
    *,
    model: Callable[[], nn.Module],
    train: Callable[[], Dataset],
    validation: Callable[[], Dataset] | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    name: str = "generation",
) -> Workload:
    """Predict the next word; the loss is the cross entropy of all words of a batch.

    Args:
        model: ``words_BT → scores (B, T, V)``.
        train: ``(inputs_BT, targets_BT)``, the targets being the inputs moved on by one word, as ``text`` has them.
    """
    return Workload(
        model=model,
        dataset=train,
        validation=validation,
        loss=loss or compute_loss,
        optimizer=optimizer,
        metrics={"accuracy": compute_accuracy},
        derive=derive_perplexity,
        name=name,
    )


def compute_loss(scores_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return functional.cross_entropy(scores_BTV.flatten(0, 1), targets_BT.flatten())


def compute_accuracy(scores_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return (scores_BTV.argmax(-1) == targets_BT).float().mean(1)


def derive_perplexity(means: Mapping[str, float]) -> dict[str, float]:
    loss = means["loss"]
    return {"perplexity": math.exp(loss) if loss < MAX_EXPONENT else math.inf}
