"""Sensor events: the made file and the dataset that reads it."""

import pickle
import tracemalloc

import h5py
import numpy as np
import pytest
import torch

from fulltilt.data import DATASETS, build_loader, make_sensor_hdf5
from fulltilt.data.sensors import make_sensor
from fulltilt.data.sensors.make_sensor import build_geometry, compute_events, estimate_bytes
from fulltilt.errors import DataError, UsageError

sensor_hdf5 = DATASETS["sensor_hdf5"]


def read_all(path):
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}


def test_file_has_the_layout_and_the_size_it_was_said_to_have(tmp_path):
    seen = []
    path = make_sensor_hdf5(tmp_path / "s.h5", 300, 130, with_info=True, progress=lambda *counts: seen.append(counts))
    shapes = {name: (values.shape, values.dtype) for name, values in read_all(path).items()}
    tables = {"input": (300, 2, 130), "label": (300, 6), "info": (300, 9)}
    expected = tables | dict.fromkeys(("xpmt", "ypmt", "zpmt"), (130,))
    assert shapes == {name: (shape, np.dtype("f4")) for name, shape in expected.items()}
    assert 0 <= path.stat().st_size - estimate_bytes(300, 130, with_info=True) < 20_000
    assert seen == [(128, 300), (256, 300), (300, 300)]
    with h5py.File(path) as file:
        assert bool(file.attrs["synthetic"])
        assert list(file["label"].attrs["columns"]) == list(make_sensor.LABELS)
        assert list(file["info"].attrs["columns"]) == list(make_sensor.INFO)
        assert file["input"].chunks is None


def test_equal_seeds_give_equal_rows_and_a_longer_file_begins_with_the_shorter(tmp_path):
    short = read_all(make_sensor_hdf5(tmp_path / "a.h5", 130, 70, seed=3))
    long = read_all(make_sensor_hdf5(tmp_path / "b.h5", 300, 70, seed=3, chunk_rows=7))
    other = read_all(make_sensor_hdf5(tmp_path / "c.h5", 130, 70, seed=4))
    assert np.array_equal(short["input"], long["input"][:130])
    assert not np.array_equal(short["input"], other["input"])


def test_light_falls_with_distance_leans_forward_and_arrives_no_earlier_than_light_travels():
    geometry = build_geometry(600)
    x, labels = compute_events(geometry, 400, np.random.default_rng(0))
    offset = geometry.T[None] - labels[:, None, 3:]
    distance = np.linalg.norm(offset, axis=2)
    hit = x[:, 0] > 0
    assert 0.02 < hit.mean() < 0.9
    near, far = (distance < 100) & (x[:, 0] < 1000), distance > 300
    assert x[:, 0][near].mean() > 10 * x[:, 0][far].mean()
    earliest = distance / (0.2998 / 1.32) - 6 * 3.0
    assert (x[:, 1] >= earliest)[hit].all()
    log_energy = np.log10(labels[:, 0])
    assert np.corrcoef(log_energy, np.log1p(x[:, 0].sum(1)))[0, 1] > 0.5
    assert 2 <= log_energy.min() < log_energy.max() <= 7
    cosine = (offset @ make_sensor.compute_directions(labels[:, 1], labels[:, 2])[:, :, None])[..., 0] / distance
    near, charge = distance < 200, x[:, 0]
    assert charge[near & (cosine > 0.5)].mean() > 1.3 * charge[near & (cosine < -0.5)].mean()


def test_geometry_is_strings_of_sensors_at_their_own_places():
    geometry = build_geometry(5160)
    assert geometry.shape == (3, 5160)
    assert len(np.unique(geometry.T, axis=0)) == 5160
    strings = np.unique(geometry[:2].T, axis=0)
    assert len(strings) == 86
    gaps = np.linalg.norm(strings[:, None] - strings[None], axis=2)
    assert gaps[gaps > 0].min() == pytest.approx(125, rel=1e-3)
    assert np.abs(geometry).max() < 700


def test_info_agrees_with_the_events(tmp_path):
    content = read_all(make_sensor_hdf5(tmp_path / "s.h5", 150, 90, with_info=True))
    info, charge, time = content["info"], content["input"][:, 0], content["input"][:, 1]
    assert np.array_equal(info[:, 0], np.arange(150))
    assert np.array_equal(info[:, 1], (charge > 0).sum(1))
    np.testing.assert_allclose(info[:, 2], charge.sum(1), rtol=1e-5)
    np.testing.assert_allclose(info[:, 5], time.max(1))
    np.testing.assert_allclose(np.linalg.norm(info[:, 6:], axis=1), 1, atol=1e-5)


def test_memory_does_not_grow_with_the_number_of_events(tmp_path):
    def measure_peak(n_samples):
        tracemalloc.start()
        make_sensor_hdf5(tmp_path / f"{n_samples}.h5", n_samples, 200)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    measure_peak(128)
    assert measure_peak(2560) < 1.5 * measure_peak(256)


@pytest.mark.parametrize("chunk_rows", [None, 1, 16])
def test_dataset_scales_every_field(tmp_path, chunk_rows):
    path = make_sensor_hdf5(tmp_path / "s.h5", 100, 70, chunk_rows=chunk_rows)
    content = read_all(path)
    dataset = sensor_hdf5(path=str(path), val_fraction=0)
    x, labels = dataset.get_batch([99, 3, 4])
    rows = content["input"][[99, 3, 4]]
    np.testing.assert_allclose(x[:, 0], rows[:, 0] / 100, rtol=1e-6)
    np.testing.assert_allclose(x[:, 1], np.log1p(rows[:, 1]) / 10, rtol=1e-5)
    np.testing.assert_allclose(labels, content["label"][[99, 3, 4]] / [5e7, 1, 1, 600, 550, 550], rtol=1e-5)
    assert (dataset.sample_shape, dataset.n_sensors, dataset.n_labels) == ((2, 70), 70, 6)
    np.testing.assert_allclose(dataset.geometry[0], content["xpmt"] / 600, rtol=1e-6)
    raw = sensor_hdf5(path=str(path), val_fraction=0, scale=False)
    assert np.array_equal(raw[3][0], content["input"][3])
    assert np.array_equal(raw.geometry[2], content["zpmt"])


def test_values_that_are_not_finite_become_zero_and_an_own_callable_transforms_one_event(tmp_path):
    path = make_sensor_hdf5(tmp_path / "s.h5", 20, 60)
    with h5py.File(path, "r+") as file:
        file["input"][0, :, :3] = [[np.nan, np.inf, -np.inf], [np.nan, np.inf, -5.0]]
        file["label"][0, 0] = np.inf
    x, label = sensor_hdf5(path=str(path), val_fraction=0)[0]
    assert torch.isfinite(x).all()
    assert x[:, :3].abs().sum() == 0
    assert label[0] == 0
    plain, doubled = sensor_hdf5(path=str(path)), sensor_hdf5(path=str(path), transform=lambda event: event * 2)
    assert torch.equal(doubled[1][0], plain[1][0] * 2)
    with pytest.raises(DataError, match="no image transforms"):
        sensor_hdf5(path=str(path), transform="random_flip")


def test_batches_load_in_workers_and_after_pickling(tmp_path):
    dataset = pickle.loads(pickle.dumps(sensor_hdf5(path=str(make_sensor_hdf5(tmp_path / "s.h5", 64, 60)))))
    options = {"num_workers": 2}
    loader = build_loader(dataset, batch_size=10, shuffle=True, drop_last=False, options=options, seed=0)
    total = sum(float(inputs.sum()) for inputs, _ in loader)
    assert total == pytest.approx(float(dataset.get_batch(range(len(dataset)))[0].sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("zpmt", None, r"zpmt is not in it.*xpmt \(60,\)"),
        ("xpmt", np.zeros(59, "f4"), "xpmt has 59 positions and input has 60 sensors"),
        ("input", np.zeros((20, 3, 60), "f4"), r"\(20, 3, 60\), expected \(N, 2, sensors\)"),
        ("label", np.zeros(20, "f4"), r"expected \(N, labels\)"),
        ("label", np.zeros((19, 6), "f4"), "input 20, label 19"),
    ],
)
def test_files_of_another_layout_are_refused(tmp_path, name, values, words):
    path = make_sensor_hdf5(tmp_path / "s.h5", 20, 60)
    with h5py.File(path, "r+") as file:
        del file[name]
        if values is not None:
            file[name] = values
    with pytest.raises(DataError, match=words):
        sensor_hdf5(path=str(path))


@pytest.mark.parametrize(("name", "value"), [("n_samples", 0), ("n_sensors", -1), ("chunk_rows", 0)])
def test_numbers_out_of_range_and_names_that_are_taken_are_refused(tmp_path, name, value):
    with pytest.raises(UsageError, match=f"{name} {value}"):
        make_sensor_hdf5(tmp_path / "s.h5", **{"n_samples": 5, "n_sensors": 60, name: value})
    assert list(tmp_path.iterdir()) == []
    path = make_sensor_hdf5(tmp_path / "s.h5", 5, 60)
    with pytest.raises(DataError, match="--force"):
        make_sensor_hdf5(path, 6, 60)
    assert len(read_all(path)["label"]) == 5
