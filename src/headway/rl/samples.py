"""A batch of rollouts for people: its groups with what a step learns from each answer. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.recipe import Recipe
from headway.recipe.policy import PolicyGradient
from headway.rl.groups import Group, advantages_of, chosen, groups_of, metrics_of, shares
from headway.rl.rollout import Rollout
from headway.rl.rollout_files import BatchHeader


@dataclass(frozen=True)
class SampledGroup:
    """The answers to one prompt of a batch."""

    number: int
    """In the batch, from 0."""
    group: Group
    step: int | None
    """The step that learns from it; None if dynamic sampling drops it, or the batch is not finished."""
    advantages: npt.NDArray[np.float64] | None
    """Of each answer; None without a step."""
    in_loss: tuple[bool, ...]
    """Whether each answer counts in the loss."""


@dataclass(frozen=True)
class SampledBatch:
    """A batch of rollouts, and its metrics."""

    header: BatchHeader
    finished: bool
    """Whether all of it was sampled and scored."""
    groups: tuple[SampledGroup, ...]
    metrics: dict[str, float]
    """As the first of its steps records them, over all groups that are learnt from."""

    @property
    def answers(self) -> int:
        """How many answers it has."""
        return sum(len(group.group.rollouts) for group in self.groups)

    @property
    def failed(self) -> int:
        """How many of them have a reward that failed."""
        return sum(failed(rollout) for group in self.groups for rollout in group.group.rollouts)


def failed(rollout: Rollout) -> bool:
    """Whether a reward of an answer failed."""
    return rollout.score is not None and rollout.score.error is not None


def sampled_batch(rollouts: Sequence[Rollout], header: BatchHeader, recipe: Recipe, *, finished: bool) -> SampledBatch:
    """Return a batch as the trainer takes it: which groups a step learns from, and the advantage of each answer.

    Advantages are those of the rewards: what `kl_in = "reward"` takes off them is not known here.
    """
    rl, objective = recipe.rl, recipe.objective
    assert rl is not None
    assert isinstance(objective, PolicyGradient)
    if rl.if_reward_fails == "stop":  # which is for the trainer: here failures are what people look for
        rl = rl.model_copy(update={"if_reward_fails": "zero"})
    groups = groups_of(rollouts, rl)
    learnt = chosen(groups, rl, recipe.train.batch * rl.updates) if finished else []
    advantages = {
        id(group): np.array([of_tokens[0] for of_tokens in values])  # all tokens of an answer have the same
        for group, values in zip(learnt, advantages_of(learnt, objective), strict=True)
    }
    steps = {id(group): header.step + i for i, part in enumerate(shares(learnt, rl.updates)) for group in part}
    sampled = tuple(
        SampledGroup(
            number=number,
            group=group,
            step=steps.get(id(group)),
            advantages=advantages.get(id(group)),
            in_loss=tuple(
                bool(present) and id(group) in steps and not (rl.mask_truncated and rollout.truncated)
                for present, rollout in zip(group.present, group.rollouts, strict=True)
            ),
        )
        for number, group in enumerate(groups)
    )
    return SampledBatch(header, finished, sampled, metrics_of(learnt or groups, rl, header.step - 1))


def group_document(sampled: SampledGroup, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return a group with everything that is known of it, for JSON."""
    rollouts = sampled.group.rollouts
    return {
        "group": sampled.number,
        "sample": rollouts[0].sample,
        "prompt": rollouts[0].prompt,
        "step": sampled.step,
        "prompt_text": decode(rollouts[0].prompt_ids),
        "prompt_ids": rollouts[0].prompt_ids,
        "answers": [_answer_document(sampled, place) for place in range(len(rollouts))],
    }


def _answer_document(sampled: SampledGroup, place: int) -> dict[str, Any]:
    rollout = sampled.group.rollouts[place]
    score = rollout.score
    return {
        "answer": rollout.answer,
        "text": rollout.text,
        "reward": None if score is None else score.reward,
        "rewards": None if score is None else dict(score.terms),
        "error": None if score is None else score.error,
        "trained_reward": float(sampled.group.rewards[place]) if sampled.group.present[place] else None,
        "advantage": None if sampled.advantages is None else float(sampled.advantages[place]),
        "in_loss": sampled.in_loss[place],
        "finish": rollout.finish,
        "version": rollout.version,
        "token_ids": rollout.token_ids,
        "logprobs": rollout.logprobs,
        "written": rollout.written,
    }
