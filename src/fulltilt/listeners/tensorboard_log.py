"""``TensorBoardLog``: the curves of a run for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulltilt.listeners._tracked import WithFigures, import_package, list_scalars
from fulltilt.records import Event, RunEnded, RunStarted, StepsDone


class TensorBoardLog:
    """Writes scalars over optimizer steps into ``folder``, for ``tensorboard --logdir``.

    After a resume TensorBoard is told to hide the steps past the checkpoint that an earlier process wrote.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        package = import_package("torch.utils.tensorboard", logger="tensorboard", extra="track")
        self._writer_class = package.SummaryWriter
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            if self._writer is not None:  # the run goes on in another form, see Replanned
                self._writer.close()
            purge = event.first_step + 1 if event.first_step else None
            self._writer = self._writer_class(str(self.path), purge_step=purge)
        elif self._writer is None:
            return
        elif isinstance(event, RunEnded):
            self._writer.close()
            self._writer = None
        elif isinstance(event, WithFigures):
            for name, value in list_scalars(event).items():
                self._writer.add_scalar(name, value, event.step)
            if not isinstance(event, StepsDone):
                self._writer.flush()
