"""fulltilt: PyTorch training as fast as your own hardware allows, measured.

The public names load on first use, so that ``import fulltilt`` needs no torch.
"""

from typing import TYPE_CHECKING, Any

from fulltilt._version import __version__

if TYPE_CHECKING:
    from fulltilt.tasks import Workload
    from fulltilt.tuner import find_batch_size, tune

__all__ = ["Workload", "__version__", "find_batch_size", "tune"]

_HOMES = {"Workload": "fulltilt.tasks", "find_batch_size": "fulltilt.tuner", "tune": "fulltilt.cli._notebook"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fulltilt' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
