"""What of an event is a curve: name → figure, the same names in every logger."""

from __future__ import annotations

from fulltilt.records import EpochDone, Evaluated, StepsDone

WithFigures = StepsDone | EpochDone | Evaluated


def list_scalars(event: WithFigures) -> dict[str, float]:
    """``train/loss``, ``epoch/accuracy``, ``val/accuracy`` and the like, at ``event.step``."""
    if isinstance(event, StepsDone):
        figures = {f"train/{name}": getattr(event, name) for name in ("loss", "lr", "samples_per_s")}
        phases = {f"phases_ms/{phase}": value for phase, value in event.phases_ms.items() if value is not None}
        return figures | phases
    if isinstance(event, EpochDone):
        return {f"epoch/{name}": value for name, value in {"loss": event.loss, **event.metrics}.items()}
    return {f"{event.split}/{name}": value for name, value in event.metrics.items()}
