"""Distillation: the student's distribution over the next token is to be the teacher's, at every label.

The distributions are compared on the teacher's K likeliest tokens and one more outcome, any other token. That is a KL
divergence of two distributions, a lower bound of the one over the vocabulary, and equal to it where K is the
vocabulary's size. Probabilities renormalized over the K tokens would leave out how much the student wastes elsewhere.

    p, q   probabilities of the teacher and the student at temperature T
    kl     forward: sum p (log p - log q); reverse: sum q (log q - log p)
    loss   (1 - next_token) T^2 kl + next_token nll, so that gradients have about the same size at any temperature
"""

import torch
from torch import Tensor

from headway.data.loader import MASKED, Batch
from headway.parallel.objective import TEACHER_IDS, TEACHER_LOGPROBS, DeviceBatch, DistillationObjective
from headway.recipe.objective import Distill
from headway.train.objectives.base import Counts, by_token, labels_per_document

LOWEST = -100.0
"""Of the log-probability of all other tokens: there are none, with -inf, where K is the vocabulary's size."""


class DistillLoss(DistillationObjective):
    """KL divergence from a teacher, and the next-token loss."""

    names: tuple[str, ...] = ("loss", "kl", "nll", "covered")
    terms = 1

    def __init__(self, recipe: Distill, weighted: bool) -> None:
        self.recipe, self.temperature = recipe, recipe.temperature
        stored = {TEACHER_IDS, TEACHER_LOGPROBS} if recipe.mode == "cached" else set[str]()
        self.columns = frozenset(stored | ({"weight"} if weighted else set()))

    def counts(self, batch: Batch) -> Counts:
        """Return the number of labels, or their weights, for each sum."""
        count = float(batch.trained)
        if "weight" in self.columns:
            count = float((labels_per_document(batch) * batch.columns["weight"]).sum())
        return (count,) * len(self.names)

    def measure(self, logprobs_BL: Tensor, batch: DeviceBatch) -> Tensor:
        """Return the sums over labels."""
        recipe = self.recipe
        nll_BL, student = -logprobs_BL[..., 0], _floored(logprobs_BL[..., 1:])
        teacher = _floored(batch.columns[TEACHER_LOGPROBS].to(student.dtype))
        if recipe.divergence == "forward":
            kl_BL = (teacher.exp() * (teacher - student)).sum(dim=-1)
        else:
            kl_BL = (student.exp() * (student - teacher)).sum(dim=-1)
        covered_BL = teacher[..., :-1].exp().sum(dim=-1)
        loss_BL = (1 - recipe.next_token) * recipe.temperature**2 * kl_BL + recipe.next_token * nll_BL
        weight_BL = (batch.labels != MASKED).to(loss_BL.dtype)
        if "weight" in self.columns:
            weight_BL = weight_BL * by_token(batch.columns["weight"], batch).to(loss_BL.dtype)
        rows = (loss_BL, kl_BL.detach(), nll_BL.detach(), covered_BL)
        return torch.stack([(row.where(weight_BL > 0, 0.0) * weight_BL).sum() for row in rows])


def _floored(logprobs: Tensor) -> Tensor:
    return torch.cat((logprobs[..., :-1], logprobs[..., -1:].clamp(min=LOWEST)), dim=-1)
