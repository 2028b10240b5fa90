"""Comparing rollouts: where two batches first differ, and how far the sampler is from the trainer."""

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.rl.compare import RolloutDifference, compare_rollouts, mismatch_of
from headway.rl.rollout import Rollout


def rollout(sample: int = 0, answer: int = 0, length: int = 4, **changes: Any) -> Rollout:
    made = Rollout(
        prompt=7, sample=sample, answer=answer, prompt_ids=(1, 2, 3), token_ids=tuple(range(10, 10 + length)),
        logprobs=tuple(-1.0 - place / 8 for place in range(length)), written=((0, length),), finish="stop", version=0,
        text="text",
    )  # fmt: skip
    return replace(made, **changes)


def next_up(number: float) -> float:
    """The float64 whose bits are one more."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return float(struct.unpack("<d", struct.pack("<q", bits + 1))[0])


BATCH = [rollout(sample, answer) for sample in (0, 1) for answer in (0, 1)]


def test_equal_batches_are_equal_in_any_order() -> None:
    result = compare_rollouts(BATCH, BATCH[::-1])
    assert result.equal
    assert (result.answers, result.equal_answers, result.tokens) == (4, 4, 16)


@given(st.integers(0, 3), st.integers(0, 3))
def test_one_changed_bit_of_a_log_probability_is_found(place: int, token: int) -> None:
    changed = list(BATCH[place].logprobs)
    changed[token] = next_up(changed[token])
    batch = [*BATCH[:place], replace(BATCH[place], logprobs=tuple(changed)), *BATCH[place + 1 :]]
    result = compare_rollouts(BATCH, batch)
    assert (result.answers, result.equal_answers) == (4, 3)
    stored = BATCH[place].logprobs[token]
    assert result.first == RolloutDifference(place // 2, place % 2, "log-probability", token, stored, changed[token])


@pytest.mark.parametrize(
    ("changes", "what", "position"),
    [
        ({"prompt_ids": (1, 9, 3)}, "prompt", 1),
        ({"prompt": 8}, "prompt", None),
        ({"logprobs": (-1.0, -1.125)}, "log-probability", 2),
        ({"token_ids": (10, 11, 99, 13)}, "token", 2),
        ({"token_ids": (10, 11, 99, 13), "logprobs": (-1.0, -1.125, -5.0, -6.0)}, "token", 2),
        ({"token_ids": (10, 11, 99, 13), "logprobs": (-1.0, -3.0, -5.0, -6.0)}, "log-probability", 1),
        ({"token_ids": (10, 11, 12), "logprobs": (-1.0, -1.125, -1.25)}, "length", 3),
        ({"finish": "length"}, "finish", None),
        ({"text": "another"}, "text", None),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Any], what: str, position: int | None) -> None:
    first = compare_rollouts(BATCH, [*BATCH[:2], rollout(1, 0, **changes), BATCH[3]]).first
    assert first is not None
    assert (first.sample, first.answer, first.what, first.position) == (1, 0, what, position)


def test_an_answer_that_only_one_batch_has_is_a_difference() -> None:
    assert compare_rollouts(BATCH, BATCH[:3]).first == RolloutDifference(1, 1, "answer", None, True, False)
    assert compare_rollouts(BATCH[1:], BATCH).first == RolloutDifference(0, 0, "answer", None, False, True)


def test_bits_are_compared_rather_than_values() -> None:
    nan, zero = rollout(length=2, logprobs=(math.nan, 0.0)), rollout(length=2, logprobs=(math.nan, -0.0))
    assert compare_rollouts([nan], [nan]).equal
    first = compare_rollouts([nan], [zero]).first
    assert first is not None
    assert first.position == 1


# -- sampler and trainer


def trainer(*rollouts: Rollout) -> dict[tuple[int, int], list[float]]:
    return {(each.sample, each.answer): list(each.logprobs) for each in rollouts}


def test_the_same_bits_are_no_mismatch() -> None:
    result = mismatch_of(BATCH, trainer(*BATCH))
    assert (result.tokens, result.equal, result.largest, result.mean) == (16, 16, 0.0, 0.0)
    assert result.worst == ()
    assert sum(count for *_, count in result.histogram) == 0


@given(st.lists(st.floats(-8, 8, width=32), min_size=16, max_size=16))
def test_statistics_are_those_of_all_differences(shifts: list[float]) -> None:
    other = trainer(*BATCH)
    for number, shift in enumerate(shifts):
        other[BATCH[number // 4].sample, BATCH[number // 4].answer][number % 4] += shift
    stored = np.array([each.logprobs for each in BATCH]).reshape(-1)
    differences = np.abs(stored - np.array([other[each.sample, each.answer] for each in BATCH]).reshape(-1))
    result = mismatch_of(BATCH, other, worst=3)
    assert result.equal == (differences == 0).sum()
    assert result.largest == differences.max()
    assert math.isclose(result.mean, differences.mean())
    assert sum(count for *_, count in result.histogram) == result.tokens - result.equal
    for low, high, count in result.histogram:
        assert count == sum(low <= difference < high for difference in differences if difference)
    expected = sorted(filter(None, differences), reverse=True)[:3]
    assert [token.difference for token in result.worst] == expected


def test_tokens_that_the_model_did_not_write_are_left_out() -> None:
    turns = rollout(length=6, written=((0, 2), (4, 6)), logprobs=(-1.0, -1.0, 0.0, 0.0, -1.0, -1.0))
    result = mismatch_of([turns], {(0, 0): [-1.0, -1.0, -9.0, -9.0, -1.0, -1.5]})
    assert (result.tokens, result.equal, result.largest) == (4, 3, 0.5)
    assert [(token.position, token.token) for token in result.worst] == [(5, 15)]


def test_a_trainer_that_is_not_a_number_is_the_largest_mismatch() -> None:
    result = mismatch_of([BATCH[0]], {(0, 0): [-1.0, math.nan, -1.25, -1.0]})
    assert result.largest == math.inf
    assert [token.position for token in result.worst] == [1, 3]
    assert result.histogram[-1][2] == 1


def test_no_tokens_are_no_mismatch() -> None:
    assert mismatch_of([], {}).share_equal == 1.0
