"""A contrastive configuration: pre-training, linear probe and clusters; each phase goes on where it was left."""

from __future__ import annotations

import functools
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from training_cases import assert_equal_weights, read_state

from fulltilt.cli import run_command
from fulltilt.config import config_from_values, load_config, plan_of
from fulltilt.engine.build.assemble import build_workload
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.checkpoints.checkpoint import LoadedCheckpoint
from fulltilt.engine.checkpoints.export import find_evaluated, read_weights
from fulltilt.engine.contrastive import phases
from fulltilt.engine.contrastive.options import PhaseOptions
from fulltilt.engine.contrastive.phases import run_phase
from fulltilt.engine.step.cached_step import CachedStep, build_step
from fulltilt.errors import RunFolderError, UsageError
from fulltilt.measure import NullTimer
from fulltilt.report.training import read_end

SIDE, N_CLASSES = 8, 3
OPTIONS = PhaseOptions(probe_epochs=20, cluster_epochs=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images in STL-10's format whose class is a pattern under noise."""
    folder = tmp_path_factory.mktemp("stl")
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 200, (N_CLASSES, 3, SIDE, SIDE))
    for name, n in (("train", 48), ("test", 24), ("unlabeled", 36)):
        targets = np.arange(n) % N_CLASSES
        noise = rng.integers(0, 55, (n, 3, SIDE, SIDE))
        (folder / f"{name}_X.bin").write_bytes((patterns[targets] + noise).astype(np.uint8).tobytes())
        if name != "unlabeled":
            (folder / f"{name}_y.bin").write_bytes((targets + 1).astype(np.uint8).tobytes())
    (folder / "class_names.txt").write_text("a\nb\nc\n")
    return folder


def build_values(folder, **changes):
    values = {
        "task": "contrastive(projector=8)",
        "model": "small_cnn(width=4)",
        "data": {"dataset": "stl10(part=train+unlabeled)", "path": str(folder), "batch_size": 12},
        "speed": {"accumulate": 2, "threads": 1},
        "optim": {"lr": 3e-3},
        "run": {"epochs": 2, "device": "cpu", "seed": 1, "log_every_n_steps": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values[section] = values[section] | {name: value} if name else value
    return values


def build_config(folder, **changes):
    return config_from_values(build_values(folder, **changes), base_dir=".")


def build(folder, **changes):
    config = build_config(folder, **changes)
    return build_run(config, plan_of(config), device="cpu")


def run(phase, folder, out_dir, *, resume=False, **changes):
    config = build_config(folder, **changes)
    return run_phase(phase, config, out_dir=out_dir, place=lambda usual, *_: (usual, [], resume), options=OPTIONS)


def test_a_step_trains_on_two_views_of_uint8_images(folder):
    run = build(folder, speed={"accumulate": 2, "threads": 1, "channels_last": True, "precision": "bf16"})
    batch = next(run.start_epoch(0))
    assert batch[0].dtype == torch.uint8
    inputs, _ = run.workload.prepare(batch, run.generator)
    assert inputs.shape == (24, 3, SIDE, SIDE)
    assert inputs.dtype == torch.float32
    assert not torch.equal(inputs[0], inputs[1])
    step = build_step(run)
    assert type(step) is CachedStep
    outcome = step(run.start_epoch(0), NullTimer())
    assert (outcome.n_samples, outcome.n_micro) == (24, 2)
    assert outcome.loss < 1.5 * np.log(2 * 24 - 1)
    assert run.setup.state["input_channels_last"]
    assert run.setup.state["autocast_dtype"] is torch.bfloat16
    assert any("46 negatives per anchor" in note for note in run.notes)
    assert any("knn_accuracy" in note and "48 labelled" in note for note in run.notes)


def test_plain_accumulation_says_how_few_negatives_it_has(folder):
    run = build(folder, task="contrastive(exact_batch=false)")
    assert type(build_step(run)) is not CachedStep
    assert any("22 negatives per anchor" in note and "46" in note for note in run.notes)


def test_the_configured_transform_makes_the_views(folder):
    transform = {"train": "random_crop(4) | normalize", "val": "center_crop(4) | normalize"}
    run = build(folder, data__transform=transform)
    inputs, _ = run.workload.prepare(next(run.start_epoch(0)), run.generator)
    assert inputs.shape[-2:] == (4, 4)
    assert inputs.min() < 0, "normalized"
    bank, _ = run.workload.assess.labelled()
    assert bank.get_batch([0])[0].shape[-2:] == (4, 4)
    torch.testing.assert_close(bank.get_batch([5])[0], bank.get_batch([5])[0], rtol=0, atol=0)


@pytest.fixture(scope="module")
def image_files(folder, tmp_path_factory):
    """The same images as files, one folder a class."""
    out = tmp_path_factory.mktemp("files")
    for split in ("train", "test"):
        pixels = np.fromfile(folder / f"{split}_X.bin", dtype=np.uint8).reshape(-1, 3, SIDE, SIDE)
        targets = np.fromfile(folder / f"{split}_y.bin", dtype=np.uint8)
        for number, (image, target) in enumerate(zip(pixels, targets, strict=True)):
            path = out / split / "abc"[target - 1] / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(2, 1, 0)).save(path)  # column by column there, row by row here
    return out


def test_images_of_a_folder_go_through_all_phases(image_files, tmp_path):
    data = {"dataset": "image_folder", "path": str(image_files), "batch_size": 12}
    with build(image_files, data=data) as built:
        images, _ = next(built.start_epoch(0))
    assert images.dtype == torch.uint8, "views are made of what was read"
    assert any("48 labelled" in note for note in built.notes)
    found = {phase: run(phase, image_files, tmp_path, data=data) for phase in ("pretrain", "probe", "cluster")}
    assert found["probe"].metrics["accuracy"] > 0.8
    assert {"cluster_accuracy", "nmi", "purity", "f1"} == set(found["cluster"].metrics)


@pytest.mark.parametrize("phase", ["pretrain", "probe", "cluster"])
def test_a_phase_that_was_left_ends_as_if_it_had_not_been(folder, tmp_path, phase, monkeypatch):
    if phase != "pretrain":
        for out_dir in (tmp_path / "whole", tmp_path / "left"):
            run("pretrain", folder, out_dir)
    whole = run(phase, folder, tmp_path / "whole")
    monkeypatch.setattr(phases, "train", functools.partial(phases.train, max_steps=3))
    left = run(phase, folder, tmp_path / "left")
    assert left.step == 3 < whole.step
    monkeypatch.undo()
    resumed = run(phase, folder, tmp_path / "left", resume=True)
    assert (resumed.step, resumed.metrics) == (whole.step, whole.metrics)
    assert_equal_weights(*(read_state(tmp_path / name / phase)["model"] for name in ("left", "whole")))


def test_features_are_read_from_the_disk_the_second_time(folder, tmp_path, monkeypatch):
    run("pretrain", folder, tmp_path)
    run("probe", folder, tmp_path)
    assert {path.name.split("-")[0] for path in (tmp_path / "features").iterdir()} == {"labelled", "validation"}

    extract, encoded = phases.extract_features, []

    def count(encode, dataset, rows, *args, **options):
        encoded.append(len(rows))
        return extract(encode, dataset, rows, *args, **options)

    monkeypatch.setattr(phases, "extract_features", count)
    run("cluster", folder, tmp_path)
    assert encoded == [36], "only the unlabelled images are new"
    with pytest.raises(RunFolderError, match="of another run"):
        run("cluster", folder, tmp_path, resume=True, data__val_dataset="stl10(part=train)")
    assert len(list((tmp_path / "features").glob("validation-*"))) == 2, "other validation images are encoded anew"


def test_a_probe_of_another_encoder_is_another_run(folder, tmp_path):
    run("pretrain", folder, tmp_path)
    run("probe", folder, tmp_path)
    run("pretrain", folder, tmp_path, resume=True, run__epochs=3)
    with pytest.raises(RunFolderError):
        run("probe", folder, tmp_path, resume=True)


def test_a_tied_weight_of_the_encoder_is_the_average_under_both_names(folder, tmp_path, monkeypatch):
    """the raw weight of the second name was loaded over the average of the first"""
    run("pretrain", folder, tmp_path, optim__ema=0.5)
    path = tmp_path / "pretrain" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    name, weights = "backbone.blocks.0.0.weight", read_weights(state, find_evaluated(state))
    assert torch.equal(weights[name], state["average"]["weights"][name]), "as evaluations took it"
    assert not torch.equal(weights[name], state["model"][name])
    assert weights.keys() == state["model"].keys()
    state["model"]["again"] = state["model"][name]
    seen, loaded = {}, LoadedCheckpoint(state=state, path=path, note=None)
    monkeypatch.setattr(phases.checkpoint, "load_checkpoint", lambda _: loaded)
    monkeypatch.setattr(phases.checkpoint, "load_model_state", lambda model, weights, path: seen.update(weights))
    run("probe", folder, tmp_path)
    assert torch.equal(seen["again"], state["average"]["weights"][name])


def test_a_probe_needs_an_encoder_of_a_contrastive_task(folder, tmp_path):
    with pytest.raises(UsageError, match="run the phase pretrain first"):
        run("probe", folder, tmp_path)
    with pytest.raises(UsageError, match="task: contrastive"):
        run("probe", folder, tmp_path, task="classification", data={"dataset": "digits"})


@pytest.fixture
def file(folder, tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps(build_values(folder)))
    return str(tmp_path / "c.yaml")


def test_the_command_runs_all_phases_and_writes_json(file, tmp_path, capsys):
    words = ["contrastive", file, "--out", str(tmp_path / "out"), "--json", str(tmp_path / "r.json"), "--quiet"]
    options = ["--probe-epochs", "5", "--cluster-epochs", "5", "--epochs", "1"]
    assert run_command([*words, *options]) == 0
    said = capsys.readouterr().out
    for text in ("pretrain: knn_accuracy", "probe: loss", "cluster: cluster_accuracy"):
        assert text in said
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["version"] == 1
    assert list(document["phases"]) == ["pretrain", "probe", "cluster"]
    assert 0 <= document["phases"]["cluster"]["metrics"]["nmi"] <= 1
    metrics = {phase: document["phases"][phase]["metrics"] for phase in document["phases"]}
    assert set(metrics["pretrain"]) == {"knn_accuracy"}
    assert set(metrics["cluster"]) == {"cluster_accuracy", "nmi", "purity", "f1"}
    events = {path: path.read_text() for path in (tmp_path / "out").rglob("events.jsonl")}
    for more in ([], ["--resume"]):
        assert run_command([*words, *options, *more]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("Complete already: pretrain: knn_accuracy ")
        again = json.loads((tmp_path / "r.json").read_text())["phases"]
        assert {phase: again[phase]["metrics"] for phase in again} == metrics, "no phase is trained again"
        assert {path: path.read_text() for path in events} == events
    assert run_command([*words, "--phases", "cluster", "--cluster-epochs", "5"]) == 0
    assert run_command([*words, "--epochs", "2"]) == 2, "another length, in a folder that was named"
    assert "--resume" in capsys.readouterr().err


def read_epochs(folder):
    """How many epochs each run in a folder was to take, by its place."""
    return {str(path.parent.relative_to(folder)): read_end(path.parent)[0] for path in folder.rglob("events.jsonl")}


def test_the_same_command_goes_on_where_it_was_left_and_another_one_gets_folders_of_its_own(
    file, tmp_path, monkeypatch, capsys
):
    """It was refused, and one with other clusters too."""
    monkeypatch.chdir(tmp_path)
    words = ["contrastive", file, "--epochs", "1", "--probe-epochs", "2", "--cluster-epochs", "2"]
    out = tmp_path / "runs" / "contrastive"
    assert run_command(words) == 0
    left = out / "c" / "probe" / "events.jsonl"
    left.write_text(left.read_text().replace('"finished"', '"interrupted"'))
    capsys.readouterr()
    assert run_command(words) == 0
    said = capsys.readouterr().out
    assert "note: the checkpoint is at step" in said, "of the probe alone"
    assert re.search("^Complete already: pretrain: .*; cluster: .*; files: runs/contrastive/c$", said, re.M)
    assert run_command([*words, "--clusters", "2", "--phases", "cluster"]) == 0
    said = capsys.readouterr().out
    assert "c/cluster holds another run (changed: workload 3 clusters of" in said
    assert read_epochs(out) == {"c/pretrain": 1, "c/probe": 2, "c/cluster": 2, "c/cluster-2": 2}
    assert run_command([*words, "--phases", "pretrain", "--epochs", "2"]) == 0
    assert "c holds another run (changed: run.epochs 1 → 2): this one is in" in capsys.readouterr().out
    assert read_epochs(out)["c-2/pretrain"] == 2
    for more in ([], ["--resume"]):
        assert run_command([*words, "optim.lr=1", "--phases", "probe", *more]) == 2
        assert "there is no checkpoint in runs/contrastive/c-3/pretrain" in capsys.readouterr().err
    left = out / "c" / "cluster" / "events.jsonl"
    left.write_text(left.read_text().replace('"finished"', '"failed: no more"'))
    assert run_command(words) == 2
    assert "cluster holds a checkpoint of this run; go on with --resume" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--clusters", "1"], ["--clear-share", "0"], ["--probe-epochs", "0"]])
def test_flags_out_of_range_are_told(file, flags, capsys):
    assert run_command(["contrastive", file, *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_the_configuration_of_the_guide_says_what_the_guide_says_and_builds_on_images_in_the_format(folder):
    config = load_config("configs/stl10_config.yaml")
    assert (config.data.batch_size, config.data.num_workers, config.data.pin_memory) == (128, 6, True)
    assert (config.speed.accumulate, config.speed.precision, config.speed.cudnn_benchmark) == (4, "auto", True)
    assert config.speed.empty_cache_every == "5 epochs"
    assert "gradient_accumulation" in config.provenance["speed.accumulate"]
    words = [f"data.path={folder}", "data.batch_size=8", "model=small_cnn(width=4)"]
    workload = build_workload(load_config("configs/stl10_config.yaml", words))
    assert workload.couples_samples
    assert "1,022 negatives" in workload.explain(128, 4)[0]
    assert workload.model().encode(torch.zeros(2, 3, SIDE, SIDE)).shape == (2, 16)
