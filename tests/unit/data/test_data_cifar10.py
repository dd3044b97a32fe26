"""CIFAR-10 in its forms; small made-up files, and a few real images where they are there."""

import collections
import itertools
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fulltilt.data import DATASETS
from fulltilt.data.images.cifar10_formats import CLASSES
from fulltilt.data.images.decoded_cache import write_cached
from fulltilt.errors import DataError

cifar10 = DATASETS["cifar10"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_rows(n, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), [int(v) for v in rng.integers(0, 10, n)]


NAMES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def write_pickles(folder, protocol=2):
    folder.mkdir(parents=True)
    for seed, name in enumerate(NAMES):
        rows, labels = make_rows(4, seed)
        content = {b"data": rows, b"labels": labels, b"batch_label": b"x", b"filenames": [b"a.png"] * 4}
        (folder / name).write_bytes(pickle.dumps(content, protocol=protocol))


def write_binary(folder):
    folder.mkdir(parents=True)
    for seed, name in enumerate(NAMES):
        rows, labels = make_rows(4, seed)
        (folder / f"{name}.bin").write_bytes(np.column_stack([np.array(labels, np.uint8), rows]).tobytes())


def write_folders(root, n=2):
    """PNG, so that pixels come back exactly."""
    for split, target in itertools.product(("train", "test"), range(10)):
        folder = root / split / CLASSES[target]
        folder.mkdir(parents=True)
        for i in range(n):
            Image.fromarray(make_picture(split, target, i)).save(folder / f"{i:04}.png")
    return root


def make_picture(split, target, i):
    return np.random.default_rng([split == "train", target, i]).integers(0, 256, (32, 32, 3), dtype=np.uint8)


@pytest.mark.parametrize("below", ["", "cifar-10-batches"])
@pytest.mark.parametrize("protocol", [2, 4, 5, None])
def test_python_pickles_and_binary_records(tmp_path, protocol, below):
    folder = tmp_path / "c" / below
    write_binary(folder) if protocol is None else write_pickles(folder, protocol)
    train, val = cifar10("train", path=str(tmp_path / "c")), cifar10("val", root=str(tmp_path / "c"))
    rows, labels = zip(*(make_rows(4, seed) for seed in range(6)), strict=True)
    assert np.array_equal(train.images.numpy().reshape(20, 3072), np.concatenate(rows[:5]))
    assert train.targets.tolist() == np.concatenate(labels[:5]).tolist()
    assert val.targets.tolist() == labels[5]
    assert (train.n_classes, train.sample_shape, train.classes[3]) == (10, (3, 32, 32), "cat")


@pytest.mark.parametrize("form", ["folders", "tar"])
def test_class_folders_and_a_tar_of_them(tmp_path, form):
    root = write_folders(tmp_path / "images")
    path = root
    if form == "tar":
        path = tmp_path / "images.tar.xz"
        with tarfile.open(path, "w:xz") as tar:
            for folder in ("test", "train"):
                tar.add(root / folder, arcname=folder)
    for split, folder in (("train", "train"), ("val", "test")):
        dataset = cifar10(split, path=str(path))
        assert dataset.targets.tolist() == [t for t in range(10) for _ in range(2)]
        for index in range(20):
            expected = make_picture(folder, index // 2, index % 2).transpose(2, 0, 1)
            assert np.array_equal(dataset.images[index].numpy(), expected)


def test_second_process_takes_decoded_images_from_the_cache_until_the_files_change(tmp_path, own_cache):
    root = write_folders(tmp_path / "images")
    first = cifar10("train", path=str(root))
    files = list(own_cache.rglob("*.npz"))
    assert len(files) == 1
    os.truncate(files[0], 100)  # a torn cache is made again
    assert torch.equal(cifar10("train", path=str(root)).images, first.images)
    changed = root / "train" / "cat" / "0000.png"
    Image.new("RGB", (32, 32), (255, 0, 0)).save(changed)
    again = cifar10("train", path=str(root))
    assert not torch.equal(again.images, first.images)
    assert len(list(own_cache.rglob("*.npz"))) == 2
    # With the cache in place the files are listed and not opened.
    stamp = changed.stat()
    changed.write_bytes(b"\0" * stamp.st_size)
    os.utime(changed, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert torch.equal(cifar10("train", path=str(root)).images, again.images)
    with pytest.raises(DataError, match=r"0000\.png cannot be decoded"):
        cifar10("train", path=str(root), cache=False)


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(cifar10("val", path=str(write_folders(tmp_path / "images", n=1)))) == 10


@pytest.mark.parametrize("vanishing", [None, 5])
def test_the_cache_keeps_the_newest_files_also_where_another_process_drops_one_meanwhile(
    own_cache, monkeypatch, vanishing
):
    folder = own_cache / "fulltilt" / "decoded"
    folder.mkdir(parents=True)
    files = [folder / f"images-f{number:02}.npz" for number in range(11)]
    for number, file in enumerate(files):
        file.touch()
        os.utime(file, (number, number))
    stat = Path.stat

    def vanish(path, **options):
        if vanishing is not None and path == files[vanishing]:
            path.unlink(missing_ok=True)
        return stat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", vanish)
        write_cached("newest", np.zeros((1, 3, 2, 2), np.uint8), np.zeros(1, np.int64))
    kept = sorted(file.stem for file in folder.iterdir())
    assert (len(kept), kept[0], kept[-1]) == (8, "images-f04" if vanishing is None else "images-f03", "images-newest")


def test_limit_keeps_images_from_everywhere(tmp_path):
    root = write_folders(tmp_path / "images")
    assert cifar10("train", path=str(root), limit=10).targets.tolist() == list(range(10))
    with pytest.raises(DataError, match="limit 21"):
        cifar10("train", path=str(root), limit=21)


def test_a_limit_above_one_split_names_it_and_the_way_out(tmp_path):
    write_pickles(tmp_path / "images")
    assert len(cifar10("train", path=str(tmp_path / "images"), limit=15)) == 15
    remedy = "write the same call with limit=4 at data.val_dataset"
    with pytest.raises(DataError, match=f"limit 15 is not between 1 and the 4 images of split val; {remedy}"):
        cifar10("val", path=str(tmp_path / "images"), limit=15)
    for split in ("train", "val"):
        with pytest.raises(DataError, match=r"limit 0 is not .*; use 1 or more"):
            cifar10(split, path=str(tmp_path / "images"), limit=0)


def test_normalize_knows_the_channels_and_relative_paths_start_at_base_dir(tmp_path):
    write_binary(tmp_path / "data" / "x")
    plain, scaled = (cifar10(base_dir=str(tmp_path), transform=transform) for transform in (None, "normalize"))
    assert len(plain) == 20
    assert torch.allclose(scaled[0][0][1], (plain[0][0][1] - 0.4822) / 0.2435, atol=1e-5)


def test_real_jpeg_images(tmp_path):
    folder = Path(os.environ.get("FULLTILT_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))
    if not (folder / "cifar10_jpeg.tar.xz").is_file():
        pytest.skip(f"cifar10_jpeg.tar.xz is not in {folder} (FULLTILT_DATA)")
    written = collections.Counter()
    with tarfile.open(folder / "cifar10_jpeg.tar.xz", "r|xz") as members:
        for member in members:
            _, *name = member.name.split("/")
            if len(name) == 2 and member.isfile() and written[name[0]] < 2:
                written[name[0]] += 1
                target = tmp_path.joinpath("real", "train", *name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(members.extractfile(member).read())
            if written.total() == 20:
                break
    dataset = cifar10("train", path=str(tmp_path / "real"), transform="normalize")
    inputs, targets = dataset.get_batch(range(20))
    assert targets.tolist() == [t for t in range(10) for _ in range(2)]
    assert 0.3 < inputs.std() < 2.0
    smoothness = (inputs[..., 1:] - inputs[..., :-1]).abs().mean()
    assert smoothness < 0.5 * inputs.std()  # neighbours are alike in a photograph, not in noise
