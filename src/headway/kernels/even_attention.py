"""Attention of decoding over pages, with the tiles of keys shared out evenly among the device's multiprocessors.

A program per sequence and head, as in `paged_triton.py`, leaves a multiprocessor idle while a program begins, and the
device while the longest sequences end. Here the tiles of all sequences are one list (`share_out`, once per pass), of
which every program has a run of about the same length, for one key head. It goes from one sequence to the next without
emptying its pipeline of loads. A sequence that ends in another program than it began in is joined by a second kernel.
In exact mode runs end where spans do (`online_softmax.py`), so that how tiles are shared out changes no bit.

On an H200, beside one program per sequence and head: as fast for 190 sequences and more, 3 % faster for 64 to 128, 10
to 14 % for 14 to 34; in exact mode 2 to 3 % for 190 and more, 8 to 11 % for 34 to 128, and no faster for 14.

Shapes are those of `paged_batch.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels import online_softmax
from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.online_softmax import add_tile, join_span, sum_of_pairs, weigh
from headway.kernels.triton_compat import runs_on, tl, triton

LEAST_SEQUENCES, LEAST_EXACT_SEQUENCES = 8, 16
"""Of a pass, the second in exact mode: one program per head and part of a sequence is as good for fewer."""
NO_SPAN = 1 << 20
"""Tiles of a span without exact mode: more than a sequence has."""
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
    cuts_R1: Tensor
    """The first tile of each run in the list, and at the end the number of tiles, int32."""
    span: int
    """Tiles of a span: runs begin where spans do; NO_SPAN without exact mode."""
    room: int
    """Spans that a run has at most of a sequence that began before it."""


@triton.jit(do_not_specialize=["count", "stride", "runs", "room"])
def _share_out_kernel(
    lengths_ptr, tables_ptr, entries_ptr, owners_ptr, firsts_ptr, cuts_ptr, count, stride, runs, room,
    KEYS: tl.constexpr, CUT: tl.constexpr, PAGE: tl.constexpr, SEQUENCES: tl.constexpr, ENTRY: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PER_PAGE: tl.constexpr = PAGE // KEYS
    sequence = tl.program_id(0)
    other = tl.arange(0, SEQUENCES)
    tiles = (tl.load(lengths_ptr + other, mask=other < count, other=0) + KEYS - 1) // KEYS
    first = tl.sum(tl.where(other < sequence, tiles, 0), 0)
    all_tiles = tl.sum(tiles, 0)
    length = tl.load(lengths_ptr + sequence)
    own = (length + KEYS - 1) // KEYS
    tl.store(firsts_ptr + sequence, first)
    if sequence == count - 1:
        tl.store(firsts_ptr + count, all_tiles)
        tl.store(cuts_ptr + runs, all_tiles)
    table_ptr = tables_ptr + sequence.to(tl.int64) * stride
    for begin in range(0, own, 32):
        tile = begin + tl.arange(0, 32)
        inside = tile < own
        page = tl.load(table_ptr + tile // PER_PAGE, mask=inside, other=0)
        valid = tl.minimum(length - tile * KEYS, KEYS)
        tl.store(entries_ptr + first + tile, (page * PER_PAGE + tile % PER_PAGE) * ENTRY + valid, mask=inside)
        tl.store(owners_ptr + first + tile, tl.zeros_like(tile) + sequence, mask=inside)
    # The runs that would begin in this sequence begin at the nearest of its cuts; if there is no room, whole sequences.
    fits = all_tiles // runs // CUT + 4 <= room
    last_run = ((first + own) * runs + all_tiles - 1) // all_tiles
    for begin in range((first * runs + all_tiles - 1) // all_tiles, last_run, 32):
        run = begin + tl.arange(0, 32)
        tile = run * all_tiles // runs - first
        below = tl.where(fits, tile // CUT * CUT, 0)
        above = tl.where(fits, tl.minimum(below + CUT, own), own)
        tl.store(cuts_ptr + run, first + tl.where(tile - below <= above - tile, below, above), mask=run < last_run)


@triton.jit(do_not_specialize=["room"])
def _even_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, parts_ptr, peaks_ptr, totals_ptr, entries_ptr, owners_ptr, firsts_ptr, cuts_ptr,
    scale, q_stride_t, q_stride_n, k_stride_p, k_stride_z, k_stride_k, v_stride_p, v_stride_z, v_stride_k, key_heads,
    room,
    SHARE: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PER_PAGE: tl.constexpr,
    SPAN: tl.constexpr, ORDERED: tl.constexpr, ENTRY: tl.constexpr, IEEE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, run = tl.program_id(0) % key_heads, tl.program_id(0) // key_heads
    low, high = tl.load(cuts_ptr + run), tl.load(cuts_ptr + run + 1)
    row, key, size = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, HEAD)
    heads = key_heads * SHARE
    real = row < SHARE
    q_at = (head * SHARE + row)[:, None] * q_stride_n + size[None, :]
    out_at = (head * SHARE + row)[:, None] * HEAD + size[None, :]
    k_ptr += head * k_stride_k
    v_ptr += head * v_stride_k
    factor = scale * 1.4426950408889634

    sequence = tl.load(owners_ptr + low, mask=low < high, other=0)
    first, end = tl.load(firsts_ptr + sequence), tl.load(firsts_ptr + sequence + 1)
    # Of a sequence that began in this run, spans are joined here; of another, each has a place.
    begun, kept = (first == low).to(tl.int32), 0
    q = tl.load(q_ptr + sequence.to(tl.int64) * q_stride_t + q_at, mask=real[:, None], other=0.0)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if ORDERED:
        total = tl.zeros([ROWS, KEYS], tl.float32)
    acc = tl.zeros([ROWS, HEAD], tl.float32)
    spans_acc, spans_total = tl.zeros([ROWS, HEAD], tl.float32), tl.zeros([ROWS], tl.float32)
    spans_peak = tl.full([ROWS], -float("inf"), tl.float32)
    for tile in range(low, high):
        entry = tl.load(entries_ptr + tile)
        valid, place = entry % ENTRY, entry // ENTRY
        page, inner = (place // PER_PAGE).to(tl.int64), (place % PER_PAGE) * KEYS + key
        k = tl.load(k_ptr + page * k_stride_p + inner[None, :] * k_stride_z + size[:, None])
        if IEEE:
            scores = tl.dot(q, k, input_precision="ieee")
        else:
            scores = tl.dot(q, k)
        scores = tl.where((key < valid)[None, :], scores, -float("inf"))
        weights, shrink, peak = weigh(scores, peak, factor)
        v = tl.load(
            v_ptr + page * v_stride_p + inner[:, None] * v_stride_z + size[None, :], mask=(key < valid)[:, None],
            other=0.0,
        )  # fmt: skip
        acc, total = add_tile(acc, total, weights, shrink, v, IEEE, ORDERED)
        after = tile + 1
        if ((after - first) % SPAN == 0) | (after == end) | (after == high):
            row_total = total
            if ORDERED:
                row_total = sum_of_pairs(total)
            if begun == 1:
                spans_acc, spans_total, spans_peak = join_span(spans_acc, spans_total, spans_peak, acc, row_total, peak)
                if after == end:
                    tl.store(out_ptr + sequence.to(tl.int64) * heads * HEAD + out_at,
                             spans_acc / spans_total[:, None], mask=real[:, None])  # fmt: skip
                elif after == high:  # the sequence goes on: its begin has the last place
                    part = (run * (room + 1) + room) * heads + head * SHARE + row
                    tl.store(peaks_ptr + part, spans_peak, mask=real)
                    tl.store(totals_ptr + part, spans_total, mask=real)
                    part_at = part.to(tl.int64)[:, None] * HEAD + size[None, :]
                    tl.store(parts_ptr + part_at, spans_acc, mask=real[:, None])
            else:
                part = (run * (room + 1) + kept) * heads + head * SHARE + row
                tl.store(peaks_ptr + part, peak, mask=real)
                tl.store(totals_ptr + part, row_total, mask=real)
                tl.store(parts_ptr + part.to(tl.int64)[:, None] * HEAD + size[None, :], acc, mask=real[:, None])
                kept += 1
            peak = tl.full([ROWS], -float("inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            if ORDERED:
                total = tl.zeros([ROWS, KEYS], tl.float32)
            acc = tl.zeros([ROWS, HEAD], tl.float32)
            if (after == end) & (after < high):
                sequence += 1
                begun, first = 1, end
                end = tl.load(firsts_ptr + sequence + 1)
                q = tl.load(q_ptr + sequence.to(tl.int64) * q_stride_t + q_at, mask=real[:, None], other=0.0)
                spans_acc, spans_total = tl.zeros([ROWS, HEAD], tl.float32), tl.zeros([ROWS], tl.float32)
                spans_peak = tl.full([ROWS], -float("inf"), tl.float32)


@triton.jit(do_not_specialize=["count", "runs", "room"])
def _join_kernel(
    parts_ptr, peaks_ptr, totals_ptr, out_ptr, firsts_ptr, cuts_ptr, count, runs, heads, room,
    HEAD: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Join the parts of a head of a sequence that several runs have; the others are written already."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    all_tiles = tl.load(firsts_ptr + count)
    first, end = tl.load(firsts_ptr + sequence), tl.load(firsts_ptr + sequence + 1)
    single, size, begun = tl.arange(0, 1), tl.arange(0, HEAD), 0
    acc, total = tl.zeros([1, HEAD], tl.float32), tl.zeros([1], tl.float32)
    peak = tl.full([1], -float("inf"), tl.float32)
    for run in range((first * runs + all_tiles - 1) // all_tiles, (end * runs + all_tiles - 1) // all_tiles):
        low = tl.load(cuts_ptr + run)
        if (low > first) & (low < end):
            spans = (tl.minimum(tl.load(cuts_ptr + run + 1), end) - low + SPAN - 1) // SPAN
            # before the first of these runs, the one in which the sequence begins
            for span in range(begun - 1, spans):
                place = (run * (room + 1) + span).to(tl.int64)
                part = place * heads + head + single
                more_acc = tl.load(parts_ptr + part[:, None] * HEAD + size[None, :])
                acc, total, peak = join_span(
                    acc, total, peak, more_acc, tl.load(totals_ptr + part), tl.load(peaks_ptr + part)
                )
            begun = 1
    if begun == 1:
        place = (sequence.to(tl.int64) * heads + head + single)[:, None] * HEAD + size[None, :]
        tl.store(out_ptr + place, acc / total[:, None])


def takes_evenly(device: torch.device, head: int, page: int) -> bool:
    """Whether the kernel takes heads and pages of such sizes."""
    return runs_on(device) and head in (64, 128) and page % online_softmax.EXACT_KEYS == 0


def share_out(
    lengths_S: Tensor, tables_SP: Tensor, pages: int, page: int, runs: int, *, exact: bool = False, early: bool = False
) -> TileList:
    """Return the list of tiles of sequences in a cache of so many pages, made on the device, where lengths are."""
    count, width = tables_SP.shape
    keys = online_softmax.EXACT_KEYS
    span = online_softmax.EXACT_SPAN // keys
    entries, owners = torch.empty(2, count * width * (page // keys), dtype=torch.int32, device=lengths_S.device)
    firsts_S1, cuts_R1 = (torch.empty(n + 1, dtype=torch.int32, device=lengths_S.device) for n in (count, runs))
    # Sequences that share pages may have more; then there is no room, and no sequence is cut.
    room = min(count * width, pages) * page // keys // span // runs + 4
    options = {"launch_pdl": True} if early else {}
    _share_out_kernel[(count,)](
        lengths_S, tables_SP, entries, owners, firsts_S1, cuts_R1, count, tables_SP.stride(0), runs,
        room if exact else 1 << 30, KEYS=keys, CUT=span if exact else 1, PAGE=page,
        SEQUENCES=max(16, _power_of_two(count)), ENTRY=ENTRY, EARLY=early, num_warps=4, **options,
    )  # fmt: skip
    return TileList(entries, owners, firsts_S1, cuts_R1, *((span, room) if exact else (NO_SPAN, 1)))


def count_runs(processors: int, key_heads: int, tiling: EvenTiling = EvenTiling()) -> int:  # noqa: B008  (a named tuple)
    """Return how many runs the tiles of a key head are cut into."""
    return max(1, processors * tiling.programs // key_heads)


def even_attention(
    q_TNH: Tensor,
    keys_PZKH: Tensor,
    values_PZKH: Tensor,
    tiles: TileList,
    scale: float,
    tiling: EvenTiling = EvenTiling(),  # noqa: B008  (a named tuple)
    *,
    early: bool = False,
) -> Tensor:
    """Return attention [T, N, H] of one query per sequence to all of its keys."""
    count, heads, size = q_TNH.shape
    page, key_heads = keys_PZKH.shape[1:3]
    keys = online_softmax.EXACT_KEYS
    q_TNH = q_TNH.contiguous()
    runs, share = len(tiles.cuts_R1) - 1, heads // key_heads
    out = torch.empty_like(q_TNH)
    parts = torch.empty(runs, tiles.room + 1, heads, size, dtype=torch.float32, device=q_TNH.device)
    peaks, totals = (torch.empty(parts.shape[:3], dtype=torch.float32, device=q_TNH.device) for _ in range(2))
    options = {"launch_pdl": True} if early else {}
    _even_kernel[(runs * key_heads,)](
        q_TNH, keys_PZKH, values_PZKH, out, parts, peaks, totals, tiles.entries, tiles.owners, tiles.firsts_S1,
        tiles.cuts_R1, scale, *q_TNH.stride()[:2], *keys_PZKH.stride()[:3], *values_PZKH.stride()[:3], key_heads,
        tiles.room, SHARE=share, HEAD=size, ROWS=max(16, _power_of_two(share)), KEYS=keys, PER_PAGE=page // keys,
        SPAN=tiles.span, ORDERED=tiles.span != NO_SPAN, ENTRY=ENTRY, IEEE=q_TNH.dtype == torch.float32, EARLY=early,
        num_warps=tiling.warps, num_stages=tiling.stages, **options,
    )  # fmt: skip
    _join_kernel[(count * heads,)](
        parts, peaks, totals, out, tiles.firsts_S1, tiles.cuts_R1, count, runs, heads, tiles.room, HEAD=size,
        SPAN=tiles.span, EARLY=early, num_warps=1, **options,
    )  # fmt: skip
    return out


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


_INTEGERS = dict.fromkeys(("entries_ptr", "owners_ptr", "firsts_ptr", "cuts_ptr"), "*i32")
_PARTS = dict.fromkeys(("parts_ptr", "peaks_ptr", "totals_ptr"), "*fp32")
_PAGE_STRIDES = [f"{pages}_stride_{dim}" for pages in "kv" for dim in "pzk"]


def _numbers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


AHEAD = (
    LaunchSpec(
        "even_attention.list",
        _share_out_kernel,
        dict.fromkeys(("lengths_ptr", "tables_ptr"), "*i32") | _INTEGERS | _numbers("count", "stride", "runs", "room"),
        {"KEYS": online_softmax.EXACT_KEYS, "CUT": 1, "PAGE": 64, "SEQUENCES": 256} | {"ENTRY": ENTRY, "EARLY": True},
        odd=frozenset({"count", "stride", "runs", "room"}),
    ),
    LaunchSpec(
        "even_attention.128",
        _even_kernel,
        dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
        | _PARTS
        | _INTEGERS
        | {"scale": "fp32"}
        | _numbers("q_stride_t", "q_stride_n", *_PAGE_STRIDES, "key_heads", "room"),
        {"SHARE": 2, "HEAD": 128, "ROWS": 16, "KEYS": online_softmax.EXACT_KEYS, "PER_PAGE": 1}
        | {"SPAN": NO_SPAN, "ORDERED": False, "ENTRY": ENTRY, "IEEE": False, "EARLY": True},
        EvenTiling().warps,
        EvenTiling().stages,
        odd=frozenset({"key_heads", "room"}),
    ),
    LaunchSpec(
        "even_attention.join",
        _join_kernel,
        _PARTS
        | dict.fromkeys(("firsts_ptr", "cuts_ptr"), "*i32")
        | {"out_ptr": "*bf16"}
        | _numbers("count", "runs", "heads", "room"),
        {"HEAD": 128, "SPAN": NO_SPAN, "EARLY": True},
        1,
        odd=frozenset({"count", "runs", "heads", "room"}),
    ),
)
