import resource

import pytest
import torch

from fulltilt.errors import DeviceError, DeviceMemoryError
from fulltilt.measure.limit import apply_memory_limit, compute_data_limit_bytes
from fulltilt.records import Evidence, classify_outcome

GIB = 2**30
MIB = 2**20


def test_mapped_but_untouched_pages_are_not_billed():
    """3 GiB mapped of which 0.5 are resident, and a limit of 2: there is room for another 1.5 GiB and the stacks."""
    figures = {"mapped_bytes": 3 * GIB, "resident_bytes": GIB // 2, "limit_bytes": 2 * GIB}
    value = compute_data_limit_bytes(**figures, n_threads=4)
    assert 0 <= value - (3 * GIB + 3 * GIB // 2) <= 128 * MIB
    assert compute_data_limit_bytes(**figures, n_threads=6) - value == 16 * MIB


@pytest.mark.parametrize("limit_bytes", [0, -1, 1, 16 * MIB])
def test_limit_below_what_is_used_is_out_of_memory_and_changes_nothing(limit_bytes):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(DeviceMemoryError) as caught:
        apply_memory_limit("cpu", limit_bytes)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    evidence = Evidence(exit_code=1, exception_type="DeviceMemoryError", message=str(caught.value))
    assert classify_outcome(evidence)[0] == "out_of_memory"


def test_what_has_no_limit_is_refused():
    with pytest.raises(DeviceMemoryError, match=r"limit of 1\.00 GiB.*uses 1\.50 GiB.*set a limit above"):
        compute_data_limit_bytes(mapped_bytes=0, resident_bytes=3 * GIB // 2, limit_bytes=GIB, n_threads=1)
    with pytest.raises(DeviceError, match="meta"):
        apply_memory_limit("meta", GIB)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_refuses_past_the_limit_and_serves_below_it():
    try:
        apply_memory_limit("cuda:0", GIB)
        torch.ones(GIB // 8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(GIB // 2, device="cuda")
    finally:
        apply_memory_limit("cuda:0", torch.cuda.get_device_properties("cuda").total_memory)
