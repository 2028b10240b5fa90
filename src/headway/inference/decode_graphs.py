"""CUDA graphs of decoding: a pass with one token per sequence is one launch instead of hundreds, and samples, too.

There is a graph per number of sequences, captured when the engine starts; a batch takes the next larger one, and the
rows beyond it attend to a scratch page. All that a pass needs is one row of integers per sequence, copied to the device
at once (`kernels/decode_rows.py`). The pass advances the rows, so that it can be replayed: several tokens of every
sequence come of one round-trip with the host.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headway.inference.kv_cache import PagedKvCache, PassCache
from headway.inference.sampler import Sampled, mixed_seeds
from headway.inference.scheduler import Chunk
from headway.kernels import decode_rows
from headway.kernels.decode_rows import (
    ADAPTER,
    DRAW,
    GENERATED,
    LEFT,
    LOGPROB,
    PAGES,
    POSITION,
    SEED,
    SOURCE,
    TOKEN,
)
from headway.kernels.paged_batch import PagedBatch
from headway.kernels.pointer_table import uploaded
from headway.kernels.sampling import draw, new_sums

MOST_STEPS = 8
"""Passes without the host at most: a token is at most so many passes late."""
Pass = Callable[[Tensor, PassCache], Tensor]
"""From tokens [1, T] and the cache to what the runner returns of them."""


def graph_sizes(most: int) -> list[int]:
    """Return the numbers of sequences that have a graph: powers of two, and from 32 on every 16, up to `most`."""
    return sorted({size for size in (1, 2, 4, 8, 16, *range(32, most, 16)) if size < most} | {most})


class DecodeGraphs:
    """The graphs of a model."""

    def __init__(
        self,
        pages: PagedKvCache,
        max_sequences: int,
        max_length: int,
        device: torch.device,
        vocabulary: int,
        *,
        counts_padding: bool = False,
    ) -> None:
        """Tokens from `vocabulary` on are padding; log-probabilities count them if `counts_padding`."""
        self.pages, self.max_length, self.device = pages, max_length, device
        self.vocabulary, self.counts_padding = vocabulary, counts_padding
        self.sizes = graph_sizes(max_sequences)
        width = PAGES - (-max_length // pages.page_size)
        self._rows = torch.zeros(max_sequences, width + width % 2, dtype=torch.int32, device=device)
        self._last, self._positions, self._slots, self._tokens = (
            torch.zeros(max_sequences, dtype=torch.int64, device=device) for _ in range(4)
        )
        """Tokens that the last pass sampled; positions, slots and tokens of this one."""
        self._lengths, self._draws = (torch.zeros(max_sequences, dtype=torch.int32, device=device) for _ in range(2))
        self._numbers = torch.arange(max_sequences + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros_like(self._numbers)
        self._logprobs = torch.zeros(max_sequences, dtype=torch.float32, device=device)
        self._all_tokens = torch.zeros(MOST_STEPS, max_sequences, dtype=torch.int64, device=device)
        self._all_logprobs = torch.zeros(MOST_STEPS, max_sequences, dtype=torch.float32, device=device)
        self._replays: dict[int, Callable[[], Tensor]] = {}

    @torch.inference_mode()
    def capture(self, run: Pass, logits: Callable[[Tensor], Tensor]) -> None:
        """Capture all graphs, the largest first: the others reuse its memory. Without a GPU, passes are just run."""
        if self.device.type != "cuda":
            self._replays = {size: partial(self._pass, run, logits, size) for size in self.sizes}
            return
        pool = None
        stream = torch.cuda.Stream()
        for size in reversed(self.sizes):
            self._idle_rows(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._pass(run, logits, size)  # kernels are compiled, and libraries take their workspaces
            torch.cuda.current_stream().wait_stream(stream)
            self._idle_rows(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                out = self._pass(run, logits, size)
            pool = graph.pool()
            self._replays[size] = partial(_replay, graph, out)

    def takes(self, chunks: Rows[Chunk]) -> bool:
        """Whether there is a graph for a batch."""
        return len(chunks) <= self.sizes[-1] and all(c.count == 1 and not c.sequence.long for c in chunks)

    def run(self, chunks: Rows[Chunk], sources: Rows[int], last_R: Tensor | None) -> Tensor:
        """Replay the graph of a batch once; return what the runner's pass returns."""
        return self._prepared(chunks, sources, last_R, [1] * len(chunks))()[: len(chunks)]

    def decode(self, chunks: Rows[Chunk], sources: Rows[int], last_R: Tensor | None, counts: Rows[int]) -> Sampled:
        """Sample so many tokens of each sequence: tokens and log-probabilities are [R, most]."""
        steps = max(counts)
        assert 0 < steps <= MOST_STEPS, "there is room for so many"
        replay = self._prepared(chunks, sources, last_R, counts)
        for _ in range(steps):
            replay()
        here, kept = (slice(steps), slice(len(chunks))), (self._all_tokens, self._all_logprobs)
        tokens_RS, logprobs_RS = (x[here].t().clone(memory_format=torch.contiguous_format) for x in kept)
        return Sampled(tokens_RS, logprobs_RS)  # copies: the next pass writes there

    def _prepared(
        self, chunks: Rows[Chunk], sources: Rows[int], last_R: Tensor | None, counts: Rows[int]
    ) -> Callable[[], Tensor]:
        size = next(size for size in self.sizes if size >= len(chunks))
        if last_R is not None:
            self._last[: len(last_R)].copy_(last_R)
        rows = uploaded(self.rows(chunks, sources, counts, size), self.device)
        self._rows[:size, : rows.shape[1]] = rows
        return self._replays[size]

    def rows(self, chunks: Rows[Chunk], sources: Rows[int], counts: Rows[int], size: int) -> np.ndarray:
        """Return the integers of passes, `counts` of each chunk; rows beyond the chunks have one token, on the scratch
        page."""
        count = len(chunks)
        sequences = [chunk.sequence for chunk in chunks]
        width = max(len(sequence.blocks) for sequence in sequences)
        rows = np.zeros((size, PAGES + width), dtype=np.int32)
        rows[count:, SOURCE] = -1
        rows[count:, PAGES] = self.pages.scratch
        real = rows[:count]
        real[:, TOKEN] = [chunk.sequence.token_ids[chunk.first] for chunk in chunks]
        real[:, SOURCE] = sources
        real[:, POSITION] = [chunk.first for chunk in chunks]
        real[:, ADAPTER] = [sequence.adapter for sequence in sequences]
        real[:, SEED : SEED + 2] = mixed_seeds([sequence.seed for sequence in sequences]).view(np.int32).reshape(-1, 2)
        real[:, GENERATED] = [sequence.generated for sequence in sequences]
        temperatures = np.ones((size, 2), dtype=np.float32)
        temperatures[:count] = [(s.params.temperature, s.params.logprob_temperature) for s in sequences]
        rows[:, DRAW : LOGPROB + 1] = temperatures.view(np.int32)
        real[:, LEFT] = counts
        for row, sequence in zip(real, sequences, strict=True):
            row[PAGES : PAGES + len(sequence.blocks)] = sequence.blocks
        return rows

    def _idle_rows(self, size: int) -> None:
        """Have all rows fill up a batch."""
        self._rows.zero_()
        self._rows[:size, SOURCE] = -1
        self._rows[:size, PAGES] = self.pages.scratch
        self._rows.view(torch.float32)[:, DRAW : LOGPROB + 1] = 1

    def _pass(self, run: Pass, logits: Callable[[Tensor], Tensor], size: int) -> Tensor:
        rows = self._rows[:size]
        tokens, positions, slots, lengths, draws, last, logprobs = (
            x[:size]
            for x in (
                self._tokens, self._positions, self._slots, self._lengths, self._draws, self._last, self._logprobs
            )
        )  # fmt: skip
        decode_rows.begin(
            rows, self._last, tokens, positions, slots, lengths, draws, self.pages.page_size, self.pages.scratch
        )
        temperatures, seeds, tables = decode_rows.views(rows)
        batch = PagedBatch(
            starts=tuple(range(size + 1)),
            lengths=(self.max_length,) * size,  # the kernel's tiling must suit every length
            starts_S1=self._numbers[: size + 1],
            lengths_S=lengths,
            tables_SP=tables,
            slots_T=slots,
            _programs={1: (self._numbers[:size], self._zeros[:size])},
        )
        cache = PassCache(self.pages, batch, positions.unsqueeze(0), adapters_T=rows[:, ADAPTER])
        x_TD = run(tokens.unsqueeze(0), cache)
        scores_TV = logits(x_TD)
        width = scores_TV.shape[1] if self.counts_padding else self.vocabulary
        sums = new_sums(size, width, self.device)
        draw(scores_TV, self.vocabulary, width, temperatures, seeds, draws, last, logprobs, sums)
        decode_rows.keep(rows, last, logprobs, self._all_tokens, self._all_logprobs)
        return x_TD


def _replay(graph: torch.cuda.CUDAGraph, out: Tensor) -> Tensor:
    graph.replay()
    return out
