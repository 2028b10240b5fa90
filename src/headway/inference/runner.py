"""Runs a model over the chunks of a batch."""

from collections.abc import Sequence as Rows
from typing import Protocol

import torch
from torch import Tensor, nn

from headway.inference.kv_cache import PagedKvCache, PassCache
from headway.inference.scheduler import Chunk
from headway.kernels.paged_attention import PagedBatch
from headway.models import Decoder


class Runner(Protocol):
    """What the engine needs of a model."""

    def run(self, chunks: Rows[Chunk]) -> Tensor:
        """Return the residual stream [T, D] (or logits) of all tokens of the chunks."""
        ...

    def logits(self, x_RD: Tensor) -> Tensor:
        """Return the logits of rows of what `run` returned."""
        ...


class PagedRunner:
    """A decoder, or a model of the user's own that takes a cache, with pages for keys and values."""

    def __init__(self, model: nn.Module, pages: PagedKvCache, device: torch.device) -> None:
        self.model, self.pages, self.device = model, pages, device

    @torch.inference_mode()
    def run(self, chunks: Rows[Chunk]) -> Tensor:
        """Run one pass over all chunks."""
        ids = [token for c in chunks for token in c.sequence.token_ids[c.first : c.first + c.count]]
        tokens_BL = torch.tensor([ids], device=self.device)
        cache = pass_cache(chunks, self.pages, self.device)
        if isinstance(self.model, Decoder):
            return self.model.hidden(tokens_BL, cache=cache)[0]
        logits: Tensor = self.model(tokens_BL, cache=cache)
        return logits[0]

    @torch.inference_mode()
    def logits(self, x_RD: Tensor) -> Tensor:
        """Apply the head."""
        return self.model.logits(x_RD) if isinstance(self.model, Decoder) else x_RD


class WholeRunner:
    """A model of the user's own that takes no cache: every pass computes all tokens of its sequences again."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device

    @torch.inference_mode()
    def run(self, chunks: Rows[Chunk]) -> Tensor:
        """Run the sequences one by one; the rows of a chunk are the last of its sequence."""
        rows = []
        for chunk in chunks:
            end = chunk.first + chunk.count
            tokens_BL = torch.tensor([chunk.sequence.token_ids[:end]], device=self.device)
            logits: Tensor = self.model(tokens_BL)
            rows.append(logits[0, chunk.first :])
        return torch.cat(rows)

    def logits(self, x_RD: Tensor) -> Tensor:
        """The model has returned logits."""
        return x_RD


def pass_cache(chunks: Rows[Chunk], pages: PagedKvCache, device: torch.device) -> PassCache:
    """Return the cache's view for a pass over chunks."""
    size = pages.page_size
    starts, lengths, positions, slots = [0], [], [], []
    for chunk in chunks:
        blocks, end = chunk.sequence.blocks, chunk.first + chunk.count
        starts.append(starts[-1] + chunk.count)
        lengths.append(end)
        positions.extend(range(chunk.first, end))
        slots.extend(blocks[place // size] * size + place % size for place in range(chunk.first, end))
    widest = max(-(-length // size) for length in lengths)
    tables = [chunk.sequence.blocks[:widest] for chunk in chunks]
    batch = PagedBatch(
        starts=tuple(starts),
        lengths=tuple(lengths),
        starts_S1=torch.tensor(starts, dtype=torch.int32, device=device),
        lengths_S=torch.tensor(lengths, dtype=torch.int32, device=device),
        tables_SP=torch.tensor(
            [table + [0] * (widest - len(table)) for table in tables], dtype=torch.int32, device=device
        ),
        slots_T=torch.tensor(slots, device=device),
    )
    long = None
    if any(chunk.sequence.long for chunk in chunks):
        long = torch.tensor([[c.sequence.long for c in chunks for _ in range(c.count)]], device=device)
    return PassCache(pages, batch, torch.tensor([positions], device=device), long)
