"""Device time of an operation: at vendor peaks, by a kernel model, or as measured.

Times are at full clock; `power_share` is what the power limit leaves of it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from headway.hardware import Ceilings, Chip
from headway.plan.operations import Operation
from headway.plan.settings import Software


@dataclass(frozen=True)
class ChipGeneration:
    """Kernel behaviour of a generation of chips. Shares are of the vendor's dense peak."""

    processors: int
    """Streaming multiprocessors or compute units: tiles that run at once."""
    gemm: Mapping[str, float]
    """Best share that a GEMM reaches, by precision."""
    ramp: Mapping[str, float]
    """Cost of filling and draining a tile, in units of k, by precision."""
    attention: Mapping[str, tuple[float, float, float, float]]
    """By kernel: share of forward plus backward at head size 128, at 64, speedup of forward alone, and the length at
    which half of that is reached. The backward pass counts as two and a half forward passes."""
    memory: float
    """Best share of the memory bandwidth."""
    kernel_s: float
    """Overhead per kernel: start, drain, gap to the next."""
    demand: float
    """Power that back-to-back GEMMs would draw at full clock, relative to the chip's limit."""
    source: str


PLAIN = 0.74
"""Share of a copy's bandwidth that a framework's own elementwise kernels reach, with strides and casts: measured on an
H200 over full training steps."""

_MAMF = "stas00/ml-engineering, maximum achievable matmul FLOPS"
_FLASH = "FlashAttention-2 and -3 papers' figures"
_OURS = "measured on an H200, hardware/measured/h200.json"


def _by_precision(bf16: float, fp8: float = 0.0, nvfp4: float = 0.0) -> Mapping[str, float]:
    shares = {"bf16": bf16, "fp16": bf16, "fp8": fp8, "mxfp8": fp8, "nvfp4": nvfp4}
    return MappingProxyType({name: value for name, value in shares.items() if value})


GENERATIONS: Mapping[str, ChipGeneration] = MappingProxyType(
    {
        "ampere": ChipGeneration(
            108, _by_precision(0.89), _by_precision(96),
            MappingProxyType({
                "flash1": (0.27, 0.31, 1.0, 230), "triton1": (0.29, 0.29, 1.0, 230), "flash2": (0.62, 0.56, 1.05, 486),
            }),
            0.86, 2.5e-6, 1.05, f"{_MAMF}: A100 SXM 271 of 312; {_FLASH}",
        ),
        "hopper": ChipGeneration(
            132, _by_precision(0.85, 0.82), _by_precision(128, 400),
            MappingProxyType({
                "flash1": (0.14, 0.16, 1.0, 215), "triton1": (0.16, 0.16, 1.0, 215),
                "flash2": (0.334, 0.293, 1.02, 525), "flash3": (0.57, 0.45, 1.1, 450), "cudnn": (0.54, 0.43, 1.12, 400),
                "paged": (0.44, 0.385, 1.0, 525),
            }),
            0.87, 2.5e-6, 1.45, f"{_OURS}; {_MAMF}: H100 SXM 795 of 989; {_FLASH}",
        ),
        "blackwell": ChipGeneration(
            148, _by_precision(0.80, 0.78, 0.68), _by_precision(192, 512, 800),
            MappingProxyType({
                "flash2": (0.2, 0.17, 1.02, 525), "flash3": (0.5, 0.40, 1.2, 600), "cudnn": (0.5, 0.40, 1.2, 600),
            }),
            0.87, 2.5e-6, 1.35, f"{_MAMF}: B200 1745 of 2250, GB200 1822 of 2500; FlashAttention-4 abstract",
        ),
        "cdna3": ChipGeneration(
            304, _by_precision(0.55, 0.52), _by_precision(256, 512),
            MappingProxyType({"flash2": (0.27, 0.22, 1.2, 600)}),
            0.8, 4e-6, 1.2, f"{_MAMF}: MI300X 668 of 1300; attention assumed",
        ),
        "ada": ChipGeneration(
            142, _by_precision(0.85, 0.8), _by_precision(128, 256),
            MappingProxyType({"flash1": (0.27, 0.31, 1.0, 230), "flash2": (0.6, 0.55, 1.05, 486)}),
            0.88, 2.5e-6, 1.3, "assumed like Ampere",
        ),
        "cpu": ChipGeneration(
            16, MappingProxyType({"bf16": 0.4, "float32": 0.5}), _by_precision(32),
            MappingProxyType({"flash2": (0.2, 0.2, 1.0, 64)}),
            0.6, 10e-6, 1.0, "assumed",
        ),
    }
)  # fmt: skip

_GENERATION_OF = {
    "a100": "ampere", "h100": "hopper", "h200": "hopper", "b200": "blackwell", "b300": "blackwell",
    "gb200": "blackwell", "gb300": "blackwell", "mi300x": "cdna3", "l40s": "ada", "rtx4090": "ada", "cpu": "cpu",
}  # fmt: skip


def generation_name(chip: Chip) -> str:
    """Name of a chip's generation."""
    return _GENERATION_OF[chip.name.split("-")[0]]


def generation(chip: Chip) -> ChipGeneration:
    """The generation of a chip."""
    return GENERATIONS[generation_name(chip)]


@dataclass(frozen=True, eq=False)
class Rates(ABC):
    """Seconds of an operation on one device."""

    chip: Chip

    @abstractmethod
    def gemm(self, operation: Operation) -> float:
        """Seconds of a GEMM, or several equal ones."""

    @abstractmethod
    def attention(self, operation: Operation, kernel: str) -> float:
        """Seconds of fused attention."""

    @abstractmethod
    def memory(self, operation: Operation) -> float:
        """Seconds of a memory-bound operation."""

    def host(self, software: Software) -> tuple[float, float] | None:  # noqa: ARG002
        """Host seconds of a dense layer's forward and backward pass, if measured."""
        return None

    def peak(self, precision: str) -> float:
        """The vendor's dense FLOP/s."""
        return self.chip.peak(precision)


class LimitRates(Rates):
    """Roofline: vendor peaks and full memory bandwidth."""

    def gemm(self, operation: Operation) -> float:
        """At the peak, or at the memory's bandwidth."""
        return max(operation.flops / self.peak(operation.precision), operation.bytes / self.chip.bandwidth_bytes_s)

    def attention(self, operation: Operation, kernel: str) -> float:  # noqa: ARG002
        """At the peak, or at the memory's bandwidth."""
        return self.gemm(operation)

    def memory(self, operation: Operation) -> float:
        """At full bandwidth."""
        return operation.bytes / self.chip.bandwidth_bytes_s


class ModelRates(Rates):
    """A kernel model: GEMM tiles in waves, attention curves, a share of the memory bandwidth."""

    def gemm(self, operation: Operation) -> float:
        """Waves of the best tiling, or the memory time if that is longer."""
        busy_flops = _tiled(
            self.chip.name, operation.precision, math.ceil(operation.m), math.ceil(operation.n), math.ceil(operation.k),
            round(operation.count * 16),
        )  # fmt: skip
        kernels = generation(self.chip)
        if operation.name.startswith("attention.") and operation.count > 1:
            busy_flops /= _BATCHED
        moved = operation.bytes / (self.chip.bandwidth_bytes_s * kernels.memory)
        return max(busy_flops / self.peak(operation.precision), moved) + kernels.kernel_s

    def attention(self, operation: Operation, kernel: str) -> float:
        """At the kernel's best share, less for short sequences."""
        kernels = generation(self.chip)
        wide, narrow, gain, half = kernels.attention.get(kernel) or kernels.attention["flash2"]
        share = narrow + (wide - narrow) * min(1.0, max(0.0, (operation.head_dim - 64) / 64))
        share *= operation.seq / (operation.seq + half)
        # both passes are 3.5 forward passes of work at that share; a backward pass counts as two
        times = 1 / gain if operation.phase == "forward" else (3.5 - 1 / gain) / 2
        return times * operation.flops / (share * self.peak(operation.precision)) + kernels.kernel_s

    def memory(self, operation: Operation) -> float:
        """At the best share of the bandwidth, plus the overhead per kernel."""
        kernels = generation(self.chip)
        rate = self.chip.bandwidth_bytes_s * kernels.memory * (PLAIN if operation.plain else 1.0)
        return operation.bytes / rate + operation.kernels * kernels.kernel_s


_TILES = (
    (128, 256, 1.0),
    (256, 128, 1.0),
    (128, 128, 0.97),
    (64, 256, 0.92),
    (256, 64, 0.92),
    (64, 128, 0.8),
    (64, 64, 0.6),
)
"""Rows and columns of a tile, and the speed of its inner loop relative to the largest tile."""


_BATCHED = 0.65
"""Speed of the small GEMMs of unfused attention relative to a large one: the baseline in FlashAttention-2's figures."""


@lru_cache(maxsize=262144)
def _tiled(chip: str, precision: str, m: int, n: int, k: int, sixteenths: int) -> float:
    """FLOPs that the full chip could do while it runs a GEMM in waves of tiles."""
    kernels = GENERATIONS[_GENERATION_OF[chip.split("-")[0]]]
    best = math.inf
    best_share, ramp, count = kernels.gemm.get(precision, 0.5), kernels.ramp.get(precision, 64), sixteenths / 16
    for rows, columns, share in _TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * count
        for parts in (1, 2, 4, 8):
            if parts > 1 and k / parts < 512:
                break
            waves = math.ceil(tiles * parts / kernels.processors)
            time = waves * kernels.processors * 2.0 * rows * columns * (k / parts + ramp) / (best_share * share)
            best = min(best, time * (1.0 if parts == 1 else 1.05))
    return best


@dataclass(frozen=True, eq=False)
class MeasuredRates(Rates):
    """Ceilings that `headway hardware measure` measured on this chip."""

    ceilings: Ceilings

    def gemm(self, operation: Operation) -> float:
        """From the grid of measured GEMMs."""
        m, n, k = (max(1, round(size)) for size in (operation.m, operation.n, operation.k))
        return operation.count * self.ceilings.gemm_seconds(m, n, k, operation.precision)

    def attention(self, operation: Operation, kernel: str) -> float:
        """From the measured attention curves."""
        backend: Literal["flash", "cudnn"] = "flash" if kernel in ("flash1", "flash2") else "cudnn"
        backward = operation.phase == "input_grad"
        rate = self.ceilings.attention_flops(operation.seq, operation.head_dim, backward=backward, backend=backend)
        return operation.flops / rate

    def host(self, software: Software) -> tuple[float, float] | None:
        """As measured, eager or compiled."""
        mode = "compiled" if software.fusion == "compiled" else "autocast" if software.casts_weights else "plain"
        if not any(host.mode == mode for host in self.ceilings.host):
            return None
        return self.ceilings.layer_host_seconds(mode), self.ceilings.layer_host_seconds(mode, backward=True)

    def memory(self, operation: Operation) -> float:
        """At the bandwidth measured for that many bytes per kernel."""
        size = operation.bytes / operation.kernels
        return operation.bytes / (self.ceilings.memory_bytes_s(size) * (PLAIN if operation.plain else 1.0))


ATTENTION_DEMAND = 1.15
MEMORY_DEMAND = 0.65
"""Power that fused attention and memory-bound kernels draw at full clock, relative to the chip's limit: an H200's clock
fell to 1485 MHz in training steps dominated by GEMMs and to 1830 in those dominated by attention."""


def power_share(chip: Chip, limit_w: float, gemm: float, attention: float, memory: float, demand: float) -> float:
    """Share of full clock that the power limit leaves for kernels with these times, GEMMs drawing `demand`.

    Near the top, power is about quadratic in the clock, so speed goes with the square root of the available power.
    """
    total = gemm + attention + memory
    if total == 0:
        return 1.0
    drawn = (gemm * demand + attention * min(demand, ATTENTION_DEMAND) + memory * MEMORY_DEMAND) / total
    return min(1.0, math.sqrt(limit_w / (drawn * chip.power_w)))
