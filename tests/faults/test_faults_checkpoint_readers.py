"""Checkpoints that are read while another process saves."""

import multiprocessing
import os
import time

import pytest
import torch

from fulltilt.engine.checkpoints import checkpoint
from fulltilt.engine.checkpoints.checkpoint import load_checkpoint, save_checkpoint

FORK = multiprocessing.get_context("fork")


def build_state(n):
    return {"n": n, "weights": torch.full((50,), float(n))}


def read_until_the_end(folder, last, saved, answers):
    """Whole, and never older than the newest that was saved when the reading began."""
    n_read = 0
    while True:
        newest = saved.value
        loaded = load_checkpoint(folder)
        n = loaded.state["n"]
        if loaded.note or n < newest or not torch.equal(loaded.state["weights"], build_state(n)["weights"]):
            answers.put(f"{newest} was saved, {n} was read ({loaded.note})")
            return
        n_read += 1
        if n == last:
            answers.put(n_read)
            return


@pytest.mark.parametrize("n_saves", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_four_readers_find_the_newest_whole_at_every_moment_while_one_process_saves(tmp_path, n_saves):
    save_checkpoint(tmp_path, build_state(0))
    answers, saved = FORK.SimpleQueue(), FORK.Value("i", 0)
    readers = [FORK.Process(target=read_until_the_end, args=(tmp_path, n_saves, saved, answers)) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        for n in range(1, n_saves + 1):
            save_checkpoint(tmp_path, build_state(n))
            saved.value = n
        found = [answers.get() for _ in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.join()
    assert all(isinstance(answer, int) and answer > 1 for answer in found), found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.previous.pt", "checkpoint.pt"]
    assert load_checkpoint(tmp_path).state["n"] == n_saves


@pytest.mark.parametrize("has_links", [True, False])
def test_the_newest_name_exists_at_every_moment_of_a_save(tmp_path, monkeypatch, has_links):
    for n in range(2):
        save_checkpoint(tmp_path, build_state(n))
    seen = []
    for name in ("rename", "replace"):
        rename = getattr(os, name)

        def look(*names, _rename=rename, **options):
            _rename(*names, **options)
            seen.append((tmp_path / "checkpoint.pt").exists())

        monkeypatch.setattr(os, name, look)
    if not has_links:
        monkeypatch.setattr(os, "link", lambda *names, **options: (_ for _ in ()).throw(OSError("no links here")))
    save_checkpoint(tmp_path, build_state(2))
    assert seen == [True, True]
    assert torch.load(tmp_path / "checkpoint.previous.pt", weights_only=True)["n"] == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_only_who_holds_the_lock_renames_a_damaged_checkpoint_and_one_being_replaced_is_read_again(
    tmp_path, monkeypatch
):
    for n in range(2):
        save_checkpoint(tmp_path, build_state(n))
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    loaded = load_checkpoint(tmp_path)
    assert (loaded.state["n"], loaded.path.name) == (0, "checkpoint.previous.pt")
    assert (tmp_path / "checkpoint.pt").exists()
    load_checkpoint(tmp_path, holds_lock=True)
    assert (tmp_path / "checkpoint.damaged.pt").read_bytes() == b"no checkpoint"
    save_checkpoint(tmp_path, build_state(1))
    newest = tmp_path / "checkpoint.pt"
    good = newest.read_bytes()
    newest.write_bytes(good[:100])
    read = checkpoint.read_state

    def read_and_mend(path):
        try:
            return read(path)
        finally:
            if len(newest.read_bytes()) == 100:
                time.sleep(0.01)
                newest.write_bytes(good)

    monkeypatch.setattr(checkpoint, "read_state", read_and_mend)
    assert load_checkpoint(tmp_path).state["n"] == 1
