"""Tasks: what a batch means, its loss and its metrics; a zoo of models to train on.

What the engine builds a Workload from:

- ``TASKS[name](model=factory, train=dataset_factory, validation=dataset_factory | None, loss=callable | None,
  optimizer=callable | None, name=str, **arguments) -> Workload``. ``arguments`` are those of the component call
  (``task: diffusion(schedule=cosine)``); all parameters are keyword-only and annotated. ``loss=None`` takes the
  task's own loss. A task with a parameter ``views`` makes views of images on the device: its ``train`` yields them
  untransformed in uint8, ``views`` builds the transform, ``labelled`` the images that features are judged by.
- ``LOSSES[name](**arguments) -> (outputs, targets) -> scalar``: the mean over the batch.
- ``METRICS[name](outputs, targets) -> (B,)``: one value per sample, on the device.
- ``read_data_facts(dataset) -> dict``: what a model may need to know of the data (``n_classes``, ``in_channels``,
  ``image_size``, ``n_features``, ``n_outputs``, ``n_sensors``, ``n_labels``, ``geometry``, ``vocab_size``), read from
  the dataset's attributes; hand it to ``build_model`` or as the given values of ``config.build_component``.
- ``build_model(text, *, where="model", **facts) -> nn.Module``: a name of ``MODELS``, ``torchvision:resnet50(…)``,
  ``timm:convnext_tiny(…)`` or ``my_module:build(…)``. ``MODELS`` holds builders by name and, under ``torchvision:``
  and ``timm:``, the resolvers that ``config.build_component`` calls with the rest of a name. Facts that the model
  has no parameter for are left out.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fulltilt.tasks.contrastive import build_contrastive
from fulltilt.tasks.diffusion import build_diffusion
from fulltilt.tasks.facts import read_data_facts
from fulltilt.tasks.language import build_language_model
from fulltilt.tasks.losses import LOSSES
from fulltilt.tasks.metrics import METRICS
from fulltilt.tasks.models import MODELS, build_model
from fulltilt.tasks.recipes import build_classification, build_regression
from fulltilt.tasks.workload import Workload

__all__ = [
    "LOSSES",
    "METRICS",
    "MODELS",
    "TASKS",
    "Workload",
    "build_classification",
    "build_contrastive",
    "build_diffusion",
    "build_language_model",
    "build_model",
    "build_regression",
    "read_data_facts",
]

TASKS: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {
        "classification": build_classification,
        "contrastive": build_contrastive,
        "regression": build_regression,
        "diffusion": build_diffusion,
        "language_model": build_language_model,
    }
)
