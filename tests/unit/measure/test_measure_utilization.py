import threading

import pytest
import torch
from tests.fake_nvml import FakeNvml, build_status

from fulltilt.hardware import NvmlDevice, RealNvml
from fulltilt.measure.utilization import UtilizationSampler, find_device_index

DEVICE = NvmlDevice(index=0, name="x", uuid="GPU-a", memory_total_bytes=None, compute_capability=None)


def build_nvml(*utilizations_pct):
    return FakeNvml([DEVICE], {0: [build_status(utilization_pct=pct) for pct in utilizations_pct]})


def test_short_span_has_one_sample():
    sampler = UtilizationSampler(build_nvml(40.0, 80.0), 0, 30.0)
    sampler.start()
    assert (mean := sampler.stop()).n_samples == 1
    assert mean.mean_pct == 40.0
    sampler.start()
    assert sampler.stop().mean_pct == 80.0


def test_mean_over_samples_leaves_missing_ones_out():
    nvml, taken, has_read_all = build_nvml(0.0, None, 90.0, 45.0), [], threading.Event()
    read = nvml.read_utilization

    def note(index):
        taken.append(read(index))
        if len(taken) >= 4:
            has_read_all.set()
        return taken[-1]

    nvml.read_utilization = note
    sampler = UtilizationSampler(nvml, 0, interval_s=0.001)
    sampler.start()
    has_read_all.wait()
    mean = sampler.stop()
    taken = [reading.gpu_pct for reading in taken if reading.gpu_pct is not None]
    assert mean.n_samples == len(taken) >= 3
    assert mean.mean_pct == pytest.approx(sum(taken) / len(taken))
    assert mean.reason is None


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (UtilizationSampler(FakeNvml(), None), "the device is a CPU"),
        (UtilizationSampler(build_nvml(None), 0, 30.0), "the fake was given no figure"),
        (UtilizationSampler(FakeNvml([DEVICE]), 5), "index 5"),
    ],
)
def test_a_mean_that_is_missing_has_its_reason(sampler, reason):
    sampler.start()
    mean = sampler.stop()
    assert (mean.mean_pct, mean.n_samples) == (None, 0)
    assert reason in mean.reason
    assert find_device_index("cpu", FakeNvml([DEVICE])) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_busy_gpu_is_seen():
    nvml = RealNvml()
    index = find_device_index("cuda:0", nvml)
    assert index is not None
    a_NN = torch.randn(8192, 8192, device="cuda")
    sampler = UtilizationSampler(nvml, index, 0.1)
    sampler.start()
    for _ in range(200):
        a_NN @ a_NN
    torch.cuda.synchronize()
    assert sampler.stop().mean_pct > 0
    nvml.close()
