"""Objectives of reinforcement learning: presets of named parts, each of which a recipe may replace.

advantage    rewards of a group of answers -> how much better each answer is; or returns of tokens, how much each token
ratio        probabilities now / when the update began, per token or per sequence
clip         how far the ratio counts
normalizer   what the sum over tokens is divided by
kl           distance to the reference model, in the loss or in the reward
correction   the sampler's probabilities against the trainer's
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headway.recipe.section import DERIVED, Positive, Section

Weight = Annotated[float, Field(ge=0, le=100)]
Margin = Annotated[float, Field(gt=0)]

PARTS: dict[str, Any] = {
    "advantage": "group",
    "ratio": "token",
    "clip": "ppo",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "normalizer": "sequence",
    "kl": "none",
    "kl_weight": 0.0,
    "kl_in": "loss",
    "correction": "none",
}
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr-grpo": {"advantage": "group-mean", "normalizer": "constant"},
    "dapo": {"clip_high": 0.28, "normalizer": "tokens"},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip": "cispo", "clip_low": 1.0, "clip_high": 4.0, "normalizer": "tokens"},
    "rloo": {"advantage": "leave-one-out", "clip": "none", "normalizer": "constant", "normalizer_tokens": 1},
    "reinforce++": {"advantage": "batch", "normalizer": "tokens", "kl": "k1", "kl_weight": 0.01, "kl_in": "reward"},
}
"""What each preset has besides PARTS."""


def derived_correction(objective: Any, rl: Any) -> str | None:
    """Return the default `correction` of the sections of a recipe, as they were written; None if one is given.

    With staleness, weights have moved since answers were sampled. Clipping does not see that: its ratios begin with the
    update.
    """
    if not isinstance(objective, Mapping) or objective.get("kind") not in PRESETS or objective.get("correction"):
        return None
    staleness = rl.get("staleness", 0) if isinstance(rl, Mapping) else getattr(rl, "staleness", 0)
    return "truncate" if isinstance(staleness, int) and staleness >= 1 else "none"


class PolicyGradient(Section):
    """Reinforcement learning on the model's own answers, which `[rl]` samples and scores."""

    kind: Literal["grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++"]
    """Preset of the parts below; `headway recipe show` prints them."""
    advantage: Literal["group", "group-mean", "leave-one-out", "batch"] = DERIVED
    """Of an answer: its reward less the group's mean, over the group's standard deviation (GRPO); without that division
    (Dr. GRPO); less the mean of the group's other answers (RLOO); or, with batch, the return of each token, normalized
    over all tokens of the batch (REINFORCE++)."""
    ratio: Literal["token", "sequence"] = DERIVED
    """Importance ratio of each token, or of each answer: the geometric mean over its tokens (GSPO)."""
    clip: Literal["ppo", "cispo", "none"] = DERIVED
    """PPO's pessimistic clipping of the objective; CISPO's, which clips the detached ratio and keeps every token's
    gradient; or none."""
    clip_low: Margin = DERIVED
    """The ratio is clipped at 1 - clip_low."""
    clip_high: Margin = DERIVED
    """The ratio is clipped at 1 + clip_high; larger than clip_low in DAPO's clip-higher."""
    normalizer: Literal["sequence", "tokens", "constant"] = DERIVED
    """Mean over each answer's tokens, then over answers; mean over all tokens of the batch; or the sum over tokens
    divided by normalizer_tokens, then the mean over answers (Dr. GRPO)."""
    normalizer_tokens: Positive | None = None
    """Of normalizer = "constant"; by default rl.max_tokens."""
    kl: Literal["none", "k1", "k2", "k3"] = DERIVED
    """Estimator of the divergence from the reference, the model as the run began with it."""
    kl_weight: Weight = DERIVED
    """Its weight (beta)."""
    kl_in: Literal["loss", "reward"] = DERIVED
    """Whether the divergence is a term of the loss, or taken off the rewards before advantages: with advantage =
    "batch" at each token, so off the returns of the tokens up to there; with the others as a whole."""
    entropy: Weight = 0.0
    """Weight of the entropy of the model's distribution at each token, which is maximized."""
    correction: Literal["none", "truncate", "mask"] = DERIVED
    """Correction of the probabilities that answers were sampled with by the trainer's when the update began: multiply
    each token's policy term by their ratio, at most correction_limit; or, with mask, by 0 where it is above that or
    below one over it. By default truncate if rl.staleness is 1 or more, else none."""
    correction_limit: Annotated[float, Field(gt=1)] = 2.0
    """See correction."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        defaults = PARTS | PRESETS.get(str(values.get("kind")), {})
        return values | {key: value for key, value in defaults.items() if values.get(key) is None}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.clip == "ppo" and self.clip_low >= 1:
            raise ValueError(f"clip_low is {self.clip_low}, which clips nothing: use less than 1")
        if self.kl != "none" and self.kl_weight == 0:
            raise ValueError(f'kl_weight is 0, so kl = "{self.kl}" has no effect: set a weight, such as 0.04')
        if self.kl == "none" and self.kl_weight > 0:
            raise ValueError(f'kl_weight is {self.kl_weight}, but kl is "none": use "k3", or leave kl_weight out')
        return self
