"""Compares rollouts: with those that a replay sampled, and the sampler's log-probabilities with the trainer's. Pure.

Numbers are compared by their bits, so that NaN equals NaN and 0 differs from -0.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headway.rl.rollout import Rollout

Answer = tuple[int, int]
"""Sample of the run, and answer to it."""

DECADES = (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, inf)
"""Bounds of a histogram of differences."""


# -- a replay


@dataclass(frozen=True)
class RolloutDifference:
    """Where a replayed batch first differs from the stored one."""

    sample: int
    answer: int
    what: Literal["answer", "prompt", "token", "log-probability", "length", "finish", "text"]
    """`answer` is one that only one of the two has."""
    position: int | None
    """Of the token in the answer, or in the prompt."""
    stored: Any
    replayed: Any


@dataclass(frozen=True)
class Replay:
    """How a replayed batch compares with the stored one."""

    answers: int
    """In either of them."""
    equal_answers: int
    """Answers of which everything is equal."""
    tokens: int
    """In the stored answers."""
    first: RolloutDifference | None
    """By sample, then by answer, then by token; None if all is equal."""

    @property
    def equal(self) -> bool:
        """Whether everything is equal, bit for bit."""
        return self.first is None


def compare_rollouts(stored: Sequence[Rollout], replayed: Sequence[Rollout]) -> Replay:
    """Compare prompts, tokens, log-probabilities, ends and texts of all answers; rewards and versions are not."""
    before = {(rollout.sample, rollout.answer): rollout for rollout in stored}
    now = {(rollout.sample, rollout.answer): rollout for rollout in replayed}
    compared = [difference_of(key, before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())]
    different = [difference for difference in compared if difference is not None]
    return Replay(
        answers=len(compared),
        equal_answers=len(compared) - len(different),
        tokens=sum(len(rollout.token_ids) for rollout in stored),
        first=different[0] if different else None,
    )


def difference_of(key: Answer, stored: Rollout | None, replayed: Rollout | None) -> RolloutDifference | None:
    """Return where two answers first differ; None if they are equal."""
    if stored is None or replayed is None:
        return RolloutDifference(*key, "answer", None, stored is not None, replayed is not None)
    if (stored.prompt, stored.prompt_ids) != (replayed.prompt, replayed.prompt_ids):
        position = first_difference(stored.prompt_ids, replayed.prompt_ids)
        return RolloutDifference(*key, "prompt", position, stored.prompt, replayed.prompt)
    token = first_difference(stored.token_ids, replayed.token_ids)
    logprob = first_difference([*map(bits, stored.logprobs)], [*map(bits, replayed.logprobs)])
    shorter = min(len(stored.token_ids), len(replayed.token_ids))
    if logprob is not None and (token is None or logprob < token):
        before, now = (each.logprobs[logprob : logprob + 1] for each in (stored, replayed))
        return RolloutDifference(
            *key, "log-probability", logprob, *(values[0] if values else None for values in (before, now))
        )
    if token is not None and token < shorter:
        return RolloutDifference(*key, "token", token, stored.token_ids[token], replayed.token_ids[token])
    if token is not None:
        return RolloutDifference(*key, "length", token, len(stored.token_ids), len(replayed.token_ids))
    if stored.finish != replayed.finish:
        return RolloutDifference(*key, "finish", None, stored.finish, replayed.finish)
    if stored.text != replayed.text:
        return RolloutDifference(*key, "text", None, stored.text, replayed.text)
    return None


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """Return the first position at which two sequences differ, or one has ended; None if they are equal."""
    for position, (one_side, other_side) in enumerate(zip(left, right, strict=False)):
        if one_side != other_side:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def bits(number: float) -> bytes:
    """Return the bits of a float64."""
    return struct.pack("<d", number)


# -- sampler and trainer


@dataclass(frozen=True)
class TokenMismatch:
    """A token whose log-probability is not the same by the sampler and by the trainer."""

    sample: int
    answer: int
    position: int
    """In the answer."""
    token: int
    sampler: float
    trainer: float
    difference: float
    """The absolute one; infinite if either is not a number."""


@dataclass(frozen=True)
class Mismatch:
    """The sampler's log-probabilities beside the trainer's, over all tokens that the model wrote."""

    tokens: int
    equal: int
    """Tokens with the same bits."""
    largest: float
    mean: float
    """Of |trainer - sampler|, as `largest`."""
    histogram: tuple[tuple[float, float, int], ...]
    """From, to, and how many of the unequal tokens differ by as much."""
    worst: tuple[TokenMismatch, ...]
    """The tokens that differ most, largest first."""

    @property
    def share_equal(self) -> float:
        """Tokens with the same bits, as a share of all; 1 if there are none."""
        return self.equal / self.tokens if self.tokens else 1.0


def mismatch_of(rollouts: Sequence[Rollout], trainer: Mapping[Answer, Sequence[float]], worst: int = 10) -> Mismatch:
    """Compare stored log-probabilities with the trainer's, given by answer for every token after the prompt.

    Tokens that the model did not write are left out.
    """
    places = [
        (rollout, position) for rollout in rollouts for first, end in rollout.written for position in range(first, end)
    ]
    sampled = np.array([rollout.logprobs[position] for rollout, position in places], dtype=np.float64)
    trained = np.array([trainer[r.sample, r.answer][position] for r, position in places], dtype=np.float64)
    equal = sampled.view(np.int64) == trained.view(np.int64)
    with np.errstate(invalid="ignore"):
        differences = np.where(equal, 0.0, np.abs(trained - sampled))
    differences = np.nan_to_num(differences, nan=inf, posinf=inf)
    order = np.argsort(-differences, kind="stable")[:worst]
    return Mismatch(
        tokens=len(places),
        equal=int(equal.sum()),
        largest=float(differences.max(initial=0.0)),
        mean=float(differences.mean()) if len(places) else 0.0,
        histogram=_histogram(differences[~equal]),
        worst=tuple(
            TokenMismatch(
                places[place][0].sample, places[place][0].answer, places[place][1],
                places[place][0].token_ids[places[place][1]],
                float(sampled[place]), float(trained[place]), float(differences[place]),
            )
            for place in order
            if not equal[place]
        ),
    )  # fmt: skip


def _histogram(differences: npt.NDArray[np.float64]) -> tuple[tuple[float, float, int], ...]:
    """Return how many differences are in each decade; the last one has those that are infinite."""
    return tuple(
        (low, high, int(((differences >= low) & ((differences < high) | (high == inf))).sum()))
        for low, high in pairwise(DECADES)
    )
