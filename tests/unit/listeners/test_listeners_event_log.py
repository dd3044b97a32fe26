"""EventLog: every event is one line of JSON that is a faithful copy of it."""

import json

from listener_events import steps_done, tell

from fulltilt.listeners import EventLog
from fulltilt.records import Noted, RunEnded, StepsDone, decode


def read(tmp_path):
    return [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]


def test_an_event_comes_back_as_it_was_and_a_loss_that_is_not_finite_is_null(tmp_path):
    event = steps_done(10, rank=1, attempt=2, time_s=3.5, phases_ms={"forward": 1.5})
    ended = RunEnded(reason="failed", step=1, seconds=1.0, metrics={"loss": float("nan")})
    tell(EventLog(tmp_path), event, ended)
    line, last = read(tmp_path)
    assert line["event"] == "StepsDone"
    assert decode(StepsDone, line) == event
    assert last["metrics"] == {"loss": None}


def test_every_event_is_there_once_and_in_order_though_steps_are_held(tmp_path):
    log = EventLog(tmp_path, clock=lambda: 0.0)
    tell(log, Noted(message="begin"), *map(steps_done, range(3)))
    assert [line["event"] for line in read(tmp_path)] == ["Noted"]
    log(Noted(message="end"))
    assert [line.get("step", line.get("message")) for line in read(tmp_path)] == ["begin", 0, 1, 2, "end"]


def test_a_torn_line_of_a_killed_process_is_cut_off(tmp_path):
    EventLog(tmp_path)(Noted(message="first"))
    with (tmp_path / "events.jsonl").open("a") as stream:
        stream.write('{"event": "No')
    EventLog(tmp_path)(Noted(message="zweite Zeile – naïve"))
    assert [line["message"] for line in read(tmp_path)] == ["first", "zweite Zeile – naïve"]
