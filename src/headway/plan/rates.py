"""How long a device takes for an operation: at the speed of light, by a model of its kernels, or as measured.

Times are those of a device that power does not hold back; `power_share` says what its limit leaves.
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

__all__ = [
    "GENERATIONS",
    "ChipGeneration",
    "LimitRates",
    "MeasuredRates",
    "ModelRates",
    "Rates",
    "generation",
    "generation_name",
    "power_share",
]


@dataclass(frozen=True)
class ChipGeneration:
    """What chips of a generation share: how their kernels behave. Shares are of the vendor's dense peak."""

    processors: int
    """Streaming multiprocessors or compute units: how many tiles run at once."""
    gemm: Mapping[str, float]
    """Best share that a product reaches, by precision."""
    ramp: Mapping[str, float]
    """Depth (in k) that filling and draining a tile costs, by precision."""
    attention: Mapping[str, tuple[float, float, float, float]]
    """By kernel: share of forward and backward together at heads of 128, at heads of 64, how much faster forward is
    alone, and the length at which half of that is reached. Two and a half forward passes' work are counted for
    backward."""
    memory: float
    """Best share of the memory's bandwidth."""
    kernel_s: float
    """What each kernel takes beyond its work: start, drain, gap to the next."""
    demand: float
    """Power that products back to back would draw at full clock, over the chip's own limit."""
    source: str


PLAIN = 0.74
"""What a framework's own elementwise kernels reach of a copy's bandwidth, strided halves and casts among them:
measured on an H200 over whole training steps."""

_MAMF = "stas00/ml-engineering, maximum achievable matmul FLOPS"
_FLASH = "FlashAttention-2 and -3 papers' figures"
_OURS = "measured on an H200, hardware/measured/h200.json"


def _by(bf16: float, fp8: float = 0.0, nvfp4: float = 0.0) -> Mapping[str, float]:
    shares = {"bf16": bf16, "fp16": bf16, "fp8": fp8, "mxfp8": fp8, "nvfp4": nvfp4}
    return MappingProxyType({name: value for name, value in shares.items() if value})


GENERATIONS: Mapping[str, ChipGeneration] = MappingProxyType(
    {
        "ampere": ChipGeneration(
            108, _by(0.89), _by(96),
            MappingProxyType({
                "flash1": (0.27, 0.31, 1.0, 230), "triton1": (0.29, 0.29, 1.0, 230), "flash2": (0.62, 0.56, 1.05, 486),
            }),
            0.86, 2.5e-6, 1.05, f"{_MAMF}: A100 SXM 271 of 312; {_FLASH}",
        ),
        "hopper": ChipGeneration(
            132, _by(0.85, 0.82), _by(128, 400),
            MappingProxyType({
                "flash1": (0.14, 0.16, 1.0, 215), "triton1": (0.16, 0.16, 1.0, 215),
                "flash2": (0.334, 0.293, 1.02, 525), "flash3": (0.57, 0.45, 1.1, 450), "cudnn": (0.54, 0.43, 1.12, 400),
            }),
            0.87, 2.5e-6, 1.45, f"{_OURS}; {_MAMF}: H100 SXM 795 of 989; {_FLASH}",
        ),
        "blackwell": ChipGeneration(
            148, _by(0.80, 0.78, 0.68), _by(192, 512, 800),
            MappingProxyType({
                "flash2": (0.2, 0.17, 1.02, 525), "flash3": (0.5, 0.40, 1.2, 600), "cudnn": (0.5, 0.40, 1.2, 600),
            }),
            0.87, 2.5e-6, 1.35, f"{_MAMF}: B200 1745 of 2250, GB200 1822 of 2500; FlashAttention-4 abstract",
        ),
        "cdna3": ChipGeneration(
            304, _by(0.55, 0.52), _by(256, 512),
            MappingProxyType({"flash2": (0.27, 0.22, 1.2, 600)}),
            0.8, 4e-6, 1.2, f"{_MAMF}: MI300X 668 of 1300; attention assumed",
        ),
        "ada": ChipGeneration(
            142, _by(0.85, 0.8), _by(128, 256),
            MappingProxyType({"flash1": (0.27, 0.31, 1.0, 230), "flash2": (0.6, 0.55, 1.05, 486)}),
            0.88, 2.5e-6, 1.3, "assumed like Ampere",
        ),
        "cpu": ChipGeneration(
            16, MappingProxyType({"bf16": 0.4, "float32": 0.5}), _by(32),
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
    """What the generation of a chip is called."""
    return _GENERATION_OF[chip.name.split("-")[0]]


def generation(chip: Chip) -> ChipGeneration:
    """The generation a chip belongs to."""
    return GENERATIONS[_GENERATION_OF[chip.name.split("-")[0]]]


class Rates(ABC):
    """Seconds of an operation on one device."""

    chip: Chip

    @abstractmethod
    def gemm(self, operation: Operation) -> float:
        """Of a matrix product, or several equal ones."""

    @abstractmethod
    def attention(self, operation: Operation, kernel: str) -> float:
        """Of fused attention."""

    @abstractmethod
    def memory(self, operation: Operation) -> float:
        """Of an operation that memory bounds."""

    @abstractmethod
    def host(self, software: Software) -> tuple[float, float] | None:
        """Host seconds of one dense layer's forward and backward pass, where they were measured."""

    def peak(self, precision: str) -> float:
        """Dense FLOP/s of the vendor."""
        return self.chip.peak(precision)


@dataclass(frozen=True, eq=False)
class LimitRates(Rates):
    """The speed of light: vendors' peaks, and every byte at full bandwidth."""

    chip: Chip

    def gemm(self, operation: Operation) -> float:
        """At the peak, or at the memory's bandwidth."""
        return max(operation.flops / self.peak(operation.precision), operation.bytes / self.chip.bandwidth_bytes_s)

    def attention(self, operation: Operation, kernel: str) -> float:  # noqa: ARG002
        """At the peak, or at the memory's bandwidth."""
        return self.gemm(operation)

    def memory(self, operation: Operation) -> float:
        """At full bandwidth."""
        return operation.bytes / self.chip.bandwidth_bytes_s

    def host(self, software: Software) -> None:
        """A host that is never late."""


@dataclass(frozen=True, eq=False)
class ModelRates(Rates):
    """A model of kernels: tiles in waves over the processors, attention's curves, memory's best share."""

    chip: Chip

    def gemm(self, operation: Operation) -> float:
        """The best tiling's waves, or the memory's time where that is longer."""
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
        """The kernel's best share, less for short sequences."""
        kernels = generation(self.chip)
        wide, narrow, gain, half = kernels.attention.get(kernel) or kernels.attention["flash2"]
        share = narrow + (wide - narrow) * min(1.0, max(0.0, (operation.head_dim - 64) / 64))
        share *= operation.seq / (operation.seq + half)
        # both passes take 3.5 forward passes' work at the share; we count a backward pass as two
        times = 1 / gain if operation.phase == "forward" else (3.5 - 1 / gain) / 2
        return times * operation.flops / (share * self.peak(operation.precision)) + kernels.kernel_s

    def memory(self, operation: Operation) -> float:
        """At the best share of the bandwidth, and each kernel's start."""
        kernels = generation(self.chip)
        rate = self.chip.bandwidth_bytes_s * kernels.memory * (PLAIN if operation.plain else 1.0)
        return operation.bytes / rate + operation.kernels * kernels.kernel_s

    def host(self, software: Software) -> None:
        """Nothing was measured: a parameter stands in."""


_TILES = (
    (128, 256, 1.0),
    (256, 128, 1.0),
    (128, 128, 0.97),
    (64, 256, 0.92),
    (256, 64, 0.92),
    (64, 128, 0.8),
    (64, 64, 0.6),
)
"""Rows and columns of a tile, and how its inner loop compares with the largest one's."""


_BATCHED = 0.65
"""What many small products of unfused attention reach of a large one's speed: FlashAttention-2's figures, its
baseline."""


@lru_cache(maxsize=262144)
def _tiled(chip: str, precision: str, m: int, n: int, k: int, sixteenths: int) -> float:
    """FLOPs that a product keeps the whole chip busy for, waves and all: at least its own."""
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
    """What `headway hardware measure` found on a device of this kind."""

    chip: Chip
    ceilings: Ceilings

    def gemm(self, operation: Operation) -> float:
        """From the grid of measured products."""
        m, n, k = (max(1, round(size)) for size in (operation.m, operation.n, operation.k))
        return operation.count * self.ceilings.gemm_seconds(m, n, k, operation.precision)

    def attention(self, operation: Operation, kernel: str) -> float:
        """From the curves of measured attention."""
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
        """At the bandwidth measured for as many bytes a kernel."""
        size = operation.bytes / operation.kernels
        return operation.bytes / (self.ceilings.memory_bytes_s(size) * (PLAIN if operation.plain else 1.0))


ATTENTION_DEMAND = 1.15
MEMORY_DEMAND = 0.65
"""Power that fused attention and memory-bound kernels draw at full clock, over the chip's limit: an H200 in training
steps, whose clock fell to 1485 MHz where products took most of the time and to 1830 where attention did."""


def power_share(chip: Chip, limit_w: float, gemm: float, attention: float, memory: float, demand: float) -> float:
    """Share of full clock that the power limit leaves for kernels that take such times, products drawing `demand`.

    Power falls with about the square of the clock near the top, so speed falls with the root of what is missing.
    """
    total = gemm + attention + memory
    if total == 0:
        return 1.0
    drawn = (gemm * demand + attention * min(demand, ATTENTION_DEMAND) + memory * MEMORY_DEMAND) / total
    return min(1.0, math.sqrt(limit_w / (drawn * chip.power_w)))
