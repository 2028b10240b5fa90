"""AdamW over many tensors in one launch, with clipping, stochastic rounding and master weights in the same pass.

    g = factor * gradient
    m = beta1 * m + (1 - beta1) * g                 v = beta2 * v + (1 - beta2) * (g * g)
    w = w - (lr * decay) * w                        c_i = 1 - beta_i ^ step
    w = w - (lr / c_1 * m) / (sqrt(v) * (1 / sqrt(c_2)) + eps)

in this order, in float32 (a GPU fuses products with the sums they go into, and takes its quick root and quotient, which
are off by two units in the last place at most). Bytes bind it: 28 for an element all in float32, 14 all in bfloat16,
each read and written once. A table on the device says where each tensor lies and a map says which piece each program
takes, so that a group of parameters of the same precisions is one launch; a second, tiny one makes the step's factors
from the counts of steps, which stay on the device.

What is kept in bfloat16 is rounded up or down by the bits of train/optim/rounding.py, which depend on an element's row
and column in the whole tensor. A program takes 1024 columns of 8 rows, one row after the other: what a column adds to
the bits is hashed once for all of them, what a row adds once for all columns, and one mix is left for each element,
which weight and moments share. Matrices of fewer than 512 columns go 8 rows of 128 at a time. Where nothing is rounded,
rows do not matter and tensors go by in one stretch.

Nothing is differentiated, and tensors hide behind their addresses: call this outside of compiled graphs.
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

__all__ = [
    "AHEAD",
    "AdamwPart",
    "AdamwTable",
    "AdamwVariant",
    "Draw",
    "Launch",
    "adamw",
    "advanced",
    "cut_of",
    "factors_of",
    "mix",
    "pointer",
    "reference",
    "rounded",
    "shares_of",
    "spread",
    "table_of",
]

Draw = Callable[[str], bytes]
"""The 16 bytes that key the random bits of a parameter in this step, by its name."""
WORDS = tl.constexpr(12)
"""Of an entry: five addresses of what is kept, of the shown copy and of the step; rows, columns, length, first row,
first column."""
FRESH = tl.constexpr(5)
"""Of an entry, anew in each step: where its gradient lies, and four words of key."""
ODD = 0x9E3779B1 - 2**32
OTHER = tl.constexpr(ODD)
"""What a word is multiplied by for bits of the mean of squares."""
TILE = 1024
"""Elements at a time: 8 for each of 128 threads, which are 16 bytes of bfloat16."""
LOOPS = 8
WARPS = 4


@dataclass(frozen=True)
class AdamwPart:
    """What one worker has of a parameter, its gradient and its moments; all but the gradient are updated in place."""

    weight: Tensor
    """float32 or bfloat16; of a parameter with a master copy, that one."""
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    """How many updates there have been with this one: a float32 scalar."""
    name: str
    box: Box
    """Where this part lies in the whole tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    shown: Tensor | None = None
    """A bfloat16 copy of a float32 weight, rounded to the nearest."""
    scales: tuple[Tensor, Tensor] | None = None
    """Of moments in eight bits."""


@dataclass(frozen=True)
class AdamwVariant:
    """What a launch is compiled for."""

    weight: torch.dtype
    gradient: torch.dtype
    moment: torch.dtype
    shown: bool
    aligned: bool
    """Every row begins at a multiple of 16 bytes and of 16 elements, so that a thread may read 16 bytes at once."""
    tall: int
    """Rows of a tile."""
    span: int
    """Columns of a tile."""

    @property
    def rounds(self) -> bool:
        """Whether some of what is kept is rounded by random bits."""
        return torch.bfloat16 in (self.weight, self.moment)

    @property
    def each(self) -> int:
        """Neighbours that a thread takes: 16 bytes of the widest, of all tensors alike, so that none changes hands."""
        return 4 if torch.float32 in (self.weight, self.gradient, self.moment) else 8

    @property
    def flat(self) -> bool:
        """Whether it does not matter which row an element is of."""
        return not self.rounds and self.moment != torch.uint8


@dataclass(frozen=True)
class Launch:
    """Parts of one kind."""

    kind: AdamwVariant
    owners: tuple[tuple[int, int], ...]
    """Of each entry, the number of its part and how many of the part's elements come before."""
    entries: Tensor
    pieces: Tensor
    fresh: Tensor | None = None


@dataclass(frozen=True)
class AdamwTable:
    """Where the parts of a group lie; good for as long as all but gradients lie there."""

    addresses: tuple[tuple[Any, ...], ...]
    gradients: tuple[int, ...]
    launches: tuple[Launch, ...]


def table_of(parts: Sequence[AdamwPart], draw: Draw | None, before: AdamwTable | None = None) -> AdamwTable:
    """The table of a step: of the one of before, all that still holds."""
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
    kept = (part.weight, part.mean, part.square, part.step, part.shown, *(part.scales or ()))
    places = tuple(0 if tensor is None else tensor.data_ptr() for tensor in kept)
    return (*places, part.gradient.dtype, part.gradient.data_ptr() % 16, part.box, part.shape)


def _launches(parts: Sequence[AdamwPart]) -> Iterator[Launch]:
    kinds = dict[AdamwVariant, list[tuple[tuple[int, int], list[int]]]]()
    for number, part in enumerate(parts):
        kind = _kind(part)
        for before, rows, row in _stretches(part) if not kind.flat else [(0, 0, 0)]:
            kinds.setdefault(kind, []).append(((number, before), _entry(part, kind, before, rows, row)))
    for kind, found in kinds.items():
        high, wide = (np.array([entry[word] for _, entry in found], dtype=np.int64) for word in (7, 8))
        counts = -(-high // (kind.tall * LOOPS)) * -(-wide // kind.span)
        device = parts[found[0][0][0]].weight.device
        entries = uploaded(np.array([entry for _, entry in found], dtype=np.int64), device)
        owners = tuple(owner for owner, _ in found)
        yield Launch(kind, owners, entries, uploaded(map_of(counts.tolist()), device))


def _kind(part: AdamwPart) -> AdamwVariant:
    """ValueError for what no kernel takes."""
    like = [part.gradient, part.mean, part.square, *([] if part.shown is None else [part.shown])]
    if any(other.shape != part.weight.shape or other.device != part.weight.device for other in like):
        raise ValueError(f"{part.name}: weight, gradient and moments are not of one shape on one device")
    everything = [part.weight, *like, *(part.scales or ())]
    if not all(tensor.is_contiguous() for tensor in everything):
        raise ValueError(f"{part.name}: its rows do not follow each other in memory")
    moments = (torch.uint8,) if part.scales is not None else (torch.float32, torch.bfloat16)
    if part.mean.dtype not in moments or part.mean.dtype != part.square.dtype:
        raise ValueError(f"{part.name}: moments are {part.mean.dtype} and {part.square.dtype}")
    if part.weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{part.name}: weights are float32 or bfloat16, not {part.weight.dtype}")
    if part.shown is not None and (part.shown.dtype != torch.bfloat16 or part.weight.dtype != torch.float32):
        raise ValueError(f"{part.name}: a master is float32 and shown in bfloat16")
    if part.step.dtype != torch.float32 or part.step.numel() != 1:
        raise ValueError(f"{part.name}: the count of steps is one float32 number")
    columns = part.box.shape[-1]
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (part.weight, *like))
    types = (part.weight.dtype, part.gradient.dtype, part.mean.dtype, part.shown is not None)
    made = AdamwVariant(*types, aligned and part.weight.numel() % 16 == 0, tall=1, span=TILE)
    if made.flat:
        return made
    if columns >= 1 << 28:
        raise ValueError(f"{part.name}: rows of {columns} elements are longer than what 32 bits count in eight of them")
    narrow = 256 if part.scales is not None else 128
    span = TILE if columns >= TILE // 2 else narrow
    return replace(made, aligned=aligned and columns % 16 == 0, tall=TILE // span, span=span)


def _stretches(part: AdamwPart) -> Iterator[tuple[int, int, int]]:
    """Rows that follow each other in the part and in the whole: elements before them, how many, the first's number."""
    *lead, columns = part.box.shape
    whole = part.shape[:-1]
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    # from the last dim on, as long as all of a dim is here, one index of the next follows the other
    cut = len(lead)
    while cut > 0 and (cut == len(lead) or lead[cut] == whole[cut]):
        cut -= 1
    rows = math.prod(lead[cut:])
    for number, outer in enumerate(product(*map(range, lead[:cut]))):
        corner = [start + index for start, index in zip(part.box.start, outer, strict=False)]
        corner += part.box.start[cut:-1]
        first = sum(index * stride for index, stride in zip(corner, strides, strict=True))
        yield number * rows * columns, rows, first


def _entry(part: AdamwPart, kind: AdamwVariant, before: int, rows: int, row: int) -> list[int]:
    scales = part.scales or (None, None)
    kept = [part.weight, part.mean, part.square]
    places = [tensor.data_ptr() + before * tensor.element_size() for tensor in kept]
    columns, length = part.box.shape[-1], rows * part.box.shape[-1]
    if kind.flat:
        length, columns = part.weight.numel(), TILE
        rows = -(-length // columns)
    for scale in scales:
        blocks = 1 if scale is None else scale.shape[-1]
        places.append(0 if scale is None else scale.data_ptr() + before // part.box.shape[-1] * blocks * 4)
    places.append(0 if part.shown is None else part.shown.data_ptr() + before * part.shown.element_size())
    return [*places, part.step.data_ptr(), rows, columns, length, row, part.box.start[-1]]


def _fresh(launch: Launch, parts: Sequence[AdamwPart], gradients: Sequence[int], draw: Draw | None) -> Tensor:
    """Where gradients lie now, and the keys of this step."""
    made = np.empty((len(launch.owners), 5), dtype=np.int64)
    sizes = launch.kind.gradient.itemsize
    made[:, 0] = [gradients[number] + before * sizes for number, before in launch.owners]
    assert draw is not None or not launch.kind.rounds, "who rounds has keys"
    draws = draw if draw is not None and launch.kind.rounds else _no_draw
    keys = [draws(parts[number].name) for number, _ in launch.owners]
    made[:, 1:] = np.frombuffer(b"".join(keys), dtype="<i4").reshape(len(made), 4)
    return uploaded(made, launch.entries.device)


def _no_draw(_: str) -> bytes:
    return bytes(16)


# -- on the device


@triton.jit
def mix(x):
    """A bijection of 32-bit words that leaves no trace of what came in."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


@triton.jit
def spread(x, first, second):
    """A row's or a column's share of the random bits, by two words of key."""
    return mix(mix(x.to(tl.int32) ^ first.to(tl.int32)) ^ second.to(tl.int32))


@triton.jit
def as_read(x, sample):
    """Numbers, spread over threads as a sample of what was read is."""
    # Of numbers that meet no memory the compiler gives each thread every 128th, of what is read 16 bytes: where the two
    # meet, one of them goes through shared memory. A zero that only the next compiler knows to be one ties them early.
    return x + ((sample.to(tl.float32).to(tl.int32, bitcast=True) & 0xFFFF) >> 16)


@triton.jit
def rounded(value, bits, TYPE: tl.constexpr):
    """float32 as a type: to bfloat16 up or down by the lower 16 bits. What is no number comes with zeros."""
    # An infinite number has nothing to carry from, and stays one; of what is no number all bits may be set.
    if tl.bfloat16 == TYPE:
        up = ((bits & 0xFFFF) + value.to(tl.int32, bitcast=True)) >> 16
        return up.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(TYPE)


@triton.jit
def advanced(w, g, m, v, decay, size, root, beta1, rest1, beta2, rest2, eps):
    """Weight and moments after one update."""
    # Which product is fused with a sum is said here: left to the compiler, it differs from one kind of launch to the
    # next, and with it the last bit of the same element on another mesh.
    m = tl.fma(beta1, m, rest1 * g)
    v = tl.fma(beta2, v, rest2 * (g * g))
    w = tl.fma(-decay, w, w)
    w = tl.fma(-(size * m), 1.0 / tl.fma(tl.sqrt(v), root, eps), w)
    return w, m, v


@triton.jit
def pointer(address, before, TYPE: tl.constexpr, ALIGNED: tl.constexpr, EACH: tl.constexpr):
    """An address as that of a type, some elements on, with what is known of it."""
    made = address.to(tl.pointer_type(TYPE))
    # The hint is the pointer's: of the number that it was, the compiler forgets in the cast what it knew.
    if ALIGNED:
        made = tl.multiple_of(made, EACH * TYPE.primitive_bitwidth // 8)
    return made + before


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
    steps = tl.load(entries + entry * WORDS + 6, mask=inside, other=0)
    if LR_LOADED:
        rate = tl.zeros([BLOCK], tl.float64) + tl.load(lr)
    else:
        rate = tl.zeros([BLOCK], tl.float64) + lr
    # in float64: of one less a power of 0.999, float32 would lose three of its seven digits
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
    entry = entries + number * WORDS
    keys = fresh + number * FRESH
    wide = tl.load(entry + 8)
    length = tl.load(entry + 9)
    if ALIGNED:
        wide = tl.multiple_of(wide, 16)
        length = tl.multiple_of(length, 16)
    # Places in 32 bits, from the program's first row on: half the registers of places in the whole.
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

    # Zeros stand for the bits where nothing is rounded, and are dropped by the compiler.
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
        places = row[:, None] * columns + column[None, :]
        if FLAT:
            inside = places < left
        else:
            inside = (row < rows)[:, None] & within[None, :]
        if ROUNDS:
            bits = mix(spread(whole_row + i * TALL, k0, k1)[:, None] + of_columns)
        w = tl.load(weights + places, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradients + places, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(means + places, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(squares + places, mask=inside, other=0.0).to(tl.float32)
        w, m, v = advanced(w, g * share, m, v, decay, size, root, beta1, rest1, beta2, rest2, eps)
        bits = tl.where(w == w, bits, 0)  # where a moment is no number, the weight is none
        tl.store(weights + places, rounded(w, bits, WEIGHT), mask=inside)
        tl.store(means + places, rounded(m, bits >> 16, MOMENT), mask=inside)
        tl.store(squares + places, rounded(v, (bits * OTHER) >> 16, MOMENT), mask=inside)
        if SHOWN:
            tl.store(shown + places, w.to(tl.bfloat16), mask=inside)


# -- on the host


def factors_of(launch: Launch, lr: float | Tensor, betas: tuple[float, float], weight_decay: float) -> Tensor:
    """What the count of steps makes of rate and decay, for each entry: decay, size of a step, root of the square's."""
    count, block = len(launch.owners), 128
    made = torch.empty(count, 3, device=launch.entries.device)
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in betas]
    _factors_kernel[(-(-count // block),)](
        launch.entries, made, count, lr, weight_decay, *logs, LR_LOADED=isinstance(lr, Tensor), BLOCK=block
    )
    return made


def shares_of(betas: tuple[float, float]) -> tuple[float, float, float, float]:
    """What stays of each moment, and what is new of it."""
    return betas[0], 1 - betas[0], betas[1], 1 - betas[1]


def cut_of(kind: AdamwVariant, clipped: bool) -> dict[str, Any]:
    """The constants of a launch that every form of AdamW has."""
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
    """One update of all parts, in place. Give the table that comes back to the next call.

    `lr` may be, and `factor` is, a float32 scalar on the device; gradients are multiplied by the factor on their way.
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
    """One update of all parts, one after the other, in place."""
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
        for kept, value, bits in (
            (part.weight, w, word),
            (part.mean, m, word >> 16),
            (part.square, v, (word * ODD) >> 16),
        ):
            kept.copy_(value if kept.dtype == torch.float32 else _rounded(value, bits))
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
    weight, gradient, moment = ({"f": tl.float32, "b": tl.bfloat16}[one] for one in types)
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
