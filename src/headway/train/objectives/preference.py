"""Preference optimization on pairs: documents 2i and 2i + 1 of a row are the chosen and the rejected answer.

A pair never leaves its row, so that it stays in one microbatch. Its weight is the chosen answer's. The sums of the
reference model come as a column: they are computed once, before the first step (`reference.py`).

    r      beta * (log p - log p_ref) of an answer, its reward         m   r_chosen - r_rejected, the margin
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headway.data.loader import Batch
from headway.parallel.objective import DeviceBatch, Objective
from headway.recipe.objective import Dpo, Orpo, SimPo
from headway.train.objectives.base import Counts, labels_per_document, lengths_by_document, sums_by_document

REFERENCE = "reference"
"""The column of the reference model's log-probabilities."""


class PairObjective(Objective):
    """What objectives of pairs have in common."""

    names: tuple[str, ...] = ("loss", "accuracy", "margin", "chosen", "rejected")
    terms = 1
    columns = frozenset({"weight"})

    def counts(self, batch: Batch) -> Counts:
        """Return the weight of all pairs, for each sum."""
        return (float(batch.columns["weight"][:, ::2].sum()),) * len(self.names)


class DpoLoss(PairObjective):
    """DPO (sigmoid, with label smoothing), its hinge variant (SLiC) and IPO."""

    def __init__(self, recipe: Dpo) -> None:
        self.recipe = recipe
        self.columns = frozenset({"weight"} if recipe.reference_free else {"weight", REFERENCE})

    def measure(self, logprobs_BL: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the sums over pairs."""
        recipe, sums_BD = self.recipe, sums_by_document(logprobs_BL, batch)
        ratios_BD = sums_BD if recipe.reference_free else sums_BD - batch.columns[REFERENCE].to(sums_BD.dtype)
        if recipe.loss == "ipo":
            ratios_BD = ratios_BD / lengths_by_document(batch)
        margin = ratios_BD[:, ::2] - ratios_BD[:, 1::2]
        match recipe.loss:
            case "sigmoid":
                certain, wrong = logsigmoid(recipe.beta * margin), logsigmoid(-recipe.beta * margin)
                losses = -(1 - recipe.smoothing) * certain - recipe.smoothing * wrong
            case "hinge":
                losses = torch.relu(1 - recipe.beta * margin)
            case "ipo":
                losses = (margin - 1 / (2 * recipe.beta)).square()
        return pair_totals(losses, recipe.beta * ratios_BD, batch)


class OrpoLoss(PairObjective):
    """ORPO: the chosen answer's cross-entropy, over its tokens, and the log odds ratio, over pairs."""

    names: tuple[str, ...] = ("nll", "odds", "accuracy", "margin", "chosen", "rejected")
    terms = 2

    def __init__(self, recipe: Orpo) -> None:
        self.recipe = recipe

    def counts(self, batch: Batch) -> Counts:
        """Return the weight of the chosen answers' labels, and of all pairs."""
        weight = batch.columns["weight"][:, ::2]
        tokens = labels_per_document(batch)[:, ::2]
        return (float((tokens * weight).sum()), *(float(np.sum(weight)),) * (len(self.names) - 1))

    def measure(self, logprobs_BL: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the sums over tokens and pairs."""
        sums_BD = sums_by_document(logprobs_BL, batch)
        means_BD = sums_BD / lengths_by_document(batch)
        chosen, rejected = means_BD[:, ::2], means_BD[:, 1::2]
        odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        weight = batch.columns["weight"][:, ::2]
        # A row's places without a pair have log-probabilities of 0, whose odds are infinite.
        losses = torch.where(weight > 0, -self.recipe.beta * logsigmoid(odds), 0.0)
        nll = -(sums_BD[:, ::2] * weight).sum().reshape(1)
        return torch.cat((nll, pair_totals(losses, self.recipe.beta * means_BD, batch)))


class SimPoLoss(PairObjective):
    """SimPO: rewards are mean log-probabilities; a target margin."""

    def __init__(self, recipe: SimPo) -> None:
        self.recipe = recipe

    def measure(self, logprobs_BL: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the sums over pairs."""
        rewards_BD = self.recipe.beta * sums_by_document(logprobs_BL, batch) / lengths_by_document(batch)
        losses = -logsigmoid(rewards_BD[:, ::2] - rewards_BD[:, 1::2] - self.recipe.margin)
        return pair_totals(losses, rewards_BD, batch)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of x < 0, exact near 0 and far from it; 0 is taken as the number below."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    return torch.where(x > -0.6931, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def pair_totals(losses: Tensor, rewards_BD: Tensor, batch: DeviceBatch) -> Tensor:
    """Return the weighted sums of losses, accuracy, margin and rewards over pairs."""
    weight = batch.columns["weight"][:, ::2]
    chosen, rejected = rewards_BD[:, ::2].detach(), rewards_BD[:, 1::2].detach()
    rows = (losses, (chosen > rejected).to(losses.dtype), chosen - rejected, chosen, rejected)
    return torch.stack([(row * weight).sum() for row in rows])
