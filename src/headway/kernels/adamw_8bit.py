"""AdamW with 8-bit moments: decoded, updated and encoded in the pass that updates weights.

The quantization is that of train/optim/eightbit.py: blocks of 256 neighbours of a row, scaled by their largest, the
first moment with 256 numbers between -1 and 1 and the root of the second with 256 between 0 and 1. The update is that
of adamw.py. It is memory-bound: 10 bytes per element of bfloat16 weight and gradient, of which 4 are the moments', and
16 with float32. A program handles 4 blocks of 8 rows, row by row; each warp has a block, whose maximum is found within
the warp.

Encoding is exact and takes one lookup. The code of a scaled value is the number of borders below it. The upper half of
its float32 (sign, exponent and seven mantissa bits) names a cell, and no cell contains more than one border: the table
has, for each cell, the number of borders below, and the lower half of the one inside. A binary search would take eight
dependent lookups. A NaN gets the last code, as from torch.bucketize, and with its block's NaN scale stays NaN.

Nothing is differentiable, and tensors are hidden behind addresses: call this outside of compiled graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.kernels.adamw import (
    ENTRY_WORDS,
    FRESH,
    LOOPS,
    WARPS,
    AdamwPart,
    AdamwTable,
    Draw,
    advanced,
    cut_of,
    factors_of,
    mix,
    pointer,
    rounded,
    shares_of,
    spread,
    table_of,
)
from headway.kernels.adamw import reference as reference_adamw
from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.triton_compat import tl, triton

BLOCK = tl.constexpr(256)
UNITS = tl.constexpr(4)
"""Blocks at a time."""
TOP = 0x3F80
"""The cell of 1, the largest scaled value."""


@dataclass(frozen=True)
class Codebooks:
    """The values of codes, and the cells of the encoding."""

    numbers: Tensor
    """float32: 256 of the first moment, 256 of the root of the second."""
    cells: Tensor
    """int32: for positive and negative first moments, and for roots."""
    lowest: int
    """The lowest cell with a border."""


def books_of(signed: Tensor, unsigned: Tensor, device: torch.device) -> Codebooks:
    """Build codebooks from 256 ascending numbers each, on the CPU."""
    edges = [_borders(numbers) for numbers in (signed, unsigned)]
    lowest = min(int(abs(edge).min().view(np.int32)) >> 16 for edge in edges) - 1
    sides = [(edges[0], False), (edges[0], True), (edges[1], False)]
    cells = np.concatenate([_cells(borders, lowest, negative) for borders, negative in sides])
    numbers = torch.cat([signed, unsigned]).to(torch.float32)
    return Codebooks(numbers.to(device), torch.from_numpy(cells).to(device), lowest)


def _borders(numbers: Tensor) -> np.ndarray:
    """Return the midpoints between neighbours."""
    wide = numbers.double()
    return ((wide[1:] + wide[:-1]) / 2).to(torch.float32).numpy()


def _cells(borders: np.ndarray, lowest: int, negative: bool) -> np.ndarray:
    """Return for each cell the number of borders below it, and the lower half of the one inside."""
    cells = np.arange(lowest, TOP + 1, dtype=np.int64)
    ends = [((cells << 16) + half).astype(np.int32).view(np.float32) for half in (0, 0xFFFF)]
    ends[0][0] = 0.0  # the first cell includes everything smaller
    if negative:
        sides = np.sort(-borders[borders < 0])
        below = len(sides) - np.searchsorted(sides, ends[1], side="right")
    else:
        sides = borders
        below = np.searchsorted(sides, ends[0], side="left")
    first, end = (np.searchsorted(sides, edge, side=side) for edge, side in zip(ends, ("left", "right"), strict=True))
    assert (end - first).max() <= 1, "no cell has two borders"
    inside = sides[np.minimum(first, len(sides) - 1)].view(np.int32) & 0xFFFF
    # a half that no value is above, or below: no border
    halves = np.where(end > first, inside, 0 if negative else 0xFFFF)
    return ((below << 16) | halves).astype(np.int32)


@triton.jit
def _each(x):
    """Repeat each block's value for its elements."""
    # Elements are one-dimensional, which has a single layout: for a gathered tensor of blocks x 256, some compilers
    # choose a column layout, and send every element through shared memory.
    return tl.reshape(tl.broadcast_to(x[:, None], (UNITS, BLOCK)), (UNITS * BLOCK,))


@triton.jit
def _codes(value, cells, lowest, SIGNED: tl.constexpr):
    """Return the scales of blocks and the codes of their elements."""
    # The maximum of the bits, which order like the numbers; NaNs are larger than all of them.
    largest = tl.max(tl.reshape(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (UNITS, BLOCK)), axis=1)
    scale = largest.to(tl.float32, bitcast=True)
    # at least the smallest normal number, by bits again: NaNs pass
    divisor = tl.maximum(largest, 0x00800000).to(tl.float32, bitcast=True)
    share = value * _each(tl.div_rn(1.0, divisor))
    bits = share.to(tl.int32, bitcast=True)
    half = bits & 0xFFFF
    cell = tl.minimum(tl.maximum((bits & 0x7FFFFFFF) >> 16, lowest), 0x3F80) - lowest
    if SIGNED:
        negative = share < 0
        entry = tl.load(cells + tl.where(negative, cell + (0x3F80 + 1 - lowest), cell))
        border = entry & 0xFFFF
        above = (negative & (half < border)) | ((share >= 0) & (half > border))
    else:
        entry = tl.load(cells + cell)
        above = (share >= 0) & (half > (entry & 0xFFFF))
    return scale, ((entry >> 16) + above.to(tl.int32)).to(tl.uint8)


@triton.jit
def _adamw_8bit_kernel(
    entries,
    fresh,
    pieces,
    factors,
    factor,
    numbers,
    cells,
    lowest,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    SHOWN: tl.constexpr,
    CLIPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    EACH: tl.constexpr,
    TALL: tl.constexpr,
    LOOPS: tl.constexpr,
):
    ALONG: tl.constexpr = UNITS // TALL
    program = tl.program_id(0).to(tl.int64)
    number = tl.load(pieces + 2 * program).to(tl.int64)
    piece = tl.load(pieces + 2 * program + 1)
    entry = entries + number * ENTRY_WORDS
    keys = fresh + number * FRESH
    wide = tl.load(entry + 8)
    if ALIGNED:
        wide = tl.multiple_of(wide, 16)
    columns = wide.to(tl.int32)
    blocks = (columns + BLOCK - 1) // BLOCK
    segments = (blocks + ALONG - 1) // ALONG
    first = (piece // segments).to(tl.int64) * (TALL * LOOPS)
    rows = tl.minimum(tl.load(entry + 7) - first, TALL * LOOPS).to(tl.int32)
    before = first * wide
    weights = pointer(tl.load(entry), before, WEIGHT, ALIGNED, EACH)
    means = pointer(tl.load(entry + 1), before, tl.uint8, ALIGNED, EACH)
    roots = pointer(tl.load(entry + 2), before, tl.uint8, ALIGNED, EACH)
    mean_scales = tl.load(entry + 3).to(tl.pointer_type(tl.float32)) + first * blocks
    root_scales = tl.load(entry + 4).to(tl.pointer_type(tl.float32)) + first * blocks
    shown = pointer(tl.load(entry + 5), before, tl.bfloat16, ALIGNED, EACH)
    gradients = pointer(tl.load(keys), before, GRADIENT, ALIGNED, EACH)
    decay = tl.load(factors + number * 3)
    size = tl.load(factors + number * 3 + 1)
    root = tl.load(factors + number * 3 + 2)
    share = 1.0
    if CLIPPED:
        share = tl.load(factor)

    unit = tl.arange(0, UNITS)
    of_row = unit // ALONG
    block = (piece % segments) * ALONG + unit % ALONG
    element = tl.arange(0, UNITS * BLOCK)
    column = ((piece % segments) * ALONG + element // BLOCK % ALONG) * BLOCK + element % BLOCK
    within = column < columns
    weight_columns = tl.zeros([UNITS * BLOCK], tl.int32)
    weight_rows = tl.zeros([UNITS], tl.int32)
    whole_row = tl.load(entry + 10) + first + of_row
    k0, k1 = tl.load(keys + 1), tl.load(keys + 2)
    if tl.bfloat16 == WEIGHT:
        weight_columns = spread(tl.load(entry + 11) + column, tl.load(keys + 3), tl.load(keys + 4))
    for i in range(tl.cdiv(rows, TALL)):
        row = i * TALL + of_row
        element_row = i * TALL + element // BLOCK // ALONG
        indices = element_row * columns + column
        inside = (element_row < rows) & within
        scaled = (row < rows) & (block < blocks)
        scale_places = row * blocks + block
        w = tl.load(weights + indices, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradients + indices, mask=inside, other=0.0).to(tl.float32)
        mean_codes = tl.load(means + indices, mask=inside, other=0)
        root_codes = tl.load(roots + indices, mask=inside, other=0)
        mean_scale = tl.load(mean_scales + scale_places, mask=scaled, other=0.0)
        root_scale = tl.load(root_scales + scale_places, mask=scaled, other=0.0)
        m = tl.load(numbers + mean_codes.to(tl.int32)) * _each(mean_scale)
        v = tl.load(numbers + 256 + root_codes.to(tl.int32)) * _each(root_scale)
        w, m, v = advanced(w, g * share, m, v * v, decay, size, root, beta1, rest1, beta2, rest2, eps)
        if tl.bfloat16 == WEIGHT:
            weight_rows = spread(whole_row + i * TALL, k0, k1)
        bits = tl.where(w == w, mix(_each(weight_rows) + weight_columns), 0)
        tl.store(weights + indices, rounded(w, bits, WEIGHT), mask=inside)
        if SHOWN:
            tl.store(shown + indices, w.to(tl.bfloat16), mask=inside)
        # elements outside of a short block must not count for its maximum
        mean_scale, mean_codes = _codes(tl.where(inside, m, 0.0), cells, lowest, True)
        root_scale, root_codes = _codes(
            tl.where(inside, tl.sqrt_rn(v), 0.0), cells + 2 * (0x3F80 + 1 - lowest), lowest, False
        )
        tl.store(means + indices, mean_codes, mask=inside)
        tl.store(roots + indices, root_codes, mask=inside)
        tl.store(mean_scales + scale_places, mean_scale, mask=scaled)
        tl.store(root_scales + scale_places, root_scale, mask=scaled)


def adamw_8bit(
    parts: Sequence[AdamwPart],
    books: Codebooks,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: Tensor | None = None,
    draw: Draw | None = None,
    before: AdamwTable | None = None,
) -> AdamwTable:
    """Update all parts in place; their moments are codes, the second's of its root.

    Pass the returned table to the next call. A part starts at a multiple of 256 columns of the whole.
    """
    for part in parts:
        if part.scales is None or part.box.start[-1] % 256:
            raise ValueError(f"{part.name}: 8-bit moments need scales, and must start at a block")
    table = table_of([part for part in parts if part.weight.numel()], draw, before)
    for launch in table.launches:
        kind, factors = launch.kind, factors_of(launch, lr, betas, weight_decay)
        _adamw_8bit_kernel[(len(launch.pieces),)](
            launch.entries,
            launch.fresh,
            launch.pieces,
            factors,
            factors if factor is None else factor,
            books.numbers,
            books.cells,
            books.lowest,
            *shares_of(betas),
            eps,
            **cut_of(kind, clipped=factor is not None),
        )
    return table


def reference(
    parts: Sequence[AdamwPart],
    books: Codebooks,
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
        assert part.scales is not None
        numbers = books.numbers.view(2, 256)
        mean = _decoded(part.mean, part.scales[0], numbers[0])
        square = _decoded(part.square, part.scales[1], numbers[1]).square_()
        opened = AdamwPart(
            part.weight, part.gradient, mean, square, part.step, part.name, part.box, part.shape, part.shown
        )
        reference_adamw([opened], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, factor=factor, draw=draw)
        moments = ((part.mean, part.scales[0], mean), (part.square, part.scales[1], square.sqrt_()))
        for (codes, scales, value), book in zip(moments, numbers, strict=True):
            new_codes, new_scales = _encoded(value, book)
            codes.copy_(new_codes)
            scales.copy_(new_scales)


def _decoded(codes: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
    each = scales.repeat_interleave(256, dim=-1, output_size=scales.shape[-1] * 256)
    return numbers[codes.int()] * each[..., : codes.shape[-1]]


def _encoded(value: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    length = value.shape[-1]
    rows = torch.nn.functional.pad(value, (0, -length % 256)).unflatten(-1, (-1, 256))
    scales = rows.abs().amax(dim=-1)
    shares = rows * scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal().unsqueeze(-1)
    borders = ((numbers[1:].double() + numbers[:-1].double()) / 2).float()
    codes = torch.bucketize(shares, borders, out_int32=True).to(torch.uint8)
    return codes.flatten(-2)[..., :length], scales


def _ahead(name: str, types: str, aligned: bool = True, tall: int = 1) -> LaunchSpec:
    weight, gradient = ({"f": tl.float32, "b": tl.bfloat16}[letter] for letter in types)
    tables = {"entries": "*i64", "fresh": "*i64", "pieces": "*i32", "factors": "*fp32", "factor": "*fp32"}
    floats = dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps"), "fp32")
    arguments = tables | {"numbers": "*fp32", "cells": "*i32", "lowest": "i32"} | floats
    constants = {"WEIGHT": weight, "GRADIENT": gradient, "SHOWN": False, "CLIPPED": True, "ALIGNED": aligned}
    shape = {"EACH": 4 if "f" in types else 8, "TALL": tall, "LOOPS": LOOPS}
    return LaunchSpec(name, _adamw_8bit_kernel, arguments, constants | shape, WARPS, odd=frozenset({"lowest"}))


AHEAD = (
    _ahead("adamw 8bit fp32", "ff"),
    _ahead("adamw 8bit bf16", "bb"),
    _ahead("adamw 8bit bf16 unaligned", "bb", aligned=False),
    _ahead("adamw 8bit bf16 narrow", "bb", tall=4),
)
