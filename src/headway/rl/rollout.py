"""A rollout: one answer to a prompt, with what the sampler knew of it and what it is worth. Plain data, JSON lines."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """What an answer is worth."""

    reward: float
    """The weighted sum of the terms."""
    terms: Mapping[str, float]
    """Each term's own value, by name, without its weight."""
    error: str | None = None
    """The traceback, or what became of it, of a term that failed."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer, of one or several turns."""

    prompt: int
    """The prompt's number in the dataset."""
    sample: int
    """Which sample of the run the prompt is: its place in the order of prompts."""
    answer: int
    """Which answer of the group."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """All tokens after the prompt; in an environment, also those that the model did not write."""
    logprobs: tuple[float, ...]
    """The sampler's log-probability of each token, at the sampling temperature; 0 for tokens that it did not write."""
    written: tuple[tuple[int, int], ...]
    """Ranges of token_ids that the model wrote, and is trained on."""
    finish: str
    """`stop`, `length`, or what an environment ended with."""
    version: int
    """Step whose weights sampled it."""
    text: str
    """The answer as text, without special tokens."""
    score: AnswerScore | None = None
    """None until it has been scored."""
