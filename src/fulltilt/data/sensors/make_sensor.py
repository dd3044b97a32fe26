"""Make a file of synthetic sensor events, for trials and timing.

An event is light from one point: the expected charge of a sensor falls with the square of its distance and with
absorption, and is larger ahead of the direction of flight; its time is distance over the speed of light in ice plus
scattering delay and noise. Charges are Poisson counts; a sensor without charge has time 0.
"""

from pathlib import Path

import numpy as np

from fulltilt.data.new_file import Counter, Progress, check_name, check_room, new_file, reserve
from fulltilt.data.tables.hdf5_repack import create_table
from fulltilt.errors import UsageError

LABELS = ("energy_gev", "zenith_rad", "azimuth_rad", "x_m", "y_m", "z_m")
INFO = (
    "event", "n_hits", "charge_sum", "charge_max", "first_time_ns", "last_time_ns",
    "direction_x", "direction_y", "direction_z",
)  # fmt: skip
_BLOCK_ROWS = 128  # unit of randomness: part of the definition of the file, so that a seed always gives the same rows
_SENSORS_PER_STRING = 60
_STRING_SPACING_M, _SENSOR_SPACING_M = 125.0, 17.0
_SPEED_M_PER_NS = 0.2998 / 1.32
_ABSORPTION_M, _SCATTERING_NS_PER_M, _NOISE_NS = 120.0, 0.8, 3.0
_CHARGE_PER_GEV, _SOFTENING_M2 = 40.0, 25.0
_MAX_CHARGE = 1000.0  # where a sensor saturates


def make_sensor_hdf5(
    path: str | Path,
    n_samples: int,
    n_sensors: int = 5160,
    *,
    seed: int = 0,
    with_info: bool = False,
    chunk_rows: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write synthetic events in the layout of ``sensor_hdf5``; equal arguments give equal rows.

    The file gets its name when it is complete. Memory: one block of 128 events.

    Args:
        n_sensors: Sensors, 60 to a string on a hexagonal grid.
        with_info: Also write ``info (N, 9)``, the columns of ``INFO``.
        chunk_rows: Rows per chunk; None writes one array each, which is read faster
            (``benchmarks/results/hdf5_loader-cpu.json`` times both).
        progress: Called with (events done, events) after each block.

    Raises:
        DataError: The file exists.
        StorageError: There is no room for it; nothing is written.
        UsageError: A number is out of range.
    """
    path = Path(path)
    for name, value in (("n_samples", n_samples), ("n_sensors", n_sensors), ("chunk_rows", chunk_rows)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value} must be 1 or more")
    check_name(path, force=force)
    remedy = f"make fewer events than {n_samples}"
    check_room(path, estimate_bytes(n_samples, n_sensors, with_info=with_info), remedy=remedy)
    with new_file(path, remedy=remedy) as temporary:
        _write_file(temporary, n_samples, n_sensors, seed, with_info, chunk_rows, progress)
    return path


def estimate_bytes(n_samples: int, n_sensors: int, *, with_info: bool = False) -> int:
    """Estimate the size of the file without its headers."""
    columns = 2 * n_sensors + len(LABELS) + (len(INFO) if with_info else 0)
    return 4 * (n_samples * columns + 3 * n_sensors)


def build_geometry(n_sensors: int) -> np.ndarray:
    """Place sensors (3, n_sensors) float32, in metres: strings on a hexagonal grid around the origin."""
    n_strings = -(-n_sensors // _SENSORS_PER_STRING)
    strings_N2 = _build_hexagonal_grid(n_strings) * _STRING_SPACING_M
    string, depth = np.divmod(np.arange(n_sensors), _SENSORS_PER_STRING)
    z = (depth - (_SENSORS_PER_STRING - 1) / 2) * -_SENSOR_SPACING_M
    return np.stack([strings_N2[string, 0], strings_N2[string, 1], z]).astype(np.float32)


def compute_events(geometry_3S: np.ndarray, n_events: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Compute input (n, 2, S) and label (n, 6) of synthetic events, float32."""
    energy = 10 ** rng.uniform(2, 7, n_events)
    zenith, azimuth = np.arccos(rng.uniform(-1, 1, n_events)), rng.uniform(0, 2 * np.pi, n_events)
    low, high = geometry_3S.min(axis=1), geometry_3S.max(axis=1)
    vertex_N3 = rng.uniform(low, high, (n_events, 3))
    offset_N3S = geometry_3S[None].astype(np.float64) - vertex_N3[:, :, None]
    distance_NS = np.sqrt((offset_N3S**2).sum(axis=1))
    along_NS = np.einsum("nds,nd->ns", offset_N3S, compute_directions(zenith, azimuth)) / np.maximum(distance_NS, 1e-9)
    falloff_NS = np.exp(-distance_NS / _ABSORPTION_M) / (distance_NS**2 + _SOFTENING_M2)
    expected_NS = _CHARGE_PER_GEV * energy[:, None] * falloff_NS * (1 + 0.5 * along_NS)
    charge_NS = rng.poisson(np.minimum(expected_NS, _MAX_CHARGE))
    delay_NS = rng.exponential(1.0, distance_NS.shape) * _SCATTERING_NS_PER_M * distance_NS
    noise_NS = rng.normal(0, _NOISE_NS, distance_NS.shape)
    time_NS = np.maximum(distance_NS / _SPEED_M_PER_NS + delay_NS + noise_NS, 0) * (charge_NS > 0)
    label_N6 = np.column_stack([energy, zenith, azimuth, vertex_N3])
    return np.stack([charge_NS, time_NS], axis=1).astype(np.float32), label_N6.astype(np.float32)


def compute_directions(zenith: np.ndarray, azimuth: np.ndarray) -> np.ndarray:
    """Compute unit vectors (n, 3) from zenith and azimuth angles."""
    return np.column_stack([np.sin(zenith) * np.cos(azimuth), np.sin(zenith) * np.sin(azimuth), np.cos(zenith)])


def _compute_info(first: int, x_N2S: np.ndarray, label_N6: np.ndarray) -> np.ndarray:
    charge_NS, time_NS = x_N2S[:, 0], x_N2S[:, 1]
    hit_NS = charge_NS > 0
    any_hit = hit_NS.any(axis=1)
    first_time = np.where(any_hit, np.where(hit_NS, time_NS, np.inf).min(axis=1), 0)
    columns = [
        np.arange(first, first + len(x_N2S)), hit_NS.sum(axis=1), charge_NS.sum(axis=1), charge_NS.max(axis=1),
        first_time, time_NS.max(axis=1), compute_directions(label_N6[:, 1], label_N6[:, 2]),
    ]  # fmt: skip
    return np.column_stack(columns).astype(np.float32)


def _write_file(
    path: Path,
    n_samples: int,
    n_sensors: int,
    seed: int,
    with_info: bool,
    chunk_rows: int | None,
    progress: Progress | None,
) -> None:
    """Create the whole file, allocate its blocks, then fill it."""
    import h5py

    geometry_3S = build_geometry(n_sensors)
    columns = {"label": LABELS} | ({"info": INFO} if with_info else {})
    shapes = {"input": (2, n_sensors)} | {name: (len(names),) for name, names in columns.items()}
    reserve(path, estimate_bytes(n_samples, n_sensors, with_info=with_info))
    with h5py.File(path, "w") as file:
        for name, values in zip(("xpmt", "ypmt", "zpmt"), geometry_3S, strict=True):
            file.create_dataset(name, data=values)
        for name, row in shapes.items():
            rows = min(chunk_rows, n_samples) if chunk_rows else None
            create_table(file, name, (n_samples, *row), h5py.h5t.NATIVE_FLOAT, rows)
        for name, names in columns.items():
            file[name].attrs["columns"] = list(names)
        file.attrs["synthetic"] = True
        file.attrs["seed"] = seed
    reserve(path, path.stat().st_size)
    report = Counter(progress, n_samples)
    with h5py.File(path, "r+") as file:
        for first in range(0, n_samples, _BLOCK_ROWS):
            end = min(first + _BLOCK_ROWS, n_samples)
            rng = np.random.default_rng([seed, first])
            x_N2S, label_N6 = (part[: end - first] for part in compute_events(geometry_3S, _BLOCK_ROWS, rng))
            file["input"][first:end], file["label"][first:end] = x_N2S, label_N6
            if with_info:
                file["info"][first:end] = _compute_info(first, x_N2S, label_N6)
            report.add(end - first)


def _build_hexagonal_grid(n_points: int) -> np.ndarray:
    """Return the ``n_points`` points of a hexagonal grid of spacing 1 that lie nearest to the origin."""
    reach = int(np.ceil(np.sqrt(n_points))) + 1
    a, b = (axis.reshape(-1) for axis in np.meshgrid(*[np.arange(-reach, reach + 1)] * 2))
    points = np.column_stack([a + b / 2, b * np.sqrt(3) / 2])
    order = np.lexsort((points[:, 1], points[:, 0], np.round((points**2).sum(axis=1), 6)))
    return points[order[:n_points]]
