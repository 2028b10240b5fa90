"""Reward models (Bradley-Terry): the reward of an answer is what the model's scalar head gives for its last token.

Documents 2i and 2i + 1 of a row are the chosen and the rejected answer, with their prompts.

    loss   -log sigmoid(r_chosen - r_rejected) + center (r_chosen + r_rejected)^2
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headway.parallel.objective import DeviceBatch
from headway.recipe.objective import Reward
from headway.train.objectives.base import sums_by_document
from headway.train.objectives.preference import PairObjective, pair_totals


class RewardLoss(PairObjective):
    """The probability that the chosen answer is preferred, from the rewards of both."""

    def __init__(self, recipe: Reward) -> None:
        self.recipe = recipe

    def measure(self, rewards_BL: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the sums over pairs; a model with a reward head gives rewards instead of log-probabilities."""
        rewards_BD = last_of_documents(rewards_BL, batch)
        chosen, rejected = rewards_BD[:, ::2], rewards_BD[:, 1::2]
        losses = -logsigmoid(chosen - rejected)
        if self.recipe.center:
            losses = losses + self.recipe.center * (chosen + rejected).square()
        return pair_totals(losses, rewards_BD, batch)


def last_of_documents(values_BL: Tensor, batch: DeviceBatch) -> Tensor:
    """Return the value at the last token of each document of a row, [B, documents]."""
    assert batch.documents is not None, "rows of documents are numbered"
    following = torch.nn.functional.pad(batch.documents[:, 1:], (0, 1), value=-1)
    return sums_by_document(values_BL.where(batch.documents != following, 0.0), batch)
