import gc
import mmap
import subprocess
import sys
import time

import pytest
import torch

from fulltilt.measure.memory import MemoryMeter, MemoryPeaks, join_peaks

GIB = 2**30
MIB = 2**20
N_256_MIB = 64 * MIB  # float32


def measure_peak_gib(body=lambda: None, **options):
    meter = MemoryMeter("cpu", **options)
    meter.start()
    body()
    return meter.stop().rss_peak_gib


def touch_256_mib():
    """Map memory and give it back: what an allocator does depends on what the process freed before."""
    with mmap.mmap(-1, 256 * MIB) as mapped:
        for start in range(0, 256 * MIB, MIB):
            mapped[start : start + MIB] = bytes([1]) * MIB


def test_peak_between_two_samples_is_not_missed():
    before_gib = measure_peak_gib()
    peak_gib = measure_peak_gib(touch_256_mib, interval_s=30.0)
    assert peak_gib - before_gib == pytest.approx(0.25, abs=0.05)


def test_next_span_does_not_inherit_the_peak():
    meter = MemoryMeter("cpu")
    meter.start()
    torch.ones(N_256_MIB)
    first = meter.stop()
    meter.start()
    second = meter.stop()
    assert first.rss_peak_gib - second.rss_peak_gib > 0.2
    assert (first.allocated_peak_gib, first.reserved_peak_gib) == (None, None)
    assert set(first.null_reasons) == {"memory_allocated_peak_gib", "memory_reserved_peak_gib"}


def test_memory_of_a_data_worker_counts_also_when_it_ended_before_the_span_did():
    worker_code = f"b = bytearray(256 * {MIB}); b[::4096] = b'x' * len(b[::4096]); print(); input()"
    gc.collect()  # what other tests left must not go during the span
    before_gib = measure_peak_gib()
    meter = MemoryMeter("cpu", interval_s=0.005)
    meter.start()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-S", "-c", worker_code], **pipes) as worker:
        worker.stdout.readline()
        end_s = time.monotonic() + 300
        while meter._peak_bytes / GIB - before_gib < 0.2 and time.monotonic() < end_s:
            time.sleep(0.02)  # looks are rationed: one may take a while
        worker.communicate("\n")
    peaks = meter.stop()
    assert peaks.rss_peak_gib - before_gib == pytest.approx(0.25, abs=0.06)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_peaks_are_those_of_the_span():
    torch.ones(2 * N_256_MIB, device="cuda")
    torch.cuda.empty_cache()
    meter = MemoryMeter("cuda")
    base_gib = torch.cuda.memory_allocated() / GIB
    meter.start()
    torch.ones(N_256_MIB, device="cuda")
    peaks = meter.stop()
    assert peaks.allocated_peak_gib - base_gib == pytest.approx(0.25, abs=0.01)
    assert peaks.reserved_peak_gib >= peaks.allocated_peak_gib
    assert peaks.null_reasons == {}


def test_the_peak_over_spans_is_the_largest_and_named_where_it_was_reached():
    def build(rss_gib, reserved_gib=None):
        return MemoryPeaks(allocated_peak_gib=reserved_gib, reserved_peak_gib=reserved_gib, rss_peak_gib=rss_gib)

    on_cpu, name = join_peaks({"steps": build(1.0), "evaluation": build(1.5), "checkpoint": build(1.5)})
    assert (on_cpu.rss_peak_gib, on_cpu.reserved_peak_gib, name) == (1.5, None, "evaluation")
    few_pages_more, name = join_peaks({"steps": build(1.0), "evaluation": build(1.001)})
    assert (few_pages_more.rss_peak_gib, name) == (1.001, "steps")
    on_gpu, name = join_peaks({"steps": build(3.0, 8.0), "checkpoint": build(9.0, 8.0)})
    assert (on_gpu.reserved_peak_gib, on_gpu.rss_peak_gib, name) == (8.0, 9.0, "steps")
