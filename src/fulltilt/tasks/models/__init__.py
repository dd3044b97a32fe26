"""The zoo: models by name, and the door to models of torchvision, timm and the user's own modules."""

from fulltilt.tasks.models._zoo import MODELS, build_model

__all__ = ["MODELS", "build_model"]
