"""A pass of the model whose sampled tokens are on their way from the device to the host."""

from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor

from headway.inference.outputs import TokenLogprobs
from headway.inference.runner import SampledTokens
from headway.inference.sampler import Sampled
from headway.inference.scheduler import Chunk
from headway.inference.sequence import UNKNOWN


class SampledPass:
    """A pass whose tokens are on their way to the host."""

    def __init__(
        self, chunks: Rows[Chunk], sampled: Sampled | None, version: int, counts: Rows[int] | None = None
    ) -> None:
        """`counts`: tokens of each chunk's sequence, if not one of each that samples."""
        self.version = version
        self.sequences = [chunk.sequence for chunk in chunks]
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        counts = counts or [1] * len(sampling)
        self.places = [(sequence, sequence.length, count) for sequence, count in zip(sampling, counts, strict=True)]
        """Sequences that get tokens, where, and how many."""
        self.tokens: SampledTokens | None = None
        self._values: list[Tensor | None] = []
        self._arrived = torch.cuda.Event() if sampled is not None and sampled.tokens_R.is_cuda else None
        if sampled is not None:
            tokens_RS = sampled.tokens_R.view(len(sampling), -1)
            self.tokens = SampledTokens(tokens_RS[:, -1], {s.arrival: row for row, s in enumerate(sampling)})
            logprobs_RS = None if sampled.logprobs_R is None else sampled.logprobs_R.view(tokens_RS.shape)
            values = tokens_RS, logprobs_RS, *sampled[2:]
            self._values = [None if x is None else x.to("cpu", non_blocking=True) for x in values]
        if self._arrived is not None:
            self._arrived.record()
        for sequence, _, count in self.places:
            sequence.token_ids += [UNKNOWN] * count
            sequence.unknown += count

    def values(self) -> list[Any]:
        """Wait for what was sampled, and return it as lists."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [None if x is None else x.tolist() for x in self._values]


def noted_logprobs(
    asked: int | None, values: list[Any], row: int, step: int
) -> tuple[TokenLogprobs | None, float | None]:
    """Return a token's log-probabilities, as far as they were asked for, and the mass that truncation kept."""
    if asked is None:
        return None, None
    _, logprobs, top_ids, top_logprobs, kept = values
    top = dict(zip(top_ids[row][:asked], top_logprobs[row][:asked], strict=True)) if asked else {}
    return TokenLogprobs(logprobs[row][step], top), 1.0 if kept is None else kept[row]
