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
        assert (roof.nominal, roof.nominal_source) == (None, None)


@pytest.mark.parametrize(
    ("device", "seconds", "refusal", "said"),
    [*[("cpu", s, ValueError, "roofs need time") for s in (0, float("nan"))], ("meta", 1.0, DeviceError, "meta")],
)
def test_no_time_and_other_devices_are_refused(device, seconds, refusal, said):
    with pytest.raises(refusal, match=said):
        measure_roofs(device, seconds=seconds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_roofs_put_the_precision_back():
    before = torch.get_float32_matmul_precision()
    roofs = {roof.name: roof for roof in measure_roofs("cuda", seconds=1.0)}
    assert torch.get_float32_matmul_precision() == before
    assert roofs["matmul fp16"].measured > roofs["matmul fp32"].measured
