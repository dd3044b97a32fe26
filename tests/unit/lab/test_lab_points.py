"""From a grid to rows, and from a row to the words that train exactly it."""

from __future__ import annotations

import pytest
from tests.fake_nvml import FakeNvml, build_status

from fulltilt.config import config_from_values, load_config
from fulltilt.errors import ConfigError, DeviceError
from fulltilt.hardware import NvmlDevice, NvmlProcess
from fulltilt.lab.executors.local import LocalExecutor, build_slots
from fulltilt.lab.points import build_words, list_dry_runs, read_grid

TEN = str(list(range(1, 11)))
BILLION = "".join(f"{axis}: {TEN}\n" for axis in ("lr", "batch_size", "seed", "epochs", "num_workers"))
BILLION += f"speed: {{accumulate: {TEN}}}\noptim: {{weight_decay: {TEN}, clip_norm: {TEN}}}\n"
BILLION += f"model: [{', '.join('abcdefghij')}]\n"
GRID = "lr: [0.1, 0.2]\nmodel: ['net(width=${batch_size})', \"other(name='ä')\"]\nbatch_size: 4\ndevice: [0, 1]\n"


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "grid.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


def test_the_list_of_devices_is_the_pool_and_no_part_of_an_experiment(write):
    grid, narrower = read_grid(write(GRID), []), read_grid(write(GRID), ["device=[3]"])
    assert (grid.pool, narrower.pool) == ([0, 1], [3])
    assert [point.values["optim.lr"] for point in grid.points] == [0.1, 0.1, 0.2, 0.2]
    assert len({point.digest for point in grid.points}) == 4
    assert [point.digest for point in grid.points] == [point.digest for point in narrower.points]
    assert grid.points[0].values["model"] == "net(width=4)"


def test_a_grid_shares_its_devices_and_one_experiment_alone_spans_them(write):
    shared, alone = read_grid(write(GRID), []), read_grid(write("lr: 1\ndevice: [0, 1, 2]\n"), [])
    ranks = read_grid(write("lr: [1, 2]\nrun: {n_ranks: 2}\ndevice: cpu\n"), [])
    assert [grid.n_devices for grid in (shared, alone, ranks)] == [1, 3, 2]


def test_what_does_not_train_or_stands_there_twice_does_not_make_another_experiment(write):
    first = read_grid(write(GRID), []).points[0]
    more = "benchmark: {steps_per_test: 3}\ntargets: {memory_gib: 3}\nseed: 42\n"  # the last is the default
    assert read_grid(write(GRID + more), []).points[0].digest == first.digest
    assert read_grid(write(GRID + "seed: 43\n"), []).points[0].digest != first.digest
    assert len(read_grid(write("lr: [0.1, 0.1, 0.2]\n"), []).points) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr: [1, 2]\ndevice: !grid [cpu, 0]\n", "as an axis: it is the pool"),
        ("lr: [1, -2]\n", "lr -2: expected a number above 0"),
        (f"lr: {list(range(1, 400))}\nbatch_size: {list(range(1, 400))}\n", "grid of 159201 points"),
        (BILLION, "grid of 1000000000 points"),
    ],
)
def test_refused(write, text, said):
    with pytest.raises(ConfigError) as refused:
        read_grid(write(text), [])
    assert said in str(refused.value)


def test_the_words_of_a_row_win_over_a_file_that_has_changed(write):
    values = {
        "model": "net(a='x\\y', b=${c})".replace("${c}", "3"),
        "data": {"transform": {"train": "a | b(c=1)"}, "path": 'ä "q"\n😀', "batch_size": 3},
        "optim": {"lr": 1e-7, "warmup": "1 epoch"},
        "run": {"name": "null", "checkpoint_every": None, "loggers": ["csv", "tensorboard"], "device": "auto"}
        | {"promise": "runs/tune/a/promise.json"},
    }
    wanted = config_from_values(values, base_dir="/")
    changed = write("lr: [5, 6]\nmodel: other\nseed: 7\ntransform: {val: c}\nspeed: {compile: true}\nuse_amp: true\n")
    assert load_config(changed, build_words(wanted.to_values())).to_values() == wanted.to_values()


def test_a_dry_run_for_each_component_and_none_for_numbers(write):
    points = read_grid(write("model: [a, b]\nlr: [0.1, 0.2]\noptimizer: [sgd, adamw]\n"), []).points
    tried = [(point.values["model"], point.values["optim.optimizer"]) for point in list_dry_runs(points)]
    assert tried == [("a", "sgd"), ("a", "adamw"), ("b", "sgd")]
    assert len(list(list_dry_runs(read_grid(write("lr: [1, 2]\nbatch_size: [1, 2]\n"), []).points))) == 1


def build_nvml(n: int, statuses=None) -> FakeNvml:
    device = {"name": "H200", "memory_total_bytes": 1 << 37, "compute_capability": (9, 0)}
    return FakeNvml([NvmlDevice(index=i, uuid=f"GPU-{i}", **device) for i in range(n)], statuses)


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr("fulltilt.hardware.devices.read_package_version", lambda name: "2.13.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_each_gpu_of_the_pool_is_the_only_one_its_training_sees(cuda_build):
    slots = build_slots([2, 0], build_nvml(3))
    seen = [(slot.name, slot.device, slot.n_threads, slot.environ["CUDA_VISIBLE_DEVICES"]) for slot in slots]
    assert seen == [("cuda:2", "cuda:0", None, "GPU-2"), ("cuda:0", "cuda:0", None, "GPU-0")]
    for pool, names in {"auto": ["cuda:0", "cuda:1"], "cuda:1": ["cuda:1"], "cpu": ["cpu:0"]}.items():
        assert [slot.name for slot in build_slots(pool, build_nvml(2))] == names
    with pytest.raises(DeviceError, match="cuda:3 is not there"):
        build_slots([0, 3], build_nvml(2))


def test_a_gpu_that_others_compute_on_or_that_does_not_answer_is_busy_and_one_without_processes_is_not(
    cuda_build, tmp_path
):
    """Where NVML tells no processes, as in Windows' Linux and for others of a container, a GPU is as free as ever."""
    known = (
        {"processes": (NvmlProcess(pid=42, memory_used_bytes=1 << 30),)},
        {"processes": ()},
        {"memory_used_bytes": 9},
    )
    nvml = build_nvml(5, {1 + index: build_status(**each) for index, each in enumerate(known)})
    nvml.read_devices = build_nvml(6).read_devices  # the last one was there
    (place,) = LocalExecutor([1, 2, 3, 4, 5], logs=tmp_path, nvml=nvml).read_places()
    assert len(place.devices) == 5
    assert place.busy == {
        "cuda:1": "used by process 42",
        "cuda:4": "it does not answer (the fake was given no figure)",
        "cuda:5": "no NVIDIA device with index 5: there are 5 (0 to 4)",
    }


def test_without_a_gpu_the_pool_is_slots_on_the_cpu(cuda_build, monkeypatch):
    monkeypatch.setattr("fulltilt.lab.executors.local.count_usable_cores", lambda: 9)
    slots = build_slots([0, 1, 2, 3], FakeNvml())
    assert [(slot.name, slot.device, slot.n_threads) for slot in slots] == [(f"cpu:{i}", "cpu", 2) for i in range(4)]
    assert {slot.environ["OMP_NUM_THREADS"] for slot in slots} == {"2"}
    assert [slot.n_threads for slot in build_slots("auto", FakeNvml())] == [9]
    with pytest.raises(DeviceError, match="use --device cpu"):
        build_slots("cuda", FakeNvml())
