"""Attention over pages in Triton, for GPUs.

A program has some queries of one sequence, those of all query heads that share a key head, and goes through the pages
with an online softmax. So every key is read once per key head. If there are too few programs for the device, as in
decoding of a few long sequences, each sequence's keys are split among several, whose partial results a second kernel
joins. It is bound by the memory that keys and values take in decoding, by products in prefill.

`causal_attention` is the same kernel over rows of documents, for training in exact mode. Shapes are those of
`paged_batch.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels import online_softmax
from headway.kernels.online_softmax import add_tile, join_span, sum_of_pairs, weigh
from headway.kernels.paged_batch import PagedBatch
from headway.kernels.triton_compat import runs_on, tl, triton

WIDEST = 256
"""Of a head: wider ones do not fit into a program's registers; for latent vectors see `latent_attention.py`."""


def takes_heads(device: torch.device, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel takes heads of these sizes."""
    return runs_on(device) and key_dim == value_dim <= WIDEST


class PagedTiling(NamedTuple):
    """A program's share of the work."""

    queries: int
    """Tokens of a program."""
    rows: int
    """Rows of its products: tokens times query heads that share a key head, at least 16."""
    keys: int
    """Keys at a time."""
    splits: int
    """Programs that share a sequence's keys at most."""
    warps: int
    stages: int = 3
    """Of the pipeline that loads keys and values."""
    least: int = 64
    """Keys of a split at least: short sequences have fewer splits."""


MOST_SPANS = 8192
"""Programs beyond which spans have none of their own: most would find nothing to do in shorter sequences."""


def cut(
    batch: PagedBatch, share: int, key_heads: int, head: int, processors: int, *, exact: bool = False
) -> PagedTiling:
    """Choose the tiling: one token per program in decoding; as many as fill 64 rows in prefill."""
    longest_query = max(end - start for start, end in zip(batch.starts, batch.starts[1:], strict=False))
    keys = online_softmax.EXACT_KEYS if head <= 128 or exact else 32
    if longest_query > 1:
        rows = max(64 if head <= 128 else 32, _power_of_two(share))
        return PagedTiling(rows // _power_of_two(share), rows, keys, 1, 4)
    rows, programs = max(16, _power_of_two(share)), len(batch.lengths) * key_heads
    splits, longest = 1, max(batch.lengths)
    if exact:
        spans = -(-longest // online_softmax.EXACT_SPAN)
        if programs < 3 * processors and programs * spans <= MOST_SPANS:
            return PagedTiling(1, rows, keys, spans, 2)
        return PagedTiling(1, rows, keys, 1, 4, 5)
    while programs * splits < 2 * processors and longest >= keys * splits * 2 and splits < 32:
        splits *= 2
    # Page numbers are loaded first: in 5 stages two tiles of keys are on their way, in 3 only one (H200: 168 us for 256
    # sequences instead of 190, but no less for 64 or with splits).
    warps, stages = (4, 5) if programs >= 6 * processors else (2, 3)
    return PagedTiling(1, rows, keys, splits, warps, stages, keys)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@triton.jit
def _attend_tiles(
    q, acc, total, peak, spans_acc, spans_total, spans_peak, low, high, last, position, table_ptr, k_ptr, v_ptr,
    scale, softcap, window, k_stride_p, k_stride_z, v_stride_p, v_stride_z,
    HEAD: tl.constexpr, HEAD_2: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, IEEE: tl.constexpr, ORDERED: tl.constexpr, SPAN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go through the tiles of keys from `low` to `high`; without MASKED, every query sees all of them.

    If ORDERED, the weights of all tiles are added up by place in their tile: `sum_of_pairs` joins them at the end of a
    span, whose sums then join those of the spans before it.
    """
    size = tl.arange(0, HEAD_2)
    for tile in range(low, high, KEYS):
        if SPAN > 0:  # noqa: SIM102  (one is known when compiled)
            if tile % SPAN == 0:
                spans_acc, spans_total, spans_peak = join_span(
                    spans_acc, spans_total, spans_peak, acc, sum_of_pairs(total), peak
                )
                acc, total = tl.zeros_like(acc), tl.zeros_like(total)
                peak = tl.zeros_like(peak) - float("inf")
        place = tile + tl.arange(0, KEYS)
        inside = place < last
        if PAGE == 0:  # keys lie one after another
            k_at, v_at = place.to(tl.int64) * k_stride_z, place.to(tl.int64) * v_stride_z
        elif PAGE % KEYS == 0:
            page = tl.load(table_ptr + tile // PAGE).to(tl.int64)
            k_at = page * k_stride_p + (place % PAGE) * k_stride_z
            v_at = page * v_stride_p + (place % PAGE) * v_stride_z
        else:
            if MASKED:
                page = tl.load(table_ptr + place // PAGE, mask=inside, other=0).to(tl.int64)
            else:
                page = tl.load(table_ptr + place // PAGE).to(tl.int64)
            k_at = page * k_stride_p + (place % PAGE) * k_stride_z
            v_at = page * v_stride_p + (place % PAGE) * v_stride_z
        if MASKED:
            k = tl.load(k_ptr + k_at[None, :] + size[:, None], mask=inside[None, :] & (size < HEAD)[:, None], other=0.0)
        elif HEAD == HEAD_2:
            k = tl.load(k_ptr + k_at[None, :] + size[:, None])
        else:
            k = tl.load(k_ptr + k_at[None, :] + size[:, None], mask=(size < HEAD)[:, None], other=0.0)
        if IEEE:
            scores = tl.dot(q, k, input_precision="ieee")
        else:
            scores = tl.dot(q, k)
        factor = scale * 1.4426950408889634
        if CAPPED:
            scores = softcap * (2 / (1 + tl.exp(-2 * scores * scale / softcap)) - 1)
            factor = 1.4426950408889634
        if MASKED:
            seen = (place[None, :] <= position[:, None]) & inside[None, :]
            if WINDOWED:
                seen = seen & (place[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, -float("inf"))
        weights, shrink, peak = weigh(scores, peak, factor)
        if MASKED:
            v = tl.load(v_ptr + v_at[:, None] + size[None, :], mask=inside[:, None] & (size < HEAD)[None, :], other=0.0)
        elif HEAD == HEAD_2:
            v = tl.load(v_ptr + v_at[:, None] + size[None, :])
        else:
            v = tl.load(v_ptr + v_at[:, None] + size[None, :], mask=(size < HEAD)[None, :], other=0.0)
        acc, total = add_tile(acc, total, weights, shrink, v, IEEE, ORDERED)
    return acc, total, peak, spans_acc, spans_total, spans_peak


# Counts differ from pass to pass: a kernel compiled for each kind of number would take seconds amid serving.
@triton.jit(do_not_specialize=["window", "tables_stride", "tokens"])
def _paged_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, parts_ptr, peak_ptr, total_ptr, sinks_ptr, program_sequence_ptr,
    program_first_ptr, starts_ptr, lengths_ptr, tables_ptr, scale, softcap, window,
    q_stride_t, q_stride_n, k_stride_p, k_stride_z, k_stride_k, v_stride_p, v_stride_z, v_stride_k,
    out_stride_t, out_stride_n, tables_stride, heads, tokens,
    SHARE: tl.constexpr, SHARE_2: tl.constexpr, HEAD: tl.constexpr, HEAD_2: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, SUNK: tl.constexpr, IEEE: tl.constexpr, ORDERED: tl.constexpr, SPAN: tl.constexpr,
    SUMS: tl.constexpr,
    HEADS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    key_heads = heads // SHARE
    split = tl.program_id(1)
    if HEADS_FIRST:
        program, key_head = tl.program_id(0) // key_heads, tl.program_id(0) % key_heads
    else:
        programs = tl.num_programs(0) // key_heads
        program, key_head = tl.program_id(0) % programs, tl.program_id(0) // programs
    sequence = tl.load(program_sequence_ptr + program)
    first = tl.load(program_first_ptr + program)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    length = tl.load(lengths_ptr + sequence)

    row = tl.arange(0, ROWS)
    query = first + row // SHARE_2
    share = row % SHARE_2
    head = key_head * SHARE + share
    real = (query < count) & (share < SHARE)
    position = length - count + query
    size = tl.arange(0, HEAD_2)
    in_head = size < HEAD
    token = (start + query).to(tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * q_stride_t + head[:, None] * q_stride_n + size[None, :],
        mask=real[:, None] & in_head[None, :], other=0.0,
    )  # fmt: skip

    last = length - count + tl.minimum(first + ROWS // SHARE_2, count)  # one beyond the last key that a query sees
    begin = 0
    if WINDOWED:
        begin = tl.maximum(length - count + first - window + 1, 0) // KEYS * KEYS
    low, high = begin, last
    if SPLITS > 1:
        if SPAN > 0:
            low = tl.maximum(begin, split * SPAN)
            high = tl.minimum((split + 1) * SPAN, last)
        else:
            each = tl.maximum(tl.cdiv(tl.cdiv(last - begin, SPLITS), KEYS) * KEYS, LEAST)
            low = begin + split * each
            high = tl.minimum(low + each, last)

    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if ORDERED:
        total = tl.zeros([ROWS, KEYS], tl.float32)
    if SUNK:  # noqa: SIM102  (one is known when compiled, the other is not)
        if split == 0:
            peak = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
    acc = tl.zeros([ROWS, HEAD_2], tl.float32)
    spans_acc, spans_total = tl.zeros([ROWS, HEAD_2], tl.float32), tl.zeros([ROWS], tl.float32)
    spans_peak = tl.full([ROWS], -float("inf"), tl.float32)
    if PAGE == 0:
        k_ptr += start.to(tl.int64) * k_stride_z
        v_ptr += start.to(tl.int64) * v_stride_z
    k_ptr += key_head * k_stride_k
    v_ptr += key_head * v_stride_k
    table_ptr = tables_ptr + sequence.to(tl.int64) * tables_stride
    # Tiles that all queries see come first; with a window there are none.
    middle = low
    if not WINDOWED:
        middle = tl.minimum(high, length - count + first + 1) // KEYS * KEYS
        middle = tl.maximum(middle, low)
        acc, total, peak, spans_acc, spans_total, spans_peak = _attend_tiles(
            q, acc, total, peak, spans_acc, spans_total, spans_peak, low, middle, high, position, table_ptr, k_ptr,
            v_ptr, scale, softcap, window, k_stride_p, k_stride_z, v_stride_p, v_stride_z,
            HEAD, HEAD_2, PAGE, KEYS, WINDOWED, CAPPED, IEEE, ORDERED, SPAN, False,
        )  # fmt: skip
    acc, total, peak, spans_acc, spans_total, spans_peak = _attend_tiles(
        q, acc, total, peak, spans_acc, spans_total, spans_peak, middle, high, high, position, table_ptr, k_ptr,
        v_ptr, scale, softcap, window, k_stride_p, k_stride_z, v_stride_p, v_stride_z,
        HEAD, HEAD_2, PAGE, KEYS, WINDOWED, CAPPED, IEEE, ORDERED, SPAN, True,
    )  # fmt: skip
    if ORDERED:
        total = sum_of_pairs(total)
        if SPAN > 0 and SPLITS == 1:
            acc, total, peak = join_span(spans_acc, spans_total, spans_peak, acc, total, peak)

    if SPLITS == 1:
        if SUMS:
            sums = (peak + tl.log2(tl.where(real, total, 1.0))) * 0.6931471805599453
            tl.store(total_ptr + head * tokens + token, sums, mask=real)
        acc = acc / tl.where(real, total, 1.0)[:, None]
        tl.store(
            out_ptr + token[:, None] * out_stride_t + head[:, None] * out_stride_n + size[None, :],
            acc, mask=real[:, None] & in_head[None, :],
        )  # fmt: skip
    else:
        place = split * tokens * heads + token * heads + head
        tl.store(peak_ptr + place, peak, mask=real)
        tl.store(total_ptr + place, total, mask=real)
        tl.store(
            parts_ptr + place[:, None] * HEAD + size[None, :], acc,
            mask=(real & (low < high))[:, None] & in_head[None, :],
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _join_kernel(
    parts_ptr, peak_ptr, total_ptr, out_ptr, rows,
    HEAD: tl.constexpr, HEAD_2: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    size = tl.arange(0, HEAD_2)
    peaks = tl.load(peak_ptr + split * rows + row)
    totals = tl.load(total_ptr + split * rows + row)
    share = tl.exp2(peaks - tl.max(peaks, 0))
    parts = tl.load(
        parts_ptr + (split[:, None] * rows + row) * HEAD + size[None, :],
        mask=(peaks > -float("inf"))[:, None] & (size < HEAD)[None, :], other=0.0,
    )  # fmt: skip
    joined = tl.sum(parts * share[:, None], 0) / tl.sum(totals * share, 0)
    tl.store(out_ptr + row * HEAD + size, joined, mask=size < HEAD)


def triton_attention(
    q_TNH: Tensor,
    keys_PZKH: Tensor,
    values_PZKH: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    tiling: PagedTiling | None = None,
    *,
    exact: bool = False,
    early: bool = False,
) -> Tensor:
    """Return attention [T, N, H] of the pass's queries; if `exact`, a query has the same bits in every pass, and in
    `causal_attention`."""
    tokens, heads, size = q_TNH.shape
    key_heads = keys_PZKH.shape[2]
    q_TNH = q_TNH.contiguous()
    tiling = tiling or cut(batch, heads // key_heads, key_heads, size, processors(q_TNH.device), exact=exact)
    sequences, firsts = batch.programs(tiling.queries)
    out = torch.empty_like(q_TNH)
    parts, peaks, totals = out, out, out
    if tiling.splits > 1:
        parts = torch.empty((tiling.splits, *q_TNH.shape), dtype=torch.float32, device=q_TNH.device)
        peaks, totals = (torch.empty(parts.shape[:3], dtype=torch.float32, device=q_TNH.device) for _ in range(2))
    options = {"launch_pdl": True} if early else {}
    _paged_kernel[len(sequences) * key_heads, tiling.splits](
        q_TNH, keys_PZKH, values_PZKH, out, parts, peaks, totals, q_TNH if sinks_N is None else sinks_N,
        sequences, firsts, batch.starts_S1, batch.lengths_S, batch.tables_SP, scale, softcap or 0.0, window or 0,
        *q_TNH.stride()[:2], *keys_PZKH.stride()[:3], *values_PZKH.stride()[:3], *out.stride()[:2],
        batch.tables_SP.stride(0), heads, tokens,
        PAGE=keys_PZKH.shape[1], ORDERED=exact, SPAN=online_softmax.EXACT_SPAN if exact else 0, SUMS=False,
        **_constants(q_TNH, heads // key_heads, tiling, window, softcap, sinks_N), EARLY=early, **options,
    )  # fmt: skip
    if tiling.splits > 1 and exact:
        _join_spans_kernel[(tokens * heads,)](
            parts, peaks, totals, out, batch.lengths_S, tokens * heads, heads, HEAD=size,
            HEAD_2=max(16, _power_of_two(size)), SPAN=online_softmax.EXACT_SPAN, EARLY=early, num_warps=1, **options,
        )  # fmt: skip
    elif tiling.splits > 1:
        join_splits(parts, peaks, totals, out, early=early)
    return out


@triton.jit(do_not_specialize=["rows"])
def _join_spans_kernel(
    parts_ptr, peak_ptr, total_ptr, out_ptr, lengths_ptr, rows, heads,
    HEAD: tl.constexpr, HEAD_2: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Join the spans of a row in their order, as the kernel does that has all of them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    spans = tl.cdiv(tl.load(lengths_ptr + row // heads), SPAN)
    first, size = tl.arange(0, 1), tl.arange(0, HEAD_2)
    acc, total = tl.zeros([1, HEAD_2], tl.float32), tl.zeros([1], tl.float32)
    peak = tl.full([1], -float("inf"), tl.float32)
    for span in range(0, spans):
        place = span * rows + row + first
        more_peak = tl.load(peak_ptr + place)
        inside = (more_peak > -float("inf"))[:, None] & (size < HEAD)[None, :]
        more_acc = tl.load(parts_ptr + place[:, None] * HEAD + size[None, :], mask=inside, other=0.0)
        acc, total, peak = join_span(acc, total, peak, more_acc, tl.load(total_ptr + place), more_peak)
    out = acc / total[:, None]
    tl.store(out_ptr + (row + first)[:, None] * HEAD + size[None, :], out, mask=(size < HEAD)[None, :])


def _warps_of_join(size: int, splits: int) -> int:
    """Return warps whose threads have 128 elements at most."""
    return max(1, max(16, _power_of_two(size)) * splits // 4096)


def join_splits(parts: Tensor, peaks: Tensor, totals: Tensor, out_TNU: Tensor, *, early: bool = False) -> None:
    """Join partial results [splits, T, N, U]: sums over values, the largest scores and sums of weights."""
    tokens, heads, size = out_TNU.shape
    options = {"launch_pdl": True} if early else {}
    _join_kernel[(tokens * heads,)](
        parts, peaks, totals, out_TNU, tokens * heads, HEAD=size, HEAD_2=max(16, _power_of_two(size)),
        SPLITS=len(parts), EARLY=early, num_warps=_warps_of_join(size, len(parts)), **options,
    )  # fmt: skip


def _constants(
    q_TNH: Tensor,
    share: int,
    tiling: PagedTiling,
    window: int | None,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> dict[str, int | bool]:
    size = q_TNH.shape[-1]
    return {
        "SHARE": share, "SHARE_2": _power_of_two(share), "HEAD": size, "HEAD_2": max(16, _power_of_two(size)),
        "ROWS": tiling.rows, "KEYS": tiling.keys, "SPLITS": tiling.splits, "LEAST": tiling.least,
        "WINDOWED": window is not None, "CAPPED": softcap is not None, "SUNK": sinks_N is not None,
        "IEEE": q_TNH.dtype == torch.float32, "HEADS_FIRST": tiling.queries == 1,
        "num_warps": tiling.warps, "num_stages": tiling.stages,
    }  # fmt: skip


def causal_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    starts_S1: Tensor,
    programs: tuple[Tensor, Tensor],
    scale: float,
    window: int | None = None,
    tiling: PagedTiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention within the documents of a row of tokens, with the bits of exact inference, and the log-sum-exp
    of the scores [N, T].

    Documents begin at `starts_S1` (int32; at the end, T); `programs` are the document and the first query of each
    program, for `exact_tiling(...).queries` queries each.
    """
    tokens, heads, _ = q_TNH.shape
    share = heads // k_TKH.shape[1]
    tiling = tiling or exact_tiling(share)
    out = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    sums_NT = torch.empty(heads, tokens, dtype=torch.float32, device=q_TNH.device)
    lengths_S = starts_S1.diff()
    assert q_TNH.stride(2) == k_TKH.stride(2) == v_TKH.stride(2) == 1
    _paged_kernel[len(programs[0]) * k_TKH.shape[1], 1](
        q_TNH, k_TKH, v_TKH, out, sums_NT, sums_NT, sums_NT, q_TNH, *programs, starts_S1, lengths_S,
        starts_S1, scale, 0.0, window or 0, *q_TNH.stride()[:2], 0, *k_TKH.stride()[:2], 0, *v_TKH.stride()[:2],
        *out.stride()[:2], 0, heads, tokens, PAGE=0, ORDERED=True, SPAN=online_softmax.EXACT_SPAN, SUMS=True,
        **_constants(q_TNH, share, tiling, window, None, None), EARLY=False,
    )  # fmt: skip
    return out, sums_NT


def exact_tiling(share: int) -> PagedTiling:
    """Return the tiling of whole documents."""
    rows = max(64, _power_of_two(share))
    return PagedTiling(rows // _power_of_two(share), rows, online_softmax.EXACT_KEYS, 1, 4 if rows == 64 else 8, 2)


def processors(device: torch.device) -> int:
    """Return the multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
