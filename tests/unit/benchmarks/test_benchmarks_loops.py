"""The arms of ``loop_overhead`` do the same work, so what differs between them is the loop."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io

import pytest
import torch
from benchmarks import _loops, loop_overhead
from benchmarks._loops import (
    AGAIN,
    LIGHTNING_LISTENING,
    LOOPS,
    N_CLASSES,
    N_FEATURES,
    OURS,
    OURS_LISTENING,
    REFERENCE,
    Block,
    Case,
    Loop,
    MarkedRows,
    build_model,
    build_shared_loader,
    fetch_batches,
    measure_block,
)
from benchmarks._runner import silence_peers
from torch.utils.data import DataLoader

from fulltilt.records import EpochDone

HERE = [name for name, loop in LOOPS.items() if not loop.package or importlib.util.find_spec(loop.package)]


def build_rows(n_batches: int, *, first: int = 0, last: int = 1) -> MarkedRows:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(n_batches * 8, N_FEATURES, generator=generator)
    targets = torch.randint(N_CLASSES, (len(inputs),), generator=generator)
    return MarkedRows(inputs, targets, batch_size=8, first=first, last=last)


@pytest.mark.parametrize("arm", [arm for arm in HERE if arm != REFERENCE])
def test_every_arm_ends_with_the_weights_of_the_hand_written_loop(arm):
    torch.manual_seed(0)
    model = build_model(32)
    other = copy.deepcopy(model)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    LOOPS[REFERENCE].run(model, build_rows(6))
    with silence_peers():
        LOOPS[arm].run(other, build_rows(6))
    trained = list(model.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(start, trained, strict=True))
    torch.testing.assert_close(list(other.parameters()), trained, rtol=0, atol=0)


def test_the_arm_with_metrics_logs_them(monkeypatch):
    rows = []
    monkeypatch.setattr(_loops, "build_listeners", lambda folder: (rows.append,))
    LOOPS[OURS_LISTENING].run(build_model(16), build_rows(24))
    (told,) = [event.metrics for event in rows if isinstance(event, EpochDone)]
    assert 0 <= told["accuracy"] <= 1


@pytest.mark.skipif(LIGHTNING_LISTENING not in HERE, reason="lightning is not installed here")
def test_lightning_writes_the_metric_and_draws_its_bar(monkeypatch, tmp_path):
    drawn = io.StringIO()
    monkeypatch.setattr(_loops.io, "StringIO", lambda: drawn)
    monkeypatch.setattr(_loops.tempfile, "TemporaryDirectory", lambda prefix: contextlib.nullcontext(str(tmp_path)))
    with silence_peers():
        LOOPS[LIGHTNING_LISTENING].run(build_model(16), build_rows(120))
    (written,) = tmp_path.rglob("metrics.csv")
    lines = written.read_text().splitlines()
    assert "accuracy" in lines[0]
    assert len(lines) == 3, "every 50 steps of 120"
    assert "120/120" in drawn.getvalue()


@pytest.mark.parametrize("arm", HERE)
def test_a_block_times_the_steps_between_its_marks(arm):
    block = measure_block(arm, Case(name="c", width=16, batch_size=8, n_warmup=3, n_steps=10))
    assert block.wall_us > 0
    assert block.cpu_us > 0
    assert block.waits >= 0


def test_every_model_of_a_width_has_its_own_weights_in_the_same_place():
    places = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = build_model(24)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        _loops.move_home(model, 24)
        torch.testing.assert_close(list(model.parameters()), values, rtol=0, atol=0)
        places.append([parameter.data_ptr() for parameter in model.parameters()])
    assert places[0] == places[1]


def test_the_clocks_are_read_at_two_batches_only():
    rows = build_rows(5, first=1, last=3)
    seen = []
    for _ in build_shared_loader(rows):
        seen.append(len(rows.marks))
    assert seen == [0, 1, 1, 2, 2]
    assert rows.marks[0].wall_s <= rows.marks[1].wall_s


def test_a_loop_that_stops_early_gives_no_figure(monkeypatch):
    def stop_early(model, dataset):
        next(iter(build_shared_loader(dataset)))

    monkeypatch.setitem(LOOPS, REFERENCE, Loop(stop_early, ""))
    with pytest.raises(RuntimeError, match="too few batches"):
        measure_block(REFERENCE, Case(name="c", width=16, batch_size=8, n_warmup=3, n_steps=10))


def test_on_a_gpu_the_clocks_wait_for_the_device_and_batches_are_copied_there(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(waits)))
    rows = build_rows(3, first=1, last=2)
    assert isinstance(fetch_batches(rows), DataLoader), "on a CPU nothing is added to a step"
    for _ in fetch_batches(rows):
        pass
    assert waits == []
    rows = build_rows(3, first=1, last=2)
    rows.device = "meta"  # a device that is no CPU and is everywhere
    assert [inputs.device.type for inputs, _ in fetch_batches(rows)] == ["meta"] * 3
    assert waits == [0, 1], "once at either end"


@pytest.mark.parametrize(("device", "measured"), [("cpu", 3.0), ("cuda", 7.0)])
def test_a_loop_is_held_against_cpu_time_and_on_a_gpu_against_the_wall_clock(device, measured):
    def build_block(extra_us):
        return Block(wall_us=1000.0 + 7 * extra_us, cpu_us=1000.0 + 3 * extra_us, waits=0.0)

    pair = {name: (build_block(extra), build_block(extra)) for name, extra in ((REFERENCE, 0), (AGAIN, 0), (OURS, 1))}
    case = Case(name="step 1 ms", width=16, batch_size=8, n_warmup=3, n_steps=10, device=device)
    (target,) = loop_overhead.judge_rounds([pair] * 6, case)
    assert target.measured == pytest.approx(measured)


@pytest.mark.parametrize(("device", "limit_us"), [("cpu", "cpu_us"), ("cuda", "wall_us")])
def test_a_batch_is_calibrated_by_the_clock_that_judges(monkeypatch, device, limit_us):
    seen = []

    def measure(arm, case):
        seen.append(case.device)
        figures = {"cpu_us": 1.0, "wall_us": 1.0} | {limit_us: 10.0 * case.batch_size}
        return Block(**figures, waits=0.0)

    monkeypatch.setattr(_loops, "measure_block", measure)
    assert _loops.calibrate_batch_size(1.0, width=16, n_tries=1, device=device) == 104, "the first with 1,000 µs"
    assert set(seen) == {device}
