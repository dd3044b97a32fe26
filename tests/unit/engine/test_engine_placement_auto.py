"""``data.placement: auto``: chosen when the run starts, said, and kept when it goes on."""

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from training_cases import build_config, run_train

from fulltilt.config import plan_of
from fulltilt.data import DATASETS
from fulltilt.engine.build import facts as facts_room
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.ranks.world import World
from fulltilt.errors import RunFolderError
from fulltilt.tasks import Workload

PLENTY, NONE = 1 << 40, 0


@pytest.fixture
def workload(tmp_path):
    x = np.random.default_rng(0).random((64, 5), dtype=np.float32)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["input"], file["label"] = x, np.arange(64) % 4
    return Workload(
        model=lambda: nn.Linear(5, 4),
        dataset=lambda: DATASETS["hdf5"](path=str(tmp_path / "f.h5"), val_fraction=0),
        loss=nn.CrossEntropyLoss(),
    )


@pytest.fixture
def set_free_ram(monkeypatch):
    return lambda n_bytes: monkeypatch.setattr(
        facts_room, "read_free_ram_bytes", lambda n_processes=1: n_bytes // n_processes
    )


AUTO = build_config(data__placement="auto")


def build(workload, *, started_with=None, **data):
    config = build_config(**{f"data__{name}": value for name, value in {"placement": "auto", **data}.items()})
    return build_run(config, plan_of(config), device="cpu", workload=workload, started_with=started_with)


@pytest.mark.parametrize(
    ("free_bytes", "data", "expected"),
    [
        (PLENTY, {}, "ram"),
        (NONE, {}, "block_shuffled"),
        (PLENTY, {"on_bad_sample": "skip(limit=3)"}, "memory_map"),
        (PLENTY, {"placement": "stream"}, "stream"),
    ],
)
def test_the_fastest_that_fits_is_in_force_and_said_in_one_line(workload, set_free_ram, free_bytes, data, expected):
    set_free_ram(free_bytes)
    with build(workload, **data) as run:
        assert run.plan["placement"] == expected
        assert getattr(run.loader.dataset.source, "placement", "stream") == expected
        said = [note for note in run.notes if note.startswith("placement: auto is")]
    assert len(said) == (0 if data.get("placement") else 1)
    assert all(f"auto is {expected}; faster ones cannot apply: " in note for note in said)


@pytest.mark.parametrize(
    ("started_with", "free_bytes", "expected"),
    [
        ("stream", PLENTY, "stream"),
        ("block_shuffled", PLENTY, "block_shuffled"),
        ("ram", PLENTY, "ram"),
        ("ram", NONE, "stream"),  # the order of samples stays
        ("device", PLENTY, "ram"),  # started on a GPU
    ],
)
def test_a_run_that_goes_on_keeps_what_it_was_started_with(workload, set_free_ram, started_with, free_bytes, expected):
    set_free_ram(free_bytes)
    with build(workload, started_with=started_with) as run:
        assert run.plan["placement"] == expected
        assert sum("placement: auto" in note for note in run.notes) == 1


def test_a_choice_that_comes_out_differently_does_not_refuse_a_resume(tmp_path, workload, set_free_ram):
    out = tmp_path / "run"
    set_free_ram(NONE)
    run_train(out, AUTO, workload=workload, max_steps=2)
    set_free_ram(PLENTY)
    result, recorder = run_train(out, AUTO, workload=workload, max_steps=4, resume=True)
    assert result.step == 4
    assert recorder.events[0].plan["placement"] == "block_shuffled"
    assert any("auto goes on as block_shuffled, which the run was started with" in note for note in result.notes)
    named = build_config(data__placement="ram")
    with pytest.raises(RunFolderError, match=r"was trained with data\.placement block_shuffled, and ram puts"):
        run_train(out, named, workload=workload, max_steps=6, resume=True)
    run_train(tmp_path / "ram", AUTO, workload=workload, max_steps=2)
    result, _ = run_train(tmp_path / "ram", named, workload=workload, max_steps=4, resume=True)
    assert result.step == 4, "naming what auto chose refuses nothing"


def test_ranks_of_one_machine_share_its_memory_and_take_one_choice(workload, set_free_ram):
    class Told(World):
        """Rank 1 of 2, told what rank 0 chose."""

        def hand_out(self, value):
            offered.append(value[0])
            return "stream", "auto is stream: rank 0 says so"

    offered = []
    with build(workload) as run:
        facts = run.facts
    needed = 2 * facts.data_bytes
    for free_bytes in (needed, 2 * needed):
        set_free_ram(free_bytes)
        described = facts_room.describe(nn.Linear(5, 4), workload.dataset(), torch.device("cpu"), n_ranks=2)
        plan, notes = facts_room.resolve_plan(plan_of(AUTO), described, world=Told(rank=1, n_ranks=2))
        assert (plan["placement"], notes) == ("stream", ["placement: auto is stream: rank 0 says so"])
    assert offered == ["memory_map", "ram"]
