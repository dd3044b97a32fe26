"""Checkpoints: whole or absent, readable without running code, and clear when they do not fit."""

import os
import random
import subprocess
import sys
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from training_cases import assert_equal_weights

from fulltilt.engine.checkpoints.checkpoint import (
    FORMAT,
    check_finite,
    load_checkpoint,
    load_model_state,
    load_part_state,
    make_plain,
    save_checkpoint,
)
from fulltilt.engine.checkpoints.files import NEWEST, PREVIOUS, find_checkpoint
from fulltilt.engine.step.rng import capture_rng, restore_rng
from fulltilt.errors import DeviceMemoryError, NonFiniteLossError, RunFolderError, StorageError, UsageError


def state_of(step):
    return {"step": step, "weights": torch.arange(10_000, dtype=torch.float32) + step}


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints, of steps 1 and 2."""
    for step in (1, 2):
        save_checkpoint(tmp_path, state_of(step))
    return tmp_path


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip_byte(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


def test_the_newest_comes_back_and_the_one_before_is_kept(tmp_path):
    assert load_checkpoint(tmp_path) is None
    assert not find_checkpoint(tmp_path)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, state_of(step))
    loaded = load_checkpoint(tmp_path)
    assert (loaded.state["step"], loaded.note) == (3, None)
    assert torch.equal(loaded.state["weights"], state_of(3)["weights"])
    assert torch.load(tmp_path / PREVIOUS, weights_only=True)["step"] == 2
    assert list_names(tmp_path) == [PREVIOUS, NEWEST]
    (tmp_path / NEWEST).unlink()
    assert find_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path).state["step"] == 2


DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "no archive": lambda path: path.write_text("<html>404</html>"),
    "a flipped byte in a weight": lambda path: flip_byte(path, path.stat().st_size // 2),
    "of another program": lambda path: torch.save({"state_dict": {}}, path),
    "a pickle that runs code": lambda path: torch.save({"format": FORMAT, "x": Harmful()}, path),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("/tmp/fulltilt-was-here",)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_gives_way_to_the_one_before_and_does_not_take_its_place(folder, damage):
    DAMAGES[damage](folder / NEWEST)
    loaded = load_checkpoint(folder, holds_lock=True)
    assert loaded.state["step"] == 1
    assert f"{NEWEST} cannot be read" in loaded.note
    assert f"going on from {PREVIOUS}" in loaded.note
    assert not os.path.exists("/tmp/fulltilt-was-here")
    save_checkpoint(folder, state_of(3))
    os.truncate(folder / NEWEST, 100)
    assert load_checkpoint(folder).state["step"] == 1


def test_a_checkpoint_with_code_in_it_is_called_hostile_and_torchs_advice_to_load_it_is_left_out(folder):
    DAMAGES["a pickle that runs code"](folder / NEWEST)
    said = load_checkpoint(folder, holds_lock=True).note
    assert "loading it could run code; fulltilt writes no such file: do not trust it" in said
    assert "weights_only" not in said


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError("no room")])
def test_want_of_memory_is_no_damage(folder, monkeypatch, error):
    """A good checkpoint was renamed to a damaged one, and the run went back to the one before."""
    monkeypatch.setattr(torch, "load", Mock(side_effect=error))
    with pytest.raises(DeviceMemoryError, match="takes more host memory to be read than is left"):
        load_checkpoint(folder, holds_lock=True)
    assert list_names(folder) == [PREVIOUS, NEWEST]


def test_when_none_can_be_read_both_are_named(folder):
    for name in (NEWEST, PREVIOUS):
        os.truncate(folder / name, 100)
    with pytest.raises(RunFolderError, match=rf"{NEWEST}.*{PREVIOUS}.*another folder"):
        load_checkpoint(folder)


@pytest.mark.parametrize(("number", "release"), [(FORMAT - 1, "older"), (99, "newer")])
def test_another_format_is_not_taken_for_damage(tmp_path, number, release):
    save_checkpoint(tmp_path, state_of(1))
    torch.save({"format": number, "step": 2}, tmp_path / NEWEST)
    with pytest.raises(RunFolderError, match=f"{release} fulltilt"):
        load_checkpoint(tmp_path)


def test_a_failed_save_leaves_both_generations_and_no_rest(folder):
    with pytest.raises(TypeError, match="cannot pickle"):
        save_checkpoint(folder, {"weights": torch.zeros(1000), "bad": threading.Lock()})
    assert list_names(folder) == [PREVIOUS, NEWEST]
    assert load_checkpoint(folder).state["step"] == 2


SAVE_WITH_LITTLE_ROOM = """
import pathlib, resource, signal, sys, torch
from fulltilt.engine.checkpoints.checkpoint import save_checkpoint
from fulltilt.errors import StorageError

sys.dont_write_bytecode = True  # Python 3.11 keeps a file of its own that the limit cut short
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        save_checkpoint(pathlib.Path(sys.argv[1]), {"step": 2, "weights": torch.zeros(100_000)})
    except StorageError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        print(limit, error, flush=True)
"""


def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path):
    """The kernel refuses at different places of the archive: its head, a tensor, its table of contents."""
    limits_bytes = [0, 100, 50_000, 399_000, 400_300]
    save_checkpoint(tmp_path, state_of(1))
    command = [sys.executable, "-c", SAVE_WITH_LITTLE_ROOM, str(tmp_path), *map(str, limits_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == limits_bytes
    assert all("cannot be written" in line for line in lines)
    assert list_names(tmp_path) == [NEWEST]
    assert load_checkpoint(tmp_path).state["step"] == 1


def test_a_folder_that_is_a_file_is_a_storage_error(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(StorageError):
        save_checkpoint(tmp_path / "out", state_of(1))


def test_every_generator_comes_back(tmp_path):
    def draw():
        prepare = torch.randn(2, generator=generator).tolist()
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss(0, 1), prepare

    generator = torch.Generator().manual_seed(5)
    random.gauss(0, 1)  # leaves a second value waiting inside the generator
    np.random.randn()
    save_checkpoint(tmp_path, {"rng": capture_rng({"prepare": generator})})
    expected = draw()
    draw()
    restore_rng(load_checkpoint(tmp_path).state["rng"], {"prepare": generator})
    assert draw() == expected


def test_another_model_is_told_by_names_and_shapes_and_another_optimizer_too():
    saved = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).state_dict()
    model = nn.Sequential(nn.Linear(4, 16), nn.Identity(), nn.Linear(16, 3), nn.Linear(3, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RunFolderError) as caught:
        load_model_state(model, saved, "checkpoint.pt")
    for words in (
        "2 missing: 3.weight, 3.bias",
        "5 unexpected: 1.weight, 1.bias, 1.running_mean, 1.running_var and 1 more",
        "0.weight (8, 4) instead of (16, 4)",
    ):
        assert words in str(caught.value)
    assert_equal_weights(model.state_dict(), before)
    one = nn.Linear(2, 2)
    saved = torch.optim.SGD([{"params": [one.weight]}, {"params": [one.bias]}], lr=0.1).state_dict()
    with pytest.raises(RunFolderError, match=r"optimizer in checkpoint\.pt does not fit AdamW"):
        load_part_state("optimizer", torch.optim.AdamW(one.parameters()), saved, "checkpoint.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_single_bad_weight_is_found(value, dtype):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(dtype)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    check_finite(model, step=1)
    model[1].bias.data[2] = value
    with pytest.raises(NonFiniteLossError, match=r"after step 7 1 of 4 .* first 1\.bias"):
        check_finite(model, step=7)


def test_numbers_of_numpy_are_written_as_what_can_be_read_back(tmp_path):
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter], lr=np.float64(0.1), betas=(np.float64(0.5), 0.9))
    parameter.grad = torch.ones(2)
    optimizer.step()
    save_checkpoint(tmp_path, {"optimizer": make_plain(optimizer.state_dict(), "optimizer")})
    loaded = load_checkpoint(tmp_path).state["optimizer"]
    assert loaded["param_groups"][0]["lr"] == 0.1
    assert loaded["param_groups"][0]["betas"] == (0.5, 0.9)
    assert torch.equal(loaded["state"][0]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_an_object_in_a_state_is_named_before_anything_is_written():
    with pytest.raises(UsageError, match=r"optimizer\.state\.0\.kind is of type Harmful"):
        make_plain({"state": {0: {"kind": Harmful()}}}, "optimizer")
