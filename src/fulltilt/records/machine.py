"""The machine that a number was measured on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or the CPU described as one. A field that could not be read is ``None``."""

    name: str
    type: str  # "cpu" or "cuda"
    index: int = 0
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    driver: str | None = None
    uuid: str | None = None
    nominal_bf16_tflops: float | None = None
    nominal_memory_gib_per_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Roof:
    """The measured peak rate of one device beside the nominal one from its data sheet."""

    name: str  # for instance "matmul fp32", "memory copy"
    unit: str  # "tflops" or "gib_per_s"
    measured: float
    measured_ci95: tuple[float, float]
    nominal: float | None = None
    nominal_source: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine as this process sees it: limits of cgroup and affinity included."""

    hostname_hash: str  # a name of a machine never leaves it; its hash tells two apart
    system: str  # "Linux 6.18"
    is_wsl: bool
    cpu_model: str
    n_cores_physical: int | None
    n_cores_logical: int
    n_cores_usable: int  # after affinity and cgroup quota
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None  # cgroup limit
    shm_total_bytes: int | None
    devices: tuple[Device, ...]  # accelerators only
    python: str
    packages: dict[str, str]  # torch, numpy, h5py, torchvision, timm → version
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    roofs: tuple[Roof, ...] = ()
