"""Runs a model over the chunks of a batch."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from headway.inference.adapters import AdapterSet
from headway.inference.decode_graphs import MOST_STEPS, DecodeGraphs
from headway.inference.fused_decoder import FusedDecoder, takes_fused
from headway.inference.kv_cache import PagedKvCache, PassCache
from headway.inference.sampler import Sampled, needs_host
from headway.inference.scheduler import Chunk
from headway.inference.sequence import UNKNOWN
from headway.kernels.paged_batch import PagedBatch
from headway.kernels.pointer_table import uploaded
from headway.models import Decoder


@dataclass(frozen=True)
class SampledTokens:
    """The tokens that the last pass sampled, which may still be on the device."""

    tokens_R: Tensor
    rows: dict[int, int]
    """Row of each sequence, by arrival."""


class Runner(Protocol):
    """What the engine needs of a model."""

    def run(self, chunks: Rows[Chunk], last: SampledTokens | None = None) -> Tensor:
        """Return the residual stream [T, D] (or logits) of all tokens of the chunks; `last` has those unknown here."""
        ...

    def logits(self, x_RD: Tensor) -> Tensor:
        """Return the logits of rows of what `run` returned."""
        ...

    def most_steps(self, chunks: Rows[Chunk], /) -> int:
        """Return how many tokens of each chunk's sequence `decode` samples without the host at most; 0 for none."""
        ...

    def decode(self, chunks: Rows[Chunk], last: SampledTokens | None, counts: Rows[int], /) -> Sampled:
        """Run and sample so many tokens of each chunk's sequence: tokens and log-probabilities are [R, most]."""
        ...


class PagedRunner:
    """A decoder, or a model of the user's own that takes a cache, with pages for keys and values."""

    def __init__(
        self,
        model: nn.Module,
        pages: PagedKvCache,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
        adapters: AdapterSet | None = None,
        max_length: int = 0,
    ) -> None:
        """`max_length`: of sequences; with it, fused kernels run the models that they know."""
        self.model, self.pages, self.device, self.graphs, self.adapters = model, pages, device, graphs, adapters
        self.fused: FusedDecoder | None = None
        if max_length and adapters is None and takes_fused(model, device):
            self.fused = FusedDecoder(model, pages, max_length)  # type: ignore[arg-type]
        if graphs is not None:
            graphs.capture(self._hidden, self.logits)

    def most_steps(self, chunks: Rows[Chunk]) -> int:
        """Return how many tokens the graphs sample at most."""
        if self.graphs is None or not self.graphs.takes(chunks) or any(needs_host(c.sequence) for c in chunks):
            return 0
        return MOST_STEPS

    def decode(self, chunks: Rows[Chunk], last: SampledTokens | None, counts: Rows[int]) -> Sampled:
        """Replay a graph, until each sequence has its tokens."""
        assert self.graphs is not None, "`most_steps` said so"
        sources = [_source(chunk, last) for chunk in chunks]
        return self.graphs.decode(chunks, sources, None if last is None else last.tokens_R, counts)

    @torch.inference_mode()
    def run(self, chunks: Rows[Chunk], last: SampledTokens | None = None) -> Tensor:
        """Run one pass over all chunks."""
        sources = [_source(chunk, last) for chunk in chunks]
        if self.graphs is not None and self.graphs.takes(chunks):
            return self.graphs.run(chunks, sources, None if last is None else last.tokens_R)
        ids = [token for c in chunks for token in c.sequence.token_ids[c.first : c.first + c.count]]
        tokens_T = uploaded(np.array(ids, dtype=np.int64), self.device)
        cache = pass_cache(chunks, self.pages, self.device)
        if last is not None and max(sources) >= 0:
            places = [end - 1 for end, source in zip(cache.batch.starts[1:], sources, strict=True) if source >= 0]
            rows = [source for source in sources if source >= 0]
            places_R, rows_R = uploaded(np.array([places, rows], dtype=np.int64), self.device)
            tokens_T = tokens_T.index_copy(0, places_R, last.tokens_R[rows_R])
        return self._hidden(tokens_T.unsqueeze(0), cache)

    @torch.inference_mode()
    def logits(self, x_RD: Tensor) -> Tensor:
        """Apply the head, in float32."""
        if self.fused is not None:
            return self.fused.logits(x_RD)
        return self.model.float32_logits(x_RD) if isinstance(self.model, Decoder) else x_RD

    def _hidden(self, tokens_BL: Tensor, cache: PassCache) -> Tensor:
        if self.fused is not None:
            return self.fused.hidden(tokens_BL[0], cache)
        if self.adapters is not None:
            self.adapters.select(cache.adapters_T)
        if isinstance(self.model, Decoder):
            return self.model.hidden(tokens_BL, cache=cache)[0]
        logits: Tensor = self.model(tokens_BL, cache=cache)
        return logits[0]


class WholeRunner:
    """A model of the user's own that takes no cache: every pass computes all tokens of its sequences again."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device

    @torch.inference_mode()
    def run(self, chunks: Rows[Chunk], last: SampledTokens | None = None) -> Tensor:
        """Run the sequences one by one; the rows of a chunk are the last of its sequence."""
        rows = []
        for chunk in chunks:
            end = chunk.first + chunk.count
            tokens_BL = torch.tensor([chunk.sequence.token_ids[:end]], device=self.device)
            if last is not None and (source := _source(chunk, last)) >= 0:
                tokens_BL[0, -1] = last.tokens_R[source]
            logits: Tensor = self.model(tokens_BL)
            rows.append(logits[0, chunk.first :])
        return torch.cat(rows)

    def logits(self, x_RD: Tensor) -> Tensor:
        """The model has returned logits."""
        return x_RD

    def most_steps(self, _chunks: Rows[Chunk]) -> int:
        """Every pass needs the host."""
        return 0

    def decode(self, _chunks: Rows[Chunk], _last: SampledTokens | None, _counts: Rows[int]) -> Sampled:
        """It never does."""
        raise NotImplementedError


def _source(chunk: Chunk, last: SampledTokens | None) -> int:
    """Return the row of the last pass that has the chunk's last token, or -1 if that is known."""
    sequence = chunk.sequence
    if last is None or not sequence.unknown or sequence.token_ids[chunk.first + chunk.count - 1] != UNKNOWN:
        return -1
    return last.rows[sequence.arrival]


def pass_cache(chunks: Rows[Chunk], pages: PagedKvCache, device: torch.device) -> PassCache:
    """Return the cache's view for a pass over chunks."""
    size = pages.page_size
    counts = np.array([chunk.count for chunk in chunks])
    firsts = np.array([chunk.first for chunk in chunks])
    starts, lengths = np.concatenate(([0], counts.cumsum())), firsts + counts
    tables = page_tables(chunks, -(-int(lengths.max()) // size))
    owner_T = np.repeat(np.arange(len(chunks)), counts)
    positions_T = np.arange(starts[-1]) - (starts[:-1] - firsts)[owner_T]
    slots_T = tables[owner_T, positions_T // size].astype(np.int64) * size + positions_T % size
    on_device = uploaded(np.stack((positions_T, slots_T)), device)
    batch = PagedBatch(
        starts=tuple(starts.tolist()),
        lengths=tuple(lengths.tolist()),
        starts_S1=uploaded(starts.astype(np.int32), device),
        lengths_S=uploaded(lengths.astype(np.int32), device),
        tables_SP=uploaded(tables, device),
        slots_T=on_device[1],
    )
    long = None
    if any(chunk.sequence.long for chunk in chunks):
        long = uploaded(np.array([chunk.sequence.long for chunk in chunks])[owner_T][None], device)
    adapters = None
    if any(chunk.sequence.adapter for chunk in chunks):
        adapters = uploaded(np.array([chunk.sequence.adapter for chunk in chunks])[owner_T], device)
    return PassCache(pages, batch, on_device[:1], long, adapters)


def page_tables(chunks: Rows[Chunk], width: int) -> np.ndarray:
    """Return the pages of each chunk's sequence, int32; zeros after its last."""
    tables = np.zeros((len(chunks), width), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        blocks = chunk.sequence.blocks[:width]
        row[: len(blocks)] = blocks
    return tables
