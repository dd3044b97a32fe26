"""eager: the model as it is, operator by operator; what every other engine falls back to. Imports torch."""

from pathlib import Path

from fulltilt.infer.engines._torch import TorchRunner, open_setup
from fulltilt.infer.manifest import Manifest


def load(folder: Path, manifest: Manifest) -> TorchRunner:
    setup = open_setup(folder, manifest)
    assert setup.model is not None
    return TorchRunner(setup.model, setup.device, manifest).record(folder)
