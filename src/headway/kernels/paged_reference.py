"""Attention over pages in PyTorch: the reference, which CPUs use, and GPUs for what no kernel takes.

Decoding sequences are gathered and padded to the longest of them, the others run one by one. Shapes are those of
`paged_batch.py`.
"""

import torch
from torch import Tensor

from headway.kernels.paged_batch import KeySpan, PagedBatch


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
    """Return attention [T, N, U] of the pass's queries."""
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
