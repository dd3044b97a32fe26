"""Sample GPU utilisation over a span of time on a thread.

NVML's figure is the share of the driver's last window (1/6 s to 1 s) in which any kernel ran: a duty cycle, not how
much of the chip was used. It goes beside a result and never ranks one.
"""

import dataclasses
import threading

from fulltilt.errors import DeviceError
from fulltilt.hardware import Nvml, find_nvml_index


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UtilizationMean:
    """The mean over a span, or why there is none."""

    mean_pct: float | None
    n_samples: int
    reason: str | None = None


class UtilizationSampler:
    """Averages one device's utilisation from ``start()`` to ``stop()``; afterwards it may start again.

    Args:
        nvml: The driver, or its fake.
        device_index: NVML's index; ``None`` on a CPU.
        interval_s: Pause between two samples; below the driver's window they repeat.
    """

    def __init__(self, nvml: Nvml, device_index: int | None, interval_s: float = 0.2):
        self._nvml, self._index, self._interval_s = nvml, device_index, interval_s
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples: list[float] = []
        self._reason: str | None = None

    def start(self) -> None:
        """Begin a new mean. Without a device no thread starts."""
        self._samples, self._reason = [], None
        if self._index is None:
            self._reason = "the device is a CPU"
            return
        self._halt.clear()
        self._thread = threading.Thread(target=self._sample, name="utilization-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> UtilizationMean:
        """End the thread and return the mean; a span shorter than one interval still has one sample."""
        if self._thread is not None:
            self._halt.set()
            self._thread.join()
            self._thread = None
        n_samples = len(self._samples)
        if not n_samples:
            return UtilizationMean(mean_pct=None, n_samples=0, reason=self._reason)
        return UtilizationMean(mean_pct=sum(self._samples) / n_samples, n_samples=n_samples)

    def _sample(self) -> None:
        assert self._index is not None
        while True:
            done = self._halt.wait(self._interval_s)
            try:
                reading = self._nvml.read_utilization(self._index)
            except DeviceError as problem:
                self._reason = str(problem)
                return
            if reading.gpu_pct is None:
                self._reason = reading.reason
            else:
                self._samples.append(reading.gpu_pct)
            if done:
                return


def find_device_index(device: object, nvml: Nvml) -> int | None:
    """Find NVML's index of a torch device by UUID: CUDA and NVML count differently. ``None`` on a CPU."""
    import torch

    device = torch.device(device)  # type: ignore[arg-type]
    if device.type != "cuda":
        return None
    return find_nvml_index(str(torch.cuda.get_device_properties(device).uuid), nvml)
