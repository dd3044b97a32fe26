"""Transforms, by their effect on pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from fulltilt.data import TRANSFORMS, build_pipeline
from fulltilt.data.transforms.colors import ColorJitter, Grayscale, Normalize
from fulltilt.data.transforms.steps import CenterCrop, Cutout, RandomCrop, RandomFlip, RandomResizedCrop, Resize
from fulltilt.errors import ConfigError, DataError


def make_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_images(n=8, c=3, h=16, w=20, seed=0):
    return torch.randint(0, 256, (n, c, h, w), dtype=torch.uint8, generator=make_generator(seed))


def test_random_crop_takes_windows_of_the_padded_image_at_many_places():
    image = torch.arange(1, 1 + 6 * 6, dtype=torch.uint8).reshape(1, 1, 6, 6)
    padded = torch.nn.functional.pad(image, (2,) * 4)[0, 0]
    crops = RandomCrop(6, padding=2)(image.expand(400, -1, -1, -1), make_generator())
    places = {
        (top, left)
        for crop in crops
        for top in range(5)
        for left in range(5)
        if torch.equal(padded[top : top + 6, left : left + 6], crop[0])
    }
    assert crops.shape == (400, 1, 6, 6)
    assert crops.dtype == torch.uint8
    assert len(places) == 25  # every window, and (sum below) no crop that is none
    windows = [padded[t : t + 6, l : l + 6] for t in range(5) for l in range(5)]  # noqa: E741
    assert all(any(torch.equal(crop[0], window) for window in windows) for crop in crops)


def test_random_crop_keeps_channels_of_one_window_together():
    image = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8).expand(50, 3, -1, -1)
    crops = RandomCrop(4)(image, make_generator())
    assert torch.equal(crops[:, 0], crops[:, 1])
    assert torch.equal(crops[:, 0], crops[:, 2])


def test_random_crop_reflect_mirrors_the_border_as_numpy_does():
    image = make_images(1, 1, 5, 6)
    step = RandomCrop(9, 10, padding=2, mode="reflect")
    expected = np.pad(image[0, 0].numpy(), 2, mode="reflect")
    assert np.array_equal(step(image, make_generator())[0, 0].numpy(), expected)


def test_random_flip_flips_whole_images_at_its_probability():
    n = 4000
    images = torch.arange(12, dtype=torch.uint8).reshape(1, 1, 3, 4).expand(n, -1, -1, -1)
    out = RandomFlip(0.25)(images, make_generator())
    flipped = (out == images.flip(-1)).flatten(1).all(1)
    kept = (out == images).flatten(1).all(1)
    assert bool((flipped ^ kept).all())
    spread = 5 * (n * 0.25 * 0.75) ** 0.5
    assert abs(int(flipped.sum()) - n * 0.25) < spread
    assert torch.equal(RandomFlip(0.0)(images, None), images)
    assert torch.equal(RandomFlip(1.0)(images, None), images.flip(-1))


@pytest.mark.parametrize("as_float", [False, True])
def test_normalize_agrees_with_numpy(as_float):
    images = make_images()
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    unit = images.numpy().astype(np.float64) / 255
    expected = (unit - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    given = torch.from_numpy(unit).float() if as_float else images
    before = given.clone()
    out = Normalize(mean, std)(given, None)
    np.testing.assert_allclose(out.numpy(), expected, atol=2e-6)
    assert out.dtype == torch.float32
    assert torch.equal(given, before)


def test_center_crop_takes_the_middle():
    image = torch.arange(36).reshape(1, 1, 6, 6)
    assert CenterCrop(2)(image, None).flatten().tolist() == [14, 15, 20, 21]


def test_resize_is_close_to_pillow():
    image = make_images(1, 3, 40, 30)
    ours = Resize(13, 17)(image, None)[0]
    theirs = np.asarray(Image.fromarray(image[0].permute(1, 2, 0).numpy()).resize((17, 13), Image.Resampling.BILINEAR))
    difference = np.abs(ours.permute(1, 2, 0).numpy().astype(int) - theirs.astype(int))
    assert ours.dtype == torch.uint8
    assert difference.max() <= 2


def test_random_resized_crop_draws_windows_of_the_asked_area():
    ramp = torch.linspace(0, 1, 64).expand(1, 1, 64, 64)  # a window's range of values tells its width
    out = RandomResizedCrop(8, scale=(0.25, 0.25), ratio=(1.0, 1.0))(ramp.expand(60, -1, -1, -1), make_generator())
    widths = (out.amax((1, 2, 3)) - out.amin((1, 2, 3))) * 64
    assert out.shape == (60, 1, 8, 8)
    assert 24 < widths.min() <= widths.max() < 33
    assert len(set(out[:, 0, 0, 0].tolist())) > 10


def test_random_resized_crop_of_a_flat_image_falls_back_to_a_window_inside():
    out = RandomResizedCrop(4, scale=(1.0, 1.0), ratio=(1.0, 1.0))(make_images(3, 3, 2, 50), make_generator())
    assert out.shape == (3, 3, 4, 4)


def test_grayscale_weighs_channels():
    images = make_images()
    expected = np.tensordot(images.numpy().astype(float), [0.299, 0.587, 0.114], axes=(1, 0))
    out = Grayscale(3)(images, None)
    assert out.shape == images.shape
    assert np.abs(out[:, 1].numpy() - expected).max() <= 0.51


def test_color_jitter_moves_each_image_by_its_own_factor_within_bounds():
    images = torch.full((200, 3, 4, 4), 0.5)
    out = ColorJitter(brightness=0.4)(images, make_generator())
    levels = out.mean((1, 2, 3))
    assert 0.3 - 1e-6 <= levels.min() < 0.35
    assert 0.65 < levels.max() <= 0.7 + 1e-6
    assert torch.allclose(out, levels[:, None, None, None].expand_as(out))


def test_color_jitter_saturation_zero_amount_changes_nothing_and_full_reaches_gray():
    images = make_images().float() / 255
    assert torch.allclose(ColorJitter()(images, None), images, atol=1e-6)
    spread_before = images.std(dim=1).mean()
    out = ColorJitter(saturation=1.0)(images, make_generator(3))
    assert not torch.allclose(out, images)
    assert out.min() >= 0
    assert out.max() <= 1
    assert spread_before > 0


def test_cutout_zeroes_one_square_per_image():
    out = Cutout(4)(torch.ones(300, 2, 10, 10), make_generator())
    holes = (out == 0).all(1)
    sizes = holes.sum((1, 2))
    assert torch.equal((out == 0).any(1), holes)
    assert sizes.max() == 16
    assert sizes.min() >= 4  # cut by a corner
    for hole in holes[:50]:
        rows, columns = hole.any(1).nonzero(), hole.any(0).nonzero()
        assert len(rows) * len(columns) == hole.sum()


def test_pipeline_on_one_image_is_the_pipeline_on_a_batch_of_one():
    pipeline = build_pipeline(
        "random_crop(16, padding=4) | random_flip | normalize(mean=[0.5, 0.5, 0.5], std=[1, 1, 1])"
    )
    image = make_images(1)
    single, batch = pipeline(image[0], make_generator(5)), pipeline(image, make_generator(5))
    assert single.shape == (3, 16, 16)
    assert torch.equal(single, batch[0])


def test_pipeline_ends_as_float_in_unit_range_by_itself():
    out = build_pipeline("random_flip")(make_images(), make_generator())
    assert out.dtype == torch.float32
    assert 0 <= out.min() < out.max() <= 1


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_every_transform_runs_from_text_and_leaves_its_input_alone(name):
    arguments = {
        "normalize": "(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])",
        "color_jitter": "(0.3, 0.3, 0.3)",
    } | dict.fromkeys(("resize", "center_crop", "random_crop", "random_resized_crop", "cutout"), "(8)")
    images = make_images()
    before = images.clone()
    pipeline = build_pipeline(name + arguments.get(name, ""))
    first, second = pipeline(images, make_generator(1)), pipeline(images, make_generator(1))
    assert torch.equal(first, second)
    assert torch.equal(images, before)
    assert first.is_contiguous()
    assert torch.isfinite(first).all()


def test_random_draws_come_from_the_generator_only():
    pipeline = build_pipeline("random_crop(8) | random_flip | color_jitter(0.3, 0.3, 0.3) | cutout(3)")
    state = torch.get_rng_state()
    pipeline(make_images(), make_generator())
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(pipeline(make_images(), make_generator(1)), pipeline(make_images(), make_generator(2)))


def test_normalize_takes_the_values_of_the_dataset_unless_given():
    images = make_images()
    default = build_pipeline("normalize", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))(images)
    assert torch.allclose(default, images / 127.5 - 1, atol=1e-5)
    given = build_pipeline("normalize(mean=[0, 0, 0], std=[1, 1, 1])", mean=(0.5,) * 3, std=(0.5,) * 3)(images)
    assert torch.allclose(given, images / 255, atol=1e-6)


def test_own_transform_by_import_path_runs_on_each_image(tmp_path, monkeypatch):
    (tmp_path / "own_augment_for_data.py").write_text(
        "def darken(by=2):\n"
        "    def run(image):\n"
        "        assert image.dim() == 3\n"
        "        return image // by\n"
        "    return run\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = build_pipeline("own_augment_for_data:darken(by=4)", base_dir=str(tmp_path))(make_images())
    assert torch.allclose(out, (make_images() // 4) / 255)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("normalize", "knows no mean"),
        ("normalize(mean=[0.5], std=[0])", "must be above 0"),
        ("random_flip(1.5)", "between 0 and 1"),
        ("random_crop(0)", "0 × 0"),
        ("random_crop(4, padding=-1)", "negative"),
        ("random_crop(4, padding=1, mode=wrap)", "zeros or reflect"),
        ("random_resized_crop(8, scale=[0.5, 0.2])", "must rise"),
        ("color_jitter(brightness=2)", "brightness 2"),
    ],
)
def test_arguments_out_of_range_are_refused(spec, words):
    with pytest.raises(DataError, match=words):
        build_pipeline(spec)


def test_unknown_transform_names_the_nearest():
    with pytest.raises(ConfigError, match="random_flip"):
        build_pipeline("random_flipp")


def test_window_larger_than_the_image_is_refused():
    with pytest.raises(DataError, match=r"32 × 32 does not fit images of 16 × 20"):
        build_pipeline("random_crop(32)")(make_images())


def test_normalize_with_other_channels_is_refused():
    with pytest.raises(DataError, match="3 means and the images have 1 channels"):
        build_pipeline("normalize(mean=[0, 0, 0], std=[1, 1, 1])")(make_images(c=1))


def test_no_text_is_no_pipeline():
    assert build_pipeline(None) is None
    assert build_pipeline("  ") is None
