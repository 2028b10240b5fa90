"""CUDA graphs of decoding: a pass with one token per sequence is one launch instead of hundreds.

There is a graph per number of sequences, captured when the engine starts; a batch takes the next larger one, and the
rows beyond it attend to a scratch page. All that a pass needs is one row of integers per sequence, copied to the
device at once: token, the row of the last pass that sampled it, position, slot, length, adapter, and pages.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from headway.inference.kv_cache import PagedKvCache, PassCache
from headway.inference.scheduler import Chunk
from headway.kernels.paged_attention import PagedBatch

TOKEN, SOURCE, POSITION, SLOT, LENGTH, ADAPTER, PAGES = range(7)
"""Columns of a row; the pages are the last ones."""
Pass = Callable[[Tensor, PassCache], Tensor]
"""From tokens [1, T] and the cache to what the runner returns of them."""


def graph_sizes(most: int) -> list[int]:
    """Return the numbers of sequences that have a graph: powers of two, and from 32 on every 16, up to `most`."""
    return sorted({size for size in (1, 2, 4, 8, 16, *range(32, most, 16)) if size < most} | {most})


class DecodeGraphs:
    """The graphs of a model."""

    def __init__(self, pages: PagedKvCache, max_sequences: int, max_length: int, device: torch.device) -> None:
        self.pages, self.max_length, self.device = pages, max_length, device
        self.sizes = graph_sizes(max_sequences)
        width = PAGES - (-max_length // pages.page_size)
        self._rows = torch.zeros(max_sequences, width, dtype=torch.int32, device=device)
        self._rows[:, LENGTH] = 1
        self._last = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        """Tokens that the last pass sampled."""
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.inference_mode()
    def capture(self, run: Pass) -> None:
        """Capture all graphs, the largest first: the others reuse its memory."""
        pool = None
        stream = torch.cuda.Stream()
        for size in reversed(self.sizes):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._pass(run, size)  # kernels are compiled, and libraries take their workspaces
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                out = self._pass(run, size)
            pool = graph.pool()
            self._graphs[size] = graph, out

    def takes(self, chunks: Rows[Chunk]) -> bool:
        """Whether there is a graph for a batch."""
        return len(chunks) <= self.sizes[-1] and all(c.count == 1 and not c.sequence.long for c in chunks)

    def run(self, chunks: Rows[Chunk], sources: Rows[int], last_R: Tensor | None) -> Tensor:
        """Replay the graph of a batch."""
        size = next(size for size in self.sizes if size >= len(chunks))
        if last_R is not None:
            self._last[: len(last_R)].copy_(last_R)
        rows = torch.from_numpy(self.rows(chunks, sources, size)).pin_memory()
        self._rows[:size, : rows.shape[1]].copy_(rows, non_blocking=True)
        graph, out = self._graphs[size]
        graph.replay()
        return out[: len(chunks)]

    def rows(self, chunks: Rows[Chunk], sources: Rows[int], size: int) -> np.ndarray:
        """Return the integers of a pass; rows beyond the chunks have one token, on the scratch page."""
        page_size, count = self.pages.page_size, len(chunks)
        width = max(len(chunk.sequence.blocks) for chunk in chunks)
        rows = np.zeros((size, PAGES + width), dtype=np.int32)
        rows[count:, SOURCE] = -1
        rows[count:, LENGTH] = 1
        rows[count:, PAGES] = self.pages.scratch
        rows[count:, SLOT] = self.pages.scratch * page_size
        rows[:count, TOKEN] = [chunk.sequence.token_ids[chunk.first] for chunk in chunks]
        rows[:count, SOURCE] = sources
        rows[:count, POSITION] = [chunk.first for chunk in chunks]
        rows[:count, LENGTH] = rows[:count, POSITION] + 1
        rows[:count, ADAPTER] = [chunk.sequence.adapter for chunk in chunks]
        for row, chunk in zip(rows, chunks, strict=False):
            row[PAGES : PAGES + len(chunk.sequence.blocks)] = chunk.sequence.blocks
        page, place = np.divmod(rows[:count, POSITION], page_size)
        rows[:count, SLOT] = rows[np.arange(count), PAGES + page] * page_size + place
        return rows

    def _pass(self, run: Pass, size: int) -> Tensor:
        rows = self._rows[:size]
        source = rows[:, SOURCE].long()
        tokens = torch.where(source < 0, rows[:, TOKEN].long(), self._last[source.clamp(min=0)])
        batch = PagedBatch(
            starts=tuple(range(size + 1)),
            lengths=(self.max_length,) * size,  # the kernel's tiling must suit every length
            starts_S1=torch.arange(size + 1, dtype=torch.int32, device=self.device),
            lengths_S=rows[:, LENGTH].contiguous(),
            tables_SP=rows[:, PAGES:],
            slots_T=rows[:, SLOT].long(),
        )
        positions = rows[:, POSITION].long().unsqueeze(0)
        return run(tokens.unsqueeze(0), PassCache(self.pages, batch, positions, adapters_T=rows[:, ADAPTER]))
