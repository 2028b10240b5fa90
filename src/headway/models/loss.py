"""Summed cross-entropy of a head's logits, and log-probabilities of labels, without materializing all logits.

Logits of log-probabilities are float32 also where x and the head are bfloat16, as those of the sampler: objectives
compare them with others of the same tokens. Those of the cross-entropy are in the precision of products, for speed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headway.kernels import batch_invariant, linear_cross_entropy
from headway.kernels.dispatch import exact_triton, uses_triton
from headway.kernels.exact_products import WHOLE
from headway.kernels.inputs import IGNORED, autocast, float32_product
from headway.kernels.sampling import label_logprobs
from headway.models.entropy import logprobs_and_entropy
from headway.models.top_k import logprobs_among, top_k_logprobs

__all__ = ["IGNORED", "Loss", "autocast", "chunk_rows", "summed_cross_entropy", "token_logprobs"]

CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**28}
"""Most logits in memory at once, by kind of device."""


class Loss(nn.Module):
    """The summed cross-entropy of a head's logits; a module, so that vocabulary parallelism can replace it."""

    def __init__(self, softcap: float | None = None) -> None:
        super().__init__()
        self.softcap = softcap
        """Soft cap of logits."""
        self.z_loss = 0.0
        """Weight of the z-loss, the squared log-sum-exp of a token's logits; only in training."""
        self.exact = False
        """Whether a token's logits have the same bits in every batch: see `models/exact.py`."""

    def forward(self, x_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor) -> Tensor:
        """Return the loss as a float32 scalar."""
        return summed_cross_entropy(x_BLD.flatten(0, 1), weight_VD, labels_BL.flatten(), self.softcap, self.z_loss)

    def logprobs(self, x_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the log-probability of each label [B, L], in float32, of logits / temperature; 0 where it is
        IGNORED."""
        flat_T = token_logprobs(
            x_BLD.flatten(0, 1), weight_VD, labels_BL.flatten(), self.softcap, temperature, self.exact
        )
        return flat_T.view(labels_BL.shape)

    def logprobs_and_entropy(
        self, x_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """Return the log-probability of each label, and the entropy of the distribution it is drawn from [B, L, 2].

        In exact mode, log-probabilities have the bits of `logprobs`, on CPUs or at other temperatures than 1 for one
        more product.
        """
        labels_T, x_TD = labels_BL.flatten(), x_BLD.flatten(0, 1)
        fused = temperature == 1 and _fused(x_TD, self.exact)
        if fused:
            scores = linear_cross_entropy.token_scores(x_TD, weight_VD, labels_T, self.softcap, self.exact)
            flat = torch.stack(scores, dim=1)
        else:
            rows = chunk_rows(x_BLD.device.type, weight_VD.shape[0])
            flat = logprobs_and_entropy(x_TD, weight_VD, labels_T, temperature, self.softcap, rows)
        scores_BL2 = flat.view(*labels_BL.shape, 2)
        if self.exact and not fused:
            logprobs_BL = self.logprobs(x_BLD, weight_VD, labels_BL, temperature)
            return torch.stack((logprobs_BL, scores_BL2[..., 1]), dim=-1)
        return scores_BL2

    def logprobs_among(
        self, x_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor, ids_BLK: Tensor, temperature: float
    ) -> Tensor:
        """Return the log-probabilities of labels, of ids, and of all other tokens together [B, L, K + 2]."""
        rows = chunk_rows(x_BLD.device.type, weight_VD.shape[0])
        labels_T, ids_TK = labels_BL.flatten(), ids_BLK.flatten(0, 1)
        flat = logprobs_among(x_BLD.flatten(0, 1), weight_VD, labels_T, ids_TK, temperature, self.softcap, rows)
        return flat.view(*labels_BL.shape, -1)

    def top_k(self, x_BLD: Tensor, weight_VD: Tensor, count: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens [B, L, K], and the log-probabilities of them and of all others [B, L, K + 1]."""
        rows = chunk_rows(x_BLD.device.type, weight_VD.shape[0])
        ids_TK, logprobs_TC = top_k_logprobs(x_BLD.flatten(0, 1), weight_VD, count, temperature, self.softcap, rows)
        return ids_TK.view(*x_BLD.shape[:2], -1), logprobs_TC.view(*x_BLD.shape[:2], -1)


def summed_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None = None, z_loss: float = 0.0
) -> Tensor:
    """Return the cross-entropy of x @ weight.T summed over unmasked labels, without materializing all logits.

    `z_loss` applies only with gradients: an evaluation measures the cross-entropy alone.
    """
    if uses_triton("loss", x_TD):
        return linear_cross_entropy.summed_cross_entropy(x_TD, weight_VD, labels_T, softcap, z_loss)
    x_TD, weight_VD = autocast(x_TD), autocast(weight_VD)
    wanted = torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad)
    return _SummedCrossEntropy.apply(x_TD, weight_VD, labels_T, softcap, z_loss if wanted else 0.0, wanted)


def _fused(x_TD: Tensor, exact: bool) -> bool:
    """Whether log-probabilities and entropies come from one pass over the logits."""
    return exact_triton(x_TD.device) if exact else uses_triton("loss", x_TD)


def token_logprobs(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    softcap: float | None = None,
    temperature: float = 1.0,
    exact: bool = False,
) -> Tensor:
    """Return the log-probability of each label under x @ weight.T / temperature, in float32; 0 where it is IGNORED.

    Not all logits are in memory at once: the backward pass computes them again. If `exact`, with the same bits in every
    batch, and the sampler's.
    """
    if temperature == 1 and _fused(x_TD, exact):
        return linear_cross_entropy.token_scores(x_TD, weight_VD, labels_T, softcap, exact)[0]
    flat_T: Tensor = _TokenLogprobs.apply(autocast(x_TD), autocast(weight_VD), labels_T, softcap, temperature, exact)
    return flat_T


def chunk_rows(kind: str, vocabulary: int) -> int:
    """Return the tokens per chunk of logits, on a kind of device."""
    return max(1, CHUNK_ELEMENTS.get(kind, 2**28) // vocabulary)


class _SummedCrossEntropy(torch.autograd.Function):
    """Computes gradients in the same pass as the loss, in chunks of tokens.

    The loss is a plain sum, so that its gradients are known up to the factor of the backward pass. Compared with
    recomputing logits there, this saves one of four products with the largest matrix.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        softcap: float | None,
        z_loss: float,
        wanted: bool,
    ) -> Tensor:
        rows = chunk_rows(x_TD.device.type, weight_VD.shape[0])
        total = torch.zeros((), dtype=torch.float32, device=x_TD.device)
        dx_TD = torch.empty_like(x_TD) if wanted else None
        trains = wanted and ctx.needs_input_grad[1]  # else the head is frozen
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if trains else None
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            unmasked = labels_T[here] != IGNORED
            targets = labels_T[here].where(unmasked, 0).unsqueeze(1)
            logits, bent = x_TD[here] @ weight_VD.T, None
            if softcap is not None:
                bent = torch.tanh(logits.float() / softcap)
                logits = softcap * bent
            scores = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
            chosen = scores.gather(1, targets)
            total -= chosen.squeeze(1).where(unmasked, 0.0).sum()
            steeper = None
            if z_loss:
                sums_T1 = logits.gather(1, targets).float() - chosen  # log-sum-exp
                total += z_loss * sums_T1.squeeze(1).where(unmasked, 0.0).square().sum()
                steeper = 1 + 2 * z_loss * sums_T1
            if dx_TD is not None:
                # Directly into the dtype of the products, and masked on their narrow side: fewer passes over the
                # logits, 63 ms instead of 73 on an H200 (16k tokens, width 2048, a vocabulary of 128k).
                slope = scores if scores.dtype == x_TD.dtype else torch.empty_like(scores, dtype=x_TD.dtype)
                torch.exp(scores, out=slope)
                at_label = chosen.exp()
                if steeper is not None:
                    slope.mul_(steeper)
                    at_label.mul_(steeper)
                slope.scatter_(1, targets, at_label.sub_(1).to(slope.dtype))
                if bent is not None:
                    slope.mul_(1 - bent * bent)
                torch.mm(slope, weight_VD, out=dx_TD[here]).mul_(unmasked.unsqueeze(1))
                if dweight_VD is not None:
                    dweight_VD += slope.T @ (x_TD[here] * unmasked.unsqueeze(1))
        ctx.save_for_backward(dx_TD, dweight_VD)
        ctx.dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        dx_TD, dweight_VD = ctx.saved_tensors
        # In float32: the factor is 1 / tokens, and rounding it to bfloat16 would scale every gradient.
        dweight_VD = None if dweight_VD is None else (dweight_VD * factor).to(ctx.dtype)
        return (dx_TD.float() * factor).to(dx_TD.dtype), dweight_VD, None, None, None, None


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities of labels in chunks of tokens, whose logits the backward pass computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        softcap: float | None,
        temperature: float,
        exact: bool,
    ) -> Tensor:
        rows = chunk_rows(x_TD.device.type, weight_VD.shape[0])
        samples = exact and exact_triton(x_TD.device)
        if samples:
            rows = max(rows // WHOLE, 1) * WHOLE
        product = batch_invariant.float32_product if exact else float32_product
        logprobs_T = torch.empty(len(x_TD), dtype=torch.float32, device=x_TD.device)
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            logits = product(x_TD[here], weight_VD)
            if samples:
                logprobs_T[here] = label_logprobs(_capped(logits, softcap), labels_T[here], temperature)
                continue
            scores, targets, unmasked, _ = _scored(logits, labels_T[here], softcap, temperature)
            logprobs_T[here] = scores.gather(1, targets).squeeze(1).where(unmasked, 0.0)
        ctx.save_for_backward(x_TD, weight_VD, labels_T)
        ctx.options = softcap, temperature
        return logprobs_T

    @staticmethod
    def backward(ctx: Any, factors_T: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_VD, labels_T = ctx.saved_tensors
        softcap, temperature = ctx.options
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        rows = chunk_rows(x_TD.device.type, weight_VD.shape[0])
        dx_TD = torch.empty_like(x_TD) if wants_x else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        for first in range(0, len(x_TD), rows):
            here = slice(first, first + rows)
            logits = float32_product(x_TD[here], weight_VD)
            scores, targets, unmasked, bent = _scored(logits, labels_T[here], softcap, temperature)
            slope = scores.exp_().neg_()
            slope.scatter_add_(1, targets, torch.ones_like(targets, dtype=slope.dtype))
            slope.mul_(factors_T[here].where(unmasked, 0.0).unsqueeze(1))
            if temperature != 1:
                slope.div_(temperature)
            if bent is not None:
                slope.mul_(1 - bent * bent)
            slope = slope.to(x_TD.dtype)
            if dx_TD is not None:
                torch.mm(slope, weight_VD, out=dx_TD[here])
            if dweight_VD is not None:
                dweight_VD += slope.T @ x_TD[here]
        return dx_TD, None if dweight_VD is None else dweight_VD.to(weight_VD.dtype), *[None] * 4


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _scored(
    logits: Tensor, labels_T: Tensor, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return log-probabilities [T, V], labels as indices [T, 1], which are not IGNORED, and the soft cap's tanh."""
    unmasked = labels_T != IGNORED
    targets = labels_T.where(unmasked, 0).unsqueeze(1)
    bent = None
    if softcap is not None:
        bent = torch.tanh(logits.float() / softcap)
        logits = softcap * bent
    if temperature != 1:
        logits = logits.float() / temperature
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32), targets, unmasked, bent
