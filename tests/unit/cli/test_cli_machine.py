"""``fulltilt machine``: what it says under Windows' Linux."""

from fulltilt.cli.machine import list_wsl_rows
from fulltilt.hardware import WslReport

REPORT = WslReport(
    version=2,
    memory_total_bytes=16 * 2**30,
    swap_total_bytes=4 * 2**30,
    config_path="/mnt/c/Users/kim/.wslconfig",
    config_memory="16GB",
    config_swap=None,
    gpu="there is no /dev/dxg",
    advice=("first", "second"),
)


def test_memory_limits_gpu_and_advice_stand_in_rows_of_their_own_and_elsewhere_there_are_none():
    limits = "16.00 GiB memory, 4.00 GiB swap; memory=16GB, swap=not set in /mnt/c/Users/kim/.wslconfig"
    gpu = ("WSL: GPU", "not usable: there is no /dev/dxg")
    assert list_wsl_rows(REPORT) == [("WSL 2", limits), gpu, ("WSL: advice", "first"), ("WSL: advice", "second")]
    assert list_wsl_rows(None) == []
