"""Log-probabilities of prompts, collected chunk by chunk until the first token of an answer returns them."""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.inference.outputs import TokenLogprobs
from headway.inference.sampler import Sampler
from headway.inference.scheduler import Chunk
from headway.inference.sequence import Sequence

ROWS_AT_ONCE = 256
"""Rows of logits that are in memory at once."""


class PromptLogprobs:
    """Log-probabilities of the prompts that are being computed, by arrival of their sequences."""

    def __init__(self, logits_of: Callable[[Tensor], Tensor], sampler: Sampler) -> None:
        self._logits_of, self._sampler = logits_of, sampler
        self._rows: dict[int, list[TokenLogprobs | None]] = {}

    def note(self, chunk: Chunk, x_LD: Tensor) -> None:
        """Note the log-probabilities that a chunk gives to the prompt tokens after each of its own."""
        sequence = chunk.sequence
        noted = self._rows.setdefault(sequence.arrival, [None])
        first = len(noted) - 1  # the token that predicts the next one to note; more after a preemption
        last = min(chunk.first + chunk.count, len(sequence.prompt_ids) - 1)
        for low in range(max(first, chunk.first), last, ROWS_AT_ONCE):
            high = min(low + ROWS_AT_ONCE, last)
            logits = self._logits_of(x_LD[low - chunk.first : high - chunk.first])
            following = torch.tensor(sequence.prompt_ids[low + 1 : high + 1], device=logits.device)
            rows = [x.tolist() for x in self._sampler.prompt_logprobs(logits, following, sequence.params)]
            noted += [TokenLogprobs(p, dict(zip(ids, tops, strict=True))) for p, ids, tops in zip(*rows, strict=True)]

    def take(self, sequence: Sequence) -> tuple[TokenLogprobs | None, ...] | None:
        """Return a prompt's log-probabilities, once; None if there are none."""
        if not self._rows:  # as is usual
            return None
        noted = self._rows.pop(sequence.arrival, None)
        return None if noted is None else tuple(noted)

    def drop(self, sequence: Sequence) -> None:
        """Forget those of a sequence that has ended."""
        self._rows.pop(sequence.arrival, None)
