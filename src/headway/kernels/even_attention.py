"""Attention of decoding over pages, with the tiles of keys shared out evenly among the device's multiprocessors.

A program per sequence and head, as in `paged_triton.py`, leaves a multiprocessor idle while a program begins, and the
device while the longest sequences end. Here the tiles of all sequences are one list (`share_out`, once per pass), of
which every program has a run of the same length, for one key head. It goes from one sequence to the next without
emptying its pipeline of loads. A sequence that ends in another program than it began in is joined by a second kernel.

On an H200, beside one program per sequence and head: as fast for 190 sequences and more, 3 % faster for 64 to 128, 10
to 14 % for 14 to 34. Shapes are those of `paged_batch.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.triton_compat import runs_on, tl, triton

KEYS = 64
"""Of a tile: a page has whole tiles."""
LEAST_SEQUENCES = 8
"""Of a pass: one program per head and part of a sequence is as good for fewer."""
ENTRY = 128
"""An entry of the list is the number of a tile in the cache times this, and how many of its keys the sequence has."""


class EvenTiling(NamedTuple):
    """How the kernel works; measured on an H200."""

    programs: int = 2
    """Per multiprocessor."""
    warps: int = 4
    stages: int = 3
    """Of the pipeline that loads keys and values."""


@dataclass(frozen=True)
class TileList:
    """The tiles of all sequences of a pass, one sequence after another; the same for all layers and heads."""

    entries: Tensor
    """Of each tile, int32: see ENTRY."""
    owners: Tensor
    """The sequence of each tile, int32."""
    firsts_S1: Tensor
    """The first tile of each sequence in the list, and at the end the number of tiles, int32."""


@triton.jit(do_not_specialize=["count", "stride"])
def _share_out_kernel(
    lengths_ptr, tables_ptr, entries_ptr, owners_ptr, firsts_ptr, count, stride,
    KEYS: tl.constexpr, PAGE: tl.constexpr, SEQUENCES: tl.constexpr, ENTRY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PER_PAGE: tl.constexpr = PAGE // KEYS
    sequence = tl.program_id(0)
    other = tl.arange(0, SEQUENCES)
    tiles = (tl.load(lengths_ptr + other, mask=other < count, other=0) + KEYS - 1) // KEYS
    first = tl.sum(tl.where(other < sequence, tiles, 0), 0)
    length = tl.load(lengths_ptr + sequence)
    own = (length + KEYS - 1) // KEYS
    tl.store(firsts_ptr + sequence, first)
    if sequence == count - 1:
        tl.store(firsts_ptr + count, first + own)
    table_ptr = tables_ptr + sequence.to(tl.int64) * stride
    for begin in range(0, own, 32):
        tile = begin + tl.arange(0, 32)
        inside = tile < own
        page = tl.load(table_ptr + tile // PER_PAGE, mask=inside, other=0)
        valid = tl.minimum(length - tile * KEYS, KEYS)
        tl.store(entries_ptr + first + tile, (page * PER_PAGE + tile % PER_PAGE) * ENTRY + valid, mask=inside)
        tl.store(owners_ptr + first + tile, tl.zeros_like(tile) + sequence, mask=inside)


@triton.jit(do_not_specialize=["count", "runs"])
def _even_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, parts_ptr, peaks_ptr, totals_ptr, entries_ptr, owners_ptr, firsts_ptr, count, scale,
    runs, q_stride_t, q_stride_n, k_stride_p, k_stride_z, k_stride_k, v_stride_p, v_stride_z, v_stride_k, key_heads,
    SHARE: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PER_PAGE: tl.constexpr,
    ENTRY: tl.constexpr, IEEE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, run = tl.program_id(0) % key_heads, tl.program_id(0) // key_heads
    all_tiles = tl.load(firsts_ptr + count)
    runs = tl.minimum(runs, all_tiles)
    low = tl.minimum(run * all_tiles // runs, all_tiles)
    high = tl.minimum((run + 1) * all_tiles // runs, all_tiles)
    row, key, size = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, HEAD)
    heads = key_heads * SHARE
    real = row < SHARE
    q_at = (head * SHARE + row)[:, None] * q_stride_n + size[None, :]
    out_at = (head * SHARE + row)[:, None] * HEAD + size[None, :]
    k_ptr += head * k_stride_k
    v_ptr += head * v_stride_k
    factor = scale * 1.4426950408889634

    sequence = tl.load(owners_ptr + low, mask=low < high, other=0)
    begins_here = (tl.load(firsts_ptr + sequence) == low).to(tl.int32)
    end = tl.load(firsts_ptr + sequence + 1)
    q = tl.load(q_ptr + sequence.to(tl.int64) * q_stride_t + q_at, mask=real[:, None], other=0.0)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD], tl.float32)
    for tile in range(low, high):
        entry = tl.load(entries_ptr + tile)
        valid, place = entry % ENTRY, entry // ENTRY
        page, inner = (place // PER_PAGE).to(tl.int64), (place % PER_PAGE) * KEYS + key
        k = tl.load(k_ptr + page * k_stride_p + inner[None, :] * k_stride_z + size[:, None])
        if IEEE:
            scores = tl.dot(q, k, input_precision="ieee")
        else:
            scores = tl.dot(q, k)
        scores = tl.where((key < valid)[None, :], scores * factor, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        v = tl.load(
            v_ptr + page * v_stride_p + inner[:, None] * v_stride_z + size[None, :], mask=(key < valid)[:, None],
            other=0.0,
        )  # fmt: skip
        total = total * shrink + tl.sum(weights, 1)
        if IEEE:
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        peak = new_peak
        if (tile + 1 == end) | (tile + 1 == high):
            if (begins_here == 1) & (tile + 1 == end):
                tl.store(out_ptr + sequence.to(tl.int64) * heads * HEAD + out_at, acc / total[:, None],
                         mask=real[:, None])  # fmt: skip
            else:  # a sequence that began before has the first place of the run, one that goes on the second
                part = (run * 2 + begins_here) * heads + head * SHARE + row
                tl.store(peaks_ptr + part, peak, mask=real)
                tl.store(totals_ptr + part, total, mask=real)
                tl.store(parts_ptr + part.to(tl.int64)[:, None] * HEAD + size[None, :], acc, mask=real[:, None])
            if tile + 1 < high:
                sequence += 1
                begins_here = 1
                end = tl.load(firsts_ptr + sequence + 1)
                q = tl.load(q_ptr + sequence.to(tl.int64) * q_stride_t + q_at, mask=real[:, None], other=0.0)
                peak = tl.full([ROWS], -float("inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([ROWS, HEAD], tl.float32)


@triton.jit(do_not_specialize=["count", "runs"])
def _join_kernel(
    parts_ptr, peaks_ptr, totals_ptr, out_ptr, firsts_ptr, count, runs, heads,
    HEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Join the parts of a head of a sequence that several runs have; the others are written already."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    all_tiles = tl.load(firsts_ptr + count)
    first, end = tl.load(firsts_ptr + sequence), tl.load(firsts_ptr + sequence + 1)
    runs = tl.minimum(runs, all_tiles)
    first_run = ((first + 1) * runs - 1) // all_tiles
    last_run = (end * runs - 1) // all_tiles
    if first_run < last_run:
        single, size = tl.arange(0, 1), tl.arange(0, HEAD)
        peak = tl.full([1], -float("inf"), tl.float32)
        total, acc = tl.zeros([1], tl.float32), tl.zeros([1, HEAD], tl.float32)
        for run in range(first_run, last_run + 1):
            part = (run * 2 + (run == first_run).to(tl.int32)) * heads + head + single
            more_peak = tl.load(peaks_ptr + part)
            new_peak = tl.maximum(peak, more_peak)
            shrink, more_shrink = tl.exp2(peak - new_peak), tl.exp2(more_peak - new_peak)
            total = total * shrink + tl.load(totals_ptr + part) * more_shrink
            more = tl.load(parts_ptr + part.to(tl.int64)[:, None] * HEAD + size[None, :])
            acc = acc * shrink[:, None] + more * more_shrink[:, None]
            peak = new_peak
        place = (sequence.to(tl.int64) * heads + head + single)[:, None] * HEAD + size[None, :]
        tl.store(out_ptr + place, acc / total[:, None])


def takes_evenly(device: torch.device, head: int, page: int) -> bool:
    """Whether the kernel takes heads and pages of such sizes."""
    return runs_on(device) and head in (64, 128) and page % KEYS == 0


def share_out(lengths_S: Tensor, tables_SP: Tensor, page: int, *, early: bool = False) -> TileList:
    """Return the list of tiles of sequences, made on the device, where their lengths are."""
    count, width = tables_SP.shape
    room = torch.empty(2, count * width * (page // KEYS), dtype=torch.int32, device=lengths_S.device)
    firsts_S1 = torch.empty(count + 1, dtype=torch.int32, device=lengths_S.device)
    options = {"launch_pdl": True} if early else {}
    _share_out_kernel[(count,)](
        lengths_S, tables_SP, room[0], room[1], firsts_S1, count, tables_SP.stride(0), KEYS=KEYS, PAGE=page,
        SEQUENCES=max(16, _power_of_two(count)), ENTRY=ENTRY, EARLY=early, num_warps=4, **options,
    )  # fmt: skip
    return TileList(room[0], room[1], firsts_S1)


def even_attention(
    q_TNH: Tensor,
    keys_PZKH: Tensor,
    values_PZKH: Tensor,
    tiles: TileList,
    scale: float,
    processors: int,
    tiling: EvenTiling = EvenTiling(),  # noqa: B008  (a named tuple)
    *,
    early: bool = False,
) -> Tensor:
    """Return attention [T, N, H] of one query per sequence to all of its keys."""
    count, heads, size = q_TNH.shape
    page, key_heads = keys_PZKH.shape[1:3]
    q_TNH = q_TNH.contiguous()
    runs = max(1, processors * tiling.programs // key_heads)
    out = torch.empty_like(q_TNH)
    parts = torch.empty(runs, 2, heads, size, dtype=torch.float32, device=q_TNH.device)
    peaks, totals = (torch.empty(runs, 2, heads, dtype=torch.float32, device=q_TNH.device) for _ in range(2))
    share = heads // key_heads
    options = {"launch_pdl": True} if early else {}
    _even_kernel[(runs * key_heads,)](
        q_TNH, keys_PZKH, values_PZKH, out, parts, peaks, totals, tiles.entries, tiles.owners, tiles.firsts_S1, count,
        scale, runs, *q_TNH.stride()[:2], *keys_PZKH.stride()[:3], *values_PZKH.stride()[:3], key_heads,
        SHARE=share, HEAD=size, ROWS=max(16, _power_of_two(share)), KEYS=KEYS, PER_PAGE=page // KEYS,
        ENTRY=ENTRY, IEEE=q_TNH.dtype == torch.float32, EARLY=early, num_warps=tiling.warps, num_stages=tiling.stages,
        **options,
    )  # fmt: skip
    _join_kernel[(count * heads,)](
        parts, peaks, totals, out, tiles.firsts_S1, count, runs, heads, HEAD=size, EARLY=early, num_warps=1, **options,
    )  # fmt: skip
    return out


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


_INTEGERS = dict.fromkeys(("entries_ptr", "owners_ptr", "firsts_ptr"), "*i32")
_PARTS = dict.fromkeys(("parts_ptr", "peaks_ptr", "totals_ptr"), "*fp32")
_PAGE_STRIDES = [f"{pages}_stride_{dim}" for pages in "kv" for dim in "pzk"]

AHEAD = (
    LaunchSpec(
        "even_attention.list",
        _share_out_kernel,
        {"lengths_ptr": "*i32", "tables_ptr": "*i32", "count": "i32", "stride": "i32"} | _INTEGERS,
        {"KEYS": KEYS, "PAGE": 64, "SEQUENCES": 256, "ENTRY": ENTRY, "EARLY": True},
        odd=frozenset({"count", "stride"}),
    ),
    LaunchSpec(
        "even_attention.128",
        _even_kernel,
        dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
        | _PARTS
        | _INTEGERS
        | {"count": "i32", "scale": "fp32", "runs": "i32", "key_heads": "i32"}
        | dict.fromkeys(("q_stride_t", "q_stride_n", *_PAGE_STRIDES), "i32"),
        {"SHARE": 2, "HEAD": 128, "ROWS": 16, "KEYS": KEYS, "PER_PAGE": 1, "ENTRY": ENTRY}
        | {"IEEE": False, "EARLY": True},
        EvenTiling().warps,
        EvenTiling().stages,
        odd=frozenset({"count", "runs", "key_heads"}),
    ),
    LaunchSpec(
        "even_attention.join",
        _join_kernel,
        _PARTS | {"out_ptr": "*bf16", "firsts_ptr": "*i32", "count": "i32", "runs": "i32", "heads": "i32"},
        {"HEAD": 128, "EARLY": True},
        1,
        odd=frozenset({"count", "runs", "heads"}),
    ),
)
