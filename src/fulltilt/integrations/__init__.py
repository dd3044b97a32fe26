"""fulltilt's view of a step, for training loops that are not its own: callbacks of Lightning and of Hugging Face.

Names load on first use: the other library is needed only where its callback is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulltilt.integrations.breakdown import Breakdown, StepBreakdown
    from fulltilt.integrations.hugging_face import HuggingFaceBreakdown
    from fulltilt.integrations.lightning import LightningBreakdown

__all__ = ["Breakdown", "HuggingFaceBreakdown", "LightningBreakdown", "StepBreakdown"]

_HOME_OF = {
    "Breakdown": "breakdown",
    "HuggingFaceBreakdown": "hugging_face",
    "LightningBreakdown": "lightning",
    "StepBreakdown": "breakdown",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
