"""Attention over a paged KV cache, for the tokens of a pass: prefill, decode and both at once.

Keys and values of a layer are pages of a fixed number of tokens, shared by all sequences; each sequence has a list of
pages. A pass brings T new tokens of S sequences, one sequence after another; each query attends to its sequence's
tokens up to its own, or to the last `window` of them.

In PyTorch, the reference, which CPUs use: decoding sequences are gathered and padded to the longest of them, the
others run one by one.

In Triton, for GPUs: a program has some queries of one sequence, those of all query heads that share a key head, and
goes through the pages with an online softmax. So every key is read once per key head. If there are too few programs
for the device, as in decoding of a few long sequences, each sequence's keys are split among several, whose partial
results a second kernel joins. It is bound by the memory that keys and values take in decoding, by products in prefill.

Shapes, besides those of `models/`: T tokens of the pass, S sequences, P pages, Z tokens of a page, A all tokens that a
sequence keeps.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.kernels.batch_invariant_attention import TilePlan, plan_tiles, tiled_attention
from headway.kernels.pointer_table import uploaded
from headway.kernels.triton_compat import runs_on, tl, triton


@dataclass(frozen=True)
class PagedBatch:
    """Which sequences the tokens of a pass belong to, and where these keep their keys and values."""

    starts: tuple[int, ...]
    """Of each sequence: its first token in the pass; at the end, T."""
    lengths: tuple[int, ...]
    """Of each sequence: its tokens in the cache, those of the pass included."""
    starts_S1: Tensor
    """`starts` on the device, int32."""
    lengths_S: Tensor
    """`lengths` on the device, int32."""
    tables_SP: Tensor
    """Pages of each sequence in order, int32; whatever is beyond its length is not read."""
    slots_T: Tensor
    """Where each token's key and value go: page * Z + place in it, int64."""
    _programs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _plans: dict[int, TilePlan] = field(default_factory=dict)
    _spans: "dict[tuple[int, ...], KeySpan]" = field(default_factory=dict)

    def tiles(self, share: int, page: int) -> TilePlan:
        """Return the plan of batch-invariant attention, with so many query heads per key head; made once per pass."""
        if share not in self._plans:
            starts, lengths = np.array(self.starts), np.array(self.lengths)
            places_A = np.arange(lengths.max())
            slots_SA = self.tables_SP.cpu().numpy().astype(np.int64)[:, places_A // page] * page + places_A % page
            self._plans[share] = plan_tiles(starts[:-1], np.diff(starts), lengths, slots_SA, share)
        return self._plans[share]

    def programs(self, queries: int) -> tuple[Tensor, Tensor]:
        """Return the sequence and the first query of each program that has so many queries; made once per pass."""
        if queries not in self._programs and len(self.slots_T) == len(self.lengths):  # one token each
            numbers = torch.arange(len(self.lengths), dtype=torch.int32, device=self.slots_T.device)
            self._programs[queries] = numbers, torch.zeros_like(numbers)
        if queries not in self._programs:
            spans = list(enumerate(zip(self.starts, self.starts[1:], strict=False)))
            pairs = [(i, first) for i, (start, end) in spans for first in range(0, end - start, queries)]
            numbers = uploaded(np.array(pairs, dtype=np.int32).T.copy(), self.slots_T.device)
            self._programs[queries] = numbers[0], numbers[1]
        return self._programs[queries]


@dataclass(frozen=True)
class KeySpan:
    """What some sequences of a pass, with equally many queries each, attend to; the same in all layers."""

    pages: Tensor
    """Pages of all sequences, one after another, as many of each."""
    hidden_SMA: Tensor
    """Added to the scores: 0 where a query attends, else minus infinity."""


def store(k_TKH: Tensor, pages_PZKH: Tensor, slots_T: Tensor) -> None:
    """Write keys or values of a pass into their pages."""
    pages_PZKH.flatten(0, 1).index_copy_(0, slots_T, k_TKH.to(pages_PZKH.dtype))


def paged_attention(
    q_TNH: Tensor,
    keys_PZKH: Tensor,
    values_PZKU: Tensor,
    batch: PagedBatch,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """Return attention [T, N, U] of the pass's queries; their own keys and values are in the pages already.

    If `exact`, with the bits of attention in training: `batch_invariant_attention.py`.
    """
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
    if exact:
        plan = batch.tiles(q_TNH.shape[1] // keys_PZKH.shape[2], keys_PZKH.shape[1])
        return tiled_attention(q_TNH, keys_PZKH.flatten(0, 1), values_PZKU.flatten(0, 1), plan, scale, window)
    if q_TNH.device.type == "cuda" and takes_heads(q_TNH.device, q_TNH.shape[-1], values_PZKU.shape[-1]):
        return triton_attention(q_TNH, keys_PZKH, values_PZKU, batch, scale, window, softcap, sinks_N)
    return reference(q_TNH, keys_PZKH, values_PZKU, batch, scale, window, softcap, sinks_N)


def reference(
    q_TNH: Tensor,
    keys_PZKH: Tensor,
    values_PZKU: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """The same in PyTorch."""
    y_TNU = q_TNH.new_empty(*q_TNH.shape[:2], values_PZKU.shape[-1])
    counts = [end - start for start, end in zip(batch.starts, batch.starts[1:], strict=False)]
    decoding = [i for i, count in enumerate(counts) if count == 1]
    for i, count in enumerate(counts):
        if count == 1 and len(decoding) > 1:
            continue
        rows = slice(batch.starts[i], batch.starts[i + 1])
        y_TNU[rows] = _attend(
            q_TNH[rows].unsqueeze(0), keys_PZKH, values_PZKU, batch, [i], count, scale, window, softcap, sinks_N
        )[0]
    if len(decoding) > 1:
        every = len(decoding) == len(counts)
        rows_S = ... if every else torch.tensor([batch.starts[i] for i in decoding], device=q_TNH.device)
        y_SNU = _attend(
            q_TNH[rows_S].unsqueeze(1), keys_PZKH, values_PZKU, batch, decoding, 1, scale, window, softcap, sinks_N
        )[:, 0]
        y_TNU[rows_S] = y_SNU
    return y_TNU


def _attend(
    q_SLNH: Tensor,
    keys_PZKH: Tensor,
    values_PZKU: Tensor,
    batch: PagedBatch,
    chosen: list[int],
    count: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Attention of `count` queries of each chosen sequence: [S, L, N, U]."""
    heads, share = keys_PZKH.shape[2], q_SLNH.shape[2] // keys_PZKH.shape[2]
    key = (*chosen, share, window or 0)
    if key not in batch._spans:
        batch._spans[key] = _span(batch, chosen, count, share, keys_PZKH.shape[1], window)
    span = batch._spans[key]
    k_SKAH, v_SKAU = (_gathered(pages, span.pages, len(chosen)) for pages in (keys_PZKH, values_PZKU))
    # Query heads that share a key head become queries of it, so that no key is copied.
    q_SKMH = q_SLNH.unflatten(2, (heads, share)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    if softcap is None and sinks_N is None:
        y_SKMU = torch.nn.functional.scaled_dot_product_attention(
            q_SKMH, k_SKAH, v_SKAU, attn_mask=span.hidden_SMA.to(q_SKMH.dtype), scale=scale
        )
    else:
        y_SKMU = _plain(q_SKMH, k_SKAH, v_SKAU, span.hidden_SMA, scale, softcap, sinks_N)
    return y_SKMU.unflatten(2, (count, share)).permute(0, 2, 1, 3, 4).flatten(2, 3)


def _span(batch: PagedBatch, chosen: list[int], count: int, share: int, size: int, window: int | None) -> KeySpan:
    """Return the pages and the mask of the chosen sequences' last `count` queries, `share` heads of each."""
    shortest, longest = (pick(batch.lengths[i] for i in chosen) for pick in (min, max))
    first = 0 if window is None else max(shortest - count + 1 - window, 0) // size
    pages_SP, lengths_S = batch.tables_SP[:, first : -(-longest // size)], batch.lengths_S
    if len(chosen) < len(batch.lengths):
        pages_SP, lengths_S = pages_SP[chosen], lengths_S[chosen]
    device = lengths_S.device
    places_A = torch.arange(first * size, (first + pages_SP.shape[1]) * size, device=device)
    last_SL1 = (lengths_S.unsqueeze(1) - count + torch.arange(count, device=device)).unsqueeze(2)
    hidden_SLA = places_A > last_SL1
    if window is not None:
        hidden_SLA |= places_A <= last_SL1 - window
    added_SLA = torch.zeros(hidden_SLA.shape, device=device).masked_fill_(hidden_SLA, float("-inf"))
    return KeySpan(pages_SP.flatten(), added_SLA.repeat_interleave(share, dim=1).unsqueeze(1))


def _gathered(pages_PZKH: Tensor, pages: Tensor, sequences: int) -> Tensor:
    """Return the keys or values of some pages, [S, K, A, H]."""
    rows = pages_PZKH.index_select(0, pages)
    return rows.view(sequences, -1, *rows.shape[2:]).transpose(1, 2)


def _plain(
    q_SKMH: Tensor,
    k_SKAH: Tensor,
    v_SKAU: Tensor,
    hidden_SMA: Tensor,
    scale: float,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Attention with all scores in memory, with a soft cap or sinks."""
    scores_SKMA = (q_SKMH @ k_SKAH.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores_SKMA = softcap * torch.tanh(scores_SKMA / softcap)
    scores_SKMA = scores_SKMA + hidden_SMA
    if sinks_N is None:
        return scores_SKMA.softmax(dim=-1).to(v_SKAU.dtype) @ v_SKAU
    sequences, heads, queries, _ = scores_SKMA.shape
    share = len(sinks_N) // heads
    sinks_KM = sinks_N.float().view(heads, 1, share).expand(heads, queries // share, share).flatten(1)
    sinks_SKM1 = sinks_KM.view(1, heads, queries, 1).expand(sequences, -1, -1, -1)
    weights_SKMA = torch.cat((scores_SKMA, sinks_SKM1), dim=-1).softmax(dim=-1)[..., :-1]
    return weights_SKMA.to(v_SKAU.dtype) @ v_SKAU


# -- Triton

WIDEST = 256
"""Of a head: wider ones, as latent vectors, do not fit into a program's registers."""


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
    """Programs that share a sequence's keys."""
    warps: int


def cut(batch: PagedBatch, share: int, key_heads: int, head: int, processors: int) -> PagedTiling:
    """Choose the tiling: one token per program in decoding; as many as fill 64 rows in prefill."""
    longest_query = max(end - start for start, end in zip(batch.starts, batch.starts[1:], strict=False))
    if longest_query > 1:
        rows = max(64 if head <= 128 else 32, _power_of_two(share))
        return PagedTiling(rows // _power_of_two(share), rows, 64 if head <= 128 else 32, 1, 4)
    programs = len(batch.lengths) * key_heads
    splits, longest = 1, max(batch.lengths)
    while programs * splits * 2 <= 2 * processors and longest >= 256 * splits * 2 and splits < 32:
        splits *= 2
    return PagedTiling(1, max(16, _power_of_two(share)), 64 if head <= 128 else 32, splits, 4)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


# Counts differ from pass to pass: a kernel compiled for each kind of number would take seconds amid serving.
@triton.jit(do_not_specialize=["window", "tables_stride", "tokens"])
def _paged_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, peak_ptr, total_ptr, sinks_ptr, program_sequence_ptr, program_first_ptr,
    starts_ptr, lengths_ptr, tables_ptr, scale, softcap, window,
    q_stride_t, q_stride_n, k_stride_p, k_stride_z, k_stride_k, v_stride_p, v_stride_z, v_stride_k,
    out_stride_s, out_stride_t, out_stride_n, tables_stride, heads, tokens,
    SHARE: tl.constexpr, SHARE_2: tl.constexpr, HEAD: tl.constexpr, HEAD_2: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    SUNK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    program, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    tiles = tl.cdiv(last - begin, KEYS)
    per_split = tl.cdiv(tiles, SPLITS)
    low = begin + split * per_split * KEYS
    high = tl.minimum(begin + (split + 1) * per_split * KEYS, last)

    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SUNK:  # noqa: SIM102  (one is known when compiled, the other is not)
        if split == 0:
            peak = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32)
            total = tl.full([ROWS], 1.0, tl.float32)
    acc = tl.zeros([ROWS, HEAD_2], tl.float32)
    for tile in range(low, high, KEYS):
        place = tile + tl.arange(0, KEYS)
        inside = place < high
        page = tl.load(tables_ptr + sequence * tables_stride + place // PAGE, mask=inside, other=0).to(tl.int64)
        k = tl.load(
            k_ptr + page[None, :] * k_stride_p + (place % PAGE)[None, :] * k_stride_z + key_head * k_stride_k
            + size[:, None],
            mask=inside[None, :] & in_head[:, None], other=0.0,
        )  # fmt: skip
        if EXACT:
            scores = tl.dot(q, k, input_precision="ieee") * scale
        else:
            scores = tl.dot(q, k) * scale
        if CAPPED:
            scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)
        seen = (place[None, :] <= position[:, None]) & inside[None, :]
        if WINDOWED:
            seen = seen & (place[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # nothing seen yet
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            v_ptr + page[:, None] * v_stride_p + (place % PAGE)[:, None] * v_stride_z + key_head * v_stride_k
            + size[None, :],
            mask=inside[:, None] & in_head[None, :], other=0.0,
        )  # fmt: skip
        if EXACT:
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        peak = new_peak

    if SPLITS == 1:
        acc = acc / tl.where(real, total, 1.0)[:, None]
    else:
        place = split * tokens * heads + token * heads + head
        tl.store(peak_ptr + place, peak, mask=real)
        tl.store(total_ptr + place, total, mask=real)
    tl.store(
        out_ptr + split * out_stride_s + token[:, None] * out_stride_t + head[:, None] * out_stride_n + size[None, :],
        acc, mask=real[:, None] & in_head[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _join_kernel(
    parts_ptr, peak_ptr, total_ptr, out_ptr, rows, HEAD: tl.constexpr, HEAD_2: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    size = tl.arange(0, HEAD_2)
    peaks = tl.load(peak_ptr + split * rows + row)
    totals = tl.load(total_ptr + split * rows + row)
    share = tl.exp(peaks - tl.max(peaks, 0))
    parts = tl.load(
        parts_ptr + (split[:, None] * rows + row) * HEAD + size[None, :], mask=(size < HEAD)[None, :], other=0.0
    )
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
) -> Tensor:
    """The same in Triton."""
    tokens, heads, size = q_TNH.shape
    key_heads = keys_PZKH.shape[2]
    share = heads // key_heads
    q_TNH = q_TNH.contiguous()
    tiling = tiling or cut(batch, share, key_heads, size, _processors(q_TNH.device))
    sequences, firsts = batch.programs(tiling.queries)
    out = torch.empty_like(q_TNH)
    parts, peaks, totals = out.unsqueeze(0), out, out
    if tiling.splits > 1:
        parts = torch.empty((tiling.splits, *q_TNH.shape), dtype=torch.float32, device=q_TNH.device)
        peaks, totals = (torch.empty(parts.shape[:3], dtype=torch.float32, device=q_TNH.device) for _ in range(2))
    _paged_kernel[len(sequences), key_heads, tiling.splits](
        q_TNH, keys_PZKH, values_PZKH, parts, peaks, totals, q_TNH if sinks_N is None else sinks_N, sequences, firsts,
        batch.starts_S1, batch.lengths_S, batch.tables_SP, scale, softcap or 0.0, window or 0,
        *q_TNH.stride()[:2], *keys_PZKH.stride()[:3], *values_PZKH.stride()[:3], *parts.stride()[:3],
        batch.tables_SP.stride(0), heads, tokens,
        SHARE=share, SHARE_2=_power_of_two(share), HEAD=size, HEAD_2=max(16, _power_of_two(size)),
        PAGE=keys_PZKH.shape[1], ROWS=tiling.rows, KEYS=tiling.keys, SPLITS=tiling.splits,
        WINDOWED=window is not None, CAPPED=softcap is not None, SUNK=sinks_N is not None,
        EXACT=q_TNH.dtype == torch.float32, num_warps=tiling.warps,
    )  # fmt: skip
    if tiling.splits > 1:
        _join_kernel[(tokens * heads,)](
            parts, peaks, totals, out, tokens * heads, HEAD=size, HEAD_2=max(16, _power_of_two(size)),
            SPLITS=tiling.splits, num_warps=1,
        )  # fmt: skip
    return out


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
