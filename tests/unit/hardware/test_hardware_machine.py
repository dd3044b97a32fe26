import socket
import subprocess
import sys

import pytest
from tests.fake_nvml import FakeNvml, build_status
from tests.unit.hardware.device_cases import make_device

from fulltilt.hardware import is_wsl, read_machine
from fulltilt.records import Machine, dumps, loads

GIB = 2**30


def test_recorded_machine_without_a_gpu(recorded):
    machine = read_machine(recorded, nvml=FakeNvml(absence="NVML Shared Library Not Found"), environ={})
    assert (machine.cpu_model, machine.is_wsl, machine.devices) == ("AMD EPYC", False, ())
    assert machine.memory_available_bytes < machine.memory_total_bytes == 25276502016
    assert machine.null_reasons["devices"] == "NVML Shared Library Not Found"
    assert (machine.memory_limit_bytes, machine.shm_total_bytes) == (None, None)
    assert machine.null_reasons["memory_limit_bytes"]
    assert machine.null_reasons["shm_total_bytes"]


def test_real_machine_survives_json_and_names_no_host():
    machine = read_machine()
    text = dumps(machine)
    assert loads(Machine, text) == machine
    assert socket.gethostname() not in (machine.hostname_hash, machine.cpu_model, machine.system)
    assert len(machine.hostname_hash) == 12
    assert 1 <= machine.n_cores_usable <= machine.n_cores_logical
    assert machine.packages["torch"]
    for field in ("n_cores_physical", "memory_limit_bytes", "shm_total_bytes"):
        assert (getattr(machine, field) is None) == (field in machine.null_reasons)


def test_gpus_come_in_the_order_of_cuda_with_nominal_figures():
    devices = [make_device("NVIDIA H200"), make_device("NVIDIA Oddity", "GPU-b", index=1, memory_gib=8)]
    nvml = FakeNvml(devices, {0: build_status(memory_free_bytes=100 * GIB)}, driver="580.1")
    machine = read_machine(nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": "1,0"})
    odd, h200 = machine.devices
    assert (odd.index, odd.name, odd.nominal_bf16_tflops, odd.memory_free_bytes) == (0, "NVIDIA Oddity", None, None)
    assert (h200.index, h200.uuid, h200.nominal_bf16_tflops, h200.driver) == (1, "GPU-a", 989.4, "580.1")
    assert h200.memory_free_bytes == 100 * GIB
    assert h200.nominal_memory_gib_per_s == pytest.approx(4470.3, abs=0.1)
    assert "NVIDIA Oddity" in machine.null_reasons["devices[0].nominal_memory_gib_per_s"]
    assert machine.null_reasons["devices[0].memory_free_bytes"]
    assert "devices[1].memory_free_bytes" not in machine.null_reasons
    hidden = read_machine(nvml=FakeNvml(devices), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert hidden.null_reasons["devices"] == "CUDA_VISIBLE_DEVICES hides every GPU"


@pytest.mark.parametrize(
    ("version", "environ", "expected"),
    [
        ("Linux version 5.15.167.4-microsoft-standard-WSL2 (root@x)", {}, True),
        ("Linux version 4.4.0-19041-Microsoft (x)", {}, True),
        ("Linux version 6.8.0-45-generic (buildd@x)", {}, False),
        ("Linux version 6.8.0 (custom)", {"WSL_DISTRO_NAME": "Ubuntu"}, True),
        ("Linux version 6.8.0 (custom)", {"WSL_DISTRO_NAME": ""}, False),
    ],
)
def test_wsl(plant, version, environ, expected):
    assert is_wsl(plant({"proc/version": version}), environ) is expected


def test_a_full_reading_needs_no_torch():
    code = "import sys, fulltilt.hardware as h; h.read_machine(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
