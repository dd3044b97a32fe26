"""Read what the machine has and what it is doing: NVML, /proc and control groups. Nothing here imports torch.

Readers take the root folder of the machine, so that recorded trees can stand in for it.
"""

# ruff: noqa: F401

from fulltilt.hardware.cgroup import (
    read_cpu_quota_cores,
    read_memory_limit_bytes,
    read_memory_room_bytes,
    read_oom_kills,
)
from fulltilt.hardware.cpu import (
    CpuTimes,
    Pressure,
    compute_steal_pct,
    count_usable_cores,
    has_c_compiler,
    read_cpu_model,
    read_cpu_times,
    read_instruction_set,
    read_memory_bytes,
    read_pressure,
)
from fulltilt.hardware.datasheet import DataSheet, find_data_sheet
from fulltilt.hardware.devices import (
    find_nvml_index,
    list_rank_devices,
    read_package_version,
    read_visible_devices,
    resolve_device,
)
from fulltilt.hardware.filesystem import Filesystem, ShmSpace, read_filesystem, read_shm
from fulltilt.hardware.machine import compute_hostname_hash, is_wsl, read_machine
from fulltilt.hardware.nvml import Nvml, NvmlDevice, NvmlProcess, NvmlStatus, RealNvml, Utilization
from fulltilt.hardware.process_memory import (
    MemoryWatchdog,
    ProcessMemory,
    read_process_tree_memory,
    read_rss_bytes,
    read_status_bytes,
    reset_peak_rss,
    watch_peak_bytes,
)
from fulltilt.hardware.proctree import (
    ProcessCpu,
    describe_process_state,
    is_process_stopped,
    read_process_tree,
    read_process_tree_cpu,
)
from fulltilt.hardware.wsl import WslReport, compute_usable_device_bytes, read_wsl
