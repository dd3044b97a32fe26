"""Measure how fast a device multiplies matrices and copies memory.

Other work on the machine only ever lowers a block, so the upper quartile of the blocks is the figure.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from fulltilt.errors import DeviceError
from fulltilt.hardware import DataSheet, find_data_sheet
from fulltilt.records import Roof
from fulltilt.stats import compute_quantile_interval

_QUANTILE = 0.75
_BLOCK_S = 0.015
_MIN_BLOCKS = 13  # with fewer, all of them lie below the true upper quartile in more than 2.5 % of the cases
_FEWEST_BLOCKS = 3
_MAX_BLOCKS = 60
_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}  # several times the last cache


def measure_roofs(device: torch.device | str, *, seconds: float = 2.5) -> tuple[Roof, ...]:
    """Measure matmul and copy rates for about ``seconds`` in total.

    A matmul of size n counts 2·n³ FLOPs, a copy counts bytes read plus bytes written. On a CPU the rates are those
    of torch's present number of threads.

    **Device**: allocates up to 3 matrices or 2 copy buffers, synchronises.

    Raises:
        ValueError: ``seconds`` is not above 0.
        DeviceError: the device is neither a CPU nor a CUDA device.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds}: roofs need time to be measured, give more than 0")
    device = torch.device(device)
    precisions = _list_precisions(device)
    sheet = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        sheet = find_data_sheet(properties.name, properties.total_memory)
    share_s = seconds / (len(precisions) + 1)
    roofs = [_measure_matmul(device, precision, share_s, sheet) for precision in precisions]
    return (*roofs, _measure_copy(device, share_s, sheet))


def _list_precisions(device: torch.device) -> tuple[str, ...]:
    """List the formats that the device computes in; below compute capability 8.0 TF32 and bf16 are not among them."""
    if device.type == "cpu":
        return ("fp32", "bf16")
    if device.type != "cuda":
        raise DeviceError(f"no roofs for device {device}: fulltilt measures cpu and cuda")
    newer = torch.cuda.get_device_capability(device) >= (8, 0)
    return ("fp32", "tf32", "bf16", "fp16") if newer else ("fp32", "fp16")


def _measure_matmul(device: torch.device, precision: str, seconds: float, sheet: DataSheet | None) -> Roof:
    dtype = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.no_grad(), _allow_tf32(device, precision == "tf32"):
        n = _choose_size(device, dtype, seconds)
        a_NN, b_NN = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out_NN = torch.empty(n, n, device=device, dtype=dtype)
        rates = _measure_rates(lambda: torch.mm(a_NN, b_NN, out=out_NN), device, seconds * 0.8)
    nominal = sheet.bf16_tflops if sheet is not None and precision in ("bf16", "fp16") else None
    return _build_roof(f"matmul {precision}", "tflops", [2 * n**3 * r / 1e12 for r in rates], nominal, sheet)


def _measure_copy(device: torch.device, seconds: float, sheet: DataSheet | None) -> Roof:
    n_bytes = _COPY_BYTES[device.type]
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = _measure_rates(lambda: target.copy_(source), device, seconds)
    nominal = sheet.memory_gib_per_s if sheet is not None else None
    return _build_roof("memory copy", "gib_per_s", [2 * n_bytes * r / 2**30 for r in rates], nominal, sheet)


def _choose_size(device: torch.device, dtype: torch.dtype, seconds: float) -> int:
    """Find the largest matrix size that is fast enough: a power of two up to 2048, on a GPU 8192.

    A type without hardware support may run hundreds of times slower. On a CPU one thread is timed: on a busy machine
    the threads of a short call wait for each other for longer than they compute, and the size would stay too small.
    """
    n, largest = 256, 8192 if device.type == "cuda" else 2048
    budget_s = min(_BLOCK_S * 2, seconds / (2 * _MIN_BLOCKS))
    n_threads = torch.get_num_threads() if device.type == "cpu" else 1
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        while n < largest:
            a_NN = torch.ones(n, n, device=device, dtype=dtype)
            call_s = _time_fastest(functools.partial(torch.mm, a_NN, a_NN), device)
            if call_s * 8 / n_threads > budget_s:  # twice the size takes 8 times as long
                break
            n *= 2
    finally:
        if device.type == "cpu":
            torch.set_num_threads(n_threads)
    return n


def _time_fastest(run: Callable[[], object], device: torch.device, n_tries: int = 4) -> float:
    """Time the fastest of a few calls, in seconds: one that was interrupted would make sizes too small."""
    fastest_s = math.inf
    for _ in range(n_tries):
        began_s = time.perf_counter()
        run()
        _wait(device)
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return max(fastest_s, 1e-7)


def _measure_rates(run: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Measure the calls per second of repeated blocks of about 15 ms each."""
    n_calls = max(1, math.ceil(_BLOCK_S / _time_fastest(run, device)))
    rates: list[float] = []
    spent_s = 0.0
    # On a machine that is busy elsewhere blocks take far longer than planned: fewer of them, and a wider interval.
    while len(rates) < _MAX_BLOCKS:
        if spent_s >= seconds and len(rates) >= (_MIN_BLOCKS if spent_s < 2 * seconds else _FEWEST_BLOCKS):
            break
        block_began_s = time.perf_counter()
        for _ in range(n_calls):
            run()
        _wait(device)
        block_s = time.perf_counter() - block_began_s
        spent_s += block_s
        rates.append(n_calls / block_s)
    return rates


def _build_roof(name: str, unit: str, values: list[float], nominal: float | None, sheet: DataSheet | None) -> Roof:
    measured, interval = float(np.quantile(values, _QUANTILE)), compute_quantile_interval(values, _QUANTILE)
    source = sheet.source if sheet is not None and nominal is not None else None
    return Roof(name=name, unit=unit, measured=measured, measured_ci95=interval, nominal=nominal, nominal_source=source)


@contextlib.contextmanager
def _allow_tf32(device: torch.device, allowed: bool) -> Iterator[None]:
    """Compute matrix products in fp32 proper or in TF32, whatever the process has set; put it back afterwards."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
