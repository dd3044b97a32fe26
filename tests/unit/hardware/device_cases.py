"""GPUs that a fake NVML lists."""

from fulltilt.hardware import NvmlDevice


def make_device(name="NVIDIA H200", uuid="GPU-a", *, index=0, memory_gib=140, compute_capability=(9, 0)):
    return NvmlDevice(
        index=index,
        name=name,
        uuid=uuid,
        memory_total_bytes=memory_gib * 2**30,
        compute_capability=compute_capability,
    )
