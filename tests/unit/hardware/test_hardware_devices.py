import pytest

from fulltilt.errors import DeviceError
from fulltilt.hardware import (
    FakeNvml,
    NvmlDevice,
    find_data_sheet,
    find_nvml_index,
    read_visible_devices,
    resolve_device,
)

GIB = 2**30
CUDA_TORCH = "2.13.0+cu130"


def make_device(index: int) -> NvmlDevice:
    uuid = f"GPU-{index}000aaaa-0000"
    return NvmlDevice(
        index=index, name="NVIDIA H200", uuid=uuid, memory_total_bytes=140 * GIB, compute_capability=(9, 0)
    )


@pytest.fixture
def four() -> FakeNvml:
    return FakeNvml([make_device(i) for i in range(4)], driver="580.1")


@pytest.mark.parametrize(
    ("listed", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 1 , 0 ", [1, 0]),
        ("0,9,1", [0]),
        ("0,0", [0]),
        ("GPU-2000", [2]),
        ("GPU-", []),
        ("MIG-1", []),
    ],
)
def test_visible_devices(four, listed, indices):
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [device.index for device in read_visible_devices(four, environ)] == indices


@pytest.mark.parametrize(
    ("name", "device"), [("auto", "cuda:0"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3")]
)
def test_resolve_with_gpus(four, name, device):
    assert resolve_device(name, four, environ={}, torch_version=CUDA_TORCH) == device


def test_auto_is_the_cpu_without_a_gpu_or_with_a_torch_for_cpus(four):
    assert resolve_device("auto", FakeNvml(), environ={}, torch_version=CUDA_TORCH) == "cpu"
    assert resolve_device("auto", four, environ={}, torch_version="2.13.0+cpu") == "cpu"
    assert resolve_device("auto", four, environ={"CUDA_VISIBLE_DEVICES": ""}, torch_version=CUDA_TORCH) == "cpu"


@pytest.mark.parametrize(
    ("name", "environ", "torch_version", "said"),
    [
        ("cuda:4", {}, CUDA_TORCH, "cuda:3 (NVIDIA H200)"),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "2"}, CUDA_TORCH, "there is cuda:0 (NVIDIA H200)"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, CUDA_TORCH, "CUDA_VISIBLE_DEVICES hides every GPU"),
        ("cuda", {}, "2.13.0+cpu", "torch 2.13.0+cpu is built for the CPU"),
        ("cuad", {}, CUDA_TORCH, "did you mean cuda"),
        ("cuda:", {}, CUDA_TORCH, "unknown device 'cuda:'"),
        ("cuda:-1", {}, CUDA_TORCH, "unknown device 'cuda:-1'"),
        ("", {}, CUDA_TORCH, "valid: auto"),
    ],
)
def test_resolve_says_what_is_there(four, name, environ, torch_version, said):
    with pytest.raises(DeviceError) as caught:
        resolve_device(name, four, environ=environ, torch_version=torch_version)
    assert said in str(caught.value)


def test_resolve_hands_on_why_the_driver_has_no_device():
    with pytest.raises(DeviceError, match=r"driver is asleep.*--device cpu"):
        resolve_device("cuda", FakeNvml(absence="the driver is asleep"), environ={}, torch_version=CUDA_TORCH)


def test_nvml_index_by_uuid_with_and_without_prefix(four):
    assert find_nvml_index("GPU-2000aaaa-0000", four) == 2
    assert find_nvml_index("3000AAAA-0000", four) == 3
    assert find_nvml_index("nobody", four) is None


def test_data_sheet_names_match_as_a_whole():
    assert find_data_sheet("NVIDIA H200").bf16_tflops == 989.4
    assert find_data_sheet("NVIDIA L4").memory_gib_per_s == pytest.approx(279.4, abs=0.1)
    assert find_data_sheet("NVIDIA GeForce RTX 3060", 12 * GIB).bf16_tflops is None
    assert find_data_sheet("NVIDIA GeForce RTX 3060", 8 * GIB) is None
    assert find_data_sheet("NVIDIA GeForce RTX 3060") is None
    assert find_data_sheet("NVIDIA GeForce RTX 3060 Ti", 8 * GIB) is None
    assert find_data_sheet("NVIDIA L400") is None
