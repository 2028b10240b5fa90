"""Answers as rows of a step: packed, with the columns of the policy's loss, and this worker's share on its device."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headway.data.loader import MASKED, Batch
from headway.parallel import ParallelModel, World
from headway.parallel.objective import DeviceBatch
from headway.recipe import Recipe
from headway.recipe.policy import PolicyGradient
from headway.rl.packing import Floats, PackedAnswers, pack_answers, per_answer, per_token, token_divergences
from headway.rl.rollout import Rollout
from headway.train.feed import FedStep, on_device
from headway.train.objectives import CountedObjective
from headway.train.objectives.policy import ADVANTAGE, BEHAVIOUR, PROXIMAL, REFERENCE_LOGPROBS, WEIGHT


class AnswerRows:
    """Makes rows of answers; the same on all workers, but for what `fed` returns."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        spread: ParallelModel,
        reference: ParallelModel | None,
        objective: CountedObjective,
    ) -> None:
        assert isinstance(recipe.objective, PolicyGradient)
        self._policy, self._seq = recipe.objective, recipe.data.seq
        self._world, self._spread, self._reference, self._objective = world, spread, reference, objective

    @property
    def logprobs_needed(self) -> Collection[str]:
        """Columns of log-probabilities that the loss or the reward needs, by the trainer and by the reference."""
        needed = {PROXIMAL, REFERENCE_LOGPROBS}
        in_reward = self._policy.kl_in == "reward" and self._policy.kl != "none"
        return needed if in_reward else needed & self._objective.columns

    def pack(self, rollouts: Sequence[Rollout]) -> PackedAnswers:
        """Pack answers into rows that all workers can share."""
        return pack_answers(rollouts, self._seq, self._world.data.size * self._spread.rows_multiple)

    def logprobs(self, name: str, packed: PackedAnswers) -> Floats:
        """Return the trainer's (PROXIMAL) or the reference's log-probabilities of all labels, on every worker."""
        model = {PROXIMAL: self._spread, REFERENCE_LOGPROBS: self._reference}[name]
        assert model is not None, "a recipe with kl has a reference"
        values = model.token_logprobs(self._on_device(self._share(packed.batch), columns=False))
        whole = torch.zeros(packed.batch.inputs.shape, dtype=torch.float32)
        if values is not None and self._world.reports:
            whole[self._slice(len(whole))] = values.float().cpu()
        summed: Floats = self._world.sum(whole).numpy()
        return summed

    def taken_off(self, packed: PackedAnswers, logprobs: Mapping[str, Floats]) -> list[np.ndarray] | None:
        """Return what a divergence from the reference takes off the reward at each token of each answer; None if it is
        in the loss."""
        policy = self._policy
        if policy.kl_in != "reward" or policy.kl == "none":
            return None
        of_answers = token_divergences(packed, logprobs[PROXIMAL], logprobs[REFERENCE_LOGPROBS], policy.kl)
        return [policy.kl_weight * of_tokens for of_tokens in of_answers]

    def columns(
        self,
        packed: PackedAnswers,
        advantages: Sequence[np.ndarray],
        weights: Sequence[float] | Floats,
        logprobs: Mapping[str, Floats],
    ) -> dict[str, np.ndarray]:
        """Return the columns of the loss; advantages are by answer and token, weights by answer."""
        answers = packed.batch.columns["answer"]
        columns = {name: column for name, column in logprobs.items() if name in self._objective.columns}
        columns[ADVANTAGE] = per_token(advantages, packed)
        columns[WEIGHT] = per_answer(np.asarray(weights, dtype=np.float32), answers)
        columns[BEHAVIOUR] = packed.batch.columns["behaviour"]
        return columns

    def fed(
        self, packed: PackedAnswers, columns: dict[str, np.ndarray], cursor: int, metrics: Mapping[str, float]
    ) -> FedStep:
        """Return this worker's rows on its device, with what is known of all."""
        rows = self._share(packed.batch._replace(columns=columns))
        tokens = int((packed.batch.documents < _padding(packed.batch)).sum())
        return FedStep(self._on_device(rows), rows.trained, self._objective.counts(rows), cursor, tokens, metrics)

    def _slice(self, rows: int) -> slice:
        each = rows // self._world.data.size
        return slice(each * self._world.data.rank, each * (self._world.data.rank + 1))

    def _share(self, batch: Batch) -> Batch:
        """Return this worker's rows."""
        mine = self._slice(len(batch.inputs))
        labels = batch.labels[mine]
        assert batch.documents is not None
        columns = {name: column[mine] for name, column in batch.columns.items()}
        return Batch(batch.inputs[mine], labels, int((labels != MASKED).sum()), batch.documents[mine], columns)

    def _on_device(self, rows: Batch, *, columns: bool = True) -> DeviceBatch:
        device = self._world.device
        inputs, labels, documents = (_sent(array, device) for array in (rows.inputs, rows.labels, rows.documents))
        sent = on_device(rows.columns, self._objective.columns, device) if columns else {}
        return DeviceBatch(inputs, labels, documents, sent, rows.documents)


def _sent(array: np.ndarray | None, device: torch.device) -> Tensor:
    assert array is not None
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _padding(batch: Batch) -> np.ndarray:
    """Return the number of each row's padding: that of its answers."""
    return (batch.columns["answer"] >= 0).sum(axis=1)[:, None]
