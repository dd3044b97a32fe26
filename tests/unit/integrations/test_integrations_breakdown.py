"""StepBreakdown on a clock that stands still: what was planted is what it says."""

import json

import pytest
import torch

from fulltilt.integrations import StepBreakdown
from fulltilt.integrations.breakdown import N_JUDGED, format_breakdown, publish_breakdown
from fulltilt.measure import FakeClock

CPU = torch.device("cpu")
PLANTED_MS = {"data_wait": 3.0, "forward": 2.0, "backward": 4.0, "optimizer": 1.0}


def take_steps(breakdown, clock, n, *, planted_ms=PLANTED_MS, other_ms=0.25):
    for _ in range(n):
        for phase, ms in planted_ms.items():
            clock.enqueue(ms)
            breakdown.lap(phase)
        clock.advance(other_ms)
        breakdown.end_step()


@pytest.mark.parametrize("n_steps", [8, 3 * N_JUDGED])
def test_phases_are_what_was_planted_and_add_up_to_the_step(n_steps):
    clock = FakeClock()
    breakdown = StepBreakdown("a loop 1.0", clock=clock)
    breakdown.open(CPU)
    take_steps(breakdown, clock, n_steps)
    result = breakdown.close()
    assert result.n_steps + result.n_warmup_steps == n_steps
    assert result.n_warmup_steps <= 1
    assert result.phases_ms == {name: pytest.approx(ms) for name, ms in PLANTED_MS.items()} | {
        "h2d": None,
        "other": pytest.approx(0.25),
    }
    assert sum(ms or 0 for ms in result.phases_ms.values()) == pytest.approx(result.step_ms, rel=1e-9)
    assert sum(share or 0 for share in result.breakdown_pct.values()) == pytest.approx(100)
    assert (result.notes, result.n_lost) == ((), 0)
    assert result.null_reasons == {"h2d": "nothing is copied to a device"}


def test_warm_up_is_left_out_where_the_steps_settle():
    clock = FakeClock()
    breakdown = StepBreakdown("a loop", clock=clock)
    breakdown.open(CPU)
    take_steps(breakdown, clock, 5, planted_ms={"forward": 500.0})
    take_steps(breakdown, clock, 60, planted_ms={"forward": 5.0})
    result = breakdown.close()
    assert result.n_warmup_steps == 5
    assert result.phases_ms["forward"] == pytest.approx(5.0)


def test_what_is_no_training_is_in_no_step():
    clock = FakeClock()
    breakdown = StepBreakdown("a loop", clock=clock)
    breakdown.open(CPU)
    take_steps(breakdown, clock, 10)
    breakdown.pause()
    clock.advance(60_000)
    breakdown.lap("forward")  # of an evaluation
    breakdown.end_step()
    breakdown.resume()
    take_steps(breakdown, clock, 10)
    clock.advance(5_000)  # a checkpoint whose end is told, not its begin
    breakdown.resume()
    take_steps(breakdown, clock, 10)
    result = breakdown.close()
    assert result.n_steps + result.n_warmup_steps == 30
    assert result.step_ms == pytest.approx(10.25)


def test_the_loops_own_work_is_named_where_it_is_large():
    clock = FakeClock()
    breakdown = StepBreakdown("a loop", clock=clock)
    breakdown.open(CPU)
    take_steps(breakdown, clock, 20, other_ms=10.0)
    result = breakdown.close()
    assert result.breakdown_pct["other"] == pytest.approx(50)
    assert result.notes == ("50 % of the step is no phase's: the loop's own work between them",)


def test_on_a_device_queued_work_is_billed_to_the_phase_that_queued_it():
    clock = FakeClock(is_device=True)
    breakdown = StepBreakdown("a loop", clock=clock, null_reasons={"h2d": "said by the library"})
    breakdown.open(torch.device("cuda:0"))
    for _ in range(20):
        clock.advance(1.0)  # the host waits for data while the queue runs dry
        breakdown.lap("data_wait")
        for phase in ("forward", "backward", "optimizer"):
            clock.enqueue(2.0)
            breakdown.lap(phase)
        clock.synchronize()
        breakdown.end_step()
    result = breakdown.close()
    assert result.phases_ms == {
        "data_wait": pytest.approx(1.0),
        "h2d": None,
        **dict.fromkeys(("forward", "backward", "optimizer"), pytest.approx(2.0)),
        "other": pytest.approx(0.0),
    }
    assert result.null_reasons == {"h2d": "said by the library"}


def test_phases_that_do_not_close_are_void_with_the_reason():
    """A device's queue that grows over the whole run: its time is longer than the wall's."""
    clock = FakeClock(is_device=True)
    breakdown = StepBreakdown("a loop", clock=clock)
    breakdown.open(CPU)
    for _ in range(20):
        clock.advance(1.0)
        clock.enqueue(5.0)
        breakdown.lap("forward")
        breakdown.end_step()
    clock.synchronize()
    result = breakdown.close()
    assert result.phases_ms is None
    assert "exceed the step by" in result.null_reasons["phases_ms"]
    assert any("no phases: the phases exceed" in line for line in format_breakdown(result))


def test_a_run_without_a_step_says_so():
    breakdown = StepBreakdown("a loop", clock=FakeClock())
    assert breakdown.close() is None
    breakdown.open(CPU)
    result = breakdown.close()
    assert (result.n_steps, result.step_ms) == (0, None)
    assert result.null_reasons["step_ms"] == "no step was timed"


def test_the_report_is_printed_and_written(tmp_path, capsys):
    clock = FakeClock()
    breakdown = StepBreakdown("a loop 1.0", clock=clock)
    breakdown.open(CPU)
    take_steps(breakdown, clock, 20)
    result = breakdown.close()
    publish_breakdown(result, tmp_path / "deep" / "b.json")
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("fulltilt: where a step of a loop 1.0 goes (cpu, ")
    assert any(line.split()[:4] == ["backward", "4.000", "ms", "39.0"] for line in said)
    assert said[-1] == f"  written to {tmp_path / 'deep' / 'b.json'}"
    document = json.loads((tmp_path / "deep" / "b.json").read_text())
    assert document["phases_ms"]["data_wait"] == pytest.approx(3.0)
    assert document["n_steps"] == result.n_steps
