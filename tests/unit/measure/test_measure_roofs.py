import pytest
import torch

from fulltilt.errors import DeviceError
from fulltilt.measure.roofs import measure_roofs


def test_cpu_roofs():
    n_threads = torch.get_num_threads()
    roofs = {roof.name: roof for roof in measure_roofs("cpu", seconds=0.3)}
    assert list(roofs) == ["matmul fp32", "matmul bf16", "memory copy"]
    assert torch.get_num_threads() == n_threads
    assert [roof.unit for roof in roofs.values()] == ["tflops", "tflops", "gib_per_s"]
    for roof in roofs.values():
        low, high = roof.measured_ci95
        assert 0 < low <= roof.measured <= high
        assert roof.nominal is None
        assert roof.nominal_source is None


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_roofs_need_time(seconds):
    with pytest.raises(ValueError, match="roofs need time"):
        measure_roofs("cpu", seconds=seconds)


def test_other_devices_are_refused():
    with pytest.raises(DeviceError, match="meta"):
        measure_roofs("meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_roofs_put_the_precision_back():
    before = torch.get_float32_matmul_precision()
    roofs = {roof.name: roof for roof in measure_roofs("cuda", seconds=1.0)}
    assert torch.get_float32_matmul_precision() == before
    assert roofs["matmul fp16"].measured > roofs["matmul fp32"].measured
