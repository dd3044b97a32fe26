"""Transforms by their effect on pixels: against torchvision or a computation by hand, on both of their ways."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from fulltilt.data import TRANSFORMS, build_pipeline
from fulltilt.data.transforms import steps as transform_steps
from fulltilt.data.transforms.colors import (
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Normalize,
    RandomGrayscale,
    Solarize,
    shift_hue,
)
from fulltilt.data.transforms.rand_augment import OPERATIONS, RandAugment, apply_operations
from fulltilt.data.transforms.steps import CenterCrop, Cutout, RandomCrop, RandomErasing, RandomFlip, Resize
from fulltilt.data.transforms.windows import WINDOW_DRAWS, draw_windows
from fulltilt.errors import ConfigError, DataError
from fulltilt.tasks.vision import import_torchvision

RANDOM = {
    "random_crop": "random_crop(16, padding=3)",
    "random_crop_mirrored": "random_crop(20, padding=4, mode=reflect)",
    "random_flip": "random_flip",
    "random_resized_crop": "random_resized_crop(12)",
    "random_grayscale": "random_grayscale(0.5)",
    "color_jitter": "color_jitter(0.4, 0.4, 0.4, 0.1, probability=0.8)",
    "gaussian_blur": "gaussian_blur(kernel_size=5, probability=0.5)",
    "solarize": "solarize(probability=0.5)",
    "cutout": "cutout(6)",
    "random_erasing": "random_erasing",
    "rand_augment": "rand_augment",
}


@pytest.fixture(scope="module")
def reference():
    import_torchvision()
    from torchvision.transforms.v2 import functional

    return functional


def make_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_images(n=8, c=3, h=20, w=18, seed=0):
    """Smooth ones, as photographs are: a pixel next to the right one is nearly right."""
    coarse = torch.rand(n, c, 6, 5, generator=make_generator(seed))
    return (torch.nn.functional.interpolate(coarse, size=(h, w), mode="bilinear") * 255).to(torch.uint8)


def make_noise(n=8, c=3, h=16, w=20):
    return torch.randint(0, 256, (n, c, h, w), dtype=torch.uint8, generator=make_generator())


def measure_difference(ours, theirs):
    return (ours.float() - theirs.float()).abs().max().item()


@pytest.mark.parametrize("name", RANDOM)
def test_every_image_of_a_batch_is_transformed_by_numbers_of_its_own(name):
    images = make_images(1).expand(64, -1, -1, -1)
    out = build_pipeline(RANDOM[name])(images, make_generator())
    n_different = len({image.numpy().tobytes() for image in out})
    is_yes_or_no = name in ("random_flip", "random_grayscale", "solarize")
    assert n_different == 2 if is_yes_or_no else n_different > 8


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("name", RANDOM)
def test_the_way_of_a_device_and_of_the_host_give_the_same_images(name, as_float, monkeypatch):
    """What a GPU or a compiled graph runs, run here, beside the copies in numpy."""
    pipeline = build_pipeline(RANDOM[name])
    images = make_images(24)
    images = images.float() / 255 if as_float else images
    by_host = pipeline(images, make_generator(3))
    monkeypatch.setattr(transform_steps, "is_eager_on_cpu", lambda x: False)
    by_device = pipeline(images, make_generator(3))
    assert by_device.shape == by_host.shape
    assert measure_difference(by_device, by_host) <= (1e-5 if as_float else 1.01 / 255)


def test_a_batch_draws_once_and_an_image_at_a_time_would_draw_the_same():
    pipeline = build_pipeline(" | ".join(RANDOM[name] for name in ("random_flip", "color_jitter", "cutout")))
    images = make_images(6)
    u_BD = pipeline.draw(images, make_generator())
    assert u_BD.shape == (6, 1 + 5 + 2)
    one_by_one = torch.cat([pipeline.apply(images[i : i + 1], u_BD[i : i + 1]) for i in range(6)])
    assert torch.equal(pipeline.apply(images, u_BD), one_by_one)


@pytest.mark.parametrize(
    "spec",
    [
        "random_flip(0)",
        "random_grayscale(0)",
        "color_jitter(0, 0, 0, 0)",
        "color_jitter(1, 1, 1, 0.5, probability=0)",
        "gaussian_blur(probability=0)",
        "gaussian_blur(sigma=[0.01, 0.01])",
        "solarize(probability=0)",
        "solarize(threshold=1)",
        "random_erasing(probability=0)",
        "random_crop(20, 18)",
        "random_resized_crop(20, 18, scale=[1, 1], ratio=[0.9, 0.9])",
    ],
)
@pytest.mark.parametrize("as_float", [False, True])
def test_neutral_parameters_change_nothing(spec, as_float):
    images = make_images().clamp(max=254)  # solarize at 1 inverts what is white
    given = images.float() / 255 if as_float else images
    out = build_pipeline(spec)(given, make_generator())
    torch.testing.assert_close(out, images.float() / 255, atol=1e-6, rtol=0)


@pytest.mark.parametrize("turns", [-0.5, -0.1, 0.03, 0.3])
def test_hue_agrees_with_torchvision(turns, reference):
    images = make_images(4).float() / 255
    ours = shift_hue(images, torch.full((4, 1, 1), turns))
    torch.testing.assert_close(ours, reference.adjust_hue(images, turns), atol=1e-5, rtol=0)


def test_color_jitter_agrees_with_torchvision_step_by_step(reference):
    image = make_images(1).float() / 255
    u_BD = torch.tensor([[0.0, 0.9, 0.2, 0.7, 0.8]])
    ours = ColorJitter(0.4, 0.5, 0.6, 0.1).apply(image, u_BD)
    theirs = reference.adjust_brightness(image, 1 + 0.4 * 0.8)
    theirs = reference.adjust_contrast(theirs, 1 - 0.5 * 0.6)
    theirs = reference.adjust_saturation(theirs, 1 + 0.6 * 0.4)
    theirs = reference.adjust_hue(theirs, 0.1 * 0.6)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)  # its gray has 0.2989, ours 0.299


def test_gaussian_blur_agrees_with_torchvision(reference):
    image = make_images(1)
    ours = GaussianBlur(5, sigma=(0.5, 2.5)).apply(image, torch.tensor([[0.0, 0.5]]))
    assert measure_difference(ours, reference.gaussian_blur(image, [5, 5], [1.5, 1.5])) <= 1


def test_gaussian_blur_takes_a_tenth_of_the_image_unless_told():
    dot = torch.zeros(1, 1, 64, 64)
    dot[..., 32, 32] = 1.0
    reached = GaussianBlur(sigma=(2.0, 2.0)).apply(dot, torch.zeros(1, 2))[0, 0] > 0
    assert reached.any(0).sum() == 7


def test_random_resized_crop_agrees_with_torchvision(reference, monkeypatch):
    images = make_images(5, h=40, w=30)
    windows = draw_windows(torch.rand(5, WINDOW_DRAWS, generator=make_generator(1)), 40, 30, (0.1, 0.9), (0.7, 1.4))
    theirs = torch.cat(
        [
            reference.resized_crop(images[i : i + 1], *edges, size=[16, 12], antialias=True)
            for i, edges in enumerate(torch.stack(windows.edges, 1).tolist())
        ]
    )
    assert measure_difference(transform_steps.resize_windows(images, windows, 16, 12), theirs) <= 1
    monkeypatch.setattr(transform_steps, "is_eager_on_cpu", lambda x: False)
    assert measure_difference(transform_steps.resize_windows(images, windows, 16, 12), theirs) <= 1


def test_windows_lie_inside_and_have_the_area_and_ratio_asked_for():
    windows = draw_windows(torch.rand(2000, WINDOW_DRAWS, generator=make_generator()), 60, 90, (0.2, 0.4), (0.5, 2.0))
    tops, lefts, heights, widths = windows.edges
    assert windows.found.all()
    assert {edge.dtype for edge in windows.edges} == {torch.int64}
    assert bool(((tops >= 0) & (lefts >= 0) & (tops + heights <= 60) & (lefts + widths <= 90)).all())
    shares, ratios = heights * widths / 5400, widths / heights
    assert 0.19 < shares.min() < 0.22
    assert 0.38 < shares.max() < 0.41
    assert 0.47 < ratios.min() < 0.6
    assert ratios.max() > 1.7
    assert tops.max() > 25
    assert len(set(lefts.tolist())) > 30


def test_where_no_window_fits_the_largest_centred_one_inside_the_bounds_stands_in():
    windows = draw_windows(torch.rand(3, WINDOW_DRAWS), 4, 100, (1.0, 1.0), (0.5, 2.0))
    assert not windows.found.any()
    assert [edge.tolist() for edge in windows.edges] == [[0] * 3, [46] * 3, [4] * 3, [8] * 3]


def test_random_grayscale_agrees_with_torchvision_on_the_images_it_takes(reference):
    images = make_images(200)
    out = RandomGrayscale(0.3)(images, make_generator())
    gray = reference.rgb_to_grayscale(images, num_output_channels=3)
    is_gray = ((out.int() - gray.int()).abs() <= 1).flatten(1).all(1)
    is_kept = (out == images).flatten(1).all(1)
    assert bool((is_gray ^ is_kept).all())
    assert 35 < int(is_gray.sum()) < 86
    assert measure_difference(Grayscale(3)(images), gray) <= 1


def test_solarize_agrees_with_torchvision(reference):
    images = make_images()
    assert torch.equal(Solarize(0.5)(images), reference.solarize(images, threshold=128))


def test_random_erasing_fills_one_window_and_nothing_else():
    images = torch.rand(200, 2, 20, 30) * 0.5 + 0.25
    out = RandomErasing(probability=0.5, scale=(0.1, 0.2), ratio=(0.5, 2.0), value=-3.0)(images, make_generator())
    erased = (out == -3.0).all(1)
    assert torch.equal(out[:, 0][~erased], images[:, 0][~erased])
    shares = erased.flatten(1).float().mean(1)
    assert 70 < int((shares > 0).sum()) < 130
    assert 0.08 < shares[shares > 0].min() <= shares.max() < 0.22
    for hole in erased[shares > 0][:30]:
        assert hole.any(1).sum() * hole.any(0).sum() == hole.sum()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("magnitude", [5, 14, 30])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_rand_augment_agrees_with_torchvision(name, magnitude, sign, reference):
    image = make_images(1, h=32, w=24)
    place = torch.tensor([OPERATIONS.index(name)])
    ours = apply_operations(image, place, torch.tensor([sign]), magnitude)
    theirs = apply_reference(reference, name, image, magnitude, sign)
    difference = (ours.int() - theirs.int()).abs()
    # Pixels exactly between two: the nearest one is a matter of rounding.
    assert (difference > 1).float().mean() < (0.01 if name.startswith("shear") else 1e-9)


def apply_reference(functional, name, image, magnitude, sign):
    share, (height, width) = sign * magnitude / 30, image.shape[-2:]
    if name.startswith("shear"):
        degrees = math.degrees(math.atan(0.3 * share))
        shear = [degrees, 0.0] if name == "shear_x" else [0.0, degrees]
        return functional.affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=shear, center=[0, 0])
    if name.startswith("translate"):
        size = width if name == "translate_x" else height
        shift = [int(150 / 331 * size * share), 0]
        moved = shift if name == "translate_x" else shift[::-1]
        return functional.affine(image, angle=0.0, translate=moved, scale=1.0, shear=[0.0, 0.0])
    return {
        "identity": lambda: image,
        "rotate": lambda: functional.rotate(image, 30 * share),
        "brightness": lambda: functional.adjust_brightness(image, 1 + 0.9 * share),
        "color": lambda: functional.adjust_saturation(image, 1 + 0.9 * share),
        "contrast": lambda: functional.adjust_contrast(image, 1 + 0.9 * share),
        "sharpness": lambda: functional.adjust_sharpness(image, 1 + 0.9 * share),
        "posterize": lambda: functional.posterize(image, bits=8 - round(magnitude / 7.5)),
        "solarize": lambda: functional.solarize(image, threshold=255 * (1 - magnitude / 30)),
        "autocontrast": lambda: functional.autocontrast(image),
        "equalize": lambda: functional.equalize(image),
    }[name]()


def test_rand_augment_applies_as_many_operations_as_asked_for():
    images = make_images(1).expand(300, -1, -1, -1)
    once = RandAugment(n_ops=1, magnitude=15)(images, make_generator())
    kept = (once == images).flatten(1).all(1).float().mean()
    assert 0.02 < kept < 0.15  # identity is one of fourteen
    u_BD = torch.rand(300, 4, generator=make_generator(1))
    twice = RandAugment(n_ops=2, magnitude=15).apply(images, u_BD)
    step = RandAugment(n_ops=1, magnitude=15)
    assert torch.equal(twice, step.apply(step.apply(images, u_BD[:, :2]), u_BD[:, 2:]))


def test_gray_images_pass_every_colour_step():
    images = make_images(c=1)
    out = build_pipeline("color_jitter(0.4, 0.4, 0.4, 0.2) | rand_augment | gaussian_blur(3)")(images, make_generator())
    assert out.shape == images.shape
    assert torch.isfinite(out).all()


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
        ("gaussian_blur(4)", "kernel_size 4 must be odd"),
        ("gaussian_blur(sigma=[2, 1])", "must rise"),
        ("color_jitter(hue=0.7)", "hue 0.7"),
        ("random_grayscale(2)", "probability 2"),
        ("solarize(threshold=128)", "threshold 128"),
        ("random_erasing(scale=[0, 0.1])", r"random_erasing: scale"),
        ("rand_augment(magnitude=31)", "magnitude 31 is not between 0 and 30"),
        ("rand_augment(n_ops=0)", "n_ops 0"),
    ],
)
def test_arguments_out_of_range_are_refused(spec, words):
    with pytest.raises(DataError, match=words):
        build_pipeline(spec)


def test_every_registered_transform_is_tested_for_its_random_ways():
    untested = set(TRANSFORMS) - {spec.partition("(")[0] for spec in RANDOM.values()}
    assert untested == {"center_crop", "grayscale", "normalize", "resize", "to_float"}


def test_random_crop_takes_windows_of_the_padded_image_at_many_places():
    image = torch.arange(1, 1 + 6 * 6, dtype=torch.uint8).reshape(1, 1, 6, 6).expand(-1, 3, -1, -1)
    padded = torch.nn.functional.pad(image, (2,) * 4)[0]
    crops = RandomCrop(6, padding=2)(image.expand(400, -1, -1, -1), make_generator())
    windows = [padded[:, top : top + 6, left : left + 6] for top in range(5) for left in range(5)]
    places = [[place for place, window in enumerate(windows) if torch.equal(crop, window)] for crop in crops]
    assert (crops.shape, crops.dtype) == ((400, 3, 6, 6), torch.uint8)
    assert {len(found) for found in places} == {1}, "each crop is one window, of all channels"
    assert len({found[0] for found in places}) == 25


def test_random_crop_reflect_mirrors_the_border_as_numpy_does():
    image = make_noise(1, 1, 5, 6)
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
    images = make_noise()
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
    image = make_noise(1, 3, 40, 30)
    ours = Resize(13, 17)(image, None)[0]
    theirs = np.asarray(Image.fromarray(image[0].permute(1, 2, 0).numpy()).resize((17, 13), Image.Resampling.BILINEAR))
    difference = np.abs(ours.permute(1, 2, 0).numpy().astype(int) - theirs.astype(int))
    assert ours.dtype == torch.uint8
    assert difference.max() <= 2


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
    image = make_noise(1)
    single, batch = pipeline(image[0], make_generator(5)), pipeline(image, make_generator(5))
    assert single.shape == (3, 16, 16)
    assert torch.equal(single, batch[0])


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_every_transform_runs_from_text_and_leaves_its_input_alone(name):
    arguments = {
        "normalize": "(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])",
        "color_jitter": "(0.3, 0.3, 0.3)",
    } | dict.fromkeys(("resize", "center_crop", "random_crop", "random_resized_crop", "cutout"), "(8)")
    images = make_noise()
    before = images.clone()
    pipeline = build_pipeline(name + arguments.get(name, ""))
    first, second = pipeline(images, make_generator(1)), pipeline(images, make_generator(1))
    assert torch.equal(first, second)
    assert torch.equal(images, before)
    assert first.is_contiguous()
    assert torch.isfinite(first).all()


def test_random_draws_come_from_the_generator_only():
    pipeline = build_pipeline("random_crop(12) | random_resized_crop(8) | random_flip | color_jitter(0.3) | cutout(3)")
    state = torch.get_rng_state()
    pipeline(make_noise(), make_generator())
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(pipeline(make_noise(), make_generator(1)), pipeline(make_noise(), make_generator(2)))


def test_normalize_takes_the_values_of_the_dataset_unless_given():
    images = make_noise()
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
    out = build_pipeline("own_augment_for_data:darken(by=4)", base_dir=str(tmp_path))(make_noise())
    assert torch.allclose(out, (make_noise() // 4) / 255)


def test_unknown_transform_names_the_nearest():
    with pytest.raises(ConfigError, match="random_flip"):
        build_pipeline("random_flipp")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("random_crop(32)", "32 × 32 does not fit images of 20 × 18"),
        ("normalize(mean=[0, 0, 0], std=[1, 1, 1])", "3 means and the images have 1 channels"),
        ("gaussian_blur(41)", "kernel_size 41 does not fit images of 20 × 18; use 35 or less"),
    ],
)
def test_images_that_a_step_does_not_fit_are_refused(spec, words):
    with pytest.raises(DataError, match=words):
        build_pipeline(spec)(make_images(c=1))


def test_no_text_is_no_pipeline():
    assert build_pipeline(None) is build_pipeline("  ") is None
