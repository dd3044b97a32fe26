"""Tasks: what a batch means, its loss and its metrics; a zoo of models to train on.

The engine builds a Workload from:

- ``TASKS[name](model=…, train=…, validation=…, loss=…, optimizer=…, name=…, **arguments) -> Workload``: model and data
  are functions that build them, ``arguments`` those of ``task: diffusion(schedule=cosine)``; all are keyword-only and
  annotated. ``loss=None`` takes the task's own. A task with a parameter ``views`` makes views of images on the device:
  its ``train`` yields them untransformed in uint8, ``labelled`` the images that features are judged by.
- ``LOSSES[name](**arguments) -> (outputs, targets) -> scalar``: the mean over the batch.
- ``METRICS[name](outputs, targets) -> (B,)``: one value per sample, on the device.
- ``read_data_facts(dataset)``: what a model may need to know of the data, given to the parameters of those names.
- ``build_model(text, **facts)``: a name of ``MODELS``, ``torchvision:resnet50(…)``, ``timm:convnext_tiny(…)`` or
  ``my_module:build(…)``. Keys of ``MODELS`` that end with a colon are resolvers of ``config.build_component``.
"""

# ruff: noqa: F401

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fulltilt.tasks.contrastive import build_contrastive
from fulltilt.tasks.diffusion import build_diffusion
from fulltilt.tasks.facts import read_data_facts
from fulltilt.tasks.generation import build_generation
from fulltilt.tasks.language import build_language_model
from fulltilt.tasks.losses import LOSSES
from fulltilt.tasks.metrics import METRICS
from fulltilt.tasks.models import MODELS, build_model, check_model
from fulltilt.tasks.recipes import build_classification, build_regression
from fulltilt.tasks.sentences import build_sentence_encoder
from fulltilt.tasks.workload import Workload

TASKS: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {
        "classification": build_classification,
        "contrastive": build_contrastive,
        "regression": build_regression,
        "diffusion": build_diffusion,
        "generation": build_generation,
        "language_model": build_language_model,
        "sentence_encoder": build_sentence_encoder,
    }
)
