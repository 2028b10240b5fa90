"""The parameters of the cost model that no data sheet states, each with a physical meaning and a prior.

Defaults come from microbenchmarks and published runs; `--against` shows how well they predict. A calibration moves
them only as far as its runs demand.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType


@dataclass(frozen=True)
class Efficiencies:
    """Mostly multipliers near 1: the share of a modelled speed that training reaches."""

    ampere: float = 0.92
    """GEMM speed in a training step over the kernel model's, on A100s."""
    hopper: float = 0.95
    """The same on H100s and H200s."""
    blackwell: float = 0.9
    """The same on B200, GB200 and other Blackwell chips."""
    low: float = 1.0
    """The same for 8-bit and 4-bit GEMMs, on top."""
    attention: float = 1.0
    """Speed of attention over the kernel model's."""
    memory: float = 1.0
    """Speed of memory-bound kernels over the memory model's."""
    host_s: float = 0.45e-3
    """Host seconds to launch an eager layer's forward pass; its backward pass takes 1.75 times that."""
    near: float = 0.8
    """Share of an in-node link's bandwidth that collectives reach."""
    far: float = 0.9
    """Share of a network port's bandwidth that collectives reach."""
    latency: float = 1.0
    """Latency of collectives over that of the network levels."""
    contention: float = 0.12
    """How much slower compute runs while a collective overlaps with it."""
    hidden: float = 0.9
    """Share of a collective that overlap hides if there is enough compute."""
    loop_s: float = 0.01
    """Seconds per step in which the device waits for the host loop: data, norm, logging."""

    def measured(self) -> "Efficiencies":
        """For measured ceilings: without the factors that correct the kernel model."""
        return replace(self, ampere=1.0, hopper=1.0, blackwell=1.0, low=1.0, attention=1.0, memory=1.0)


IDEAL = Efficiencies(
    ampere=1.0, hopper=1.0, blackwell=1.0, low=1.0, attention=1.0, memory=1.0, host_s=0.0, near=1.0, far=1.0,
    latency=0.0, contention=0.0, hidden=1.0, loop_s=0.0,
)  # fmt: skip
"""No losses."""

SPREAD = MappingProxyType(
    {
        "ampere": 0.08, "hopper": 0.08, "blackwell": 0.15, "low": 0.1, "attention": 0.15, "memory": 0.2, "host_s": 0.5,
        "near": 0.15, "far": 0.25, "latency": 0.6, "contention": 0.8, "hidden": 0.1, "loop_s": 0.8,
    }
)  # fmt: skip
"""Prior of each parameter: the standard deviation of its logarithm."""


@cache
def _fitted() -> dict[str, dict[str, float]]:
    text = (resources.files("headway.plan") / "fitted.json").read_text(encoding="utf-8")
    parsed: dict[str, dict[str, float]] = json.loads(text)["parameters"]
    return parsed


def fitted_parameters(without: str | None = None) -> Efficiencies:
    """Parameters fitted to all published runs, or to those of all programs but `without`."""
    fits = _fitted()
    return Efficiencies(**fits.get(without or "all", fits["all"]))
