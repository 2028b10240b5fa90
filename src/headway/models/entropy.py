"""Log-probabilities of labels, and entropies of the distributions that they are drawn from, without materializing all
logits: the backward pass computes them again, a chunk of tokens at a time.

With z the logits over the temperature, s = log sum exp z, probabilities p = exp(z - s), entropy H and a label y:

    logprob  z_y - s                slope over z:  [y] - p
    H        -sum p (z - s)                        -p (z - s + H)

The head may be this worker's share of the vocabulary: see `models/top_k.py`, also for the letters of shapes.
"""

from typing import Any

import torch
from torch import Tensor

from headway.kernels.inputs import IGNORED, autocast
from headway.models.top_k import WHOLE, VocabularyShare, capped_scores, local_columns, log_sum_exp

__all__ = ["logprobs_and_entropy"]


def logprobs_and_entropy(
    x_TD: Tensor,
    weight_WD: Tensor,
    labels_T: Tensor,
    temperature: float,
    softcap: float | None,
    rows: int,
    share: VocabularyShare = WHOLE,
) -> Tensor:
    """Return log-probabilities and entropies under softmax(logits / temperature) [T, 2]; 0 where the label is IGNORED.

    Differentiable; logits of `rows` tokens are in memory at once.
    """
    scores_T2: Tensor = _LogprobsAndEntropy.apply(
        autocast(x_TD), autocast(weight_WD), labels_T, temperature, softcap, rows, share
    )
    return scores_T2


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_WD: Tensor,
        labels_T: Tensor,
        temperature: float,
        softcap: float | None,
        rows: int,
        share: VocabularyShare,
    ) -> Tensor:
        scores_T2 = torch.zeros(len(x_TD), 2, dtype=torch.float32, device=x_TD.device)
        sums_T = torch.zeros(len(x_TD), dtype=torch.float32, device=x_TD.device)
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            z_TW = capped_scores(x_TD[here], weight_WD, softcap)[0].div_(temperature)
            sums_T[here] = log_sum_exp(z_TW, 1.0, share)
            z_TW.sub_(sums_T[here].unsqueeze(1))
            unmasked_T1 = (labels_T[here] != IGNORED).unsqueeze(1)
            local, present = _labels(labels_T[here], z_TW, share)
            chosen_T1 = z_TW.gather(1, local).where(present, 0.0)
            own_T1 = -(z_TW.exp() * z_TW).sum(dim=1, keepdim=True)
            scores_T2[here] = share.total(torch.cat((chosen_T1, own_T1), dim=1)).where(unmasked_T1, 0.0)
        ctx.save_for_backward(x_TD, weight_WD, labels_T, sums_T, scores_T2[:, 1].clone())
        ctx.options = temperature, softcap, rows, share
        return scores_T2

    @staticmethod
    def backward(ctx: Any, factors_T2: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_WD, labels_T, sums_T, entropy_T = ctx.saved_tensors
        temperature, softcap, rows, share = ctx.options
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dx_TD = torch.empty_like(x_TD) if wants_x else None
        dweight_WD = torch.zeros_like(weight_WD, dtype=torch.float32) if wants_weight else None
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            capped_TW, bent = capped_scores(x_TD[here], weight_WD, softcap)
            z_TW = capped_TW.div_(temperature).sub_(sums_T[here].unsqueeze(1))
            unmasked_T1 = (labels_T[here] != IGNORED).unsqueeze(1)
            label_T1, entropy_T1 = (factors_T2[here].where(unmasked_T1, 0.0) / temperature).split(1, dim=1)
            p_TW = z_TW.exp()
            slope = z_TW.add_(entropy_T[here].unsqueeze(1)).mul_(entropy_T1).add_(label_T1).mul_(p_TW).neg_()
            local, present = _labels(labels_T[here], slope, share)
            slope.scatter_add_(1, local, label_T1.where(present, 0.0))
            if bent is not None:
                slope.mul_(1 - bent * bent)
            slope = slope.to(x_TD.dtype)
            if dx_TD is not None:
                torch.mm(slope, weight_WD, out=dx_TD[here])
            if dweight_WD is not None:
                dweight_WD += slope.T @ x_TD[here]
        dweight = None if dweight_WD is None else dweight_WD.to(weight_WD.dtype)
        return dx_TD, dweight, None, None, None, None, None


def _labels(labels_T: Tensor, scores_TW: Tensor, share: VocabularyShare) -> tuple[Tensor, Tensor]:
    """Return the columns of labels in this share [T, 1], and whether they are in it."""
    return local_columns(labels_T.where(labels_T != IGNORED, 0).unsqueeze(1), scores_TW.shape[1], share)
