"""Advantages, penalties and statistics against formulas restated from the papers, and their properties."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.recipe.rl import Overlong
from headway.rl.advantages import (
    EPSILON,
    batch_advantages,
    divergences,
    effective_sample_share,
    overlong_penalty,
    pass_at_k,
    returns,
    zero_variance,
)
from headway.rl.advantages import advantages as advantages_in_groups

KINDS = ["group", "group-mean", "leave-one-out", "batch"]
REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.1, 0.1, 0.1, 0.1], [2.0, -1.0, 0.0, 3.0]]


def advantages(rewards, kind: str, present=None) -> np.ndarray:
    """Of every kind; in a batch, answers have one token each."""
    if kind != "batch":
        return advantages_in_groups(rewards, kind, present)
    rewards = np.asarray(rewards, dtype=np.float64)
    counts = np.ones(rewards.shape, dtype=bool) if present is None else np.asarray(present, dtype=bool)
    values = batch_advantages([*rewards.reshape(-1, 1)], [*counts.reshape(-1, 1)])
    return np.concatenate(values).reshape(rewards.shape)


def from_papers(rewards: list[list[float]], kind: str) -> list[list[float]]:
    """The formulas, one answer at a time; groups may differ in size."""
    everyone = [reward for group in rewards for reward in group]
    result = []
    for group in rewards:
        row = []
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :]
            if kind == "batch":
                among, spread = everyone, True
            elif kind == "leave-one-out":
                row.append(reward - statistics.fmean(others) if others else 0.0)
                continue
            else:
                among, spread = group, kind == "group"
            deviation = statistics.stdev(among) + EPSILON if spread and len(among) > 1 else 1.0
            row.append((reward - statistics.fmean(among)) / deviation)
        result.append(row)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_are_those_of_the_papers(kind):
    np.testing.assert_allclose(advantages(REWARDS, kind), from_papers(REWARDS, kind), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_are_not_present_change_nothing(kind):
    present = np.array([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 0]], dtype=bool)
    rewards = np.where(present, REWARDS, np.nan)
    found = advantages(rewards, kind, present)
    smaller = [row[keep].tolist() for row, keep in zip(rewards, present, strict=True)]
    expected = np.zeros_like(found)
    expected[present] = [value for row in from_papers(smaller, kind) for value in row]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [0.1, 0.0, -3.3, 1e9, 1 / 3])
def test_equal_rewards_have_no_advantage_at_all(kind, reward):
    assert not advantages(np.full((3, 7), reward), kind).any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_alone_has_no_advantage(kind):
    assert advantages([[5.0]], kind).tolist() == [[0.0]]
    if kind != "batch":
        assert advantages([[5.0], [1.0]], kind).tolist() == [[0.0], [0.0]]
    assert advantages([[5.0, 1.0]], kind, [[True, False]]).tolist() == [[0.0, 0.0]]


def test_the_batch_is_normalized_without_group_means():
    """REINFORCE++ without its baseline: a group that is better than others has positive advantages only."""
    assert (advantages([[1.0, 1.1], [0.0, 0.1]], "batch")[0] > 0).all()


def test_returns_and_their_normalization_are_those_of_reinforce_plus_plus():
    """A_t = r - beta sum over i >= t of KL_i, less the mean over all tokens of the batch, over their deviation; a
    token at a time, with one answer left out and tokens that an environment wrote."""
    rng = np.random.default_rng(3)
    rewards, lengths, weight = [1.0, 0.0, 0.5, 7.0], [3, 1, 6, 2], 0.3
    costs = [rng.normal(size=n) for n in lengths]
    counts = [np.ones(n, dtype=bool) for n in lengths]
    counts[3][:] = False
    counts[2][2:4] = False
    costs[2][2:4] = 0
    by_token = {
        (i, t): rewards[i] - weight * sum(float(costs[i][later]) for later in range(t, lengths[i]))
        for i in range(4)
        for t in range(lengths[i])
        if counts[i][t]
    }
    mean, deviation = statistics.fmean(by_token.values()), statistics.stdev(by_token.values())
    values = batch_advantages([returns(r, weight * c) for r, c in zip(rewards, costs, strict=True)], counts)
    for i, length in enumerate(lengths):
        expected = [(by_token[i, t] - mean) / (deviation + EPSILON) if (i, t) in by_token else 0 for t in range(length)]
        np.testing.assert_allclose(values[i], expected, rtol=1e-12, atol=1e-12)


def test_a_batch_counts_long_answers_by_their_tokens():
    values = batch_advantages([np.full(3, 1.0), np.full(1, 0.0)], [np.ones(3, dtype=bool), np.ones(1, dtype=bool)])
    assert sum(map(len, values)) == 4
    np.testing.assert_allclose(np.concatenate(values), [0.5, 0.5, 0.5, -1.5], rtol=1e-5)
    assert batch_advantages([], []) == []


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(AssertionError, match="not finite"):
        advantages([[1.0, math.nan]], "group")


groups = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=size, max_size=size), min_size=1, max_size=4
    )
)


@given(groups, st.sampled_from(KINDS), st.integers(-20, 20))
def test_a_shift_of_all_rewards_changes_nothing(rewards, kind, shift):
    np.testing.assert_allclose(
        advantages(np.array(rewards) + shift, kind), advantages(rewards, kind), rtol=1e-9, atol=1e-9
    )


@given(groups, st.sampled_from(KINDS))
def test_advantages_sum_to_zero(rewards, kind):
    sums = advantages(rewards, kind).sum(axis=None if kind == "batch" else 1)
    np.testing.assert_allclose(sums, 0, atol=1e-9)


@given(groups, st.sampled_from(KINDS), st.sampled_from([0.25, 0.5, 2.0, 16.0]))
def test_only_kinds_that_divide_by_the_deviation_are_invariant_to_scale(rewards, kind, scale):
    divides = kind in ("group", "batch")
    expected = advantages(rewards, kind) * (1.0 if divides else scale)
    # The least deviation here is about 0.1, so that the epsilon counts for less than 4e-5.
    np.testing.assert_allclose(advantages(np.array(rewards) * scale, kind), expected, rtol=1e-4, atol=1e-9)


@given(groups, st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_the_order_of_answers_does_not_matter(rewards, kind, random):
    order = list(range(len(rewards[0])))
    random.shuffle(order)
    permuted = advantages(np.array(rewards)[:, order], kind)
    np.testing.assert_allclose(permuted, advantages(rewards, kind)[:, order], rtol=1e-9, atol=1e-12)


@given(groups)
def test_leave_one_out_is_the_group_mean_stretched(rewards):
    size = len(rewards[0])
    np.testing.assert_allclose(
        advantages(rewards, "leave-one-out"), advantages(rewards, "group-mean") * size / (size - 1), atol=1e-12
    )


@given(groups)
def test_group_advantages_have_unit_deviation_or_are_zero(rewards):
    found = advantages(rewards, "group")
    deviations = found.std(axis=1, ddof=1)
    np.testing.assert_allclose(deviations[~zero_variance(rewards)], 1.0, rtol=1e-4)
    assert not found[zero_variance(rewards)].any()


# -- what is added to rewards


def test_the_overlong_penalty_is_that_of_dapo():
    overlong = Overlong(buffer=4, penalty=0.5)
    lengths = [1, 16, 17, 18, 19, 20, 25]
    expected = [0, 0, -0.125, -0.25, -0.375, -0.5, -0.5]
    assert overlong_penalty(lengths, 20, overlong).tolist() == expected
    assert overlong_penalty(lengths, 20, None).tolist() == [0.0] * 7


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_are_those_of_the_divergence_to_second_order(kind):
    """k1 and k3 are unbiased: over all tokens of a distribution they are its divergence; k2 nearly is."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=50)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, logits + 0.05 * rng.normal(size=50)))
    true = float((p * np.log(p / q)).sum())
    assert float((p * divergences(np.log(p), np.log(q), kind)).sum()) == pytest.approx(true, rel=0.05)
    assert not divergences([-1.0, -2.0], [-1.0, -2.0], kind).any()


# -- statistics


def test_groups_with_one_reward_or_one_answer_have_no_variance():
    rewards = [[1.0, 1.0], [0.0, 1.0], [0.0, 5.0], [9.0, 9.0]]
    present = [[True, True], [True, True], [True, False], [False, False]]
    assert zero_variance(rewards, present).tolist() == [True, False, True, True]
    assert advantages(np.zeros((2, 0)), "group").shape == (2, 0)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(correct, k):
    if k > len(correct):
        assert pass_at_k([correct], k) is None
        return
    subsets = list(itertools.combinations(correct, k))
    assert pass_at_k([correct], k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_leaves_out_absent_answers_and_small_groups():
    correct, present = [[True, True, False], [False, True, True]], [[False, True, True], [True, False, False]]
    assert pass_at_k(correct, 1, present) == pytest.approx((1 / 2 + 0) / 2)
    assert pass_at_k(correct, 2, present) == 1.0


def test_the_effective_sample_size_is_one_over_the_mean_square_of_normalized_weights():
    weights = np.array([0.5, 1.0, 2.5])
    kish = weights.sum() ** 2 / (weights**2).sum() / len(weights)
    assert effective_sample_share(weights.mean(), (weights**2).mean()) == pytest.approx(kish)
    assert effective_sample_share(1.0, 1.0) == 1.0
    assert effective_sample_share(0.0, 0.0) == 0.0
