"""Batch-invariant attention: one kernel for training and for a paged cache, with the same bits for a query in both.

A query goes through the keys of its sequence in tiles of `KEYS`, cut at absolute positions from the sequence's start,
with an online softmax; so the order of its sums depends on its position alone. Queries of all heads that share a key
head fill tiles of `ROWS` rows, and every product of a tile has the same shape (`batch_invariant.py` says why that is
enough). A tile of which a query sees nothing changes none of its bits: it adds zeros, and multiplies by exp(0). What
goes row by row is only computed for rows that have a query: one of 16 in decoding.

So it does not matter which queries are computed together, where in a row a document is, or in which pages its keys are.
The backward pass is that of PyTorch's attention.

Shapes, besides those of `models/`: P programs, each with Q queries of one sequence; M rows of a tile, the first R of
which have queries; A keys of a tile; S sequences; C tokens that keys are held of.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headway.kernels.batch_invariant import ROWS

KEYS = 64
"""Keys of a tile."""
ELEMENTS = 2**18
"""Scores that are computed at a time, so that they stay in a core's cache."""
LEAST = -87.0
"""The least argument of an exponential. MKL's takes 15 to 50 times as long where the result is 0 or denormal, so keys
that are not seen are weighted with 0 afterwards."""


@dataclass(frozen=True)
class TilePlan:
    """Which queries attend to which keys, in tiles: the same in all layers of a pass."""

    queries_PQ: Tensor
    """Tokens of each program; the number of tokens where there is none."""
    positions_PQ: Tensor
    """Their positions in the sequence; where there is none, the program's last."""
    sequences_P: Tensor
    """The sequence of each program."""
    slots_SA: Tensor
    """Where a sequence's keys are, by position; after its last token that one's again."""
    tiles: tuple[tuple[int, int], ...]
    """Of each program: its first query's position, and its last's. Programs are in the order of the latter."""

    @property
    def queries(self) -> int:
        """Queries of a program."""
        return self.queries_PQ.shape[1]


def queries_per_tile(share: int) -> int:
    """Return the queries of a program, with so many query heads per key head."""
    return max(1, ROWS // share)


def plan_tiles(
    starts: np.ndarray, counts: np.ndarray, lengths: np.ndarray, slots_SA: np.ndarray, share: int
) -> TilePlan:
    """Plan the attention of sequences, whose queries are `counts` tokens from `starts` on, the last of `lengths`."""
    size, tokens = queries_per_tile(share), int(counts.sum())
    programs = -(-counts // size)
    sequence_P = np.repeat(np.arange(len(counts)), programs)
    number_P = np.arange(len(sequence_P)) - np.repeat(programs.cumsum() - programs, programs)
    firsts_P = number_P * size
    lasts_P = np.minimum(firsts_P + size, counts[sequence_P]) - 1
    position_P = (lengths - counts)[sequence_P]
    order = np.argsort(position_P + lasts_P, kind="stable")
    sequence_P, firsts_P, lasts_P, position_P = (x[order] for x in (sequence_P, firsts_P, lasts_P, position_P))
    query_PQ = firsts_P[:, None] + np.arange(size)
    real_PQ = query_PQ <= lasts_P[:, None]
    queries_PQ = np.where(real_PQ, query_PQ + starts[sequence_P][:, None], tokens)
    positions_PQ = np.minimum(query_PQ, lasts_P[:, None]) + position_P[:, None]
    wide = -(-slots_SA.shape[1] // KEYS) * KEYS
    last_S1 = np.take_along_axis(slots_SA, lengths[:, None] - 1, axis=1)
    inside_SA = np.arange(wide) < lengths[:, None]
    padded_SA = np.pad(slots_SA, ((0, 0), (0, wide - slots_SA.shape[1])))
    return TilePlan(
        torch.from_numpy(queries_PQ),
        torch.from_numpy(positions_PQ),
        torch.from_numpy(sequence_P),
        torch.from_numpy(np.where(inside_SA, padded_SA, last_S1)),
        tuple(zip((position_P + firsts_P).tolist(), (position_P + lasts_P).tolist(), strict=True)),
    )


def plan_documents(documents_BL: Tensor | None, rows: int, length: int, share: int) -> tuple[TilePlan, Tensor]:
    """Plan causal attention within the documents of rows; also return each token's position in its document [B, L]."""
    starts, lengths, positions_T = document_spans(documents_BL, rows, length)
    slots_SA = starts[:, None] + np.arange(lengths.max())
    plan = plan_tiles(starts, lengths, lengths, slots_SA, share)
    return plan, torch.from_numpy(positions_T).view(rows, length)


def document_spans(documents_BL: Tensor | None, rows: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where documents start among the tokens of all rows, how long they are, and each token's position."""
    begins_BL = np.zeros((rows, length), dtype=bool)
    begins_BL[:, 0] = True
    if documents_BL is not None:
        numbers_BL = documents_BL.cpu().numpy()
        begins_BL[:, 1:] = numbers_BL[:, 1:] != numbers_BL[:, :-1]
    starts = np.flatnonzero(begins_BL)
    lengths = np.diff(starts, append=rows * length)
    return starts, lengths, np.arange(rows * length) - np.repeat(starts, lengths)


def tiled_attention(
    q_TNH: Tensor, keys_CKH: Tensor, values_CKH: Tensor, plan: TilePlan, scale: float, window: int | None = None
) -> Tensor:
    """Return attention [T, N, H] of queries to the keys of their sequences, up to their own or the last `window`."""
    tokens, heads, size = q_TNH.shape
    key_heads = keys_CKH.shape[1]
    share, rows = heads // key_heads, -(-plan.queries * (heads // key_heads) // ROWS) * ROWS
    q_TNH = torch.cat((q_TNH, q_TNH.new_zeros(1, heads, size)))
    y_TNH = torch.empty_like(q_TNH)
    step = max(1, ELEMENTS // (key_heads * rows * KEYS))
    for low in range(0, len(plan.tiles), step):
        here = slice(low, low + step)
        spans = plan.tiles[here]
        most = max(last - first for first, last in spans) + 1
        queries_PQ, programs = plan.queries_PQ[here, :most], len(spans)
        q_PQKGH = q_TNH[queries_PQ].unflatten(2, (key_heads, share))
        q_KPMH = q_PQKGH.permute(2, 0, 1, 3, 4).reshape(key_heads, programs, -1, size)
        q_KPMH = torch.nn.functional.pad(q_KPMH, (0, 0, 0, rows - most * share))
        positions_PR = plan.positions_PQ[here, :most].repeat_interleave(share, dim=1)
        slots_PA = plan.slots_SA[plan.sequences_P[here]]
        y_KPRH = _online(q_KPMH, positions_PR, spans, slots_PA, keys_CKH, values_CKH, scale, window)
        y_KPQGH = y_KPRH.unflatten(2, (most, share))
        y_TNH[queries_PQ] = y_KPQGH.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return y_TNH[:tokens]


def _online(
    q_KPMH: Tensor,
    positions_PR: Tensor,
    spans: tuple[tuple[int, int], ...],
    slots_PA: Tensor,
    keys_CKH: Tensor,
    values_CKH: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Go through the key tiles of some programs, of whose rows the first R have queries."""
    key_heads, programs, rows, size = q_KPMH.shape
    count = positions_PR.shape[1]
    q_GMH = q_KPMH.flatten(0, 1).contiguous()
    first = min(first for first, _ in spans)
    begin = 0 if window is None else max(0, first - window + 1) // KEYS
    end = max(last for _, last in spans) // KEYS + 1
    peak_GR1 = q_GMH.new_full((len(q_GMH), count, 1), float("-inf"))
    total_GR1, sum_GRH = torch.zeros_like(peak_GR1), q_GMH.new_zeros(len(q_GMH), count, size)
    scores_GMA, part_GMH = q_GMH.new_empty(len(q_GMH), rows, KEYS), torch.empty_like(q_GMH)
    scores_KPRA = scores_GMA.view(key_heads, programs, rows, KEYS)[:, :, :count]
    scores_GRA, part_GRH = scores_GMA[:, :count], part_GMH[:, :count]
    head_K11 = torch.arange(key_heads).view(-1, 1, 1)
    for tile in range(begin, end):
        tile_slots = slots_PA[:, tile * KEYS : (tile + 1) * KEYS]
        places = (tile_slots * key_heads + head_K11).flatten()
        k_GAH, v_GAH = (
            x.reshape(-1, size).index_select(0, places).view(-1, KEYS, size) for x in (keys_CKH, values_CKH)
        )
        _bmm(q_GMH, k_GAH.transpose(1, 2), scores_GMA)
        seen_PRA = None
        if window is not None or (tile + 1) * KEYS > first:
            seen_PRA = _seen(tile, positions_PR, window).to(scores_GMA.dtype)
        scores_GRA.mul_(scale)
        if seen_PRA is not None:
            scores_KPRA.add_(torch.zeros_like(seen_PRA).masked_fill_(seen_PRA == 0, float("-inf")))
        new_GR1 = torch.maximum(peak_GR1, scores_GRA.amax(dim=-1, keepdim=True))
        base_GR1 = new_GR1 if window is None else new_GR1.where(new_GR1 > float("-inf"), 0.0)  # nothing seen yet
        scores_GRA.sub_(base_GR1).clamp_(min=LEAST).exp_()
        if seen_PRA is not None:
            scores_KPRA.mul_(seen_PRA)
        shrink_GR1 = (peak_GR1 - base_GR1).clamp_(min=LEAST).exp_()
        total_GR1 = total_GR1.mul_(shrink_GR1).add_(scores_GRA.sum(dim=-1, keepdim=True))
        _bmm(scores_GMA, v_GAH, part_GMH)
        sum_GRH = sum_GRH.mul_(shrink_GR1).add_(part_GRH)
        peak_GR1 = new_GR1
    return sum_GRH.div_(total_GR1).view(key_heads, programs, count, size)


def _seen(tile: int, positions_PR: Tensor, window: int | None) -> Tensor:
    """Return which keys of a tile a query sees."""
    places_A, positions_PR1 = torch.arange(tile * KEYS, (tile + 1) * KEYS), positions_PR.unsqueeze(2)
    seen_PRA = places_A <= positions_PR1
    return seen_PRA if window is None else seen_PRA & (places_A > positions_PR1 - window)


def _bmm(a_GXY: Tensor, b_GYZ: Tensor, out_GXZ: Tensor) -> Tensor:
    """Return products of one shape, in `out`, which selective recomputation does not store.

    A single one would be split up by threads.
    """
    if len(a_GXY) > 1:
        return torch.bmm(a_GXY, b_GYZ, out=out_GXZ)
    return out_GXZ.copy_(torch.bmm(a_GXY.expand(2, -1, -1), b_GYZ.expand(2, -1, -1))[:1])


def attention(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    plan: TilePlan,
    plain: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return attention [B, L, N, H] in training; `plain` computes the same otherwise, and has the gradients."""
    scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
    y: Tensor = _Attention.apply(q_BLNH, k_BLKH, v_BLKH, plan, plain, scale, window)
    return y


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        plan: TilePlan,
        plain: Callable[[Tensor, Tensor, Tensor], Tensor],
        scale: float,
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(q_BLNH, k_BLKH, v_BLKH)
        ctx.plain = plain
        flat = (x.flatten(0, 1) for x in (q_BLNH, k_BLKH, v_BLKH))
        return tiled_attention(*flat, plan, scale, window).view(q_BLNH.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BLNH: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            y_BLNH = ctx.plain(*inputs)
        return (*torch.autograd.grad(y_BLNH, inputs, dy_BLNH), None, None, None, None)
