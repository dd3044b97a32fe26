"""Transforms taken out of a dataset and run on whole batches: the same images, and no way to lose them."""

import sysconfig
from pathlib import Path

import pytest
import torch
from data_cases import assert_equal, make_generator, write_images
from torch.utils.data import TensorDataset

from fulltilt.config import config_from_values, plan_of
from fulltilt.data import DATASETS, BatchTransform, build_loader, build_pipeline, find_placements, find_transforms
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.data.transforms.batch_transform import detach_transform
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.loop.evaluate import build_validation_loader, evaluate
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import DataError, PlanObstacleError
from fulltilt.hardware import has_c_compiler
from fulltilt.levers import Facts, default_plan, find_obstacles, load_catalogue
from fulltilt.measure import NullTimer

AUGMENT = "random_crop(8, padding=2) | random_flip | color_jitter(0.3, 0.3) | normalize(mean=[0.5], std=[0.25])"
PLAIN = "normalize(mean=[0.5], std=[0.25])"


def make_images(n=12, c=1, side=8):
    return torch.randint(0, 256, (n, c, side, side), dtype=torch.uint8, generator=make_generator())


def make_dataset(transform=PLAIN, n=12):
    pipeline = build_pipeline(transform) if isinstance(transform, str) else transform
    return MemoryImages("own", make_images(n), torch.arange(n) % 3, classes="abc", transform=pipeline)


def make_config(**data):
    values = {"dataset": "digits", "batch_size": 256, "transform": {"train": PLAIN, "val": PLAIN}, **data}
    given = {"task": "classification", "model": "small_cnn", "data": values, "run": {"seed": 3}}
    return config_from_values(given, base_dir=".")


def test_a_detached_dataset_hands_out_what_was_read_and_the_pipeline_gives_the_same_batch():
    dataset = make_dataset()
    raw, pipeline = detach_transform(dataset)
    images, targets = raw.get_batch([3, 1, 2])
    assert images.dtype == torch.uint8
    assert torch.equal(images, make_images()[[3, 1, 2]])
    expected, expected_targets = dataset.get_batch([3, 1, 2])
    assert torch.equal(pipeline(images), expected)
    assert torch.equal(targets, expected_targets)
    assert dataset.get_batch([0])[0].dtype == torch.float32, "the dataset itself stays as it is"


def test_what_brings_images_of_a_folder_to_one_size_stays_with_it(tmp_path):
    folder = write_images(tmp_path, {"a": (20, 30), "b": (25, 16)})
    dataset = DATASETS["image_folder"](path=str(folder), transform="resize(12) | random_flip | random_crop(10)")
    raw, pipeline = detach_transform(dataset)
    images, _ = raw.get_batch([0, len(raw) - 1])
    assert images.shape == (2, 3, 12, 12)
    assert images.dtype == torch.uint8
    assert pipeline(images).shape == (2, 3, 10, 10)


def test_a_folder_of_images_of_one_size_transforms_them_all_at_once_and_alike(tmp_path):
    folder = write_images(tmp_path, {"a": (16, 16), "b": (16, 16)})
    dataset = DATASETS["image_folder"](path=str(folder), transform="random_resized_crop(8) | random_flip")
    whole, _ = dataset.get_batch([0, 1, 2], generator=make_generator(4))
    sizing, rest = dataset.transform.split_at_size()
    generator = make_generator(4)
    u_BD = torch.rand(3, sizing.steps[0].n_draws, generator=generator)
    sized = [sizing.apply_steps(dataset.decode(i)[None], u_BD[i : i + 1]) for i in range(3)]
    assert torch.equal(whole, rest(torch.cat(sized), generator))


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (make_dataset(), "pipeline"),
        (make_dataset(None), "pipeline"),
        (make_dataset(lambda image: image), "own"),
        (TensorDataset(torch.rand(3, 2), torch.rand(3)), "none"),
    ],
)
def test_only_a_pipeline_can_be_taken_out(dataset, kind):
    assert find_transforms(dataset) == kind
    obstacles = find_obstacles(default_plan({"transforms": "device"}), Facts(device_type="cpu", transforms=kind))
    assert bool(obstacles) is (kind != "pipeline")
    if kind == "own":
        with pytest.raises(DataError, match=r"use data\.transforms loader"):
            detach_transform(dataset)


def darken():
    return lambda image: image // 2


def test_a_step_of_the_users_own_keeps_the_pipeline_in_the_loader():
    config = make_config(transform="test_data_batch_transform:darken()", transforms="device")
    with pytest.raises(PlanObstacleError, match="a transform of your own works image by image"):
        build_run(config, plan_of(config), device="cpu")


def train_losses(config, n_epochs=1):
    losses = []
    with build_run(config, plan_of(config), device="cpu") as run:
        step = TrainStep(run)
        for epoch in range(n_epochs):
            batches = run.start_epoch(epoch)
            while (outcome := step(batches, NullTimer())) is not None:
                losses.append(float(outcome.loss))
        return losses, evaluate(run, build_validation_loader(run))


def test_where_nothing_is_random_training_and_evaluation_are_the_same_on_the_device():
    by_loader = train_losses(make_config())
    for options in ({}, {"placement": "ram"}, {"num_workers": 1}):
        assert train_losses(make_config(transforms="device", **options)) == by_loader


def test_random_transforms_on_the_device_follow_the_seed_of_the_run_and_never_reach_validation():
    config = make_config(transform={"train": AUGMENT, "val": PLAIN}, transforms="device")
    first = train_losses(config)
    assert train_losses(config) == first
    assert train_losses(make_config(transforms="device"))[0] != first[0]
    with build_run(config, plan_of(config), device="cpu") as run:
        loader = build_validation_loader(run)
        images, _ = next(iter(loader))
        assert images.dtype == torch.uint8
        assert torch.equal(loader.transform(images), build_pipeline(PLAIN)(images))


def test_images_leave_in_the_memory_format_of_the_run_and_a_batch_that_is_no_pair_is_refused():
    transform = BatchTransform(build_pipeline("random_flip"), memory_format=torch.channels_last)
    out, _ = transform((make_images(4, 3), torch.zeros(4)), torch.Generator())
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert out.dtype == torch.float32
    with pytest.raises(DataError, match="a batch is 3 parts"):
        BatchTransform(None)((torch.rand(2), torch.rand(2), torch.rand(2)), torch.Generator())


# Inductor imports a part of torch that uses torch's own deprecated decorator.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.skipif(
    not (has_c_compiler() and Path(sysconfig.get_path("include"), "Python.h").exists()),
    reason="torch.compile needs a C++ compiler and Python's headers, and one of them was not found",
)
def test_a_compiled_pipeline_gives_the_same_images_for_the_same_seed():
    with torch._inductor.config.patch(compile_threads=1):
        plain, compiled = (BatchTransform(build_pipeline(AUGMENT)) for _ in range(2))
        notes: list[str] = []
        compiled.compile(notes)
        batch = make_images(16), torch.arange(16)
        out, expected = (transform(batch, make_generator(1))[0] for transform in (compiled, plain))
    assert notes == []
    assert compiled.graphs.n_runs == 1
    torch.testing.assert_close(out, expected, atol=2 / 255 / 0.25, rtol=0)


def test_a_pipeline_that_does_not_compile_goes_on_without_and_says_so(monkeypatch):
    from torch._dynamo.exc import Unsupported

    transform = BatchTransform(build_pipeline(PLAIN))
    notes: list[str] = []
    transform.compile(notes)

    def refuse(*arguments):
        raise Unsupported("an operator that no graph can hold")

    monkeypatch.setattr(transform, "_apply", refuse)
    batch = make_images(4), torch.arange(4)
    for _ in range(2):
        out, _ = transform(batch, torch.Generator())
        assert torch.equal(out, build_pipeline(PLAIN)(batch[0]))
    assert len(notes) == 1
    assert "could not be compiled and run as they are (an operator that no graph can hold" in notes[0]


def test_a_folder_is_decoded_once_when_it_is_placed_in_memory_or_names_what_is_of_another_size(tmp_path):
    folder = write_images(tmp_path, {"a": (20, 30), "b": (25, 16)})
    dataset = DATASETS["image_folder"](path=str(folder), transform="resize(12) | random_flip(1.0)", val_fraction=0.25)
    assert find_placements(dataset) == ("stream", "ram", "device")
    assert dataset.held_bytes == len(dataset) * (3 * 12 * 12 + 8)
    options = {"placement": "ram"}
    loader = build_loader(dataset, batch_size=len(dataset), shuffle=False, drop_last=False, seed=0, options=options)
    expected = dataset.get_batch(range(len(dataset)))
    for file in folder.rglob("*.png"):
        file.unlink()
    assert loader.dataset.source.placement == "ram"
    assert_equal(loader, [expected])
    folder = write_images(tmp_path / "again", {"a": (20, 30), "b": (25, 16)})
    dataset = DATASETS["image_folder"](path=str(folder), transform="random_resized_crop(8)")
    with pytest.raises(DataError, match=r"b/\d+\.png is 16 × 25 pixels and the first image 30 × 20 pixels"):
        dataset.hold(torch.device("cpu"))


HELD = {"placements": ("stream", "ram", "device"), "is_held": True, "data_bytes": 1, "free_ram_bytes": 100}


@pytest.mark.parametrize(
    ("lever", "device", "facts", "expected"),
    [
        ("transforms", "cuda", {"transforms": "pipeline"}, ("loader", "device")),
        ("transforms", "cuda", {"transforms": "own"}, ("loader",)),
        ("transforms", "cpu", {"transforms": "pipeline"}, ("loader",)),
        ("transforms", "cuda", {}, ("loader",)),
        ("placement", "cpu", HELD, ("stream",)),  # where they lie already
        ("placement", "cuda", {"free_device_bytes": 100, **HELD}, ("stream", "ram", "device")),
    ],
)
def test_the_search_offers_what_a_device_and_a_pipeline_allow(lever, device, facts, expected):
    assert load_catalogue()[lever].candidates(Facts(device_type=device, **facts)) == expected


def test_rows_on_the_device_need_their_transforms_there():
    facts = Facts(device_type="cuda", placements=("stream", "ram", "device"), transforms="pipeline")
    obstacles = find_obstacles(default_plan({"placement": "device"}), facts)
    assert "set transforms to device" in obstacles[0]
    assert find_obstacles(default_plan({"placement": "device", "transforms": "device"}), facts) == []


@pytest.mark.parametrize("mix", ["mixup(alpha=1)", "cutmix"])
def test_mixing_reaches_training_and_not_evaluation(mix):
    mixed, metrics = train_losses(make_config(mix=mix), 2)
    assert train_losses(make_config(), 2)[0] != mixed
    assert 0.5 < metrics["accuracy"] <= 1
    assert train_losses(make_config(mix=mix), 2)[0] == mixed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_images_on_a_gpu_are_gathered_and_transformed_there_without_a_wait():
    config = make_config(transform={"train": AUGMENT, "val": PLAIN}, transforms="device", placement="device")
    with build_run(config, plan_of(config), device="cuda") as run:
        step = TrainStep(run)
        batches = run.start_epoch(0)
        step(batches, NullTimer())
        torch.cuda.set_sync_debug_mode("error")
        try:
            images, targets = next(batches)
            images, _ = run.transform((images, targets), run.generator)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert images.is_cuda
        assert images.dtype == torch.float32
