"""The context axis: each sequence is split over workers, from outside the model.

A sequence is cut into twice as many chunks as workers. Each has one chunk and its mirror, so that all have the same
work in causal attention. Everything but attention sees tokens one by one and needs no more; positions, and masks of
documents and windows, are those of the whole sequence. For attention there are three ways, `ATTENTION`:

    all-gather   every worker gets all keys and values
    all-to-all   every worker gets the whole sequence, of its share of heads
    ring         keys and values go around, and partial results are merged

B rows    L tokens of a worker    S of the sequence    N heads    K key and value heads    H head size    C of a chunk
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.models import Decoder
from headway.models.attention import BlockContext, Mask, SplitAttention, attend_all, attention_mask
from headway.models.decoder import ContextBuilder
from headway.models.experts import LoadBalanceLoss
from headway.models.gpt2 import positions_within
from headway.parallel.collectives import exchanged, gathered, shifted, whole
from headway.parallel.tensor import SEQUENCE
from headway.parallel.world import Axis
from headway.recipe.schema import ContextAttention

LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class SequenceParts:
    """Which parts of each sequence this worker has: the chunk of its rank, and the one as far from the end."""

    axis: Axis

    @property
    def count(self) -> int:
        """Chunks of a sequence."""
        return 2 * self.axis.size

    def chunks_of(self, rank: int) -> tuple[int, int]:
        """Return the numbers of a worker's chunks."""
        return rank, self.count - 1 - rank

    def take(self, x: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Return this worker's parts of whole sequences."""
        chunks = x.chunk(self.count, dim)
        return torch.cat([chunks[number] for number in self.chunks_of(self.axis.rank)], dim)

    def ordered(self, x: Tensor) -> Tensor:
        """Return whole sequences of the parts of all workers, by rank."""
        chunks = x.chunk(self.count, SEQUENCE)
        return torch.cat((*chunks[::2], *chunks[1::2][::-1]), SEQUENCE)

    def whole(self, x: Tensor) -> Tensor:
        """Return whole sequences of this worker's parts, for what all workers of the axis then compute alike."""
        assert self.axis.group is not None, "an axis of one worker splits nothing"
        return self.ordered(whole(x, SEQUENCE, self.axis.group))

    def by_rank(self, x: Tensor) -> Tensor:
        """Return the parts of all workers, by rank, of whole sequences."""
        chunks = x.chunk(self.count, SEQUENCE)
        return torch.cat([chunks[i] for rank in range(self.axis.size) for i in self.chunks_of(rank)], SEQUENCE)


def split_sequences(model: Decoder, axis: Axis, way: ContextAttention, *, first: bool) -> None:
    """Have a stage of a model work on this worker's parts of sequences; `first` if it takes tokens."""
    parts = SequenceParts(axis)
    assert isinstance(model.context, ContextBuilder)
    model.context = SplitContexts(model.context, parts, way)
    if first:
        model.embed.forward = partial(_embed, model.embed.forward, parts)
    for module in model.modules():
        if isinstance(module, LoadBalanceLoss):
            module.whole_share = partial(_mean, axis)


def _embed(
    plain: Callable[..., Tensor], parts: SequenceParts, tokens_BL: Tensor, documents_BS: Tensor | None = None, *_: Any
) -> Tensor:
    """Embed tokens at their positions in whole sequences."""
    length = tokens_BL.shape[SEQUENCE] * parts.axis.size
    return plain(tokens_BL, None, parts.take(positions_within(documents_BS, length, tokens_BL.device), dim=-1))


def _mean(axis: Axis, share_E: Tensor) -> Tensor:
    """Return the mean over workers."""
    total_E = share_E.clone()
    dist.all_reduce(total_E, group=axis.group)
    return total_E / axis.size


class SplitContexts(nn.Module):
    """Builds the context of this worker's parts of sequences."""

    def __init__(self, contexts: ContextBuilder, parts: SequenceParts, way: ContextAttention) -> None:
        super().__init__()
        self.contexts, self.parts, self.way = contexts, parts, way

    def forward(self, like_BL: Tensor, documents_BS: Tensor | None = None, _: None = None) -> BlockContext:
        """Build the context of parts of `like`'s length; documents are of whole sequences."""
        length = like_BL.shape[SEQUENCE] * self.parts.axis.size
        positions_L = self.parts.take(torch.arange(length, device=like_BL.device), dim=0)
        attention = ATTENTION[self.way](self, like_BL, length, documents_BS)
        return BlockContext(self.contexts.bits_at(positions_L, length), {}, split=attention)


# -- all-gather


@dataclass(frozen=True)
class GatheredAttention:
    """Attention of this worker's queries to all keys and values, which are gathered."""

    parts: SequenceParts
    masks: tuple[dict[int | None, Mask], ...]
    """Of each of the two chunks, whose keys end with it."""

    @classmethod
    def of(cls, contexts: SplitContexts, like_BL: Tensor, length: int, documents_BS: Tensor | None) -> SplitAttention:
        """Prepare it for sequences of a length."""
        parts, each, masks = contexts.parts, length // contexts.parts.count, []
        for number in parts.chunks_of(parts.axis.rank):
            end = (number + 1) * each
            seen_BS = None if documents_BS is None else documents_BS[:, :end]
            masks.append(contexts.contexts.masks(like_BL, end, seen_BS, number * each))
        return cls(parts, tuple(masks))

    @torch.compiler.disable  # lengths differ by rank
    def attend(
        self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, *, window: int | None = None, **options: Any
    ) -> Tensor:
        """See SplitAttention."""
        group = self.parts.axis.group
        assert group is not None, "an axis of one worker splits nothing"
        kv_BSKH = self.parts.ordered(gathered(torch.cat((k_BLKH, v_BLKH), dim=-1), SEQUENCE, group))
        k_BSKH, v_BSKH = kv_BSKH.split((k_BLKH.shape[-1], v_BLKH.shape[-1]), dim=-1)
        each, outs = q_BLNH.shape[SEQUENCE] // 2, []
        chunks = self.parts.chunks_of(self.parts.axis.rank)
        for q_BCNH, number, masks in zip(q_BLNH.chunk(2, SEQUENCE), chunks, self.masks, strict=True):
            end = (number + 1) * each
            outs.append(attend_all(q_BCNH, k_BSKH[:, :end], v_BSKH[:, :end], masks.get(window), **options))
        return torch.cat(outs, SEQUENCE)


# -- all-to-all


@dataclass(frozen=True)
class ExchangedAttention:
    """Attention of whole sequences, of this worker's share of the heads."""

    parts: SequenceParts
    masks: dict[int | None, Mask]

    @classmethod
    def of(cls, contexts: SplitContexts, like_BL: Tensor, length: int, documents_BS: Tensor | None) -> SplitAttention:
        """Prepare it for sequences of a length."""
        return cls(contexts.parts, contexts.contexts.masks(like_BL, length, documents_BS))

    @torch.compiler.disable
    def attend(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        *,
        window: int | None = None,
        sinks_N: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """See SplitAttention."""
        size, rank = self.parts.axis.size, self.parts.axis.rank
        heads = [x.unflatten(2, (size, -1)) for x in (q_BLNH, k_BLKH, v_BLKH)]
        widths = [x.shape[3] * x.shape[4] for x in heads]
        # R workers, W features of a token for each of them
        whole_BSW = self.parts.ordered(self._exchanged(torch.cat([x.flatten(3) for x in heads], dim=-1).movedim(2, 0)))
        q_BSNH, k_BSKH, v_BSKH = (
            part.unflatten(-1, x.shape[3:]) for part, x in zip(whole_BSW.split(widths, dim=-1), heads, strict=True)
        )
        own_sinks = None if sinks_N is None else sinks_N.chunk(size)[rank]
        y_BSNH = attend_all(q_BSNH, k_BSKH, v_BSKH, self.masks.get(window), sinks_N=own_sinks, **options)
        y_RBLW = self.parts.by_rank(y_BSNH.flatten(2)).unflatten(SEQUENCE, (size, -1)).movedim(SEQUENCE, 0)
        back_BRLW = self._exchanged(y_RBLW).unflatten(SEQUENCE, (size, -1))
        return back_BRLW.movedim(1, 2).flatten(2).unflatten(-1, (-1, v_BLKH.shape[-1]))

    def _exchanged(self, x_RBLW: Tensor) -> Tensor:
        """Send a part to each worker; return what comes from each, side by side [B, R * L, W]."""
        size, rows = x_RBLW.shape[:2]
        assert self.parts.axis.group is not None, "an axis of one worker splits nothing"
        arrived = exchanged(x_RBLW.flatten(0, 1), [rows] * size, [rows] * size, self.parts.axis.group)
        return arrived.unflatten(0, (size, rows)).movedim(0, 1).flatten(1, 2)


# -- ring


@dataclass(frozen=True)
class RingAttention:
    """Attention to keys and values that go from worker to worker, chunk by chunk; chunks that follow are skipped.

    All scores of two chunks are in memory at once, and kept for the backward pass.
    """

    parts: SequenceParts
    documents: Tensor | None
    """Of whole sequences [B, S]."""

    @classmethod
    def of(cls, contexts: SplitContexts, _: Tensor, __: int, documents_BS: Tensor | None) -> SplitAttention:
        """Prepare it for sequences of a length."""
        return cls(contexts.parts, documents_BS)

    @torch.compiler.disable
    def attend(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """See SplitAttention."""
        axis, each = self.parts.axis, q_BLNH.shape[SEQUENCE] // 2
        assert axis.group is not None, "an axis of one worker splits nothing"
        own = self.parts.chunks_of(axis.rank)
        seen: list[list[Weighted]] = [[], []]
        kv_BLKH = torch.cat((k_BLKH, v_BLKH), dim=-1)
        for hop in range(axis.size):
            if hop:
                kv_BLKH = shifted(kv_BLKH, axis.group)
            sent_chunks = self.parts.chunks_of((axis.rank - hop) % axis.size)
            for i, q_BCNH in enumerate(q_BLNH.chunk(2, SEQUENCE)):
                for number, kv_BCKH in zip(sent_chunks, kv_BLKH.chunk(2, SEQUENCE), strict=True):
                    if number <= own[i]:
                        k_BCKH, v_BCKH = kv_BCKH.split((k_BLKH.shape[-1], v_BLKH.shape[-1]), dim=-1)
                        mask = self._mask(own[i] * each, number * each, each, window, q_BLNH.device)
                        seen[i].append(weighted(q_BCNH, k_BCKH, v_BCKH, mask, scale, softcap))
        return torch.cat([merged(parts, sinks_N).to(v_BLKH.dtype) for parts in seen], SEQUENCE)

    def _mask(self, first: int, key: int, each: int, window: int | None, device: torch.device) -> Tensor:
        """Return the mask of the queries of a chunk and the keys of another, by where they begin."""
        positions = torch.arange(each, device=device)
        documents = self.documents
        of_queries = None if documents is None else documents[:, first : first + each]
        of_keys = None if documents is None else documents[:, key : key + each]
        return attention_mask(first + positions, key + positions, window, of_queries, of_keys)


@dataclass(frozen=True)
class Weighted:
    """Values weighted by exponentials of scores, less the largest score; their sum; and that score [B, N, C, 1]."""

    values: Tensor
    total: Tensor
    largest: Tensor


def weighted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, softcap: float | None) -> Weighted:
    """Weigh the values of some keys, in float32. Where a query sees none of them, the sum is 0."""
    share = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(share, dim=2), v.repeat_interleave(share, dim=2)))
    scores = (q @ k.transpose(-1, -2)).float() * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    largest = scores.detach().amax(dim=-1, keepdim=True).clamp(min=LEAST)
    powers = torch.exp(scores - largest)
    return Weighted(powers @ v.float(), powers.sum(dim=-1, keepdim=True), largest)


def merged(parts: list[Weighted], sinks_N: Tensor | None) -> Tensor:
    """Return attention [B, C, N, H] to all keys, from that to some; sinks take their share."""
    largest = torch.stack([part.largest for part in parts]).amax(dim=0)
    sinks = None if sinks_N is None else sinks_N.float().view(1, -1, 1, 1)
    if sinks is not None:
        largest = torch.maximum(largest, sinks.detach())
    factors = [torch.exp(part.largest - largest) for part in parts]
    values = torch.stack([part.values * factor for part, factor in zip(parts, factors, strict=True)]).sum(dim=0)
    total = torch.stack([part.total * factor for part, factor in zip(parts, factors, strict=True)]).sum(dim=0)
    if sinks is not None:
        total = total + torch.exp(sinks - largest)
    return (values / total).transpose(1, 2)


ATTENTION: dict[ContextAttention, Callable[[SplitContexts, Tensor, int, Tensor | None], SplitAttention]] = {
    "all-gather": GatheredAttention.of,
    "all-to-all": ExchangedAttention.of,
    "ring": RingAttention.of,
}
