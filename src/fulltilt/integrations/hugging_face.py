"""Time the steps of Hugging Face's Trainer, and of those built on it, by the callback ``HuggingFaceBreakdown``.

    from fulltilt.integrations import HuggingFaceBreakdown
    trainer = Trainer(…, callbacks=[HuggingFaceBreakdown()])

The Trainer calls nothing between forward and backward, so ``Accelerator.backward`` is wrapped while it trains. Hooks on
the model end up inside a compiled graph and do not see a loss that is computed outside the model.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.integrations.breakdown import Breakdown, StepBreakdown, publish_breakdown
from fulltilt.measure.clock import Clock

try:
    import accelerate
    import transformers
except ImportError as error:
    raise UsageError(
        f"HuggingFaceBreakdown needs the packages transformers and accelerate ({error}); "
        "pip install 'transformers[torch]'"
    ) from error

NULL_REASONS = {"h2d": "accelerate moves batches in its loader: a part of data_wait"}


class HuggingFaceBreakdown(transformers.TrainerCallback):
    """Times the phases of each step; prints where the time went when training ends, and writes it as JSON.

    The Trainer fetches all micro-batches of a step first: that is ``data_wait``. Clipping, the schedule and zeroing
    gradients are ``optimizer``; logging and other callbacks are ``other``. Evaluation and checkpoints are left out,
    with what was logged in front of them. Process 0 reports.

    Args:
        out: The JSON file; None writes none.
    """

    result: Breakdown | None = None  # once training has ended

    def __init__(self, out: str | Path | None = "runs/breakdown/hugging_face.json", *, clock: Clock | None = None):
        self._out = out
        loop = f"transformers {transformers.__version__}"
        self._breakdown = StepBreakdown(loop, null_reasons=NULL_REASONS, clock=clock)
        self._stop_listening: Callable[[], None] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stop_listening is None:  # still listening where an error ended the last run: nobody tells of that
            self._stop_listening = _listen_to_backward(self._breakdown)
        self._breakdown.open(args.device)

    def on_other(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bill what lies before this hook to the loop's own work."""
        self._breakdown.lap("other")

    on_epoch_begin = on_substep_end = on_log = on_epoch_end = on_other

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._breakdown.lap("data_wait")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._breakdown.lap("optimizer")
        self._breakdown.end_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._breakdown.resume()

    on_save = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None
        if (result := self._breakdown.close()) is None:
            return
        self.result = result
        if state.is_world_process_zero:
            publish_breakdown(result, self._out)


def _listen_to_backward(breakdown: StepBreakdown) -> Callable[[], None]:
    """Wrap ``Accelerator.backward`` to note when it begins and ends; return what undoes it."""
    original = accelerate.Accelerator.backward

    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        breakdown.lap("forward")
        result = original(self, *args, **kwargs)
        breakdown.lap("backward")
        return result

    def undo() -> None:
        if accelerate.Accelerator.backward is backward:  # else somebody wrapped it again: ours is silent once closed
            accelerate.Accelerator.backward = original

    accelerate.Accelerator.backward = backward
    return undo
