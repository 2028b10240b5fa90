"""What comes out of an engine: tokens with their log-probabilities, ends, and outputs that come whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headway.inference.sequence import FinishReason


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a token, and of the likeliest ones in its place."""

    logprob: float
    top: Mapping[int, float]


class WholeOutput(NamedTuple):
    """All tokens of a sequence that has ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Empty if they were not asked for."""


class Output(NamedTuple):
    """A token of a sequence, or its end."""

    request_id: str
    index: int
    token_id: int | None
    """None where a sequence ends without another token."""
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    kept: float | None = None
    """Probability mass that truncation kept."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """With the first token: those of the prompt; the first token has none."""
    version: int = 0
    """Of the weights that sampled it."""
    whole: WholeOutput | None = None
    """In place of a token: all of them, with the end of a request that asked for this."""
