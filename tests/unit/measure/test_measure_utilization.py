import pytest
import torch

from fulltilt.hardware import FakeNvml, NvmlDevice, RealNvml, build_status
from fulltilt.measure.utilization import UtilizationSampler, find_device_index

DEVICE = NvmlDevice(index=0, name="x", uuid="GPU-a", memory_total_bytes=None, compute_capability=None)


def build_sampler(*utilizations_pct: float | None, interval_s: float = 30.0) -> UtilizationSampler:
    return UtilizationSampler(
        FakeNvml([DEVICE], {0: [build_status(utilization_pct=pct) for pct in utilizations_pct]}), 0, interval_s
    )


def test_short_span_has_one_sample():
    sampler = build_sampler(40.0, 80.0)
    sampler.start()
    assert (mean := sampler.stop()).n_samples == 1
    assert mean.mean_pct == 40.0
    sampler.start()
    assert sampler.stop().mean_pct == 80.0


def test_mean_over_samples_leaves_missing_ones_out():
    nvml = FakeNvml([DEVICE], {0: [build_status(utilization_pct=pct) for pct in (0.0, None, 90.0, 45.0)]})
    seen = []
    read = nvml.read_utilization

    class Last:
        """Ends the span by itself once every reading was taken."""

        def read_utilization(self, index):
            seen.append(reading := read(index))
            if len(seen) == 4:
                sampler._halt.set()
            return reading

    sampler = UtilizationSampler(Last(), 0, interval_s=0.001)  # type: ignore[arg-type]
    sampler.start()
    thread = sampler._thread
    assert thread is not None
    thread.join()
    mean = sampler.stop()
    taken = [reading.gpu_pct for reading in seen if reading.gpu_pct is not None]
    assert mean.n_samples == len(taken) >= 3
    assert mean.mean_pct == pytest.approx(sum(taken) / len(taken))
    assert mean.reason is None


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (UtilizationSampler(FakeNvml(), None), "the device is a CPU"),
        (build_sampler(None), "the fake was given no figure"),
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
