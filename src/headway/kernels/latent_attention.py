"""Attention over a paged cache of latent vectors (DeepSeek-V3's), in Triton, for GPUs.

A token keeps one vector for all heads: the latent vector, whose products with queries are scores and which is the
value, too, and a rotated key, which only scores. So it is read once for both products:

    scores = q[:C] @ latent.T + q[C:] @ rotated.T           y = softmax(scores * scale) @ latent

A program has some query heads of one token of a pass, and goes through the sequence's pages with an online softmax. All
heads share the vector, so that a tile of products is full with a single token, in decoding as in prefill. If there are
too few programs for the device, as in decoding of a few sequences, the vectors are split among several, whose partial
results `paged_triton.join_splits` joins.

Shapes: those of `paged_batch.py`, C the latent vector, Q the rotated key, K = C + Q.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.paged_batch import PagedBatch
from headway.kernels.paged_triton import join_splits, processors
from headway.kernels.triton_compat import runs_on, tl, triton

WIDEST = 512
"""Of a latent vector: the sum over values of a program's rows stays in registers."""


def is_latent(keys_PZKH: Tensor, values_PZKU: Tensor) -> bool:
    """Whether values are the first part of the keys, of which there is one head."""
    same = keys_PZKH.data_ptr() == values_PZKU.data_ptr() and keys_PZKH.stride() == values_PZKU.stride()
    return same and keys_PZKH.shape[2] == 1 and values_PZKU.shape[3] < keys_PZKH.shape[3]


def takes_latent(device: torch.device, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel takes vectors of these sizes."""
    return runs_on(device) and value_dim <= WIDEST and 0 < key_dim - value_dim <= 128


class LatentTiling(NamedTuple):
    """A program's share of the work."""

    rows: int
    """Query heads of a token, filled up to 16 at least."""
    keys: int
    """Vectors at a time."""
    splits: int
    """Programs that share a sequence's vectors at most."""
    warps: int
    stages: int = 2


def cut(tokens: int, longest: int, heads: int, programs: int, *, wide: bool = False) -> LatentTiling:
    """Choose a tiling for tokens of a pass with so many programs at a time on the device; not measured on a GPU yet.

    `wide` elements, of float32, take twice the shared memory.
    """
    rows = min(16 if wide else 64, max(16, _power_of_two(heads)))
    keys, splits, blocks = 16 if wide else 32, 1, tokens * -(-heads // rows)
    while blocks * splits < programs and longest >= keys * splits * 4 and splits < 32:
        splits *= 2
    return LatentTiling(rows, keys, splits, 8)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


# -- the kernel


@triton.jit
def _vectors(ptr, at, inside, size, SIZE: tl.constexpr, SIZE_2: tl.constexpr):
    """Load [keys, SIZE_2] entries of some vectors; zeros beyond the last one and beyond SIZE."""
    if SIZE == SIZE_2:
        return tl.load(ptr + at[:, None] + size[None, :], mask=inside[:, None], other=0.0)
    return tl.load(ptr + at[:, None] + size[None, :], mask=inside[:, None] & (size < SIZE)[None, :], other=0.0)


@triton.jit
def _dot(a, b, acc, IEEE: tl.constexpr):
    if IEEE:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit(do_not_specialize=["tables_stride", "tokens"])
def _latent_kernel(
    q_ptr, pages_ptr, out_ptr, parts_ptr, peak_ptr, total_ptr, sequences_ptr, firsts_ptr, starts_ptr, lengths_ptr,
    tables_ptr, scale, q_stride_t, q_stride_n, page_stride, token_stride, out_stride_t, out_stride_n, tables_stride,
    heads, tokens,
    LATENT: tl.constexpr, LATENT_2: tl.constexpr, ROTARY: tl.constexpr, ROTARY_2: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    token, block, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(sequences_ptr + token)
    start, length = tl.load(starts_ptr + sequence), tl.load(lengths_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - start
    last = length - new + tl.load(firsts_ptr + token) + 1  # one beyond the last vector that the token sees
    head = block * ROWS + tl.arange(0, ROWS)
    real = head < heads
    latent, rotary = tl.arange(0, LATENT_2), tl.arange(0, ROTARY_2)
    q_at = q_ptr + token * q_stride_t + head[:, None] * q_stride_n
    q = tl.load(q_at + latent[None, :], mask=real[:, None] & (latent < LATENT)[None, :], other=0.0)
    turned = tl.load(q_at + LATENT + rotary[None, :], mask=real[:, None] & (rotary < ROTARY)[None, :], other=0.0)

    low, high = 0, last
    if SPLITS > 1:
        each = tl.cdiv(tl.cdiv(last, SPLITS), KEYS) * KEYS
        low = split * each
        high = tl.minimum(low + each, last)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT_2], tl.float32)
    table_ptr = tables_ptr + sequence.to(tl.int64) * tables_stride
    factor = scale * 1.4426950408889634
    for tile in range(low, high, KEYS):
        place = tile + tl.arange(0, KEYS)
        inside = place < high
        page = tl.load(table_ptr + place // PAGE, mask=inside, other=0).to(tl.int64)
        at = page * page_stride + (place % PAGE) * token_stride
        vectors = _vectors(pages_ptr, at, inside, latent, LATENT, LATENT_2)
        keys = _vectors(pages_ptr + LATENT, at, inside, rotary, ROTARY, ROTARY_2)
        scores = _dot(q, tl.trans(vectors), tl.zeros([ROWS, KEYS], tl.float32), IEEE)
        scores = _dot(turned, tl.trans(keys), scores, IEEE)
        scores = tl.where(inside[None, :], scores * factor, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = _dot(weights.to(vectors.dtype), vectors, acc * shrink[:, None], IEEE)
        peak = new_peak

    inside = real[:, None] & (latent < LATENT)[None, :]
    if SPLITS == 1:
        at = out_ptr + token * out_stride_t + head[:, None] * out_stride_n + latent[None, :]
        tl.store(at, acc / total[:, None], mask=inside)
    else:
        place = split * tokens * heads + token * heads + head
        tl.store(peak_ptr + place, peak, mask=real)
        tl.store(total_ptr + place, total, mask=real)
        tl.store(parts_ptr + place[:, None] * LATENT + latent[None, :], acc, mask=inside & (low < high))


# -- launches


def latent_attention(
    q_TNK: Tensor,
    pages_PZ1K: Tensor,
    batch: PagedBatch,
    scale: float,
    value_dim: int,
    tiling: LatentTiling | None = None,
) -> Tensor:
    """Return attention [T, N, C] of the pass's queries to the vectors of their sequences, up to their own."""
    tokens, heads, width = q_TNK.shape
    q_TNK = q_TNK.contiguous()
    wide = q_TNK.dtype == torch.float32
    tiling = tiling or cut(tokens, max(batch.lengths), heads, processors(q_TNK.device), wide=wide)
    sequences, firsts = batch.programs(1)
    out = q_TNK.new_empty(tokens, heads, value_dim)
    parts, peaks, totals = out, out, out
    if tiling.splits > 1:
        parts = torch.empty((tiling.splits, *out.shape), dtype=torch.float32, device=out.device)
        peaks, totals = (torch.empty(parts.shape[:3], dtype=torch.float32, device=out.device) for _ in range(2))
    _latent_kernel[tokens, -(-heads // tiling.rows), tiling.splits](
        q_TNK, pages_PZ1K, out, parts, peaks, totals, sequences, firsts, batch.starts_S1, batch.lengths_S,
        batch.tables_SP, scale, *q_TNK.stride()[:2], *pages_PZ1K.stride()[:2], *out.stride()[:2],
        batch.tables_SP.stride(0), heads, tokens, LATENT=value_dim, LATENT_2=max(16, _power_of_two(value_dim)),
        ROTARY=width - value_dim, ROTARY_2=max(16, _power_of_two(width - value_dim)), PAGE=pages_PZ1K.shape[1],
        ROWS=tiling.rows, KEYS=tiling.keys, SPLITS=tiling.splits, IEEE=wide,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if tiling.splits > 1:
        join_splits(parts, peaks, totals, out)
    return out


def _ahead(name: str, dtype: str, splits: int) -> LaunchSpec:
    """DeepSeek-V3's vectors: 512 and 64 entries, 128 heads."""
    types = dict.fromkeys(("q_ptr", "pages_ptr", "out_ptr"), dtype)
    types |= dict.fromkeys(("parts_ptr", "peak_ptr", "total_ptr"), "*fp32" if splits > 1 else dtype)
    integers = ("sequences_ptr", "firsts_ptr", "starts_ptr", "lengths_ptr", "tables_ptr")
    types |= dict.fromkeys(integers, "*i32") | {"scale": "fp32"}
    strides = ("q_stride_t", "q_stride_n", "page_stride", "token_stride", "out_stride_t", "out_stride_n")
    types |= dict.fromkeys((*strides, "tables_stride", "heads", "tokens"), "i32")
    wide = dtype == "*fp32"
    tiling = cut(1, 4096, 128, 132, wide=wide)
    constants = {
        "LATENT": 512, "LATENT_2": 512, "ROTARY": 64, "ROTARY_2": 64, "PAGE": 64, "ROWS": tiling.rows,
        "KEYS": tiling.keys, "SPLITS": splits, "IEEE": wide,
    }  # fmt: skip
    odd = frozenset({"tables_stride", "tokens"})
    return LaunchSpec(f"latent_attention{name}", _latent_kernel, types, constants, tiling.warps, tiling.stages, odd)


AHEAD = (_ahead("", "*bf16", 1), _ahead(".split", "*bf16", 8), _ahead(".float32", "*fp32", 8))
