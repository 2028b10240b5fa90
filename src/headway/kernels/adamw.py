"""AdamW over many tensors in one launch, with clipping, stochastic rounding and master weights in the same pass.

    g = factor * gradient
    m = beta1 * m + (1 - beta1) * g                 v = beta2 * v + (1 - beta2) * (g * g)
    w = w - (lr * decay) * w                        c_i = 1 - beta_i ^ step
    w = w - (lr / c_1 * m) / (sqrt(v) * (1 / sqrt(c_2)) + eps)

in this order, in float32 (a GPU fuses multiply-adds, and uses its approximate square root and division, which are off
by at most two units in the last place). It is memory-bound: 28 bytes per element all in float32, 14 all in bfloat16,
each read and written once. A table on the device has the addresses of tensors, and a map says which piece each program
handles, so that a group of parameters of the same precisions is one launch; a second, tiny one computes the step's
factors from the step counts, which stay on the device.

bfloat16 results are rounded stochastically by the bits of train/optim/rounding.py, which depend on an element's row and
column in the whole tensor. A program handles 1024 columns of 8 rows, row by row: the column's part of the bits is
hashed once for all rows, the row's part once for all columns, and one mix remains per element, which weight and moments
share. Matrices of fewer than 512 columns are handled in tiles of 8 x 128. Without rounding, rows do not matter and
tensors are handled as flat.

Nothing is differentiable, and tensors are hidden behind addresses: call this outside of compiled graphs.
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.pointer_table import map_of, named_type, uploaded
from headway.kernels.triton_compat import tl, triton
from headway.state.box import Box

Draw = Callable[[str], bytes]
"""Returns the 16-byte key of a parameter's random bits in this step, by its name."""
ENTRY_WORDS = tl.constexpr(12)
"""Words of an entry: five addresses of stored tensors, the bfloat16 copy and the step; rows, columns, length, first
row, first column."""
FRESH = tl.constexpr(5)
"""Words of an entry that change in each step: the gradient's address, and four words of key."""
ODD = 0x9E3779B1 - 2**32
OTHER = tl.constexpr(ODD)
"""Multiplier of a word, for the bits of the second moment."""
TILE = 1024
"""Elements per iteration: 8 per each of 128 threads, which are 16 bytes of bfloat16."""
LOOPS = 8
WARPS = 4


@dataclass(frozen=True)
class AdamwPart:
    """A worker's part of a parameter, its gradient and its moments; all but the gradient are updated in place."""

    weight: Tensor
    """float32 or bfloat16; the master copy if there is one."""
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    """Number of updates including this one, as a float32 scalar."""
    name: str
    box: Box
    """Position of this part in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    shown: Tensor | None = None
    """A bfloat16 copy of a float32 weight, rounded to nearest."""
    scales: tuple[Tensor, Tensor] | None = None
    """Scales of 8-bit moments."""


@dataclass(frozen=True)
class AdamwVariant:
    """The specialization of a launch."""

    weight: torch.dtype
    gradient: torch.dtype
    moment: torch.dtype
    shown: bool
    aligned: bool
    """Whether every row starts at a multiple of 16 bytes and of 16 elements, so that 16-byte loads are possible."""
    tall: int
    """Rows of a tile."""
    span: int
    """Columns of a tile."""

    @property
    def rounds(self) -> bool:
        """Whether some results are rounded stochastically."""
        return torch.bfloat16 in (self.weight, self.moment)

    @property
    def each(self) -> int:
        """Consecutive elements per thread: 16 bytes of the widest type, for all tensors alike, to avoid shuffles."""
        return 4 if torch.float32 in (self.weight, self.gradient, self.moment) else 8

    @property
    def flat(self) -> bool:
        """Whether rows do not matter."""
        return not self.rounds and self.moment != torch.uint8


@dataclass(frozen=True)
class Launch:
    """Parts of one variant."""

    kind: AdamwVariant
    owners: tuple[tuple[int, int], ...]
    """For each entry, the index of its part and the offset in that part."""
    entries: Tensor
    pieces: Tensor
    fresh: Tensor | None = None


@dataclass(frozen=True)
class AdamwTable:
    """Addresses of a group's parts; valid while all but gradients do not move."""

    addresses: tuple[tuple[Any, ...], ...]
    gradients: tuple[int, ...]
    launches: tuple[Launch, ...]


def table_of(parts: Sequence[AdamwPart], draw: Draw | None, before: AdamwTable | None = None) -> AdamwTable:
    """Return the table of a step, reusing what is still valid of the previous one."""
    addresses = tuple(_addresses(part) for part in parts)
    gradients = tuple(part.gradient.data_ptr() for part in parts)
    if before is None or before.addresses != addresses:
        before = AdamwTable(addresses, (), tuple(_launches(parts)))
    stays = before.gradients == gradients
    launches = tuple(
        launch if stays and not launch.kind.rounds else replace(launch, fresh=_fresh(launch, parts, gradients, draw))
        for launch in before.launches
    )
    return AdamwTable(addresses, gradients, launches)


def _addresses(part: AdamwPart) -> tuple[Any, ...]:
    tensors = (part.weight, part.mean, part.square, part.step, part.shown, *(part.scales or ()))
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    return (*addresses, part.gradient.dtype, part.gradient.data_ptr() % 16, part.box, part.shape)


def _launches(parts: Sequence[AdamwPart]) -> Iterator[Launch]:
    kinds = dict[AdamwVariant, list[tuple[tuple[int, int], list[int]]]]()
    for number, part in enumerate(parts):
        kind = _kind(part)
        for before, rows, row in _stretches(part) if not kind.flat else [(0, 0, 0)]:
            kinds.setdefault(kind, []).append(((number, before), _entry(part, kind, before, rows, row)))
    for kind, variant_parts in kinds.items():
        high, wide = (np.array([entry[word] for _, entry in variant_parts], dtype=np.int64) for word in (7, 8))
        counts = -(-high // (kind.tall * LOOPS)) * -(-wide // kind.span)
        device = parts[variant_parts[0][0][0]].weight.device
        entries = uploaded(np.array([entry for _, entry in variant_parts], dtype=np.int64), device)
        owners = tuple(owner for owner, _ in variant_parts)
        yield Launch(kind, owners, entries, uploaded(map_of(counts.tolist()), device))


def _kind(part: AdamwPart) -> AdamwVariant:
    """Raise ValueError for unsupported tensors."""
    like = [part.gradient, part.mean, part.square, *([] if part.shown is None else [part.shown])]
    if any(other.shape != part.weight.shape or other.device != part.weight.device for other in like):
        raise ValueError(f"{part.name}: weight, gradient and moments must have one shape and device")
    everything = [part.weight, *like, *(part.scales or ())]
    if not all(tensor.is_contiguous() for tensor in everything):
        raise ValueError(f"{part.name}: rows must be contiguous in memory")
    moments = (torch.uint8,) if part.scales is not None else (torch.float32, torch.bfloat16)
    if part.mean.dtype not in moments or part.mean.dtype != part.square.dtype:
        raise ValueError(f"{part.name}: moments must have one dtype, not {part.mean.dtype} and {part.square.dtype}")
    if part.weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{part.name}: weights must be float32 or bfloat16, not {part.weight.dtype}")
    if part.shown is not None and (part.shown.dtype != torch.bfloat16 or part.weight.dtype != torch.float32):
        raise ValueError(f"{part.name}: a master copy must be float32, and its parameter bfloat16")
    if part.step.dtype != torch.float32 or part.step.numel() != 1:
        raise ValueError(f"{part.name}: the step count must be a float32 scalar")
    columns = part.box.shape[-1]
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (part.weight, *like))
    types = (part.weight.dtype, part.gradient.dtype, part.mean.dtype, part.shown is not None)
    variant = AdamwVariant(*types, aligned and part.weight.numel() % 16 == 0, tall=1, span=TILE)
    if variant.flat:
        return variant
    if columns >= 1 << 28:
        raise ValueError(f"{part.name}: rows of {columns} elements are too long: eight of them exceed 32-bit indices")
    narrow = 256 if part.scales is not None else 128
    span = TILE if columns >= TILE // 2 else narrow
    return replace(variant, aligned=aligned and columns % 16 == 0, tall=TILE // span, span=span)


def _stretches(part: AdamwPart) -> Iterator[tuple[int, int, int]]:
    """Yield runs of rows contiguous in the part and in the whole: offset, number of rows, first row."""
    *leading, columns = part.box.shape
    full_rows = part.shape[:-1]
    strides = [math.prod(full_rows[dim + 1 :]) for dim in range(len(full_rows))]
    # from the last dim on: while a dim is complete, indices of the next one are contiguous
    cut = len(leading)
    while cut > 0 and (cut == len(leading) or leading[cut] == full_rows[cut]):
        cut -= 1
    rows = math.prod(leading[cut:])
    for number, outer in enumerate(product(*map(range, leading[:cut]))):
        corner = [start + index for start, index in zip(part.box.start, outer, strict=False)]
        corner += part.box.start[cut:-1]
        first = sum(index * stride for index, stride in zip(corner, strides, strict=True))
        yield number * rows * columns, rows, first


def _entry(part: AdamwPart, kind: AdamwVariant, before: int, rows: int, row: int) -> list[int]:
    scales = part.scales or (None, None)
    tensors = [part.weight, part.mean, part.square]
    addresses = [tensor.data_ptr() + before * tensor.element_size() for tensor in tensors]
    columns, length = part.box.shape[-1], rows * part.box.shape[-1]
    if kind.flat:
        length, columns = part.weight.numel(), TILE
        rows = -(-length // columns)
    for scale in scales:
        blocks = 1 if scale is None else scale.shape[-1]
        addresses.append(0 if scale is None else scale.data_ptr() + before // part.box.shape[-1] * blocks * 4)
    addresses.append(0 if part.shown is None else part.shown.data_ptr() + before * part.shown.element_size())
    return [*addresses, part.step.data_ptr(), rows, columns, length, row, part.box.start[-1]]


def _fresh(launch: Launch, parts: Sequence[AdamwPart], gradients: Sequence[int], draw: Draw | None) -> Tensor:
    """Return the current addresses of gradients, and the keys of this step."""
    numbers = np.empty((len(launch.owners), 5), dtype=np.int64)
    sizes = launch.kind.gradient.itemsize
    numbers[:, 0] = [gradients[number] + before * sizes for number, before in launch.owners]
    assert draw is not None or not launch.kind.rounds, "who rounds has keys"
    draws = draw if draw is not None and launch.kind.rounds else _no_draw
    keys = [draws(parts[number].name) for number, _ in launch.owners]
    numbers[:, 1:] = np.frombuffer(b"".join(keys), dtype="<i4").reshape(len(numbers), 4)
    return uploaded(numbers, launch.entries.device)


def _no_draw(_: str) -> bytes:
    return bytes(16)


# -- on the device


@triton.jit
def mix(x):
    """Mix 32-bit words bijectively."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


@triton.jit
def spread(x, first, second):
    """Hash a row or column index with two words of key."""
    return mix(mix(x.to(tl.int32) ^ first.to(tl.int32)) ^ second.to(tl.int32))


@triton.jit
def as_read(x, sample):
    """Return numbers in the thread layout of a sample that was loaded."""
    # The compiler gives each thread every 128th of computed numbers, but 16 consecutive bytes of loaded ones: combining
    # the two goes through shared memory. A zero that only a later pass recognizes ties the layouts early.
    return x + ((sample.to(tl.float32).to(tl.int32, bitcast=True) & 0xFFFF) >> 16)


@triton.jit
def rounded(value, bits, TYPE: tl.constexpr):
    """Convert float32 to a type: to bfloat16 stochastically by the lower 16 bits, which are zero for NaNs."""
    # An infinity has a zero mantissa and stays; a NaN may have all bits set.
    if tl.bfloat16 == TYPE:
        up = ((bits & 0xFFFF) + value.to(tl.int32, bitcast=True)) >> 16
        return up.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(TYPE)


@triton.jit
def advanced(w, g, m, v, decay, size, root, beta1, rest1, beta2, rest2, eps):
    """Weight and moments after one update."""
    # Multiply-adds are fused explicitly: left to the compiler, fusion differs between variants, and with it the last
    # bit of the same element on another mesh.
    m = tl.fma(beta1, m, rest1 * g)
    v = tl.fma(beta2, v, rest2 * (g * g))
    w = tl.fma(-decay, w, w)
    w = tl.fma(-(size * m), 1.0 / tl.fma(tl.sqrt(v), root, eps), w)
    return w, m, v


@triton.jit
def pointer(address, before, TYPE: tl.constexpr, ALIGNED: tl.constexpr, EACH: tl.constexpr):
    """Return an address as a typed pointer, offset by some elements, with alignment hints."""
    result = address.to(tl.pointer_type(TYPE))
    # A hint on the pointer: the compiler loses what it knew of the integer in the cast.
    if ALIGNED:
        result = tl.multiple_of(result, EACH * TYPE.primitive_bitwidth // 8)
    return result + before


@triton.jit
def _factors_kernel(
    entries,
    factors,
    count,
    lr,
    weight_decay,
    log1,
    log2,
    LR_LOADED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    steps = tl.load(entries + entry * ENTRY_WORDS + 6, mask=inside, other=0)
    if LR_LOADED:
        rate = tl.zeros([BLOCK], tl.float64) + tl.load(lr)
    else:
        rate = tl.zeros([BLOCK], tl.float64) + lr
    # in float64: float32 would lose three of its seven digits in 1 - 0.999 ** step
    step = tl.load(steps.to(tl.pointer_type(tl.float32)), mask=inside, other=1.0).to(tl.float64)
    first = 1.0 - tl.exp(step * log1)
    second = 1.0 - tl.exp(step * log2)
    at = factors + entry * 3
    tl.store(at, (rate * weight_decay).to(tl.float32), mask=inside)
    tl.store(at + 1, (rate / first).to(tl.float32), mask=inside)
    tl.store(at + 2, (1.0 / tl.sqrt(second)).to(tl.float32), mask=inside)


@triton.jit
def _adamw_kernel(
    entries,
    fresh,
    pieces,
    factors,
    factor,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    SHOWN: tl.constexpr,
    CLIPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    EACH: tl.constexpr,
    FLAT: tl.constexpr,
    TALL: tl.constexpr,
    SPAN: tl.constexpr,
    LOOPS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    number = tl.load(pieces + 2 * program).to(tl.int64)
    piece = tl.load(pieces + 2 * program + 1)
    entry = entries + number * ENTRY_WORDS
    keys = fresh + number * FRESH
    wide = tl.load(entry + 8)
    length = tl.load(entry + 9)
    if ALIGNED:
        wide = tl.multiple_of(wide, 16)
        length = tl.multiple_of(length, 16)
    # 32-bit indices from the program's first row: half the registers of 64-bit ones.
    columns = wide.to(tl.int32)
    segments = (columns + SPAN - 1) // SPAN
    first = (piece // segments).to(tl.int64) * (TALL * LOOPS)
    before = first * wide
    rows = tl.minimum(tl.load(entry + 7) - first, TALL * LOOPS).to(tl.int32)
    left = tl.minimum(length - before, SPAN * TALL * LOOPS).to(tl.int32)
    weights = pointer(tl.load(entry), before, WEIGHT, ALIGNED, EACH)
    means = pointer(tl.load(entry + 1), before, MOMENT, ALIGNED, EACH)
    squares = pointer(tl.load(entry + 2), before, MOMENT, ALIGNED, EACH)
    shown = pointer(tl.load(entry + 5), before, tl.bfloat16, ALIGNED, EACH)
    gradients = pointer(tl.load(keys), before, GRADIENT, ALIGNED, EACH)
    column = (piece % segments) * SPAN + tl.arange(0, SPAN)
    within = column < columns
    decay = tl.load(factors + number * 3)
    size = tl.load(factors + number * 3 + 1)
    root = tl.load(factors + number * 3 + 2)
    share = 1.0
    if CLIPPED:
        share = tl.load(factor)

    # Without rounding the bits are zeros, which the compiler drops.
    ROUNDS: tl.constexpr = (WEIGHT == tl.bfloat16) or (MOMENT == tl.bfloat16)  # noqa: SIM300
    of_row = tl.arange(0, TALL)
    of_columns = tl.zeros([TALL, SPAN], tl.int32)
    bits = tl.zeros([TALL, SPAN], tl.int32)
    whole_row = tl.load(entry + 10) + first + of_row
    k0, k1 = tl.load(keys + 1), tl.load(keys + 2)
    if ROUNDS:
        sample = tl.load(weights + of_row[:, None] * columns + column[None, :], mask=within[None, :], other=0.0)
        column_words = as_read((tl.load(entry + 11) + column)[None, :].to(tl.int32), sample)
        of_columns = spread(column_words, tl.load(keys + 3), tl.load(keys + 4))
    for i in range(tl.cdiv(rows, TALL)):
        row = i * TALL + of_row
        indices = row[:, None] * columns + column[None, :]
        if FLAT:
            inside = indices < left
        else:
            inside = (row < rows)[:, None] & within[None, :]
        if ROUNDS:
            bits = mix(spread(whole_row + i * TALL, k0, k1)[:, None] + of_columns)
        w = tl.load(weights + indices, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradients + indices, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(means + indices, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(squares + indices, mask=inside, other=0.0).to(tl.float32)
        w, m, v = advanced(w, g * share, m, v, decay, size, root, beta1, rest1, beta2, rest2, eps)
        bits = tl.where(w == w, bits, 0)  # if a moment is NaN, so is the weight
        tl.store(weights + indices, rounded(w, bits, WEIGHT), mask=inside)
        tl.store(means + indices, rounded(m, bits >> 16, MOMENT), mask=inside)
        tl.store(squares + indices, rounded(v, (bits * OTHER) >> 16, MOMENT), mask=inside)
        if SHOWN:
            tl.store(shown + indices, w.to(tl.bfloat16), mask=inside)


# -- on the host


def factors_of(launch: Launch, lr: float | Tensor, betas: tuple[float, float], weight_decay: float) -> Tensor:
    """Return each entry's factors from its step count: decay, step size, root of the second bias correction."""
    count, block = len(launch.owners), 128
    factors = torch.empty(count, 3, device=launch.entries.device)
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in betas]
    _factors_kernel[(-(-count // block),)](
        launch.entries, factors, count, lr, weight_decay, *logs, LR_LOADED=isinstance(lr, Tensor), BLOCK=block
    )
    return factors


def shares_of(betas: tuple[float, float]) -> tuple[float, float, float, float]:
    """Return the decay of each moment, and the weight of new values."""
    return betas[0], 1 - betas[0], betas[1], 1 - betas[1]


def cut_of(kind: AdamwVariant, clipped: bool) -> dict[str, Any]:
    """Return the constants of a launch that all forms of AdamW share."""
    types = {"WEIGHT": named_type(kind.weight), "GRADIENT": named_type(kind.gradient)}
    shape = {"ALIGNED": kind.aligned, "EACH": kind.each, "TALL": kind.tall, "LOOPS": LOOPS, "num_warps": WARPS}
    return {**types, **shape, "SHOWN": kind.shown, "CLIPPED": clipped}


def adamw(
    parts: Sequence[AdamwPart],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    draw: Draw | None = None,
    before: AdamwTable | None = None,
) -> AdamwTable:
    """Update all parts in place. Pass the returned table to the next call.

    `factor`, and optionally `lr`, is a float32 scalar on the device; gradients are multiplied by the factor.
    """
    table = table_of([part for part in parts if part.weight.numel()], draw, before)
    for launch in table.launches:
        kind, factors = launch.kind, factors_of(launch, lr, betas, weight_decay)
        _adamw_kernel[(len(launch.pieces),)](
            launch.entries,
            launch.fresh,
            launch.pieces,
            factors,
            factors if factor is None else factor,
            *shares_of(betas),
            eps,
            MOMENT=named_type(kind.moment),
            FLAT=kind.flat,
            SPAN=kind.span,
            **cut_of(kind, clipped=factor is not None),
        )
    return table


# -- in plain PyTorch


def reference(
    parts: Sequence[AdamwPart],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    draw: Draw | None = None,
) -> None:
    """Update all parts in place, one by one."""
    for part in parts:
        g = part.gradient.float() * (1.0 if factor is None else factor)
        m = betas[0] * part.mean.float() + (1 - betas[0]) * g
        v = betas[1] * part.square.float() + (1 - betas[1]) * (g * g)
        step = part.step.double()
        size, root = (lr / (1 - betas[0] ** step)).float(), (1 / (1 - betas[1] ** step).sqrt()).float()
        w = part.weight.float()
        w = w - (lr * weight_decay) * w
        w = w - (size * m) / (v.sqrt() * root + eps)
        halved = torch.bfloat16 in (part.weight.dtype, part.mean.dtype)
        word = _word(part, draw) if halved else torch.zeros((), dtype=torch.int32)
        for stored, value, bits in (
            (part.weight, w, word),
            (part.mean, m, word >> 16),
            (part.square, v, (word * ODD) >> 16),
        ):
            stored.copy_(value if stored.dtype == torch.float32 else _rounded(value, bits))
        if part.shown is not None:
            part.shown.copy_(w)


def _word(part: AdamwPart, draw: Draw | None) -> Tensor:
    assert draw is not None, "who rounds has keys"
    k, device = struct.unpack("<4i", draw(part.name)), part.weight.device
    rows = torch.cat([torch.arange(first, first + count) for _, count, first in _stretches(part)])
    rows = rows.to(device, torch.int32)
    columns = torch.arange(part.box.start[-1], part.box.stop[-1], dtype=torch.int32, device=device)
    of_rows, of_columns = _mix(_mix(rows ^ k[0]) ^ k[1]), _mix(_mix(columns ^ k[2]) ^ k[3])
    return _mix(of_rows[:, None] + of_columns).view(part.weight.shape)


def _rounded(value: Tensor, bits: Tensor) -> Tensor:
    up = (((bits & 0xFFFF) + value.view(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(value.isfinite(), up, value)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


def _ahead(name: str, types: str, aligned: bool = True, tall: int = 1, shown: bool = False) -> LaunchSpec:
    weight, gradient, moment = ({"f": tl.float32, "b": tl.bfloat16}[letter] for letter in types)
    flat = types[0] == types[2] == "f"
    floats = dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps"), "fp32")
    arguments = {"entries": "*i64", "fresh": "*i64", "pieces": "*i32", "factors": "*fp32", "factor": "*fp32"} | floats
    constants = {"WEIGHT": weight, "GRADIENT": gradient, "MOMENT": moment, "SHOWN": shown, "CLIPPED": True}
    shape = {
        "ALIGNED": aligned,
        "EACH": 4 if "f" in types else 8,
        "FLAT": flat,
        "TALL": tall,
        "SPAN": TILE // tall,
        "LOOPS": LOOPS,
    }
    return LaunchSpec(name, _adamw_kernel, arguments, constants | shape, WARPS)


_RATES = {"entries": "*i64", "factors": "*fp32", "count": "i32", "lr": "fp32", "weight_decay": "fp32"}
_LOGS = {"log1": "fp32", "log2": "fp32"}
AHEAD = (
    LaunchSpec(
        "adamw factors", _factors_kernel, _RATES | _LOGS, {"LR_LOADED": False, "BLOCK": 128}, odd=frozenset({"count"})
    ),
    _ahead("adamw fp32", "fff"),
    _ahead("adamw fp32 unaligned", "fff", aligned=False),
    _ahead("adamw masters", "fbf", shown=True),
    _ahead("adamw bf16 moments", "ffb"),
    _ahead("adamw bf16", "bbb"),
    _ahead("adamw bf16 unaligned", "bbb", aligned=False),
    _ahead("adamw bf16 narrow", "bbb", tall=8),
)
