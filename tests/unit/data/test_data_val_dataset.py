"""A validation set of a file of its own, and a training set that has none: which rows each of them gets."""

import numpy as np
import pytest
from data_cases import write_hdf5, write_images

from fulltilt.config import config_from_values
from fulltilt.engine.build.assemble import build_workload, describe_files


def count_files(folder, dataset, val_dataset=None):
    """Samples of the training and the validation set, and what is said of them."""
    data = {"dataset": dataset} | ({} if val_dataset is None else {"val_dataset": val_dataset})
    config = config_from_values({"model": "small_cnn", "data": data}, base_dir=str(folder))
    workload = build_workload(config)
    n_val = None if workload.validation is None else len(workload.validation())
    return len(workload.dataset()), n_val, describe_files(config)


@pytest.fixture
def files(tmp_path):
    for name, n in (("a", 50), ("b", 30)):
        write_hdf5(tmp_path / f"{name}.h5", input=np.zeros((n, 1, 8, 8)), label=np.arange(n) % 5)
        write_images(tmp_path / name, {"x": (8, 8), "y": (8, 8)}, n_each=n)
        write_images(tmp_path / "c" / ("train" if name == "a" else "val"), {"x": (8, 8)}, n_each=n)
    return tmp_path


def test_all_of_a_validation_file_is_evaluated_and_what_training_leaves_out_is_told(files):
    """A tenth of it was, without a word, and a tenth of the training file served nothing."""
    told = "data.val_dataset is another file, and hdf5(path=a.h5) leaves a share of its own out: add val_fraction=0"
    assert count_files(files, "hdf5(path=a.h5)", "hdf5(path=b.h5)") == (45, 30, told)
    assert count_files(files, "hdf5(path=a.h5, val_fraction=0)", "hdf5(path=b.h5)") == (50, 30, "")
    assert count_files(files, "hdf5(path=a.h5, val_fraction=0)", "hdf5(path=b.h5, val_fraction=0.5)") == (50, 15, "")
    assert count_files(files, "hdf5(path=a.h5)", "hdf5(path=./a.h5)") == (45, 5, ""), "rows that training left out"
    assert count_files(files, "image_folder(path=a, val_fraction=0)", "image_folder(path=b)") == (100, 60, "")
    assert count_files(files, "image_folder(path=a)", "image_folder(path=c)")[:2] == (80, 30), "it has a val/"
    assert count_files(files, "image_folder(path=c)", "image_folder(path=b)") == (50, 60, "")


def test_a_file_that_is_trained_on_as_a_whole_has_no_validation_set(files):
    """The error was val_fraction 0 is not between 0 and 1."""
    assert count_files(files, "hdf5(path=a.h5, val_fraction=0)") == (50, None, "")
    assert count_files(files, "image_folder(path=a, val_fraction=0)") == (100, None, "")
    assert count_files(files, "image_folder(path=c, val_fraction=0)") == (50, 30, ""), "it has a val/"
