"""Measured ceilings of a device, interpolated between measured points.

`headway hardware measure` writes a JSON file; the planner reads rates from it. Interpolation is log-log: exact for
power laws such as memory-bound GEMMs, through every measured point, and never outside the range of its neighbours.
Above the largest measured size the rate is constant; below the smallest the time is.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway.errors import UsageError
from headway.hardware.chips import Chip, precision

FORMAT = 1
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, Field(gt=0)]
Sizes = Annotated[tuple[Size, ...], Field(min_length=1)]
Times = Annotated[tuple[Positive, ...], Field(min_length=1)]
Backend = Literal["default", "flash", "cudnn"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class GemmGrid(_Part):
    """GEMMs [m, k] x [k, n] over a full grid at one precision."""

    precision: str
    m: Sizes
    n: Sizes
    k: Sizes
    microseconds: Times
    """Device time per point, k varies fastest, then n."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_axes(self.m, self.n, self.k)
        if len(self.microseconds) != len(self.m) * len(self.n) * len(self.k):
            raise ValueError("needs a time for every point of the grid")
        return self


class GemmShape(_Part):
    """A GEMM of a real model, off the grid, to validate the interpolation."""

    precision: str
    layout: Literal["forward", "input", "weight"]
    """Operand layout: forward pass, input gradient or weight gradient."""
    m: Size
    n: Size
    k: Size
    microseconds: Positive


class AttentionCurve(_Part):
    """Attention over several sequence lengths at one head size."""

    backend: Backend
    head_dim: Size
    causal: bool
    heads: Size
    kv_heads: Size
    tokens: Size
    """Tokens per batch; a longer sequence is a batch of one."""
    seq: Sizes
    forward_microseconds: Times
    backward_microseconds: Times

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_axes(self.seq)
        if not len(self.seq) == len(self.forward_microseconds) == len(self.backward_microseconds):
            raise ValueError("needs a forward and a backward time for every length")
        return self

    def flops(self, seq: int) -> float:
        """FLOPs of a measured forward pass; causal attention counts half."""
        batch = max(1, self.tokens // seq)
        return 4.0 * batch * self.heads * seq * seq * self.head_dim * (0.5 if self.causal else 1.0)

    def rate(self, seq: int, backward: bool) -> float:
        """Interpolated FLOP/s; the backward pass counts twice the FLOPs."""
        times = self.backward_microseconds if backward else self.forward_microseconds
        factor = 2.0 if backward else 1.0
        rates = [factor * self.flops(s) / (t / 1e6) for s, t in zip(self.seq, times, strict=True)]
        return _between(self.seq, rates, seq, hold_time=True)


class _OverSizes(_Part):
    """Times over several sizes."""

    bytes: Sizes
    microseconds: Times

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_axes(self.bytes)
        if len(self.bytes) != len(self.microseconds):
            raise ValueError("needs a time for every size")
        return self


class MemoryCurve(_OverSizes):
    """A memory-bound operation. Bytes are the minimum: inputs read once, outputs written once."""

    operation: str


class CopyCurve(_OverSizes):
    """Copies between host and device."""

    direction: Literal["to_device", "to_host"]
    pinned: bool


class HostOverhead(_Part):
    """Host time to launch work, independent of the device."""

    mode: Literal["autocast", "plain", "compiled"]
    """Float32 weights under autocast, weights in compute precision, or autocast compiled."""
    forward_microseconds: Positive
    """One decoder layer, forward."""
    backward_microseconds: Positive
    """One decoder layer, backward."""


class CollectiveCurve(_OverSizes):
    """A collective. Bytes are of the full tensor: what all ranks hold after a gather or before a scatter."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    ranks: Size
    backend: str


class SustainedGemm(_Part):
    """A large GEMM over seconds, at settled power and temperature."""

    precision: str
    size: Size
    flops_s: Positive
    seconds: Positive
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


class Ceilings(_Part):
    """All measurements of a device."""

    format: Literal[1] = 1
    device: str
    """The name the driver reports."""
    chip: str | None
    """Its name in the catalogue."""
    kind: Literal["cpu", "cuda"]
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    torch: str
    timer: str
    """Source of the times."""
    peaks: dict[str, Positive]
    """FLOP/s that efficiencies are relative to: the vendor's dense peak, or else the best measured."""
    gemm: tuple[GemmGrid, ...] = ()
    gemm_shapes: tuple[GemmShape, ...] = ()
    attention: tuple[AttentionCurve, ...] = ()
    memory: tuple[MemoryCurve, ...] = ()
    copies: tuple[CopyCurve, ...] = ()
    host: tuple[HostOverhead, ...] = ()
    launch_microseconds: Positive | None = None
    """Host time of the smallest operation."""
    kernel_microseconds: Positive | None = None
    """Device time of the smallest operation, back to back."""
    collectives: tuple[CollectiveCurve, ...] = ()
    sustained: tuple[SustainedGemm, ...] = ()
    skipped: dict[str, str] = {}
    """What could not be measured here, and why."""

    def precisions(self) -> tuple[str, ...]:
        """Precisions with measured GEMMs."""
        return tuple(self._grids)

    def gemm_efficiency(self, m: int, n: int, k: int, precision_name: str) -> float:
        """Share of the vendor's dense peak that a GEMM [m, k] x [k, n] reaches, at most 1."""
        return self._grid(precision_name).rate(m, n, k)

    def gemm_seconds(self, m: int, n: int, k: int, precision_name: str) -> float:
        """Device seconds of a GEMM [m, k] x [k, n]."""
        rate = self.gemm_efficiency(m, n, k, precision_name) * self.peaks[precision(precision_name)]
        return 2.0 * m * n * k / rate

    def sustained_share(self, precision_name: str) -> float:
        """Share of its burst rate that a large GEMM sustains under the power limit, at most 1.

        Grids are measured in bursts. Without pauses an H200 drops from 797 to 663 TFLOP/s: at 700 W its clock falls
        to 1455 MHz.
        """
        name = precision(precision_name)
        sustained = next((run for run in self.sustained if run.precision == name), None)
        if sustained is None:
            raise _absent(self, f"sustained GEMM in {precision_name}", [run.precision for run in self.sustained])
        burst = self.gemm_efficiency(sustained.size, sustained.size, sustained.size, name) * self.peaks[name]
        return min(1.0, sustained.flops_s / burst)

    def attention_flops(
        self,
        seq: int,
        head_dim: int,
        causal: bool = True,
        backward: bool = False,
        backend: Backend = "default",
        grouped: bool = False,
    ) -> float:
        """FLOP/s of attention at a sequence length and head size.

        A forward pass counts 4 * seq**2 * head_dim per head, the backward pass twice that, causal ones half, without
        recomputation inside the backward kernel. `grouped` prefers measurements with fewer key than query heads.
        """
        rates = {curve.head_dim: curve.rate(seq, backward) for curve in self._attention(backend, causal, grouped)}
        sizes = sorted(rates)
        return _between(sizes, [rates[size] for size in sizes], head_dim, hold_time=False)

    def memory_bytes_s(self, size: float, operation: str = "copy") -> float:
        """Bytes per second of a memory-bound operation on `size` bytes; small sizes may run from cache."""
        curve = next((curve for curve in self.memory if curve.operation == operation), None)
        if curve is None:
            raise _absent(self, f"operation {operation!r}", [curve.operation for curve in self.memory])
        return _curve_rate(curve.bytes, curve.microseconds, size)

    def copy_bytes_s(self, size: float, direction: Literal["to_device", "to_host"], pinned: bool = True) -> float:
        """Bytes per second between host and device."""
        for curve in self.copies:
            if (curve.direction, curve.pinned) == (direction, pinned):
                return _curve_rate(curve.bytes, curve.microseconds, size)
        raise _absent(self, f"copy {direction}", sorted({curve.direction for curve in self.copies}))

    def layer_host_seconds(self, mode: str = "autocast", backward: bool = False) -> float:
        """Host seconds to launch a decoder layer's forward or backward pass."""
        for host in self.host:
            if host.mode == mode:
                return (host.backward_microseconds if backward else host.forward_microseconds) / 1e6
        raise _absent(self, f"layer {mode!r}", [host.mode for host in self.host])

    def collective_seconds(self, operation: str, size: float, ranks: int) -> float:
        """Seconds of a collective over a full tensor of `size` bytes among a measured number of ranks."""
        for curve in self.collectives:
            if (curve.operation, curve.ranks) == (operation, ranks):
                return size / _curve_rate(curve.bytes, curve.microseconds, size)
        known = [f"{curve.operation} among {curve.ranks}" for curve in self.collectives]
        raise _absent(self, f"{operation} among {ranks}", known)

    def _grid(self, precision_name: str) -> "_Grid":
        grid = self._grids.get(precision(precision_name))
        if grid is None:
            raise _absent(self, f"GEMM in {precision_name}", list(self._grids))
        return grid

    @cached_property
    def _grids(self) -> dict[str, "_Grid"]:
        return {gemm.precision: _Grid(gemm, self.peaks[gemm.precision]) for gemm in self.gemm}

    def _attention(self, backend: str, causal: bool, grouped: bool) -> list[AttentionCurve]:
        curves = [curve for curve in self.attention if (curve.backend, curve.causal) == (backend, causal)]
        chosen = [curve for curve in curves if (curve.kv_heads < curve.heads) == grouped] or curves
        if not chosen:
            raise _absent(self, f"attention through {backend}", sorted({curve.backend for curve in self.attention}))
        return chosen


class _Grid:
    """GEMM efficiency by size, from the measured times."""

    def __init__(self, gemm: GemmGrid, peak: float) -> None:
        self._axes = (gemm.m, gemm.n, gemm.k)
        self._logs = tuple([math.log(size) for size in axis] for axis in self._axes)
        points = ((m, n, k) for m in gemm.m for n in gemm.n for k in gemm.k)
        self._logarithms = [
            math.log(min(1.0, 2.0 * m * n * k / (time / 1e6) / peak))
            for (m, n, k), time in zip(points, gemm.microseconds, strict=True)
        ]

    def rate(self, *sizes: int) -> float:
        positions, below = [], 0.0
        for axis, logs, size in zip(self._axes, self._logs, sizes, strict=True):
            log = math.log(size)
            below += min(0.0, log - logs[0])
            positions.append(_position(axis, logs, size, log))
        (i, x), (j, y), (k, z) = positions
        _, count_n, count_k = (len(axis) for axis in self._axes)
        total = 0.0
        for di, wx in ((0, 1.0 - x), (1, x)):
            for dj, wy in ((0, 1.0 - y), (1, y)):
                for dk, wz in ((0, 1.0 - z), (1, z)):
                    weight = wx * wy * wz
                    if weight:  # a point with weight 0 may be outside of the grid
                        total += weight * self._logarithms[((i + di) * count_n + j + dj) * count_k + k + dk]
        return math.exp(total + below)


def _position(axis: Sequence[int], logs: Sequence[float], size: int, log: float) -> tuple[int, float]:
    """Index of the measured size at or below `size`, and the fraction towards the next; clamped."""
    if size <= axis[0]:
        return 0, 0.0
    if size >= axis[-1]:
        return len(axis) - 1, 0.0
    at = bisect_right(axis, size) - 1
    return at, (log - logs[at]) / (logs[at + 1] - logs[at])


def _between(axis: Sequence[int], rates: Sequence[float], size: float, *, hold_time: bool) -> float:
    """Interpolated rate; below the smallest size `hold_time` keeps the time constant, else the rate."""
    if size <= axis[0]:
        return rates[0] * (size / axis[0] if hold_time else 1.0)
    if size >= axis[-1]:
        return rates[-1]
    at = bisect_right(axis, size) - 1
    share = math.log(size / axis[at]) / math.log(axis[at + 1] / axis[at])
    return math.exp((1.0 - share) * math.log(rates[at]) + share * math.log(rates[at + 1]))


def _curve_rate(sizes: Sequence[int], times: Sequence[float], size: float) -> float:
    rates = [count / (time / 1e6) for count, time in zip(sizes, times, strict=True)]
    return _between(sizes, rates, size, hold_time=True)


def _check_axes(*axes: Sequence[int]) -> None:
    if any(list(axis) != sorted(set(axis)) for axis in axes):
        raise ValueError("sizes must be ascending")


def _absent(ceilings: Ceilings, what: str, known: Sequence[str]) -> UsageError:
    names = ", ".join(dict.fromkeys(known)) or "none"
    return UsageError(f"no {what} was measured on {ceilings.device}", hint=f"measured: {names}")


def read_ceilings(file: Path) -> Ceilings:
    """Read a file that `headway hardware measure` wrote."""
    try:
        text = file.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{file}: cannot be read: {reason}", hint="headway hardware measure writes one") from None
    return _parse(text, str(file))


def write_ceilings(file: Path, ceilings: Ceilings) -> None:
    """Write the file atomically."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(_render(ceilings))
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{file}: cannot be written: {error.strerror or error}") from None


def find_ceilings(chip: Chip | str) -> Ceilings | None:
    """The ceilings that Headway ships for a chip; None if it was not measured."""
    name = chip if isinstance(chip, str) else chip.name
    file = resources.files("headway.hardware") / "measured" / f"{name}.json"
    return _parse(file.read_bytes(), file.name) if file.is_file() else None


def _parse(text: bytes, origin: str) -> Ceilings:
    try:
        return Ceilings.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        if key == "format":
            raise UsageError(
                f"{origin}: format {first['input']!r} is not {FORMAT}", hint="measure again with this version"
            ) from None
        raise UsageError(f"{origin}: not measured ceilings: {key}: {first['msg']}") from None


def _render(ceilings: Ceilings) -> bytes:
    """JSON with one line per list of numbers: small, with readable diffs."""

    def lines(value: object, indent: str = "") -> str:
        deeper = indent + " "
        if isinstance(value, dict):
            rows = [f"{deeper}{json.dumps(key)}: {lines(item, deeper)}" for key, item in value.items()]
            return "{\n" + ",\n".join(rows) + f"\n{indent}}}" if rows else "{}"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n" + ",\n".join(deeper + lines(item, deeper) for item in value) + f"\n{indent}]"
        return json.dumps(value, separators=(",", ":"))

    return (lines(ceilings.model_dump(mode="json")) + "\n").encode()
