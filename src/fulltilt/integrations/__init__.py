"""fulltilt's view of a step, for training loops that are not its own: callbacks of Lightning and of Hugging Face.

Names load on first use: the other library is needed only where its callback is.
"""

from typing import TYPE_CHECKING

from fulltilt._lazy import load_on_use

# ruff: noqa: F401

if TYPE_CHECKING:
    from fulltilt.integrations.breakdown import Breakdown, StepBreakdown
    from fulltilt.integrations.hugging_face import HuggingFaceBreakdown
    from fulltilt.integrations.lightning import LightningBreakdown

__getattr__, __dir__ = load_on_use(__name__, __file__)
