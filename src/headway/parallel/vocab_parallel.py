"""Vocabulary-parallel cross-entropy over the tensor axis: no worker ever holds all logits of a token.

Workers exchange three numbers per token: the largest logit, the sum of exponentials, and the label's logit, which one
of them has. Tensor names end in their shape, as in `models/layers.py`; W is this worker's share of V.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.models.entropy import logprobs_and_entropy
from headway.models.loss import IGNORED, autocast, chunk_rows
from headway.models.top_k import VocabularyShare, capped_scores, logprobs_among, top_k_logprobs
from headway.parallel.collectives import copied, gathered
from headway.parallel.local_part import share_of, to_local
from headway.parallel.tensor import SEQUENCE
from headway.parallel.world import Axis


@dataclass(frozen=True)
class LogitOptions:
    """Soft cap and z-loss: see `models.loss.Loss`."""

    softcap: float | None = None
    z_loss: float = 0.0


def shared_loss(
    axis: Axis, by_sequence: bool, shape: LogitOptions, x_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor
) -> Tensor:
    """`models.loss.Loss` with a split head."""
    assert axis.group is not None, "an axis of one place shares nothing out"
    vocabulary = weight_VD.shape[0]
    begin, _ = share_of(vocabulary, axis)
    rows = chunk_rows(x_BLD.device.type, -(-vocabulary // axis.size))  # the same on all workers
    x_BLD = gathered(x_BLD, SEQUENCE, axis.group) if by_sequence else copied(x_BLD, axis.group)
    x_TD, weight_WD = autocast(x_BLD.flatten(0, 1)), autocast(to_local(weight_VD))
    wanted = torch.is_grad_enabled() and (x_TD.requires_grad or weight_WD.requires_grad)
    shape = shape if wanted else replace(shape, z_loss=0.0)
    labels_T = labels_BL.flatten()
    loss: Tensor = _SharedCrossEntropy.apply(x_TD, weight_WD, labels_T, begin, axis.group, rows, shape, wanted)
    return loss


def shared_logprobs(
    axis: Axis,
    by_sequence: bool,
    softcap: float | None,
    x_BLD: Tensor,
    weight_VD: Tensor,
    labels_BL: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """`models.loss.Loss.logprobs` with a split head; the same on all workers of the axis."""
    assert axis.group is not None, "an axis of one place shares nothing out"
    vocabulary = weight_VD.shape[0]
    begin, _ = share_of(vocabulary, axis)
    rows = chunk_rows(x_BLD.device.type, -(-vocabulary // axis.size))
    x_BLD = gathered(x_BLD, SEQUENCE, axis.group) if by_sequence else copied(x_BLD, axis.group)
    x_TD, weight_WD = autocast(x_BLD.flatten(0, 1)), autocast(to_local(weight_VD))
    labels_T = labels_BL.flatten()
    flat_T: Tensor = _SharedLogprobs.apply(x_TD, weight_WD, labels_T, begin, axis.group, rows, softcap, temperature)
    return flat_T.view(labels_BL.shape)


def shared_logprobs_and_entropy(
    axis: Axis,
    by_sequence: bool,
    softcap: float | None,
    x_BLD: Tensor,
    weight_VD: Tensor,
    labels_BL: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """`models.loss.Loss.logprobs_and_entropy` with a split head; the same on all workers of the axis."""
    assert axis.group is not None, "an axis of one place shares nothing out"
    x_BLD = gathered(x_BLD, SEQUENCE, axis.group) if by_sequence else copied(x_BLD, axis.group)
    rows = chunk_rows(x_BLD.device.type, -(-weight_VD.shape[0] // axis.size))
    share, weight_WD = _vocabulary_share(weight_VD.shape[0], axis), to_local(weight_VD)
    flat = logprobs_and_entropy(x_BLD.flatten(0, 1), weight_WD, labels_BL.flatten(), temperature, softcap, rows, share)
    return flat.view(*labels_BL.shape, 2)


def shared_logprobs_among(
    axis: Axis,
    by_sequence: bool,
    softcap: float | None,
    x_BLD: Tensor,
    weight_VD: Tensor,
    labels_BL: Tensor,
    ids_BLK: Tensor,
    temperature: float,
) -> Tensor:
    """`models.loss.Loss.logprobs_among` with a split head; the same on all workers of the axis."""
    assert axis.group is not None, "an axis of one place shares nothing out"
    x_BLD = gathered(x_BLD, SEQUENCE, axis.group) if by_sequence else copied(x_BLD, axis.group)
    rows = chunk_rows(x_BLD.device.type, -(-weight_VD.shape[0] // axis.size))
    labels_T, ids_TK, x_TD = labels_BL.flatten(), ids_BLK.flatten(0, 1), x_BLD.flatten(0, 1)
    share, weight_WD = _vocabulary_share(weight_VD.shape[0], axis), to_local(weight_VD)
    flat = logprobs_among(x_TD, weight_WD, labels_T, ids_TK, temperature, softcap, rows, share)
    return flat.view(*labels_BL.shape, -1)


def shared_top_k(
    axis: Axis,
    by_sequence: bool,
    softcap: float | None,
    x_BLD: Tensor,
    weight_VD: Tensor,
    count: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """`models.loss.Loss.top_k` with a split head; the same on all workers of the axis."""
    assert axis.group is not None, "an axis of one place shares nothing out"
    x_BLD = gathered(x_BLD, SEQUENCE, axis.group) if by_sequence else x_BLD
    rows = chunk_rows(x_BLD.device.type, -(-weight_VD.shape[0] // axis.size))
    share, weight_WD = _vocabulary_share(weight_VD.shape[0], axis), to_local(weight_VD)
    ids_TK, logprobs_TC = top_k_logprobs(x_BLD.flatten(0, 1), weight_WD, count, temperature, softcap, rows, share)
    return ids_TK.view(*x_BLD.shape[:2], -1), logprobs_TC.view(*x_BLD.shape[:2], -1)


def _vocabulary_share(vocabulary: int, axis: Axis) -> VocabularyShare:
    """Return this worker's share of a split head, with reductions over the axis."""
    group = axis.group
    assert group is not None, "an axis of one place shares nothing out"

    def reduced(kind: dist.ReduceOp.RedOpType, x: Tensor) -> Tensor:
        dist.all_reduce(x, kind, group=group)
        return x

    return VocabularyShare(
        begin=share_of(vocabulary, axis)[0],
        largest=partial(reduced, dist.ReduceOp.MAX),
        total=partial(reduced, dist.ReduceOp.SUM),
        beside=lambda x: gathered(x, 1, group),
    )


def logprobs_of_logits(logits: Tensor, labels_BL: Tensor, axis: Axis, vocabulary: int | None) -> Tensor:
    """Return the log-probability of each label [B, L] from logits [B, L, V], or a share [B, L, W] if `vocabulary` is V;
    0 where it is IGNORED."""
    scores, labels_T = logits.flatten(0, -2).float(), labels_BL.flatten()
    if vocabulary is not None:
        begin, _ = share_of(vocabulary, axis)
        shared: Tensor = _LogprobsOfLogits.apply(scores, labels_T, begin, axis.group)
        return shared.view(labels_BL.shape)
    flat_T = -nn.functional.cross_entropy(scores, labels_T, ignore_index=IGNORED, reduction="none")
    return flat_T.view(labels_BL.shape)


def cross_entropy_of_logits(
    logits: Tensor, labels_BL: Tensor, axis: Axis, vocabulary: int | None, z_loss: float = 0.0
) -> Tensor:
    """Return the summed cross-entropy of logits [B, L, V], or of a share [B, L, W] if `vocabulary` is V.

    `z_loss` applies only with gradients, as in `models.loss`.
    """
    scores, labels = logits.flatten(0, -2).float(), labels_BL.flatten()
    z_loss = z_loss if torch.is_grad_enabled() and logits.requires_grad else 0.0
    if vocabulary is not None:
        begin, _ = share_of(vocabulary, axis)
        shared: Tensor = _OfLogits.apply(scores, labels, begin, axis.group, z_loss)
        return shared
    loss = nn.functional.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        loss = loss + z_loss * scores.logsumexp(dim=1).where(labels != IGNORED, 0.0).square().sum()
    return loss


def _softmax_(
    scores_TW: Tensor, labels_T: Tensor, begin: int, group: dist.ProcessGroup, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Turn logits into the gradient of the summed cross-entropy, in place; return the loss of each token."""
    unmasked = labels_T != IGNORED
    local = labels_T - begin
    here = unmasked & (local >= 0) & (local < scores_TW.shape[1])
    targets = local.where(here, 0).unsqueeze(1)
    chosen = scores_TW.gather(1, targets).squeeze(1).where(here, 0.0)
    largest = scores_TW.amax(dim=1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exponentials = scores_TW.sub_(largest.unsqueeze(1)).exp_()
    sums = torch.stack((exponentials.sum(dim=1), chosen))
    dist.all_reduce(sums, group=group)
    spread_T = sums[0].log() + largest  # log-sum-exp
    loss = (spread_T - sums[1]).where(unmasked, 0.0)
    slope = exponentials.div_(sums[0].unsqueeze(1))
    if z_loss:
        loss += z_loss * spread_T.where(unmasked, 0.0).square()
        slope.mul_((1 + 2 * z_loss * spread_T).unsqueeze(1))
    slope.scatter_add_(1, targets, -here.to(slope.dtype).unsqueeze(1))
    return slope.mul_(unmasked.unsqueeze(1)), loss


class _SharedCrossEntropy(torch.autograd.Function):
    """Computes gradients in the same pass as the loss, in chunks of tokens, like the plain loss."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_WD: Tensor,
        labels_T: Tensor,
        begin: int,
        group: dist.ProcessGroup,
        rows: int,
        shape: LogitOptions,
        wanted: bool,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x_TD.device)
        dx_TD = torch.empty_like(x_TD) if wanted else None
        trains = wanted and ctx.needs_input_grad[1]  # else the head is frozen
        dweight_WD = torch.zeros_like(weight_WD, dtype=torch.float32) if trains else None
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            scores, bent = capped_scores(x_TD[here], weight_WD, shape.softcap)
            slope, losses = _softmax_(scores, labels_T[here], begin, group, shape.z_loss)
            if bent is not None:
                slope.mul_(1 - bent * bent)
            total += losses.sum()
            if dx_TD is not None:
                slope = slope.to(x_TD.dtype)
                torch.mm(slope, weight_WD, out=dx_TD[here])
                if dweight_WD is not None:
                    dweight_WD += slope.T @ x_TD[here]
        ctx.save_for_backward(dx_TD, dweight_WD)
        ctx.dtype = weight_WD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        dx_TD, dweight_WD = ctx.saved_tensors
        dx_TD = (dx_TD.float() * factor).to(dx_TD.dtype)
        dweight_WD = None if dweight_WD is None else (dweight_WD * factor).to(ctx.dtype)
        return dx_TD, dweight_WD, None, None, None, None, None, None


class _OfLogits(torch.autograd.Function):
    """The same for given logits."""

    @staticmethod
    def forward(
        ctx: Any, scores_TW: Tensor, labels_T: Tensor, begin: int, group: dist.ProcessGroup, z_loss: float
    ) -> Tensor:
        slope, losses = _softmax_(scores_TW.clone(), labels_T, begin, group, z_loss)
        ctx.save_for_backward(slope)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * factor, None, None, None, None


class _SharedLogprobs(torch.autograd.Function):
    """Log-probabilities of labels in chunks of tokens, whose logits the backward pass computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_WD: Tensor,
        labels_T: Tensor,
        begin: int,
        group: dist.ProcessGroup,
        rows: int,
        softcap: float | None,
        temperature: float,
    ) -> Tensor:
        losses = []
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            scores, _ = capped_scores(x_TD[here], weight_WD, softcap)
            if temperature != 1:
                scores = scores / temperature
            losses.append(_softmax_(scores, labels_T[here], begin, group, 0.0)[1])
        ctx.save_for_backward(x_TD, weight_WD, labels_T)
        ctx.options = begin, group, rows, softcap, temperature
        return -torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, factors_T: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_WD, labels_T = ctx.saved_tensors
        begin, group, rows, softcap, temperature = ctx.options
        dx_TD = torch.empty_like(x_TD)
        dweight_WD = torch.zeros_like(weight_WD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            scores, bent = capped_scores(x_TD[here], weight_WD, softcap)
            if temperature != 1:
                scores = scores / temperature
            slope, _ = _softmax_(scores, labels_T[here], begin, group, 0.0)
            slope.mul_(-factors_T[here].unsqueeze(1))
            if temperature != 1:
                slope.div_(temperature)
            if bent is not None:
                slope.mul_(1 - bent * bent)
            slope = slope.to(x_TD.dtype)
            torch.mm(slope, weight_WD, out=dx_TD[here])
            if dweight_WD is not None:
                dweight_WD += slope.T @ x_TD[here]
        dweight = None if dweight_WD is None else dweight_WD.to(weight_WD.dtype)
        return dx_TD, dweight, None, None, None, None, None, None


class _LogprobsOfLogits(torch.autograd.Function):
    """The same for given logits."""

    @staticmethod
    def forward(ctx: Any, scores_TW: Tensor, labels_T: Tensor, begin: int, group: dist.ProcessGroup) -> Tensor:
        slope, losses = _softmax_(scores_TW.clone(), labels_T, begin, group, 0.0)
        ctx.save_for_backward(slope)
        return -losses

    @staticmethod
    def backward(ctx: Any, factors_T: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * -factors_T.unsqueeze(1), None, None, None
