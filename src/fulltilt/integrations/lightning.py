"""Time the steps of Lightning's Trainer by the callback ``LightningBreakdown``.

    from fulltilt.integrations import LightningBreakdown
    trainer = Trainer(callbacks=[LightningBreakdown()])

Phases come from the hooks of a training step, the wait for data and the transfer from the actions that the Trainer
announces to its profiler, the end of the update from the optimizer's own hook. Manual optimization is timed too.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.integrations.breakdown import Breakdown, StepBreakdown, publish_breakdown
from fulltilt.measure.clock import Clock

PHASE_OF_ACTION = {"train_dataloader_next": "data_wait", "batch_to_device": "h2d"}
"""From the end of the name of a profiler's action to its phase."""


def _import_library() -> Any:
    """Import ``lightning.pytorch`` or ``pytorch_lightning``, first the one that is loaded already."""
    names = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UsageError("LightningBreakdown needs the package lightning, which is not installed; pip install lightning")


_LIBRARY = _import_library()


class LightningBreakdown(_LIBRARY.Callback):
    """Times the phases of each step; prints where the time went when training ends, and writes it as JSON.

    Validation is left out; checkpoints, logging and other callbacks are ``other``. Process 0 reports.

    Args:
        out: The JSON file; None writes none.
    """

    result: Breakdown | None = None  # once training has ended

    def __init__(self, out: str | Path | None = "runs/breakdown/lightning.json", *, clock: Clock | None = None):
        super().__init__()
        self._out = out
        self._breakdown = StepBreakdown(f"Lightning {_LIBRARY.__version__}", clock=clock)
        self._has_zeroed = self._has_stepped = False
        self._handles: list[Any] = []
        self._profiler: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._listen(trainer)
        self._breakdown.open(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._breakdown.lap("other")

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._breakdown.lap("forward")
        self._has_zeroed = True

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        # Lightning zeroes gradients between forward and backward; that is the optimizer's work.
        self._breakdown.lap("optimizer" if self._has_zeroed else "forward")
        self._has_zeroed = False

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._breakdown.lap("backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._has_stepped = True  # an update that the loss scaler skips is a step too

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._breakdown.lap("other")
        if self._has_stepped:
            self._breakdown.end_step()
        self._has_stepped = False

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._breakdown.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._breakdown.resume()

    def on_train_end(self, trainer: Any, pl_module: Any, exception: BaseException | None = None) -> None:
        self._stop_listening()
        if (result := self._breakdown.close()) is None:
            return
        self.result = result
        if trainer.is_global_zero:
            publish_breakdown(result, self._out)

    on_exception = on_train_end

    def _listen(self, trainer: Any) -> None:
        self._stop_listening()
        profiler = self._profiler = trainer.profiler
        start, stop = profiler.start, profiler.stop

        def start_action(action_name: str) -> None:
            if _find_phase(action_name):
                self._breakdown.lap("other")
            start(action_name)

        def stop_action(action_name: str) -> None:
            stop(action_name)
            if phase := _find_phase(action_name):
                self._breakdown.lap(phase)

        profiler.start, profiler.stop = start_action, stop_action
        self._handles = [
            optimizer.register_step_post_hook(lambda *_: self._breakdown.lap("optimizer"))
            for optimizer in trainer.optimizers
        ]

    def _stop_listening(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._profiler is not None:
            del self._profiler.start, self._profiler.stop  # those of its class are in force again
            self._profiler = None


def _find_phase(action_name: str) -> str | None:
    return PHASE_OF_ACTION.get(action_name.rpartition(".")[2])
