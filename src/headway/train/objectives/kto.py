"""KTO on labelled answers: document 2i of a row is an answer, document 2i + 1 the same prompt with another's answer.

The second estimates how far the policy has moved from the reference, z = max(0, mean of log p - log p_ref). It is the
mean over the documents of a row, so that no split of rows into microbatches or workers changes it, and has no gradient.
"""

import torch
from torch import Tensor

from headway.data.loader import Batch
from headway.parallel.objective import DeviceBatch, Objective
from headway.recipe.objective import Kto
from headway.train.objectives.base import Counts, sums_by_document
from headway.train.objectives.preference import REFERENCE

DESIRABLE = "desirable"
"""The column of labels: 1 or 0."""


class KtoLoss(Objective):
    """1 - sigmoid of the reward above z for desirable answers, below z for the others."""

    names: tuple[str, ...] = ("loss", "kl", "chosen", "rejected")
    terms = 1
    columns = frozenset({"weight", REFERENCE, DESIRABLE})

    def __init__(self, recipe: Kto) -> None:
        self.recipe = recipe

    def counts(self, batch: Batch) -> Counts:
        """Return the weight of all answers, twice, of the desirable ones and of the others."""
        weight, desirable = batch.columns["weight"][:, ::2], batch.columns[DESIRABLE][:, ::2] > 0
        total = float(weight.sum())
        return total, total, float(weight[desirable].sum()), float(weight[~desirable].sum())

    def measure(self, logprobs_BL: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the sums over answers."""
        ratios_BD = sums_by_document(logprobs_BL, batch) - batch.columns[REFERENCE].to(torch.float32)
        ratio, other = ratios_BD[:, ::2], ratios_BD[:, 1::2].detach()
        weight, desirable = batch.columns["weight"][:, ::2], batch.columns[DESIRABLE][:, ::2] > 0
        present = (weight > 0).to(ratio.dtype)
        z_B1 = ((other * present).sum(dim=1, keepdim=True) / present.sum(dim=1, keepdim=True).clamp(min=1)).clamp(min=0)
        reward = self.recipe.beta * (ratio - z_B1)
        losses = 1 - torch.sigmoid(torch.where(desirable, reward, -reward))
        factor = torch.where(desirable, self.recipe.desirable_weight, self.recipe.undesirable_weight)
        scaled = self.recipe.beta * ratio.detach() * weight
        rows = (losses * factor * weight, z_B1 * weight, scaled * desirable, scaled * ~desirable)
        return torch.stack([row.sum() for row in rows])
