"""Events of a small run, for the tests of listeners."""

from fulltilt.records import EpochDone, Evaluated, RunEnded, RunStarted, StepsDone

ENDED = RunEnded(reason="finished", step=20, seconds=4.2, metrics={})


class Clock:
    """Stands still until told."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def started(**changes):
    values = {"name": "digits", "out_dir": "runs/x", "device": "cpu", "plan": {}, "n_parameters": 1234}
    return RunStarted(**values | {"n_samples": 100, "steps_per_epoch": 10, "n_epochs": 2} | changes)


def steps_done(step, loss=0.4321, **changes):
    values = {"epoch": 1, "step": step, "step_in_epoch": step % 10, "n_steps": 5, "n_samples": 50, "loss": loss}
    return StepsDone(**values | {"seconds": 0.1, "lr": 0.1, "samples_per_s": 1500.0} | changes)


def epoch_done(**changes):
    values = {"epoch": 1, "step": 10, "loss": 0.5, "metrics": {}, "seconds": 2.0, "samples_per_s": 1400.0}
    return EpochDone(**values | changes)


def evaluated(**changes):
    values = {"epoch": 1, "step": 10, "split": "val", "metrics": {"accuracy": 0.9125}, "seconds": 0.1}
    return Evaluated(**values | {"training_seconds": 2.0} | changes)


def tell(listener, *events):
    for event in events:
        listener(event)
    return listener
