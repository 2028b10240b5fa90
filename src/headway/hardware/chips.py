"""Catalogue of chips by their data sheets: dense peaks, memory, links, power.

Peaks are dense; data sheets print the sparse figure, twice that, first. Tensor-core peaks are with float32
accumulation, and "float32" is without TF32. Memory is in the vendor's "GB", 2**30 bytes within half a percent (an
"80 GB" A100 reports 81,920 MiB, a "141 GB" H200 143,771). Links are per direction; data sheets print the sum of both.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from headway.errors import UsageError, suggest

G = 10**9
T = 10**12
GIB = 2**30

PRECISIONS: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16": "bfloat16",
        "bf16": "bfloat16",
        "float16": "float16",
        "fp16": "float16",
        "tf32": "tf32",
        "float32": "float32",
        "fp32": "float32",
        "float8": "float8",
        "fp8": "float8",
        "mxfp8": "mxfp8",
        "nvfp4": "nvfp4",
        "fp4": "nvfp4",
    }
)
"""Aliases of a precision, and its canonical name."""


@dataclass(frozen=True)
class Link:
    """An interconnect of the devices of a node or rack."""

    kind: str
    """nvlink3, nvlink4, nvlink5, xgmi, pcie4, pcie5, pcie6 or memory."""
    bandwidth_bytes_s: float
    """Per device and direction, to all peers combined."""
    devices: int
    """Number of connected devices."""


@dataclass(frozen=True)
class Chip:
    """The specification of a chip."""

    name: str
    """Common name, as typed on the command line."""
    match: tuple[str, ...]
    """Words that the driver's device name must contain."""
    peaks: Mapping[str, float]
    """Dense FLOP/s by precision."""
    memory_bytes: int
    """Device memory."""
    bandwidth_bytes_s: float
    """Memory bandwidth."""
    links: tuple[Link, ...]
    """Fastest first, each connecting more devices than the previous."""
    host_bytes_s: float
    """Between a device and its host, per direction: PCIe, or NVLink-C2C to a Grace CPU."""
    power_w: float
    """Thermal design power."""
    source: str
    """Where the figures come from."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Other sources and remarks, by field."""
    aliases: tuple[str, ...] = ()
    """Other names on the command line."""

    def peak(self, name: str) -> float:
        """Dense FLOP/s at a precision, by any of its names."""
        peak = self.peaks.get(precision(name))
        if peak is None:
            raise UsageError(
                f"{self.name} does not support {name}", hint=f"{self.name} supports {', '.join(sorted(self.peaks))}"
            )
        return peak

    def source_of(self, figure: str) -> str:
        """The source of a figure, by field name."""
        return self.notes.get(figure, self.source)


def precision(name: str) -> str:
    """The canonical name of a precision: "bf16" is "bfloat16"."""
    canonical = PRECISIONS.get(name.strip().lower())
    if canonical is None:
        raise UsageError(f"unknown precision {name!r}", hint=f"precisions: {', '.join(sorted(PRECISIONS))}")
    return canonical


def _peaks(
    *, bf16: float, tf32: float, fp32: float, fp8: float = 0, mxfp8: float = 0, nvfp4: float = 0
) -> dict[str, float]:
    """Dense peaks from TFLOP/s; float16 is as fast as bfloat16 on every chip here."""
    tflops = {"bfloat16": bf16, "float16": bf16, "tf32": tf32, "float32": fp32}
    tflops |= {"float8": fp8, "mxfp8": mxfp8, "nvfp4": nvfp4}
    return {name: float(value * T) for name, value in tflops.items() if value}


def _chip(
    name: str,
    match: str,
    peaks: dict[str, float],
    *,
    gib: int,
    tb_s: float,
    links: tuple[Link, ...] = (),
    pcie: str,
    host_gb_s: float = 0,
    watts: float,
    source: str,
    aliases: str = "",
    notes: Mapping[str, str] | None = None,
) -> Chip:
    """A row of the table."""
    lanes = PCIE[pcie]
    is_card = all(link.devices < 8 for link in links)  # devices of a node connect over PCIe, bridges aside
    joined = (*links, Link(pcie, lanes, 8)) if is_card else links
    return Chip(
        name=name,
        match=tuple(match.split()),
        peaks=MappingProxyType(peaks),
        memory_bytes=gib * GIB,
        bandwidth_bytes_s=tb_s * T,
        links=joined,
        host_bytes_s=host_gb_s * G if host_gb_s else lanes,
        power_w=float(watts),
        source=source,
        notes=MappingProxyType(dict(notes or {})),
        aliases=tuple(aliases.split()),
    )


PCIE: Mapping[str, float] = MappingProxyType({"pcie4": 32.0 * G, "pcie5": 64.0 * G, "pcie6": 128.0 * G})
"""x16 per direction, rounded as in data sheets."""

_NVLINK3 = (Link("nvlink3", 300.0 * G, 8),)
_NVLINK4 = (Link("nvlink4", 450.0 * G, 8),)
_NVLINK5 = (Link("nvlink5", 900.0 * G, 8),)
_RACK = (Link("nvlink5", 900.0 * G, 72),)

_A100 = "NVIDIA A100 Tensor Core GPU data sheet (2021): BF16 312, 624 sparse"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet (2024): BF16 1,979 sparse (SXM), 1,671 sparse (NVL)"
_H100_PCIE = "NVIDIA H100 Tensor Core GPU data sheet (2022): PCIe BF16 1,513 sparse"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (2024): BF16 1,979 sparse (SXM), 1,671 sparse (NVL)"
_B200 = "NVIDIA HGX B200 data sheet (2025), one GPU of eight: BF16 4,500 sparse"
_B300 = "NVIDIA HGX B300 data sheet (2025), one GPU of eight: BF16 4,500 sparse, FP4 13,500 dense"
_GB200 = "NVIDIA GB200 NVL72 data sheet (2025), one GPU of 72: BF16 5,000 sparse, FP4 10,000 dense"
_GB300 = "NVIDIA GB300 NVL72 data sheet (2025), one GPU of 72: BF16 5,000 sparse, FP4 15,000 dense"
_MI300X = "AMD Instinct MI300X data sheet (2023): BF16 1,307.4, 2,614.9 sparse"
_L40S = "NVIDIA L40S data sheet (2023): BF16 362.05, 733 sparse"
_ADA = "NVIDIA Ada architecture white paper (2022): BF16 165.2, FP8 with FP32 accumulation 330.3"
_CPU = "assumed: 16 cores at 3 GHz, two 512-bit multiply-adds a clock, eight channels of DDR5-4800"

_AMPERE = _peaks(bf16=312, tf32=156, fp32=19.5)
_HOPPER = _peaks(bf16=989.5, tf32=494.7, fp32=67, fp8=1979)
_HOPPER_NVL = _peaks(bf16=835.5, tf32=417.5, fp32=60, fp8=1670.5)

_BRIDGE = MappingProxyType(
    {"links": "its NVLink bridge for two cards (300 GB/s a direction) is sold apart and left out"}
)
_B300_NOTES = MappingProxyType(
    {
        "peaks": f"{_B300}; earlier prints give 13,125 for FP4",
        "memory_bytes": "NVIDIA HGX B300 data sheet (2025): 2.1 TB in all, what drivers report for 288 GB of chips",
    }
)
_C2C = MappingProxyType({"host_bytes_s": "NVLink-C2C of a Grace CPU, 450 GB/s a direction, shared by two GPUs"})
_GB300_NOTES = MappingProxyType({**_C2C, "memory_bytes": f"{_GB300}; 20 TB in all, 279 GB usable of 288 GB of chips"})
_MESH = MappingProxyType({"links": f"{_MI300X}; seven links of 64 GB/s a direction, so one peer is reached at 64"})

CHIPS: tuple[Chip, ...] = (
    _chip("a100-40", "a100 sxm4 40gb", _AMPERE, gib=40, tb_s=1.555, links=_NVLINK3, pcie="pcie4", watts=400,
          source=_A100, aliases="a100-40gb"),
    _chip("a100-40-pcie", "a100 pcie 40gb", _AMPERE, gib=40, tb_s=1.555, pcie="pcie4", watts=250,
          source=_A100, notes=_BRIDGE),
    _chip("a100", "a100 sxm4 80gb", _AMPERE, gib=80, tb_s=2.039, links=_NVLINK3, pcie="pcie4", watts=400,
          source=_A100, aliases="a100-80 a100-80gb a100-sxm"),
    _chip("a100-pcie", "a100 pcie 80gb", _AMPERE, gib=80, tb_s=1.935, pcie="pcie4", watts=300,
          source=_A100, notes=_BRIDGE),
    _chip("h100", "h100 hbm3 80gb", _HOPPER, gib=80, tb_s=3.35, links=_NVLINK4, pcie="pcie5", watts=700,
          source=_H100, aliases="h100-80 h100-80gb h100-sxm"),
    _chip("h100-pcie", "h100 pcie", _peaks(bf16=756.5, tf32=378, fp32=51, fp8=1513), gib=80, tb_s=2.0,
          pcie="pcie5", watts=350, source=_H100_PCIE, notes=_BRIDGE),
    _chip("h100-nvl", "h100 nvl", _HOPPER_NVL, gib=94, tb_s=3.9, links=(Link("nvlink4", 300.0 * G, 2),),
          pcie="pcie5", watts=400, source=_H100),
    _chip("h200", "h200", _HOPPER, gib=141, tb_s=4.8, links=_NVLINK4, pcie="pcie5", watts=700,
          source=_H200, aliases="h200-141gb h200-sxm"),
    _chip("h200-nvl", "h200 nvl", _HOPPER_NVL, gib=141, tb_s=4.8, links=(Link("nvlink4", 450.0 * G, 4),),
          pcie="pcie5", watts=600, source=_H200),
    _chip("b200", "b200", _peaks(bf16=2250, tf32=1125, fp32=75, fp8=4500, mxfp8=4500, nvfp4=9000), gib=180,
          tb_s=7.7, links=_NVLINK5, pcie="pcie5", watts=1000, source=_B200),
    _chip("b300", "b300", _peaks(bf16=2250, tf32=1125, fp32=75, fp8=4500, mxfp8=4500, nvfp4=13500), gib=268,
          tb_s=7.7, links=_NVLINK5, pcie="pcie6", watts=1100, source=_B300, notes=_B300_NOTES),
    _chip("gb200", "gb200", _peaks(bf16=2500, tf32=1250, fp32=80, fp8=5000, mxfp8=5000, nvfp4=10000), gib=186,
          tb_s=8.0, links=_RACK, pcie="pcie5", host_gb_s=225, watts=1200, source=_GB200, notes=_C2C),
    _chip("gb300", "gb300", _peaks(bf16=2500, tf32=1250, fp32=80, fp8=5000, mxfp8=5000, nvfp4=15000), gib=279,
          tb_s=8.0, links=_RACK, pcie="pcie6", host_gb_s=225, watts=1400, source=_GB300,
          notes=_GB300_NOTES),
    _chip("mi300x", "mi300x", _peaks(bf16=1307.4, tf32=653.7, fp32=163.4, fp8=2614.9), gib=192, tb_s=5.3,
          links=(Link("xgmi", 448.0 * G, 8),), pcie="pcie5", watts=750, source=_MI300X,
          aliases="mi300", notes=_MESH),
    _chip("l40s", "l40s", _peaks(bf16=362.05, tf32=183, fp32=91.6, fp8=733), gib=48, tb_s=0.864, pcie="pcie4",
          watts=350, source=_L40S),
    _chip("rtx4090", "rtx 4090", _peaks(bf16=165.2, tf32=82.6, fp32=82.6, fp8=330.3), gib=24, tb_s=1.008,
          pcie="pcie4", watts=450, source=_ADA, aliases="4090"),
    Chip(
        name="cpu",
        match=(),  # CPUs report countless names: matched by the common name only
        peaks=MappingProxyType({"float32": 3.0 * T, "bfloat16": 1.5 * T, "float16": 1.5 * T}),
        memory_bytes=128 * GIB,
        bandwidth_bytes_s=0.3 * T,
        links=(Link("memory", 50.0 * G, 8),),
        host_bytes_s=300.0 * G,
        power_w=350.0,
        source=_CPU,
    ),
)  # fmt: skip

# MIG slices, and chips that share a name with a larger one (4090 D, 4090 Laptop GPU).
OTHERS = frozenset({"mig", "d", "laptop"})


def find_chip(device_name: str) -> Chip | None:
    """Find a chip by its driver name ("NVIDIA H100 80GB HBM3") or common name ("h100"); None if unknown.

    The most matching whole words win: a "GH200" is not an H200, and an "H200 NVL" is a chip of its own.
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if words & OTHERS:
        return None
    name = re.sub(r"[\s_]+", "-", device_name.strip().lower())
    typed = [chip for chip in CHIPS if name == chip.name or name in chip.aliases]
    reported = [chip for chip in CHIPS if chip.match and words.issuperset(chip.match)]
    return max(typed or reported, key=lambda chip: len(chip.match), default=None)


def known_chip(name: str) -> Chip:
    """Find a chip by name; raise UsageError with the known names if there is none."""
    chip = find_chip(name)
    if chip is None:
        hint = suggest(name, (chip.name for chip in CHIPS), "headway hardware show lists all chips")
        raise UsageError(f"unknown chip {name!r}", hint=hint)
    return chip
