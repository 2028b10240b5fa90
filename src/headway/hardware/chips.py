"""Chips and their published peaks: dense, from the vendor's data sheets.

Data sheets print the sparse figure first, twice the dense one; here is the dense one. Tensor-core products
are counted with float32 accumulation, and "float32" means the plain units, without TF32. Memory is in the
vendor's "GB", which are 2**30 bytes on all of these (an "80 GB" A100 reports 81,920 MiB).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CHIPS", "Chip", "find_chip"]

T = 10**12
GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """What one device of a kind can do at most."""

    name: str
    """What people call it, and type on the command line."""
    match: tuple[str, ...]
    """Words that are all in the name the driver reports."""
    peaks: Mapping[str, float]
    """Dense FLOP/s by dtype name."""
    memory_bytes: int
    """Device memory."""
    bandwidth_bytes_s: float
    """Between the chip and its memory."""
    source: str
    """Where the figures come from."""


def _chip(
    name: str, match: str, *, bf16: float, fp8: float | None, fp32: float, gib: int, tb_s: float, source: str
) -> Chip:
    """A row of the table: peaks in TFLOP/s; float16 runs at bfloat16's speed on every chip here."""
    peaks = {"bfloat16": float(bf16 * T), "float16": float(bf16 * T), "float32": float(fp32 * T)}
    if fp8 is not None:
        peaks["float8"] = float(fp8 * T)
    return Chip(name, tuple(match.split()), MappingProxyType(peaks), gib * GIB, tb_s * T, source)


_A100 = "NVIDIA A100 data sheet (2021): BF16 312, 624 sparse"
_H100 = "NVIDIA H100 data sheet (2024): BF16 1,979 sparse (SXM), 1,671 sparse (NVL)"
_H100_PCIE = "NVIDIA H100 data sheet (2022): PCIe BF16 1,513 sparse"
_H200 = "NVIDIA H200 data sheet (2024): BF16 1,979 sparse (SXM), 1,671 sparse (NVL)"
_B200 = "NVIDIA HGX B200 data sheet (2025), one GPU of eight: BF16 4,500 sparse"
_L40S = "NVIDIA L40S data sheet (2023): BF16 362.05, 733 sparse"
_ADA = "NVIDIA Ada architecture white paper (2022): BF16 165.2, FP8 with FP32 accumulation 330.3"

CHIPS: tuple[Chip, ...] = (
    _chip("a100-40", "a100 sxm4 40gb", bf16=312, fp8=None, fp32=19.5, gib=40, tb_s=1.555, source=_A100),
    _chip("a100-40-pcie", "a100 pcie 40gb", bf16=312, fp8=None, fp32=19.5, gib=40, tb_s=1.555, source=_A100),
    _chip("a100", "a100 sxm4 80gb", bf16=312, fp8=None, fp32=19.5, gib=80, tb_s=2.039, source=_A100),
    _chip("a100-pcie", "a100 pcie 80gb", bf16=312, fp8=None, fp32=19.5, gib=80, tb_s=1.935, source=_A100),
    _chip("h100", "h100 hbm3 80gb", bf16=989.5, fp8=1979, fp32=67, gib=80, tb_s=3.35, source=_H100),
    _chip("h100-pcie", "h100 pcie", bf16=756.5, fp8=1513, fp32=51, gib=80, tb_s=2.0, source=_H100_PCIE),
    _chip("h100-nvl", "h100 nvl", bf16=835.5, fp8=1670.5, fp32=60, gib=94, tb_s=3.9, source=_H100),
    _chip("h200", "h200", bf16=989.5, fp8=1979, fp32=67, gib=141, tb_s=4.8, source=_H200),
    _chip("h200-nvl", "h200 nvl", bf16=835.5, fp8=1670.5, fp32=60, gib=141, tb_s=4.8, source=_H200),
    _chip("b200", "b200", bf16=2250, fp8=4500, fp32=75, gib=180, tb_s=7.7, source=_B200),
    _chip("l40s", "l40s", bf16=362.05, fp8=733, fp32=91.6, gib=48, tb_s=0.864, source=_L40S),
    _chip("rtx4090", "rtx 4090", bf16=165.2, fp8=330.3, fp32=82.6, gib=24, tb_s=1.008, source=_ADA),
)

# A slice of a chip, and chips that share a name with a larger one (the 4090 D, the 4090 Laptop GPU).
OTHERS = frozenset({"mig", "d", "laptop"})


def find_chip(device_name: str) -> Chip | None:
    """The chip by the name a driver reports ("NVIDIA H100 80GB HBM3") or people type ("h100"), else None.

    Whole words decide, the most of them: a "GH200" is no H200, and an "H200 NVL" is slower than one.
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if words & OTHERS:
        return None
    typed = [chip for chip in CHIPS if chip.name == device_name.strip().lower()]
    reported = [chip for chip in CHIPS if words.issuperset(chip.match)]
    return max(typed or reported, key=lambda chip: len(chip.match), default=None)
