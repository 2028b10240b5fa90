"""Attention over a paged KV cache, for the tokens of a pass: prefill, decode and both at once.

Keys and values of a layer are pages of a fixed number of tokens, shared by all sequences; each sequence has a list of
pages. A pass brings T new tokens of S sequences, one sequence after another; each query attends to its sequence's
tokens up to its own, or to the last `window` of them.

Here is the reference in PyTorch, which CPUs use: decoding sequences are gathered and padded to the longest of them,
the others run one by one.

Shapes, besides those of `models/`: T tokens of the pass, S sequences, P pages, Z tokens of a page, A all tokens that a
sequence keeps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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
) -> Tensor:
    """Return attention [T, N, U] of the pass's queries; their own keys and values are in the pages already."""
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
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
    size, heads = keys_PZKH.shape[1:3]
    shortest, longest = (pick(batch.lengths[i] for i in chosen) for pick in (min, max))
    first = 0 if window is None else max(shortest - count + 1 - window, 0) // size
    pages_SP = batch.tables_SP[:, first : -(-longest // size)]
    if len(chosen) < len(batch.lengths):
        pages_SP = pages_SP[chosen]
    k_SKAH, v_SKAU = (_gathered(pages, pages_SP) for pages in (keys_PZKH, values_PZKU))
    places_A = torch.arange(first * size, first * size + k_SKAH.shape[2], device=q_SLNH.device)
    lengths_S = batch.lengths_S if len(chosen) == len(batch.lengths) else batch.lengths_S[chosen]
    last_SL = (lengths_S.unsqueeze(1) - count + torch.arange(count, device=q_SLNH.device)).unsqueeze(2)
    seen_SLA = places_A <= last_SL
    if window is not None:
        seen_SLA &= places_A > last_SL - window
    share = q_SLNH.shape[2] // heads
    # Query heads that share a key head become queries of it, so that no key is copied.
    q_SKMH = q_SLNH.unflatten(2, (heads, share)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    seen_SMA = seen_SLA.repeat_interleave(share, dim=1).unsqueeze(1)
    if softcap is None and sinks_N is None:
        y_SKMU = torch.nn.functional.scaled_dot_product_attention(
            q_SKMH, k_SKAH, v_SKAU, attn_mask=seen_SMA, scale=scale
        )
    else:
        y_SKMU = _plain(q_SKMH, k_SKAH, v_SKAU, seen_SMA, scale, softcap, sinks_N)
    return y_SKMU.unflatten(2, (count, share)).permute(0, 2, 1, 3, 4).flatten(2, 3)


def _gathered(pages_PZKH: Tensor, pages_SP: Tensor) -> Tensor:
    """Return the keys or values of some pages, [S, K, A, H]."""
    rows = pages_PZKH.index_select(0, pages_SP.flatten())
    return rows.unflatten(0, pages_SP.shape).flatten(1, 2).transpose(1, 2)


def _plain(
    q_SKMH: Tensor,
    k_SKAH: Tensor,
    v_SKAU: Tensor,
    seen_SMA: Tensor,
    scale: float,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Attention with all scores in memory, with a soft cap or sinks."""
    scores_SKMA = (q_SKMH @ k_SKAH.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores_SKMA = softcap * torch.tanh(scores_SKMA / softcap)
    scores_SKMA = scores_SKMA.masked_fill(~seen_SMA, float("-inf"))
    if sinks_N is None:
        return scores_SKMA.softmax(dim=-1).to(v_SKAU.dtype) @ v_SKAU
    sequences, heads, queries, _ = scores_SKMA.shape
    share = len(sinks_N) // heads
    sinks_KM = sinks_N.float().view(heads, 1, share).expand(heads, queries // share, share).flatten(1)
    sinks_SKM1 = sinks_KM.view(1, heads, queries, 1).expand(sequences, -1, -1, -1)
    weights_SKMA = torch.cat((scores_SKMA, sinks_SKM1), dim=-1).softmax(dim=-1)[..., :-1]
    return weights_SKMA.to(v_SKAU.dtype) @ v_SKAU
