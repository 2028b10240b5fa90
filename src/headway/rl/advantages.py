"""Advantages of answers from their rewards, and statistics of rewards. G groups, one per prompt, of S answers.

    group          (r - mean) / (std + 1e-6) of the group's rewards                 GRPO, DAPO, GSPO, CISPO
    group-mean     r - mean                                                         Dr. GRPO
    leave-one-out  r - mean of the group's other rewards = n / (n - 1) (r - mean)   RLOO
    batch          (R - mean) / (std + 1e-6) of the returns R of all tokens         REINFORCE++

The return of a token is its answer's reward less what is taken off from that token on, such as a divergence.

Standard deviations are unbiased (n - 1), as in TRL and verl; papers leave it open. Equal rewards have advantages of
exactly 0: the mean of equal numbers may be off by rounding, which a division by 1e-6 would turn into a direction.
An answer without others to compare it with has an advantage of 0, and so has one that is not present.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from headway.recipe.rl import Overlong

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Kind = Literal["group", "group-mean", "leave-one-out"]
Estimator = Literal["none", "k1", "k2", "k3"]

EPSILON = 1e-6
"""Added to standard deviations."""


def advantages(rewards_GS: npt.ArrayLike, kind: Kind, present_GS: npt.ArrayLike | None = None) -> Floats:
    """Return the advantage of each answer [G, S], in float64; 0 for those that are not present, whatever their
    reward."""
    rewards_GS, present_GS = _checked(rewards_GS, present_GS)
    return _centered(rewards_GS, present_GS, kind)


def returns(reward: float, taken_off_T: Floats) -> Floats:
    """Return the reward less what is taken off from each token on [T]."""
    from_here_T: Floats = reward - np.cumsum(taken_off_T[::-1])[::-1]
    return from_here_T


def batch_advantages(returns: Sequence[Floats], counts: Sequence[Flags]) -> list[Floats]:
    """Return the advantages of each answer's tokens from their returns, normalized over all tokens that count; 0 for
    the others. It needs the answers of all workers."""
    flat_1T, counts_1T = (np.concatenate([*parts, np.zeros(0)])[None] for parts in (returns, counts))
    values_1T = advantages(flat_1T, "group", counts_1T)
    return np.split(values_1T[0], np.cumsum([len(part) for part in returns])[:-1]) if returns else []


def _centered(rewards_GS: Floats, present_GS: Flags, kind: Kind) -> Floats:
    """Return the advantages within each row."""
    counts_G1 = present_GS.sum(axis=1, keepdims=True)
    means_G1 = rewards_GS.sum(axis=1, keepdims=True) / np.maximum(counts_G1, 1)
    learns_GS = present_GS & ~zero_variance(rewards_GS, present_GS)[:, None]
    centered_GS = np.where(learns_GS, rewards_GS - means_G1, 0.0)
    others_G1 = np.maximum(counts_G1 - 1, 1)
    if kind == "leave-one-out":
        centered_GS *= counts_G1 / others_G1
    if kind == "group":
        centered_GS /= np.sqrt(np.square(centered_GS).sum(axis=1, keepdims=True) / others_G1) + EPSILON
    return centered_GS


def zero_variance(rewards_GS: npt.ArrayLike, present_GS: npt.ArrayLike | None = None) -> Flags:
    """Return the groups [G] whose answers all have the same reward, or that have fewer than two: nothing to compare."""
    rewards_GS, present_GS = _checked(rewards_GS, present_GS)
    if not rewards_GS.shape[1]:
        return np.ones(len(rewards_GS), dtype=np.bool_)
    highest_G = np.where(present_GS, rewards_GS, -np.inf).max(axis=1)
    lowest_G = np.where(present_GS, rewards_GS, np.inf).min(axis=1)
    return np.asarray(highest_G <= lowest_G)


def _checked(rewards_GS: npt.ArrayLike, present_GS: npt.ArrayLike | None) -> tuple[Floats, Flags]:
    """Return rewards in float64, 0 where there is no answer, and which answers there are."""
    rewards = np.asarray(rewards_GS, dtype=np.float64)
    present = np.ones(rewards.shape, dtype=np.bool_) if present_GS is None else np.asarray(present_GS, dtype=np.bool_)
    assert rewards.ndim == 2, f"rewards have shape {rewards.shape}, not [groups, answers]"
    assert present.shape == rewards.shape, f"{present.shape} flags of {rewards.shape} rewards"
    assert np.isfinite(rewards[present]).all(), "a reward is not finite: scoring replaces those"
    return np.where(present, rewards, 0.0), present


# -- what is added to rewards


def overlong_penalty(lengths: npt.ArrayLike, max_tokens: int, overlong: Overlong | None) -> Floats:
    """Return what is added to the rewards of answers with these numbers of tokens: 0 up to max_tokens - buffer, then
    linearly down to -penalty at max_tokens and beyond (DAPO)."""
    lengths = np.asarray(lengths, dtype=np.float64)
    if overlong is None:
        return np.zeros_like(lengths)
    excess = lengths - (max_tokens - overlong.buffer)
    return -overlong.penalty * np.clip(excess / overlong.buffer, 0.0, 1.0)


def divergences(logprobs: npt.ArrayLike, reference: npt.ArrayLike, kind: Estimator) -> Floats:
    """Return the estimate of the divergence from the reference at each token.

    With d = log p - log p_ref: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d.
    """
    d = np.asarray(logprobs, dtype=np.float64) - np.asarray(reference, dtype=np.float64)
    match kind:
        case "none":
            return np.zeros_like(d)
        case "k1":
            return d
        case "k2":
            return np.square(d) / 2
        case "k3":
            return np.expm1(-d) + d


# -- statistics


def pass_at_k(correct_GS: npt.ArrayLike, k: int, present_GS: npt.ArrayLike | None = None) -> float | None:
    """Return the probability that at least one of k answers is correct: the mean over groups with at least k answers
    of the unbiased 1 - C(n - c, k) / C(n, k) for c correct answers among n. None if no group has as many."""
    correct = np.asarray(correct_GS, dtype=np.bool_)
    present = np.ones(correct.shape, dtype=np.bool_) if present_GS is None else np.asarray(present_GS, dtype=np.bool_)
    estimates = [
        _pass_at_k(int(n), int(c), k)
        for n, c in zip(present.sum(axis=1), (correct & present).sum(axis=1), strict=True)
        if n >= k
    ]
    return float(np.mean(estimates)) if estimates else None


def _pass_at_k(n: int, c: int, k: int) -> float:
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def effective_sample_share(ratio: float, ratio_squared: float) -> float:
    """Return the effective sample size as a share of the tokens, from the means of importance ratios and their squares:
    1 where the model that learns is the one that sampled."""
    return ratio * ratio / ratio_squared if ratio_squared > 0 else 0.0
