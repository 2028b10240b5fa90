"""Float8 codes of all weights of a model, cast together once per step.

    1  tiles     codes = round(w / scale of last time), in both layouts; the largest magnitude of each tile
    2  groups    scale = the least power of two that holds the largest magnitude; does it differ from last time's?
    3  again     the codes of groups whose scale differs

A scale is known once all of a group is read, and a cast reads the group again: 4 bytes read per weight in bfloat16. But
an update moves weights by little, and their scale is a power of two, which stays for hundreds of steps. So tiles are
cast with the last scale while the largest magnitude is found, and few groups are cast twice. Codes are those of the
right scale whatever the last one was: nothing here is state, and the bits are those of `kernels/fp8.py`.

It is memory-bound: 2 bytes read and 2 written per weight in bfloat16. Three launches cast all weights of one dtype.
Groups are layers that share an input: their codes lie one after the other, and they have one scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.fp8 import BLOCK, WARPS, _to_float8
from headway.kernels.pointer_table import map_of, named_type, uploaded
from headway.kernels.triton_compat import tl, triton

ENTRY_WORDS = tl.constexpr(7)
"""Addresses of a weight and its codes in both layouts; rows, width, stride of turned codes; number of its group."""
PROGRAMS = 64
"""Programs per group that cast again, or find that they need not."""
SLOTS = 1024
"""Tiles' maxima that a program reads at a time."""


class CastGroup(NamedTuple):
    """Weights that share a scale, and where their codes go."""

    weights: tuple[Tensor, ...]
    codes: Tensor
    """[N, K]."""
    codes_t: Tensor
    """[K, N]."""


@dataclass(frozen=True)
class _Launch:
    """Groups of one dtype and alignment."""

    dtype: torch.dtype
    aligned: bool
    """Whether addresses allow 16-byte loads; sizes of float8 products always do."""
    entries: Tensor
    pieces: Tensor
    """[tiles, 2]: entry, and number of the tile in it."""
    ranges: Tensor
    """[groups, 3]: number of the group, its first piece, and the one after its last."""
    amaxes: Tensor
    """[tiles], bits of float32."""
    changed: Tensor
    """[all groups]."""


@dataclass(frozen=True)
class CastTable:
    """Addresses of weights and codes; valid while they do not move."""

    addresses: tuple[int, ...]
    launches: tuple[_Launch, ...]


def table_of(groups: Sequence[CastGroup], before: CastTable | None = None) -> CastTable:
    """Return the table of groups on one device: the previous one if nothing has moved."""
    addresses = tuple(x.data_ptr() for group in groups for x in (*group.weights, group.codes, group.codes_t))
    if before is not None and before.addresses == addresses:
        return before
    kinds = dict[tuple[torch.dtype, bool], list[int]]()
    for number, group in enumerate(groups):
        assert len({weight.dtype for weight in group.weights}) == 1, "layers that share an input have one dtype"
        assert all(weight.is_contiguous() for weight in group.weights), "weights are contiguous"
        aligned = all(weight.data_ptr() % 16 == 0 for weight in group.weights)
        kinds.setdefault((group.weights[0].dtype, aligned), []).append(number)
    launches = tuple(_launch(groups, numbers, *kind) for kind, numbers in kinds.items())
    return CastTable(addresses, launches)


def _launch(groups: Sequence[CastGroup], numbers: list[int], dtype: torch.dtype, aligned: bool) -> _Launch:
    device, entries, tiles, ranges, first = groups[0].codes.device, [], [], [], 0
    for number in numbers:
        weights, codes, codes_t = groups[number]
        begin, start = 0, first
        for weight in weights:
            rows, width = weight.shape
            places = (codes.data_ptr() + begin * width, codes_t.data_ptr() + begin)
            entries.append([weight.data_ptr(), *places, rows, width, codes_t.shape[1], number])
            tiles.append(-(-rows // BLOCK) * -(-width // BLOCK))
            begin, first = begin + rows, first + tiles[-1]
        ranges.append([number, start, first])
    return _Launch(
        dtype,
        aligned,
        uploaded(np.array(entries, dtype=np.int64), device),
        uploaded(map_of(tiles), device),
        uploaded(np.array(ranges, dtype=np.int32), device),
        torch.empty(first, dtype=torch.int32, device=device),
        torch.empty(len(groups), dtype=torch.int32, device=device),
    )


def cast_all(table: CastTable, scales: Tensor, inverses: Tensor) -> None:
    """Write the codes of all groups, their scales, and the inverses of these.

    `inverses` [groups] are those of last time, or anything; `scales` has one per group along its first dim.
    """
    for launch in table.launches:
        rounds = launch.entries.device.type == "cpu"
        kind = {"TYPE": named_type(launch.dtype), "ALIGNED": launch.aligned, "ROUNDS": rounds, "BLOCK": BLOCK}
        tables = launch.entries, launch.pieces
        _tiles_kernel[(len(launch.pieces),)](*tables, inverses, launch.amaxes, **kind, num_warps=WARPS)
        _groups_kernel[(len(launch.ranges),)](
            launch.ranges, launch.amaxes, scales, inverses, launch.changed, scales.stride(0), BLOCK=SLOTS
        )
        _again_kernel[(len(launch.ranges) * PROGRAMS,)](
            *tables, launch.ranges, inverses, launch.changed, **kind, PROGRAMS=PROGRAMS, num_warps=WARPS
        )


# -- kernels


@triton.jit
def _cast_tile(
    entry, tile, inverse, TYPE: tl.constexpr, ALIGNED: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write a tile's codes in both layouts; return the bits of its largest magnitude."""
    weights = tl.load(entry).to(tl.pointer_type(TYPE))
    codes = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.float8e4nv)), 16)
    codes_t = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(tl.float8e4nv)), 16)
    # sizes of float8 products are multiples of 16; indices in a tile have 32 bits, half the registers of 64
    rows = tl.multiple_of(tl.load(entry + 3).to(tl.int32), 16)
    width = tl.multiple_of(tl.load(entry + 4).to(tl.int32), 16)
    stride_t = tl.multiple_of(tl.load(entry + 5).to(tl.int32), 16)
    if ALIGNED:
        weights = tl.multiple_of(weights, 16)
    blocks = tl.cdiv(width, BLOCK)
    first_row, first_column = tile // blocks * BLOCK, tile % blocks * BLOCK
    first = first_row.to(tl.int64) * width + first_column
    first_t = first_column.to(tl.int64) * stride_t + first_row
    row, column = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    row_inside, column_inside = row < rows - first_row, column < width - first_column
    inside = row_inside[:, None] & column_inside[None, :]
    index = row[:, None] * width + column[None, :]
    x = tl.load(weights + first + index, mask=inside, other=0)
    x = x.to(tl.bfloat16).to(tl.float32)  # weights are cast as bfloat16 has them
    # bits of magnitudes are ordered as they are, with NaNs above infinities
    most = tl.max(tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=1), axis=0)
    tile_codes = _to_float8(x * inverse, False, ROUNDS)
    tl.store(codes + first + index, tile_codes, mask=inside)
    index_t = column[:, None] * stride_t + row[None, :]
    tl.store(codes_t + first_t + index_t, tl.trans(tile_codes), mask=column_inside[:, None] & row_inside[None, :])
    return most


@triton.jit
def _tiles_kernel(
    entries, pieces, inverses, amaxes,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    entry = entries + tl.load(pieces + 2 * program).to(tl.int64) * ENTRY_WORDS
    tile = tl.load(pieces + 2 * program + 1)
    inverse = tl.load(inverses + tl.load(entry + 6))
    tl.store(amaxes + program, _cast_tile(entry, tile, inverse, TYPE, ALIGNED, ROUNDS, BLOCK))


@triton.jit
def _groups_kernel(ranges, amaxes, scales, inverses, changed, stride, BLOCK: tl.constexpr):
    number = tl.load(ranges + 3 * tl.program_id(0))
    begin = tl.load(ranges + 3 * tl.program_id(0) + 1)
    end = tl.load(ranges + 3 * tl.program_id(0) + 2)
    most = tl.zeros([BLOCK], tl.int32)
    for first in range(begin, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(amaxes + slot, mask=slot < end, other=0))
    bits = tl.max(most, axis=0)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # as in fp8.scale_of
    scale = (tl.minimum(tl.maximum(exponent, 1), 253) << 23).to(tl.float32, bitcast=True)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    inverse = 1.0 / scale
    tl.store(changed + number, (inverse != tl.load(inverses + number)).to(tl.int32))
    tl.store(scales + number * stride, scale)
    tl.store(inverses + number, inverse)


@triton.jit
def _again_kernel(
    entries, pieces, ranges, inverses, changed,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) // PROGRAMS
    number = tl.load(ranges + 3 * group)
    if tl.load(changed + number) != 0:
        inverse = tl.load(inverses + number)
        begin = tl.load(ranges + 3 * group + 1) + tl.program_id(0) % PROGRAMS
        for piece in range(begin, tl.load(ranges + 3 * group + 2), PROGRAMS):
            entry = entries + tl.load(pieces + 2 * piece).to(tl.int64) * ENTRY_WORDS
            tile = tl.load(pieces + 2 * piece + 1)
            _cast_tile(entry, tile, inverse, TYPE, ALIGNED, ROUNDS, BLOCK)


# -- launches to compile ahead of time


def _ahead(name: str, dtype: str, *, again: bool) -> LaunchSpec:
    types = {"entries": "*i64", "pieces": "*i32", "ranges": "*i32", "inverses": "*fp32", "changed": "*i32"}
    constants = {"TYPE": getattr(tl, dtype), "ALIGNED": True, "ROUNDS": False, "BLOCK": BLOCK}
    if again:
        return LaunchSpec(f"fp8_weights_{name}_again", _again_kernel, types, constants | {"PROGRAMS": PROGRAMS}, WARPS)
    return LaunchSpec(f"fp8_weights_{name}", _tiles_kernel, types | {"amaxes": "*i32"}, constants, WARPS)


AHEAD: tuple[LaunchSpec, ...] = (
    _ahead("bf16", "bfloat16", again=False),
    _ahead("bf16", "bfloat16", again=True),
    _ahead("fp32", "float32", again=False),
    LaunchSpec(
        "fp8_weights_groups", _groups_kernel,
        dict.fromkeys(("ranges", "amaxes", "changed"), "*i32") | dict.fromkeys(("scales", "inverses"), "*fp32")
        | {"stride": "i32"},
        {"BLOCK": SLOTS}, odd=frozenset({"stride"}),
    ),
)  # fmt: skip
