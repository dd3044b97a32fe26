"""Nominal figures of GPUs: dense matrix rate in bf16 and memory bandwidth, as their makers print them.

Where the sheet prints a rate "with sparsity", half of it stands here. A device that is not listed has no figures.
"""

import dataclasses

_GB_PER_GIB = 1.073741824


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataSheet:
    """What the maker prints about one GPU."""

    bf16_tflops: float | None  # dense, fp32 accumulation
    memory_gb_per_s: float  # decimal, as printed
    source: str
    memory_total_gib: float | None = None  # of names that were sold with several memories: the one meant

    @property
    def memory_gib_per_s(self) -> float:
        return self.memory_gb_per_s / _GB_PER_GIB


_H100 = "NVIDIA H100 Tensor Core GPU data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_ADA = "NVIDIA Ada GPU Architecture white paper, appendix"

_SHEETS = {
    "H200": DataSheet(bf16_tflops=989.4, memory_gb_per_s=4800, source="NVIDIA H200 Tensor Core GPU data sheet"),
    "H100 80GB HBM3": DataSheet(bf16_tflops=989.4, memory_gb_per_s=3350, source=_H100),
    "A100-SXM4-40GB": DataSheet(bf16_tflops=312, memory_gb_per_s=1555, source=_A100),
    "A100-SXM4-80GB": DataSheet(bf16_tflops=312, memory_gb_per_s=2039, source=_A100),
    "A100-PCIE-40GB": DataSheet(bf16_tflops=312, memory_gb_per_s=1555, source=_A100),
    "A100 80GB PCIe": DataSheet(bf16_tflops=312, memory_gb_per_s=1935, source=_A100),
    "A40": DataSheet(bf16_tflops=149.7, memory_gb_per_s=696, source="NVIDIA A40 data sheet"),
    "L4": DataSheet(bf16_tflops=121, memory_gb_per_s=300, source="NVIDIA L4 Tensor Core GPU data sheet"),
    "L40S": DataSheet(bf16_tflops=362, memory_gb_per_s=864, source="NVIDIA L40S data sheet"),
    "GeForce RTX 3060": DataSheet(
        bf16_tflops=None, memory_gb_per_s=360, memory_total_gib=12, source="NVIDIA GeForce RTX 3060 product page"
    ),
    "GeForce RTX 4090": DataSheet(bf16_tflops=165.2, memory_gb_per_s=1008, source=_ADA),
}


def find_data_sheet(name: str, memory_total_bytes: int | None = None) -> DataSheet | None:
    """Find the sheet of the device that NVML or CUDA calls ``name``; ``None`` when it is not listed."""
    sheet = _SHEETS.get(name.removeprefix("NVIDIA ").strip())
    if sheet is None or sheet.memory_total_gib is None:
        return sheet
    if memory_total_bytes is None or abs(memory_total_bytes / 2**30 - sheet.memory_total_gib) > 1:
        return None
    return sheet
