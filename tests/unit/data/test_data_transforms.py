"""Transforms by their effect on pixels: against torchvision or a computation by hand, on both of their ways."""

import math

import numpy as np
import pytest
import torch
from data_cases import make_generator
from PIL import Image

from fulltilt.data import TRANSFORMS, build_pipeline
from fulltilt.data.transforms import colors, steps
from fulltilt.data.transforms.rand_augment import OPERATIONS, RandAugment, apply_operations
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


def make_images(n=8, c=3, h=20, w=18, seed=0):
    """Smooth ones, as photographs are: a pixel next to the right one is nearly right."""
    coarse = torch.rand(n, c, 6, 5, generator=make_generator(seed))
    return (torch.nn.functional.interpolate(coarse, size=(h, w), mode="bilinear") * 255).to(torch.uint8)


def make_noise(n=8, h=16, w=20):
    return torch.randint(0, 256, (n, 3, h, w), dtype=torch.uint8, generator=make_generator())


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
    images = make_images(24) / 255 if as_float else make_images(24)
    by_host = pipeline(images, make_generator(3))
    monkeypatch.setattr(steps, "is_eager_on_cpu", lambda x: False)
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
    single, batch = pipeline(images[0], make_generator(5)), pipeline(images[:1], make_generator(5))
    assert torch.equal(single, batch[0])


@pytest.mark.parametrize("as_float", [False, True])
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
def test_neutral_parameters_change_nothing(spec, as_float):
    images = make_images().clamp(max=254)  # solarize at 1 inverts what is white
    out = build_pipeline(spec)(images / 255 if as_float else images, make_generator())
    torch.testing.assert_close(out, images / 255, atol=1e-6, rtol=0)


def test_colours_agree_with_torchvision_step_by_step(reference):
    images, turns = make_images(4) / 255, [-0.5, -0.1, 0.03, 0.3]
    ours = colors.shift_hue(images, torch.tensor(turns)[:, None, None])
    theirs = [reference.adjust_hue(image, turn) for image, turn in zip(images, turns, strict=True)]
    torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-5, rtol=0)
    image = images[:1]
    ours = colors.ColorJitter(0.4, 0.5, 0.6, 0.1).apply(image, torch.tensor([[0.0, 0.9, 0.2, 0.7, 0.8]]))
    theirs = reference.adjust_brightness(image, 1 + 0.4 * 0.8)
    theirs = reference.adjust_contrast(theirs, 1 - 0.5 * 0.6)
    theirs = reference.adjust_saturation(theirs, 1 + 0.6 * 0.4)
    theirs = reference.adjust_hue(theirs, 0.1 * 0.6)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)  # its gray has 0.2989, ours 0.299


def test_gaussian_blur_agrees_with_torchvision_and_takes_a_tenth_of_the_image_unless_told(reference):
    image, dot = make_images(1), torch.zeros(1, 1, 64, 64)
    ours = colors.GaussianBlur(5, sigma=(0.5, 2.5)).apply(image, torch.tensor([[0.0, 0.5]]))
    assert measure_difference(ours, reference.gaussian_blur(image, [5, 5], [1.5, 1.5])) <= 1
    dot[..., 32, 32] = 1.0
    reached = colors.GaussianBlur(sigma=(2.0, 2.0)).apply(dot, torch.zeros(1, 2))[0, 0] > 0
    assert reached.any(0).sum() == 7


@pytest.mark.parametrize("by_host", [True, False])
def test_random_resized_crop_agrees_with_torchvision(reference, monkeypatch, by_host):
    images = make_images(5, h=40, w=30)
    windows = draw_windows(torch.rand(5, WINDOW_DRAWS, generator=make_generator(1)), 40, 30, (0.1, 0.9), (0.7, 1.4))
    theirs = [
        reference.resized_crop(image, *edges, size=[16, 12], antialias=True)
        for image, edges in zip(images, torch.stack(windows.edges, 1).tolist(), strict=True)
    ]
    monkeypatch.setattr(steps, "is_eager_on_cpu", lambda x: by_host)
    assert measure_difference(steps.resize_windows(images, windows, 16, 12), torch.stack(theirs)) <= 1


def test_windows_lie_inside_and_have_the_area_and_ratio_asked_for():
    windows = draw_windows(torch.rand(2000, WINDOW_DRAWS, generator=make_generator()), 60, 90, (0.2, 0.4), (0.5, 2.0))
    tops, lefts, heights, widths = windows.edges
    assert windows.found.all()
    assert {edge.dtype for edge in windows.edges} == {torch.int64}
    assert bool(((tops >= 0) & (lefts >= 0) & (tops + heights <= 60) & (lefts + widths <= 90)).all())
    shares, ratios = heights * widths / 5400, widths / heights
    assert 0.19 < shares.min() < 0.22 < 0.38 < shares.max() < 0.41
    assert 0.47 < ratios.min() < 0.6 < 1.7 < ratios.max()
    assert tops.max() > 25
    assert len(set(lefts.tolist())) > 30


def test_where_no_window_fits_the_largest_centred_one_inside_the_bounds_stands_in():
    windows = draw_windows(torch.rand(3, WINDOW_DRAWS), 4, 100, (1.0, 1.0), (0.5, 2.0))
    assert not windows.found.any()
    assert [edge.tolist() for edge in windows.edges] == [[0] * 3, [46] * 3, [4] * 3, [8] * 3]


def test_solarize_and_grayscale_agree_with_torchvision_on_the_images_they_take(reference):
    images = make_images(200)
    assert torch.equal(colors.Solarize(0.5)(images), reference.solarize(images, threshold=128))
    out = colors.RandomGrayscale(0.3)(images, make_generator())
    gray = reference.rgb_to_grayscale(images, num_output_channels=3)
    is_gray = ((out.int() - gray.int()).abs() <= 1).flatten(1).all(1)
    is_kept = (out == images).flatten(1).all(1)
    assert bool((is_gray ^ is_kept).all())
    assert 35 < int(is_gray.sum()) < 86
    assert measure_difference(colors.Grayscale(3)(images), gray) <= 1


def test_random_erasing_fills_one_window_and_nothing_else():
    images = torch.rand(200, 2, 20, 30) * 0.5 + 0.25
    out = steps.RandomErasing(probability=0.5, scale=(0.1, 0.2), ratio=(0.5, 2.0), value=-3.0)(images, make_generator())
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
    affine = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0], "center": [0, 0]}
    degrees, shift = math.degrees(math.atan(0.3 * share)), 150 / 331 * share
    return {
        "identity": lambda: image,
        "shear_x": lambda: functional.affine(image, **{**affine, "shear": [degrees, 0.0]}),
        "shear_y": lambda: functional.affine(image, **{**affine, "shear": [0.0, degrees]}),
        "translate_x": lambda: functional.affine(image, **{**affine, "translate": [int(shift * width), 0]}),
        "translate_y": lambda: functional.affine(image, **{**affine, "translate": [0, int(shift * height)]}),
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
        ("random_flip(1.5)", "a number of at least 0 and of at most 1"),
        ("random_crop(0)", "size=0: expected a whole number of at least 1"),
        ("random_crop(4, padding=-1)", "padding=-1"),
        ("random_crop(4, padding=1, mode=wrap)", "zeros or reflect"),
        ("random_resized_crop(8, scale=[0.5, 0.2])", "must rise"),
        ("resize(size=(8, 9), width=9)", r"size \(8, 9\) has a width already"),
        ("color_jitter(brightness=2)", "brightness=2"),
        ("gaussian_blur(4)", "kernel_size 4 must be odd"),
        ("gaussian_blur(sigma=[2, 1])", "must rise"),
        ("color_jitter(hue=0.7)", "hue=0.7"),
        ("random_grayscale(2)", "probability=2"),
        ("solarize(threshold=128)", "threshold=128"),
        ("cutout(0)", "size=0"),
        ("grayscale(0)", "n_channels=0"),
        ("random_erasing(scale=[0, 0.1])", r"random_erasing: scale"),
        ("rand_augment(magnitude=31)", "magnitude=31: .*of at least 0 and below 31"),
        ("rand_augment(n_ops=0)", "n_ops=0"),
        ("random_flipp", "random_flip"),
        ("random_crop(32)", "32 × 32 does not fit images of 20 × 18"),
        ("normalize(mean=[0, 0, 0], std=[1, 1, 1])", "3 means and the images have 1 channels"),
        ("gaussian_blur(41)", "kernel_size 41 does not fit images of 20 × 18; use 35 or less"),
    ],
)
def test_unknown_names_values_out_of_range_and_images_that_do_not_fit_are_refused(spec, words):
    with pytest.raises((ConfigError, DataError), match=words):
        build_pipeline(spec)(make_images(c=1))


def test_random_crop_takes_windows_of_the_padded_image_at_many_places():
    image = torch.arange(1, 1 + 6 * 6, dtype=torch.uint8).reshape(1, 1, 6, 6).expand(-1, 3, -1, -1)
    padded = torch.nn.functional.pad(image, (2,) * 4)[0]
    crops = steps.RandomCrop(6, padding=2)(image.expand(400, -1, -1, -1), make_generator())
    windows = [padded[:, top : top + 6, left : left + 6] for top in range(5) for left in range(5)]
    places = [[place for place, window in enumerate(windows) if torch.equal(crop, window)] for crop in crops]
    assert (crops.shape, crops.dtype) == ((400, 3, 6, 6), torch.uint8)
    assert {len(found) for found in places} == {1}, "each crop is one window, of all channels"
    assert len({found[0] for found in places}) == 25


def test_random_flip_flips_whole_images_at_its_probability():
    n = 4000
    images = torch.arange(12, dtype=torch.uint8).reshape(1, 1, 3, 4).expand(n, -1, -1, -1)
    out = steps.RandomFlip(0.25)(images, make_generator())
    flipped = (out == images.flip(-1)).flatten(1).all(1)
    kept = (out == images).flatten(1).all(1)
    assert bool((flipped ^ kept).all())
    assert abs(int(flipped.sum()) - n * 0.25) < 5 * (n * 0.25 * 0.75) ** 0.5
    assert torch.equal(steps.RandomFlip(1.0)(images, None), images.flip(-1))


@pytest.mark.parametrize("as_float", [False, True])
def test_normalize_agrees_with_numpy(as_float):
    images, mean, std = make_noise(), [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    unit = images.numpy().astype(np.float64) / 255
    expected = (unit - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    given = torch.from_numpy(unit).float() if as_float else images
    before = given.clone()
    out = colors.Normalize(mean, std)(given, None)
    np.testing.assert_allclose(out.numpy(), expected, atol=2e-6)
    assert out.dtype == torch.float32
    assert torch.equal(given, before)


def test_center_crop_takes_the_middle_and_random_crop_may_mirror_the_border():
    image = torch.arange(36).reshape(1, 1, 6, 6)
    assert steps.CenterCrop(2)(image, None).flatten().tolist() == [14, 15, 20, 21]
    mirrored = steps.RandomCrop(10, padding=2, mode="reflect")(image, make_generator())
    assert np.array_equal(mirrored[0, 0].numpy(), np.pad(image[0, 0].numpy(), 2, mode="reflect"))


def test_a_size_may_be_height_and_width_as_other_libraries_write_it():
    images = make_images()
    for text in ("resize(size=(12, 7))", "resize([12, 7])", "center_crop((12, 7))", "random_resized_crop((12, 7))"):
        assert build_pipeline(text)(images, make_generator()).shape[-2:] == (12, 7), text
    assert torch.equal(build_pipeline("resize((12, 7))")(images), build_pipeline("resize(12, width=7)")(images))


def test_resize_is_close_to_pillow():
    image = make_noise(1, 40, 30)
    ours = steps.Resize(13, 17)(image, None)[0]
    theirs = np.asarray(Image.fromarray(image[0].permute(1, 2, 0).numpy()).resize((17, 13), Image.Resampling.BILINEAR))
    difference = np.abs(ours.permute(1, 2, 0).numpy().astype(int) - theirs.astype(int))
    assert ours.dtype == torch.uint8
    assert difference.max() <= 2


def test_cutout_zeroes_one_square_per_image():
    out = steps.Cutout(4)(torch.ones(300, 2, 10, 10), make_generator())
    holes = (out == 0).all(1)
    sizes = holes.sum((1, 2))
    assert torch.equal((out == 0).any(1), holes)
    assert sizes.max() == 16
    assert sizes.min() >= 4  # cut by a corner
    for hole in holes[:50]:
        rows, columns = hole.any(1).nonzero(), hole.any(0).nonzero()
        assert len(rows) * len(columns) == hole.sum()


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_every_transform_runs_from_text_and_leaves_its_input_alone(name):
    is_random = any(spec.startswith(name) for spec in RANDOM.values())
    assert is_random or name in ("center_crop", "grayscale", "normalize", "resize", "to_float"), "add it to RANDOM"
    arguments = dict.fromkeys(("resize", "center_crop", "random_crop", "random_resized_crop", "cutout"), "(8)")
    arguments |= {"normalize": "(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])", "color_jitter": "(0.3, 0.3, 0.3)"}
    images = make_noise()
    before = images.clone()
    pipeline = build_pipeline(name + arguments.get(name, ""))
    first, second = pipeline(images, make_generator(1)), pipeline(images, make_generator(1))
    assert torch.equal(first, second)
    assert torch.equal(images, before)
    assert first.is_contiguous()
    assert torch.isfinite(first).all()


def test_normalize_takes_the_values_of_the_dataset_unless_given():
    images = make_noise()
    default = build_pipeline("normalize", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))(images)
    assert torch.allclose(default, images / 127.5 - 1, atol=1e-5)
    given = build_pipeline("normalize(mean=[0, 0, 0], std=[1, 1, 1])", mean=(0.5,) * 3, std=(0.5,) * 3)
    assert torch.allclose(given(images), images / 255, atol=1e-6)
    assert len({given.steps[0], colors.Normalize([0, 0, 0], [1, 1, 1])}) == 1, "lists become tuples: it has a hash"


def darken(by):
    def run(image):
        assert image.dim() == 3
        return image // by

    return run


def test_own_transform_by_import_path_runs_on_each_image_and_no_text_is_no_pipeline():
    out = build_pipeline("test_data_transforms:darken(by=4)", base_dir="")(make_noise())
    assert torch.allclose(out, (make_noise() // 4) / 255)
    assert build_pipeline(None) is build_pipeline("  ") is None
