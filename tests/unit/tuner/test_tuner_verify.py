"""What a verification refuses before it trains anything."""

import json

import pytest

from fulltilt.errors import StorageError
from fulltilt.tuner.answer import verify
from fulltilt.tuner.answer.verify import run_verification


def test_a_diverged_run_counts_its_steps_once_and_reads_a_rate_that_is_none(tmp_path):
    """A run that went on after a kill took the steps behind its checkpoint again."""
    evaluated = [{"event": "Evaluated", "step": step, "training_seconds": float(step)} for step in (2, 4)]
    steps = [{"event": "StepsDone", "step": step, "samples_per_s": rate} for step, rate in ((2, 10.0), (4, 30.0))]
    lines = [
        {"event": "RunStarted", "step": 0}, *steps, *evaluated,
        {"event": "RunStarted", "first_step": 2, "step": 2}, {**steps[1], "samples_per_s": None}, evaluated[1],
        {"event": "RunEnded", "step": 4, "reason": "failed: NonFiniteLossError: the loss of step 5 is nan"},
    ]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = verify._read_divergence(tmp_path)
    assert [event["step"] for event in read["evaluations"]] == [2, 4]
    assert (read["samples_per_s"], read["training_seconds"]) == (10.0, 4.0)


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path):
    (tmp_path / "verify").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        run_verification(["none.yaml"], {"data.num_workers": 2}, folder=tmp_path / "verify", seed=1, n_pairs=2)
