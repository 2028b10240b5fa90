"""From scored answers to what a step learns from: groups, which of them count, advantages and metrics. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from headway.errors import WorkerError, plural
from headway.recipe.policy import PolicyGradient
from headway.recipe.rl import Rl
from headway.rl.advantages import (
    advantages,
    batch_advantages,
    overlong_penalty,
    pass_at_k,
    returns,
    zero_variance,
)
from headway.rl.rollout import ENVIRONMENT, AnswerScore, Rollout

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """The answers to one prompt."""

    rollouts: tuple[Rollout, ...]
    """By answer."""
    rewards: Floats
    """Of each answer, with the penalty of its length; 0 for one that is left out."""
    present: npt.NDArray[np.bool_]
    """Which answers count."""

    @property
    def varies(self) -> bool:
        """Whether its answers have different rewards, so that there is something to learn."""
        return not zero_variance(self.rewards[None], self.present[None])[0]


def groups_of(rollouts: Sequence[Rollout], rl: Rl) -> list[Group]:
    """Return the groups of scored rollouts, by sample; raise WorkerError for a failed reward if the recipe says so."""
    ordered = sorted(rollouts, key=lambda rollout: (rollout.sample, rollout.answer))
    return [_group(tuple(members), rl) for _, members in groupby(ordered, key=lambda rollout: rollout.sample)]


def _group(rollouts: tuple[Rollout, ...], rl: Rl) -> Group:
    rewards, present = np.zeros(len(rollouts)), np.ones(len(rollouts), dtype=bool)
    for number, rollout in enumerate(rollouts):
        assert rollout.score is not None, "only scored rollouts are grouped"
        where = f"answer {rollout.answer} to prompt {rollout.prompt}"
        score = after_failure(rollout.score, rl.if_reward_fails, where)
        present[number] = score is not None
        rewards[number] = 0.0 if score is None else score.reward
    penalties = overlong_penalty([len(rollout.token_ids) for rollout in rollouts], rl.max_tokens, rl.overlong)
    rewards += np.where(present, penalties, 0.0)
    return Group(rollouts, rewards, present)


def after_failure(
    score: AnswerScore, policy: Literal["zero", "leave-out", "stop"], answer_name: str
) -> AnswerScore | None:
    """Return what `rl.if_reward_fails` makes of a score: the score, None to leave it out, or raise WorkerError."""
    if score.error is None or policy == "zero":
        return score
    if policy == "leave-out":
        return None
    last = score.error.strip().splitlines()[-1]
    raise WorkerError(
        f"the reward of {answer_name} failed: {last}",
        hint='rl.if_reward_fails = "zero" or "leave-out" continues without it',
    )


def failure_note(groups: Sequence[Group], rl: Rl) -> str | None:
    """Return a sentence about the answers whose rewards failed, with the first reason; None if there are none."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    errors = [rollout.score.error for rollout in rollouts if rollout.score is not None and rollout.score.error]
    if not errors:
        return None
    fate = "they are left out" if rl.if_reward_fails == "leave-out" else "it counts as 0"
    reason = errors[0].strip().splitlines()[-1]
    return f"the reward of {len(errors)} of {plural(len(rollouts), 'answer')} failed, and {fate}: {reason}"


def failed_for_all(groups: Sequence[Group], rl: Rl) -> str | None:
    """Return in words which reward, or the environment, failed for every answer; None if none did."""
    scores = [rollout.score for group in groups for rollout in group.rollouts if rollout.score is not None]
    names = [*(term.name for term in rl.rewards), ENVIRONMENT]
    for name in names if scores else ():
        reasons = [_reason(score.error or "", name, names) for score in scores]
        if None not in reasons:
            return f"{name} failed for all {plural(len(scores), 'answer')} of the first batch: {reasons[0]}"
    return None


def _reason(error: str, name: str, names: Sequence[str]) -> str | None:
    """Return the last line of what one source said of its failure, among those of others; None if it did not fail."""
    reason = None
    for line in error.strip().splitlines():
        source = next((each for each in names if line.startswith(f"{each}: ")), None)
        if source == name or (source is None and reason is not None):
            reason = line.removeprefix(f"{name}: ")
        elif reason is not None:
            break
    return reason


def chosen(groups: Sequence[Group], rl: Rl, count: int) -> list[Group]:
    """Return the groups that a batch of rollouts learns from: with dynamic sampling the first `count` that vary."""
    return [group for group in groups if group.varies][:count] if rl.dynamic_sampling else list(groups)


def advantages_of(
    groups: Sequence[Group], objective: PolicyGradient, taken_off: Sequence[Floats] | None = None
) -> list[list[Floats]]:
    """Return the advantage of each token of each group's answers; `taken_off` is taken off the rewards at each token,
    by answer.

    With `advantage = "batch"` that lowers the returns of the tokens up to there. Advantages of the other kinds compare
    answers, so it is taken off as a whole, and all tokens of an answer have the same.
    """
    lengths = [[len(rollout.token_ids) for rollout in group.rollouts] for group in groups]
    costs = iter([np.zeros(count) for row in lengths for count in row] if taken_off is None else taken_off)
    by_group = [[next(costs) for _ in row] for row in lengths]
    if objective.advantage == "batch":
        return _batch_advantages(groups, by_group)
    if not groups:
        return []
    rewards, present = _table(groups)
    for row, answers in zip(rewards, by_group, strict=True):
        row[: len(answers)] -= [cost.sum() for cost in answers]
    values = advantages(rewards, objective.advantage, present)
    return [[np.full(count, values[i, j]) for j, count in enumerate(row)] for i, row in enumerate(lengths)]


def _batch_advantages(groups: Sequence[Group], costs: Sequence[Sequence[Floats]]) -> list[list[Floats]]:
    """Return advantages normalized over all tokens that the model wrote, in answers that count."""
    answers = [
        (rollout, *answer)
        for group, row in zip(groups, costs, strict=True)
        for rollout, *answer in zip(group.rollouts, group.rewards, group.present, row, strict=True)
    ]
    counts = [_written(rollout) & present for rollout, _, present, _ in answers]
    values = iter(batch_advantages([returns(reward, cost) for _, reward, _, cost in answers], counts))
    return [[next(values) for _ in group.rollouts] for group in groups]


def _written(rollout: Rollout) -> npt.NDArray[np.bool_]:
    """Return of each token whether the model wrote it."""
    places = np.arange(len(rollout.token_ids))
    flags: npt.NDArray[np.bool_] = np.zeros(len(places), dtype=np.bool_)
    for first, end in rollout.written:
        flags |= (places >= first) & (places < end)
    return flags


def weights_of(group: Group, rl: Rl) -> Floats:
    """Return the weights of a group's answers in the loss: 1, or 0 for those that are left out."""
    whole = np.array([not (rl.mask_truncated and rollout.truncated) for rollout in group.rollouts])
    weights: Floats = (group.present & whole).astype(np.float64)
    return weights


def _table(groups: Sequence[Group]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return rewards [groups, answers], and which answers count."""
    size = max(len(group.rollouts) for group in groups)
    rewards, present = np.zeros((len(groups), size)), np.zeros((len(groups), size), dtype=bool)
    for row, group in enumerate(groups):
        rewards[row, : len(group.rewards)], present[row, : len(group.present)] = group.rewards, group.present
    return rewards, present


def shares(groups: Sequence[Group], steps: int) -> list[list[Group]]:
    """Divide a batch's groups among the steps that learn from it, as evenly as possible, in order."""
    edges = np.linspace(0, len(groups), steps + 1).round().astype(int)
    return [list(groups[low:high]) for low, high in pairwise(edges)]


def metrics_of(groups: Sequence[Group], rl: Rl, trained_at: int) -> dict[str, float]:
    """Return what people watch of the answers that a step learns from; `trained_at` is the step before it."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    rewards = np.concatenate([group.rewards[group.present] for group in groups])
    written = sum(rollout.tokens for rollout in rollouts)
    metrics = {
        "reward": float(rewards.mean()) if rewards.size else 0.0,
        "length": float(np.mean([len(rollout.token_ids) for rollout in rollouts])),
        "truncated": float(np.mean([rollout.truncated for rollout in rollouts])),
        "zero_variance": float(np.mean([not group.varies for group in groups])),
        "sampled_entropy": -sum(sum(rollout.logprobs) for rollout in rollouts) / max(1, written),
        "staleness": float(np.mean([trained_at - rollout.version for rollout in rollouts])),
    }
    if rl.environment is not None:
        metrics["turns"] = float(np.mean([len(rollout.turns) for rollout in rollouts]))
    for name in (*(term.name for term in rl.rewards), *((ENVIRONMENT,) if rl.environment is not None else ())):
        metrics[f"reward/{name}"] = float(np.mean([score.terms.get(name, 0.0) for score in scores]))
    failed = float(np.mean([score.error is not None for score in scores]))
    table, present = _table(groups)
    passed = pass_at_k(table > 0, rl.samples, present)
    if passed is not None:
        metrics[f"pass@{rl.samples}"] = passed
    return metrics | ({"failed": failed} if failed else {})
