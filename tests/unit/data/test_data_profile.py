"""Times of the data path: a slow part is found, in its place, and nothing is left out."""

import time

import pytest
import torch
from data_cases import write_images

from fulltilt.data import DATASETS, build_pipeline
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.data.loading.profile import measure_data_path
from fulltilt.data.transforms.pipeline import PerImage, Pipeline
from fulltilt.errors import DataError

CPU = torch.device("cpu")


def doze(image):
    time.sleep(0.002)
    return image


def make_dataset(pipeline):
    images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    return MemoryImages("own", images, torch.zeros(40, dtype=torch.int64), classes="a", transform=pipeline)


def test_a_slow_step_stands_first_with_its_time_and_share():
    quick = build_pipeline("random_flip | to_float")
    pipeline = Pipeline((quick.steps[0], PerImage(doze), quick.steps[1]))
    profile = measure_data_path(make_dataset(pipeline), batch_size=10, device=CPU, n_samples=20)
    first = profile.parts[0]
    assert (first.name, first.where) == ("doze", "loader")
    assert first.ms_per_sample >= 2.0
    assert first.share_pct > 50
    assert {part.name for part in profile.parts} == {"read", "random_flip", "doze", "to_float", "to float"}
    assert sum(part.share_pct for part in profile.parts) == pytest.approx(100)
    times_ms = [part.ms_per_sample for part in profile.parts]
    assert profile.loader_samples_per_s == pytest.approx(1e3 / sum(times_ms))
    assert times_ms == sorted(times_ms, reverse=True)
    assert profile.n_samples == 20
    bounded = measure_data_path(make_dataset(pipeline), batch_size=10, device=CPU, n_samples=10_000, max_s=0.01)
    assert bounded.n_samples == 10


def test_parts_on_the_device_are_told_from_those_of_the_loader(tmp_path):
    write_images(tmp_path, {"a": (20, 30), "b": (12, 9)}, 5)
    dataset = DATASETS["image_folder"](path=str(tmp_path), transform="resize(8) | random_flip")
    profile = measure_data_path(dataset, batch_size=4, device=CPU, on_device=True, n_samples=8)
    assert {(part.name, part.where) for part in profile.parts} == {
        ("decode", "loader"), ("resize", "loader"), ("collate", "loader"), ("random_flip", "cpu"), ("to float", "cpu"),
    }  # fmt: skip
    by_loader = measure_data_path(dataset, batch_size=4, device=CPU, n_samples=8)
    assert {part.where for part in by_loader.parts} == {"loader"}


def test_a_dataset_that_transforms_by_itself_is_one_part():
    class Own(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.zeros(3), index

    profile = measure_data_path(Own(), batch_size=4, device=CPU, n_samples=8)
    assert {part.name for part in profile.parts} == {"read and transform", "collate"}
    assert "cannot be told apart" in profile.note


def test_a_stream_and_an_own_step_on_the_device_are_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield torch.zeros(1)

    with pytest.raises(DataError, match="Stream streams"):
        measure_data_path(Stream(), batch_size=4, device=CPU)
    with pytest.raises(DataError, match="runs in the loader only"):
        measure_data_path(make_dataset(Pipeline((PerImage(doze),))), batch_size=4, device=CPU, on_device=True)
