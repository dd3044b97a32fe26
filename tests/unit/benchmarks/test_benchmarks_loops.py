"""The arms of ``loop_overhead`` do the same work, so what differs between them is the loop."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from benchmarks._loops import (
    ARMS,
    N_CLASSES,
    N_FEATURES,
    NOTES,
    PEERS,
    REFERENCE,
    Case,
    MarkedRows,
    build_model,
    build_shared_loader,
    measure_block,
)

HERE = [arm for arm in ARMS if arm not in PEERS or importlib.util.find_spec(PEERS[arm])]


def build_rows(n_batches: int, *, first: int = 0, last: int = 1) -> MarkedRows:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(n_batches * 8, N_FEATURES, generator=generator)
    targets = torch.randint(N_CLASSES, (len(inputs),), generator=generator)
    return MarkedRows(inputs, targets, batch_size=8, first=first, last=last)


def test_every_arm_has_a_note_on_its_settings():
    assert NOTES.keys() == ARMS.keys()


@pytest.mark.parametrize("arm", [arm for arm in HERE if arm != REFERENCE])
def test_every_arm_ends_with_the_weights_of_the_hand_written_loop(arm):
    torch.manual_seed(0)
    model = build_model(32)
    other = copy.deepcopy(model)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    ARMS[REFERENCE](model, build_rows(6))
    ARMS[arm](other, build_rows(6))
    trained = list(model.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(start, trained, strict=True))
    torch.testing.assert_close(list(other.parameters()), trained, rtol=0, atol=0)


@pytest.mark.parametrize("arm", HERE)
def test_a_block_times_the_steps_between_its_marks(arm):
    block = measure_block(arm, Case(name="c", width=16, batch_size=8, n_warmup=3, n_steps=10))
    assert block.wall_us > 0
    assert block.cpu_us > 0
    assert block.waits >= 0


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

    monkeypatch.setitem(ARMS, REFERENCE, stop_early)
    with pytest.raises(RuntimeError, match="too few batches"):
        measure_block(REFERENCE, Case(name="c", width=16, batch_size=8, n_warmup=3, n_steps=10))
