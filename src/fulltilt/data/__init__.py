"""Data: datasets by name, image transforms, HDF5 of any layout, loaders whose position can be saved.

A builder of ``DATASETS`` takes ``split`` ("train" or "val"), ``transform`` (the text of a pipeline, or a callable on
one sample), ``path``, ``base_dir`` (where relative paths start; the working directory when None), the ``seed`` of a
random split, and arguments of its own. It returns a map-style dataset of (inputs, targets) with ``name``, ``n_classes``
(None when targets are no classes) and ``sample_shape``, behind the transform. Its ``get_batch(indices)`` reads a whole
batch, which ``build_loader`` uses in place of one call per sample. Datasets of images also have ``classes``, the names
by target. A class with an attribute ``collate`` has its samples joined by that, where the task says nothing else.
"""

# ruff: noqa: F401

from collections.abc import Callable, Mapping

from torch.utils.data import Dataset

from fulltilt.data.collate import fast_collate
from fulltilt.data.images.cifar10 import cifar10
from fulltilt.data.images.digits import digits
from fulltilt.data.images.image_folder import image_folder
from fulltilt.data.images.make_stl10 import make_stl10
from fulltilt.data.images.stl10 import stl10
from fulltilt.data.loading.block_sampler import BlockSampler
from fulltilt.data.loading.loader import build_loader
from fulltilt.data.loading.loader_errors import explain_loader_error
from fulltilt.data.loading.placement import count_held_bytes, find_placements, place
from fulltilt.data.loading.sampler import EpochSampler
from fulltilt.data.loading.worker_signals import GuardedLoader
from fulltilt.data.sensors.make_sensor import make_sensor_hdf5
from fulltilt.data.sensors.sensor import sensor_hdf5
from fulltilt.data.tables.hdf5 import hdf5
from fulltilt.data.tables.hdf5_inspect import inspect_hdf5
from fulltilt.data.tables.hdf5_repack import repack_hdf5
from fulltilt.data.text.passages import Passages
from fulltilt.data.text.prepare import prepare_text
from fulltilt.data.text.text import text
from fulltilt.data.transforms.batch_transform import BatchTransform, find_transforms, take_raw
from fulltilt.data.transforms.mixing import build_mix
from fulltilt.data.transforms.pipeline import TRANSFORMS, Pipeline, build_pipeline

DATASETS: Mapping[str, Callable[..., Dataset]] = {
    "cifar10": cifar10,
    "digits": digits,
    "hdf5": hdf5,
    "image_folder": image_folder,
    "passages": Passages,
    "sensor_hdf5": sensor_hdf5,
    "stl10": stl10,
    "text": text,
}
