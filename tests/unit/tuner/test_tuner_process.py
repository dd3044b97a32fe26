"""What is said of a trial process that was ended from outside, or whose data worker died."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from fulltilt.errors import DataError, WorkerDiedError, find_remedy
from fulltilt.records import TrialRequest, WorkloadSource
from fulltilt.tuner.trials import measuring, process

REQUEST = TrialRequest(source=WorkloadSource(config={}, base_dir="."), device="cpu", deadline_s=60.0)


def end(folder, kind="trial", *, elapsed_s=61.0, part=None, silent_s=None, patience_s=60.0):
    """The reason why a process with a deadline of 60 s was ended; None where it was not."""
    request = dataclasses.replace(REQUEST, patience_s=patience_s, kind=kind)
    watch = process.Watch(request, None, folder / "t1.log")
    if silent_s is not None:
        watch._progress_s = time.monotonic() - silent_s
    watch._missed, watch._part = watch._find_missed_deadline(elapsed_s), part
    return watch.collect_evidence().deadline


def test_only_where_steps_are_timed_is_it_said_that_none_was(tmp_path):
    said = {kind: "no step was timed" in end(tmp_path, kind) for kind in ("trial", "device", "facts", "roofs")}
    assert said == {"trial": True, "device": True, "facts": False, "roofs": False}


@pytest.mark.parametrize(("patience_s", "remedy"), [(60.0, process.DEADLINE_REMEDY), (120.0, "give a larger --budget")])
@pytest.mark.parametrize("part", [None, "evaluation"])
def test_a_deadline_ends_with_what_raises_it(tmp_path, patience_s, remedy, part):
    reason = end(tmp_path, patience_s=patience_s, part=part)
    assert "no result after 61.0 s, and no step was timed, the deadline is 60 s" in reason
    assert find_remedy(f"{reason} (log: t1.log)") == remedy
    assert ("in the part 'evaluation'" in reason) == (part is not None)


def test_what_a_trial_takes_is_without_the_clean_up_after_it(tmp_path, monkeypatch):
    passed_s = []
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: sum(passed_s)))
    monkeypatch.setattr(process.Watch, "fork", lambda watch: passed_s.append(1.0))
    monkeypatch.setattr(process.Watch, "wait", lambda watch: passed_s.append(2.0))
    monkeypatch.setattr(process.Watch, "is_alive", property(lambda watch: len(passed_s) < 2))
    monkeypatch.setattr(process.Watch, "close", lambda watch: passed_s.append(10.0))
    zygote = SimpleNamespace(start=lambda: None)
    assert process.run_trial_process(REQUEST, zygote=zygote, log_path=tmp_path / "t1.log").seconds == 3.0


def test_silence_has_no_remedy_but_the_log(tmp_path):
    reason = end(tmp_path, elapsed_s=50.0, silent_s=1e6)
    assert reason.startswith("no step done for 1000")
    assert find_remedy(reason) is None
    assert end(tmp_path, elapsed_s=50.0) is None


def test_a_dead_data_worker_is_explained_wherever_torch_tells_of_it():
    """torch raises from its signal handler, at times outside the loader: the row then held torch's words."""
    with (
        pytest.raises(WorkerDiedError, match=r"data worker \(pid 7\) died: killed by SIGKILL"),
        measuring.explain_workers(),
    ):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    with pytest.raises(RuntimeError, match="boom"), measuring.explain_workers():
        raise RuntimeError("boom")


def test_a_trial_says_an_error_of_torch_in_the_words_of_train():
    """A label out of range was "IndexError: Target 7 is out of bounds." in a search, without a remedy."""
    with pytest.raises(DataError, match=r"a target is 7, .* or mend the targets of the"), measuring.explain_workers():
        raise IndexError("Target 7 is out of bounds.")
