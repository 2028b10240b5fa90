"""Policy gradients: the model learns from its own answers, each weighted by how much better it is than others.

A document of a row is a prompt with its answer; labels are MASKED but on tokens that the model wrote. For token t of
answer i, with advantage A (`rl/advantages.py`) and log-probabilities of the token now (p), when the update began
(proximal, q), when it was sampled (behaviour, b) and by the reference (f), all at the sampling temperature:

    ratio       token: r = p / q               sequence: r = exp(mean over the answer of log p - log q)
    policy      ppo:   -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
                cispo: -stop(clip(r, 1 - clip_low, 1 + clip_high)) A log p
                none:  -r A
    correction  the policy term times stop(q / b), at most its limit, or 0 beyond the limits
    kl          k1: log p - log f      k2: (log p - log f)^2 / 2      k3: f / p - 1 - log(f / p)
    loss        normalized sum over tokens of policy + kl_weight kl - entropy * entropy of the distribution

    normalizer  sequence: 1 / answers, 1 / tokens of the answer      tokens: 1 / tokens of all answers
                constant: 1 / answers, 1 / normalizer_tokens

Gradients are those of the formulas as they stand. So k1 in the loss has an expected gradient of 0, that of k2 is the
divergence's own, and that of k3 is the divergence's the other way around, as in GRPO; all of this on-policy.

If one update follows each batch of rollouts, q is p without its gradient: r is 1, and its gradient that of log p.
"""

from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from headway.data.loader import MASKED, Batch
from headway.parallel.objective import DeviceBatch, PolicyObjective
from headway.recipe.policy import PolicyGradient
from headway.recipe.rl import Rl
from headway.train.objectives.base import Counts, by_token, labels_per_document, lengths_by_document, sums_by_document

WEIGHT = "weight"
"""Column [rows, documents]: 1 for an answer in the loss, 0 for padding and answers that are left out."""
ADVANTAGE = "advantage"
"""Column [rows, seq], as labels: the advantage of each token, the same for all of an answer but for REINFORCE++."""
BEHAVIOUR = "behaviour"
"""Column [rows, seq], as labels: log-probability of the label when it was sampled, by the sampler."""
PROXIMAL = "proximal"
"""Column [rows, seq], as labels: the same by the trainer, with the weights that the batch of rollouts begins with."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""Column [rows, seq], as labels: the same by the reference; preferences have another column, `reference`, per
document."""

LARGEST = 20.0
"""Differences of log-probabilities are cut at this, before an exponential overflows: of ratios, and their squares."""

RATIO_BOUNDS = (0.0, 0.5, 0.8, 0.95, 1.05, 1.2, 2.0, inf)
"""Of a histogram of importance ratios; 0.8 and 1.2 are PPO's clipping, and equal models are in the middle."""
RATIO_SHARES = {f"ratio/{low:g}-{high:g}": (low, high) for low, high in pairwise(RATIO_BOUNDS)}
"""Metrics of the histogram, with the ratios of each: from, and up to but without."""


class TokenValues(NamedTuple):
    """What is known of each label [B, L], 0 for labels outside of the loss."""

    weight: Tensor
    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantage: Tensor


class PolicyLoss(PolicyObjective):
    """The loss of a policy gradient, from the parts that the recipe names."""

    def __init__(self, recipe: PolicyGradient, rl: Rl) -> None:
        self.recipe, self.temperature, self.wants_entropy = recipe, rl.temperature, recipe.entropy > 0
        self.kl_in_loss = recipe.kl != "none" and recipe.kl_in == "loss"
        self.normalizer_tokens = recipe.normalizer_tokens or rl.max_tokens
        columns = {WEIGHT, ADVANTAGE, BEHAVIOUR}
        if needs_proximal(recipe, rl):
            columns.add(PROXIMAL)
        if self.kl_in_loss:
            columns.add(REFERENCE_LOGPROBS)
        self.columns = frozenset(columns)
        terms = ["policy_loss"] + ["kl_loss"] * self.kl_in_loss + ["entropy_loss"] * self.wants_entropy
        metrics = ["ratio", "ratio_squared", "mismatch", *RATIO_SHARES]
        metrics += ["clipped_low", "clipped_high"] if recipe.clip != "none" else []
        metrics += ["corrected"] if recipe.correction != "none" else []
        metrics += ["kl"] * self.kl_in_loss + ["entropy"] * self.wants_entropy
        self.terms = len(terms)
        self.names: tuple[str, ...] = (*terms, *metrics)

    def counts(self, batch: Batch) -> Counts:
        """Return the number of answers or of tokens for terms of the loss, and of tokens for metrics."""
        weight_BD = batch.columns[WEIGHT]
        tokens = float((labels_per_document(batch) * weight_BD).sum())
        normalizer = tokens if self.recipe.normalizer == "tokens" else float(weight_BD.sum())
        return (normalizer,) * self.terms + (tokens,) * (len(self.names) - self.terms)

    def measure(self, scores: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the sums; scores are log-probabilities [B, L], or with the entropy [B, L, 2].

        Metrics besides the loss's terms: the mean ratio p / b and its square, of which the effective sample size
        follows; the mean |log q - log b|, between trainer and sampler; the shares of tokens whose p / b is within each
        of RATIO_SHARES; shares of tokens whose ratio was clipped, and of those that the correction cut; the divergence;
        the entropy. All are means over tokens.
        """
        recipe = self.recipe
        logprobs_BL, entropy_BL = scores.unbind(-1) if self.wants_entropy else (scores, None)
        values = self._values(logprobs_BL, batch)
        ratio_BL = self._ratio(values, batch)
        policy_BL, metrics = self._policy(ratio_BL, values)
        terms, sampled = [policy_BL], values.current.detach() - values.behaviour
        importance_BL = _exp(sampled)
        seen = {"ratio": importance_BL, "ratio_squared": importance_BL.square()}
        seen["mismatch"] = (values.proximal - values.behaviour).abs()
        for name, (low, high) in RATIO_SHARES.items():
            seen[name] = ((importance_BL >= low) & (importance_BL < high)).to(importance_BL.dtype)
        seen |= metrics
        if self.kl_in_loss:
            reference_BL = _where(values.weight, batch.columns[REFERENCE_LOGPROBS])
            kl_BL = divergence(values.current, reference_BL, recipe.kl)
            terms.append(recipe.kl_weight * kl_BL)
            seen["kl"] = kl_BL.detach()
        if entropy_BL is not None:
            terms.append(-recipe.entropy * entropy_BL)
            seen["entropy"] = entropy_BL.detach()
        share_BL = self._shares(values.weight, batch)
        sums = [(_where(values.weight, term) * share_BL).sum() for term in terms]
        sums += [(_where(values.weight, seen[name]) * values.weight).sum() for name in self.names[self.terms :]]
        return torch.stack(sums)

    def _values(self, logprobs_BL: Tensor, batch: DeviceBatch) -> TokenValues:
        columns = batch.columns
        weight_BL = by_token(columns[WEIGHT].to(logprobs_BL.dtype), batch) * (batch.labels != MASKED)
        current_BL = _where(weight_BL, logprobs_BL)
        given = PROXIMAL in self.columns
        return TokenValues(
            weight=weight_BL,
            current=current_BL,
            proximal=_where(weight_BL, columns[PROXIMAL]) if given else current_BL.detach(),
            behaviour=_where(weight_BL, columns[BEHAVIOUR]),
            advantage=_where(weight_BL, columns[ADVANTAGE]),
        )

    def _ratio(self, values: TokenValues, batch: DeviceBatch) -> Tensor:
        log_ratio_BL = values.current - values.proximal
        if self.recipe.ratio == "sequence":
            means_BD = sums_by_document(log_ratio_BL, batch) / lengths_by_document(batch)
            log_ratio_BL = by_token(means_BD, batch)
        return _exp(log_ratio_BL)

    def _policy(self, ratio_BL: Tensor, values: TokenValues) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the policy term of each token, and what was clipped or corrected."""
        recipe, advantage_BL, seen = self.recipe, values.advantage, dict[str, Tensor]()
        clipped_BL = ratio_BL.clamp(1 - recipe.clip_low, 1 + recipe.clip_high)
        match recipe.clip:
            case "ppo":
                policy_BL = -torch.minimum(ratio_BL * advantage_BL, clipped_BL * advantage_BL)
            case "cispo":
                policy_BL = -clipped_BL.detach() * advantage_BL * values.current
            case "none":
                policy_BL = -ratio_BL * advantage_BL
        if recipe.clip != "none":
            # PPO's minimum keeps the gradient of a ratio that is worse than the bound.
            low, high = ratio_BL < 1 - recipe.clip_low, ratio_BL > 1 + recipe.clip_high
            pessimistic = recipe.clip == "ppo"
            seen["clipped_low"] = (low & (advantage_BL < 0) if pessimistic else low).to(ratio_BL.dtype)
            seen["clipped_high"] = (high & (advantage_BL > 0) if pessimistic else high).to(ratio_BL.dtype)
        if recipe.correction != "none":
            factor_BL, cut_BL = correction(values.proximal - values.behaviour, recipe)
            policy_BL = policy_BL * factor_BL
            seen["corrected"] = cut_BL.to(ratio_BL.dtype)
        return policy_BL, seen

    def _shares(self, weight_BL: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the factor of each token in the sums of the loss."""
        match self.recipe.normalizer:
            case "sequence":
                return weight_BL / by_token(lengths_by_document(batch), batch).clamp(min=1)
            case "tokens":
                return weight_BL
            case "constant":
                return weight_BL / self.normalizer_tokens


def needs_proximal(recipe: PolicyGradient, rl: Rl) -> bool:
    """Whether the trainer scores a batch of rollouts before its first update."""
    return rl.updates > 1 or rl.staleness > 0 or recipe.correction != "none"


def divergence(current: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Return the estimate of the divergence from the reference at each token; see the top."""
    d = current - reference
    match kind:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case _:
            return torch.expm1((-d).clamp(max=LARGEST)) + d


def correction(log_ratio: Tensor, recipe: PolicyGradient) -> tuple[Tensor, Tensor]:
    """Return the factor of each token's policy term from log q - log b, and where it was cut."""
    ratio, limit = _exp(log_ratio), recipe.correction_limit
    if recipe.correction == "truncate":
        return ratio.clamp(max=limit), ratio > limit
    outside = (ratio > limit) | (ratio < 1 / limit)
    return ratio.where(~outside, 0.0), outside


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST, LARGEST).exp()


def _where(weight: Tensor, values: Tensor) -> Tensor:
    """Return values where the weight is not 0; whatever else is there, such as NaN, is 0."""
    return values.where(weight > 0, 0.0)
