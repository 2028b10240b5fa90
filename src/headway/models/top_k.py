"""Log-probabilities of the likeliest tokens, and of given ones among all, without materializing all logits.

Distillation compares two distributions on the teacher's K likeliest tokens of each position; all other tokens are one
more outcome, whose probability is computed from their own logits: 1 minus the sum of the others would be mostly
rounding where that sum is near 1. Each function takes a head's whole weight, or this worker's share of its rows and the
reductions over the workers that have the others.

    T tokens    K the teacher's tokens of each    V vocabulary    W this worker's share of it
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.kernels.inputs import IGNORED, autocast, float32_product

__all__ = [
    "WHOLE",
    "VocabularyShare",
    "capped_scores",
    "local_columns",
    "log_sum_exp",
    "logprobs_among",
    "top_k_logprobs",
]


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class VocabularyShare:
    """Which rows of a head these are, and reductions over the workers that have the others."""

    begin: int = 0
    """Token id of the first row."""
    largest: Callable[[Tensor], Tensor] = _same
    """The elementwise maximum over workers."""
    total: Callable[[Tensor], Tensor] = _same
    """The sum over workers."""
    beside: Callable[[Tensor], Tensor] = _same
    """The tensors [T, n] of all workers, side by side."""


WHOLE = VocabularyShare()
"""A head that is not split."""


@torch.no_grad()
def top_k_logprobs(
    x_TD: Tensor,
    weight_WD: Tensor,
    count: int,
    temperature: float,
    softcap: float | None,
    rows: int,
    share: VocabularyShare = WHOLE,
) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest tokens of softmax(logits / temperature) [T, K], and their log-probabilities followed
    by that of all other tokens together [T, K + 1]; logits of `rows` tokens are in memory at once."""
    x_TD, weight_WD = autocast(x_TD), autocast(weight_WD)
    ids_TK = torch.empty(len(x_TD), count, dtype=torch.int64, device=x_TD.device)
    logprobs_TC = torch.empty(len(x_TD), count + 1, dtype=torch.float32, device=x_TD.device)
    for first in range(0, len(x_TD), rows):
        here = slice(first, first + rows)
        scores_TW, _ = capped_scores(x_TD[here], weight_WD, softcap)
        own = scores_TW.topk(min(count, scores_TW.shape[1]), dim=1)
        missing = (0, count - own.values.shape[1])  # a share may be smaller than others, or than K
        values = share.beside(torch.nn.functional.pad(own.values, missing, value=-math.inf))
        places = share.beside(torch.nn.functional.pad(own.indices + share.begin, missing))
        best = values.topk(count, dim=1)
        ids_TK[here] = places.gather(1, best.indices)
        all_T = log_sum_exp(scores_TW, temperature, share)
        others_T = log_sum_exp(_without(scores_TW, ids_TK[here], share), temperature, share)
        logprobs_TC[here, :count] = best.values / temperature - all_T.unsqueeze(1)
        logprobs_TC[here, count] = others_T - all_T
    return ids_TK, logprobs_TC


def logprobs_among(
    x_TD: Tensor,
    weight_WD: Tensor,
    labels_T: Tensor,
    ids_TK: Tensor,
    temperature: float,
    softcap: float | None,
    rows: int,
    share: VocabularyShare = WHOLE,
) -> Tensor:
    """Return log-probabilities [T, K + 2]: of the label at temperature 1, of the K ids at `temperature`, and there of
    all other tokens together (-inf if there is none); all 0 where the label is IGNORED.

    Differentiable; the backward pass computes logits again. The ids of a token are distinct.
    """
    logprobs_TC: Tensor = _LogprobsAmong.apply(
        autocast(x_TD), autocast(weight_WD), labels_T, ids_TK, temperature, softcap, rows, share
    )
    return logprobs_TC


class _LogprobsAmong(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_WD: Tensor,
        labels_T: Tensor,
        ids_TK: Tensor,
        temperature: float,
        softcap: float | None,
        rows: int,
        share: VocabularyShare,
    ) -> Tensor:
        count = ids_TK.shape[1]
        logprobs_TC = torch.zeros(len(x_TD), count + 2, dtype=torch.float32, device=x_TD.device)
        sums_T3 = torch.zeros(len(x_TD), 3, dtype=torch.float32, device=x_TD.device)
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            scores_TW, _ = capped_scores(x_TD[here], weight_WD, softcap)
            unmasked_T1 = (labels_T[here] != IGNORED).unsqueeze(1)
            wanted = torch.cat((labels_T[here].unsqueeze(1).where(unmasked_T1, 0), ids_TK[here]), dim=1)
            local, present = local_columns(wanted, scores_TW.shape[1], share)
            chosen = share.total(scores_TW.gather(1, local).where(present, 0.0))
            plain_T = log_sum_exp(scores_TW, 1.0, share)
            all_T = plain_T if temperature == 1 else log_sum_exp(scores_TW, temperature, share)
            others_T = log_sum_exp(_without(scores_TW, ids_TK[here], share), temperature, share)
            parts = (
                chosen[:, :1] - plain_T.unsqueeze(1),
                chosen[:, 1:] / temperature - all_T.unsqueeze(1),
                (others_T - all_T).unsqueeze(1),
            )
            logprobs_TC[here] = torch.cat(parts, dim=1).where(unmasked_T1, 0.0)
            sums_T3[here] = torch.stack((plain_T, all_T, others_T), dim=1)
        ctx.save_for_backward(x_TD, weight_WD, labels_T, ids_TK, sums_T3)
        ctx.options = temperature, softcap, rows, share
        return logprobs_TC

    @staticmethod
    def backward(ctx: Any, factors_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_WD, labels_T, ids_TK, sums_T3 = ctx.saved_tensors
        temperature, softcap, rows, share = ctx.options
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dx_TD = torch.empty_like(x_TD) if wants_x else None
        dweight_WD = torch.zeros_like(weight_WD, dtype=torch.float32) if wants_weight else None
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            scores_TW, bent = capped_scores(x_TD[here], weight_WD, softcap)
            slope = _slope(scores_TW, labels_T[here], ids_TK[here], sums_T3[here], factors_TC[here], temperature, share)
            if bent is not None:
                slope.mul_(1 - bent * bent)
            slope = slope.to(x_TD.dtype)
            if dx_TD is not None:
                torch.mm(slope, weight_WD, out=dx_TD[here])
            if dweight_WD is not None:
                dweight_WD += slope.T @ x_TD[here]
        dweight = None if dweight_WD is None else dweight_WD.to(weight_WD.dtype)
        return dx_TD, dweight, None, None, None, None, None, None


def _slope(
    scores_TW: Tensor,
    labels_T: Tensor,
    ids_TK: Tensor,
    sums_T3: Tensor,
    factors_TC: Tensor,
    temperature: float,
    share: VocabularyShare,
) -> Tensor:
    """Return the gradient of the log-probabilities, times their factors, over this share of the logits."""
    unmasked_T1 = (labels_T != IGNORED).unsqueeze(1)
    factors_TC = factors_TC.where(unmasked_T1, 0.0)
    label_T1, ids_factors, others_T1 = factors_TC[:, :1], factors_TC[:, 1:-1] / temperature, factors_TC[:, -1:]
    others_T1 = others_T1 / temperature
    plain_T1, all_T1, rest_T1 = sums_T3.unsqueeze(2).unbind(1)
    slope = (scores_TW / temperature - all_T1).exp_().mul_(-(ids_factors.sum(dim=1, keepdim=True) + others_T1))
    slope.addcmul_((scores_TW - plain_T1).exp_(), -label_T1)
    rest = (_without(scores_TW, ids_TK, share) / temperature - rest_T1).exp_()
    slope.add_(rest.mul_(others_T1).nan_to_num_(0.0))  # no token is left where K is V
    wanted = torch.cat((labels_T.unsqueeze(1).where(unmasked_T1, 0), ids_TK), dim=1)
    local, present = local_columns(wanted, scores_TW.shape[1], share)
    return slope.scatter_add_(1, local, torch.cat((label_T1, ids_factors), dim=1).where(present, 0.0))


def capped_scores(x_TD: Tensor, weight_WD: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return logits in float32, and the soft cap's tanh."""
    scores = float32_product(x_TD, weight_WD)
    if softcap is None:
        return scores, None
    bent = torch.tanh(scores / softcap)
    return softcap * bent, bent


def log_sum_exp(scores_TW: Tensor, temperature: float, share: VocabularyShare) -> Tensor:
    """Return the log-sum-exp of logits / temperature over the whole vocabulary; -inf for nothing."""
    largest_T = share.largest(scores_TW.amax(dim=1))
    finite_T1 = largest_T.clamp(min=torch.finfo(torch.float32).min).unsqueeze(1)
    sums_T = share.total(((scores_TW - finite_T1) / temperature).exp_().sum(dim=1))
    return largest_T / temperature + sums_T.log()


def _without(scores_TW: Tensor, ids_TK: Tensor, share: VocabularyShare) -> Tensor:
    """Return logits that are -inf at these ids."""
    width = scores_TW.shape[1]
    local = ids_TK - share.begin
    local = local.where((local >= 0) & (local < width), width)  # another worker's go into one more column
    wider = torch.nn.functional.pad(scores_TW, (0, 1))
    return wider.scatter_(1, local, -math.inf)[:, :width]


def local_columns(ids: Tensor, width: int, share: VocabularyShare) -> tuple[Tensor, Tensor]:
    """Return ids as columns of this share, and which of them it has; the columns of others are 0."""
    local = ids - share.begin
    present = (local >= 0) & (local < width)
    return local.where(present, 0), present
