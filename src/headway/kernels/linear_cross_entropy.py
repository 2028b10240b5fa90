"""Cross-entropy, log-probabilities and entropy of x @ weight.T, without all logits in memory.

With logits z = softcap(x @ weight.T), spread s = log sum exp z, probabilities p = exp(z - s) and a label y:

    loss     s - z_y + z_loss * s^2     slope over z:  p * (1 + 2 * z_loss * s) - [y]
    logprob  z_y - s                                   [y] - p
    entropy  s - sum p * z                             -p * (z - s + entropy)

It is bound by three products with the largest matrix of a model: 6 * T * V * D FLOPs. What can be saved is everything
around them. Tokens are split into a few equal chunks. For each, cuBLAS computes the logits in one reused buffer, one
Triton program per row turns them into the slope in place (`logits.py`), and cuBLAS computes both gradients.

The loss is a plain sum, so that its gradients are known in the forward pass, up to the factor of the backward pass.
They are saved for backward: dx in its own dtype, dweight in float32, where cuBLAS accumulates the chunks. The factor is
applied in float32 in the pass that converts dweight to its dtype. A scale in forward would save nothing: that pass is
needed anyway, reading the factor would synchronize, and slopes times 1 / tokens underflow in float16. Log-probabilities
and entropies have a factor per token: for them backward recomputes the logits. Those are float32 in both passes, twice
the bytes: policies compare log-probabilities with the sampler's, and a logit rounded to bfloat16 is off by up to 0.06.

A whole pass is one opaque operation to torch.compile, with the logits inside: it could fuse nothing with a cuBLAS
product, and might copy a buffer that it sees.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headway.kernels import exact_products
from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.exact_products import WHOLE
from headway.kernels.inputs import IGNORED, autocast, float32_product
from headway.kernels.logits import ROW_TILE, loss_rows_, new_logits, slopes_, statistics
from headway.kernels.sampling import label_logprobs
from headway.kernels.triton_compat import tl, triton

LOGITS_BYTES = 2**30
"""Bytes of one chunk's logits: 4096 tokens of a vocabulary of 128k in bfloat16."""

CHUNK_TILE = 128
"""Tokens of a chunk are a multiple of this, the tile size of cuBLAS."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# ---- in plain PyTorch


def reference_summed_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None = None, z_loss: float = 0.0
) -> Tensor:
    """`summed_cross_entropy` with all logits in memory."""
    kept_T = labels_T != IGNORED
    logits_TV = _capped(x_TD @ weight_VD.T, softcap)
    scores_TV = torch.log_softmax(logits_TV, dim=-1, dtype=torch.float32)
    loss = -scores_TV.gather(1, labels_T.where(kept_T, 0).unsqueeze(1)).squeeze(1).where(kept_T, 0.0).sum()
    if z_loss and loss.requires_grad:
        loss = loss + z_loss * logits_TV.float().logsumexp(dim=1).where(kept_T, 0.0).square().sum()
    return loss


def reference_token_scores(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """`token_scores` with all logits in memory."""
    kept_T = labels_T != IGNORED
    scores_TV = torch.log_softmax(_capped(x_TD.float() @ weight_VD.float().T, softcap), dim=-1)
    logprobs_T = scores_TV.gather(1, labels_T.where(kept_T, 0).unsqueeze(1)).squeeze(1)
    entropy_T = -(scores_TV.exp() * scores_TV).sum(dim=1)
    return logprobs_T.where(kept_T, 0.0), entropy_T.where(kept_T, 0.0)


def _capped(logits_TV: Tensor, softcap: float | None) -> Tensor:
    return logits_TV if softcap is None else softcap * torch.tanh(logits_TV.float() / softcap)


def chunk_rows(tokens: int, vocabulary: int, element_size: int) -> int:
    """Return the tokens per chunk: equal chunks, as few as the bound on bytes allows."""
    most = max(LOGITS_BYTES // (vocabulary * element_size) // CHUNK_TILE, 1)
    tiles = -(-tokens // CHUNK_TILE)
    chunks = max(-(-tiles // most), 1)
    return -(-tiles // chunks) * CHUNK_TILE


def _chunks(x_TD: Tensor, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of tokens and their logits in the dtype of x, all in the same buffer."""
    for here, buffer in _buffers(x_TD, weight_VD, x_TD.dtype):
        yield here, torch.mm(x_TD[here], weight_VD.T, out=buffer)


def _float32_chunks(x_TD: Tensor, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The same with logits in float32."""
    for here, buffer in _buffers(x_TD, weight_VD, torch.float32):
        yield here, float32_product(x_TD[here], weight_VD, buffer)


def _exact_chunks(x_TD: Tensor, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The same with the bits of exact mode, in chunks of which cuBLAS may do the whole."""
    tokens, vocabulary = len(x_TD), len(weight_VD)
    rows = max(chunk_rows(tokens, vocabulary, 4) // WHOLE, 1) * WHOLE
    for first in range(0, tokens, rows):
        here = slice(first, min(first + rows, tokens))
        logits_TV = exact_products.product(x_TD[here], weight_VD, dtype=torch.float32)
        if vocabulary % ROW_TILE:
            logits_TV = new_logits(len(logits_TV), vocabulary, logits_TV).copy_(logits_TV)
        yield here, logits_TV


def _buffers(x_TD: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of tokens and room for their logits, always the same."""
    tokens, vocabulary = len(x_TD), len(weight_VD)
    rows = min(chunk_rows(tokens, vocabulary, dtype.itemsize), tokens)
    buffer = new_logits(rows, vocabulary, x_TD, dtype)
    for first in range(0, tokens, max(rows, 1)):
        here = slice(first, min(first + rows, tokens))
        yield here, buffer[: here.stop - first]


def _new_gradients(x_TD: Tensor, weight_VD: Tensor, wants_x: bool, wants_weight: bool) -> tuple[Tensor, Tensor]:
    """Allocate gradients: of x in its dtype, of weight in float32; empty vectors for unneeded ones."""
    dx_TD = x_TD.new_empty(x_TD.shape if wants_x else 0)
    return dx_TD, weight_VD.new_empty(weight_VD.shape if wants_weight else 0, dtype=torch.float32)


def _add_gradients_(
    dx_TD: Tensor, dweight_VD: Tensor, here: slice, slopes_TV: Tensor, x_TD: Tensor, weight_VD: Tensor
) -> None:
    """Compute a chunk's rows of dx, and accumulate its share of dweight, from slopes."""
    if dx_TD.dim() == 2:
        torch.mm(slopes_TV, weight_VD, out=dx_TD[here])
    if dweight_VD.dim() == 2:
        x_TD, beta = x_TD[here], 0 if here.start == 0 else 1  # the first overwrites: no pass for zeroing
        if slopes_TV.dtype == torch.float32:
            torch.addmm(dweight_VD, slopes_TV.T, x_TD, beta=beta, out=dweight_VD)
        elif slopes_TV.is_cuda:
            torch.addmm(dweight_VD, slopes_TV.T, x_TD, out_dtype=torch.float32, beta=beta, out=dweight_VD)
        else:  # PyTorch has no half-precision product into float32 on CPUs
            torch.addmm(dweight_VD, slopes_TV.T.float(), x_TD.float(), beta=beta, out=dweight_VD)


# ---- operations


@triton.jit
def _scaled_kernel(source, factor, result, count, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    indices = tl.arange(0, BLOCK)
    scaled = tl.load(source + first + indices, mask=indices < count - first, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(result + first + indices, scaled.to(result.dtype.element_ty), mask=indices < count - first)


@torch.library.custom_op("headway::summed_cross_entropy", mutates_args=())
def _loss_and_gradients(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    softcap: float | None,
    z_loss: float,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and its gradients if needed, that of weight in float32."""
    labels_T, losses_T = labels_T.contiguous(), labels_T.new_empty(len(x_TD), dtype=torch.float32)
    dx_TD, dweight_VD = _new_gradients(x_TD, weight_VD, wants_x, wants_weight)
    if not len(x_TD):
        dweight_VD.zero_()
    for here, logits_TV in _chunks(x_TD, weight_VD):
        if wants_x or wants_weight:
            losses_T[here] = loss_rows_(logits_TV, labels_T[here], softcap, z_loss)
            _add_gradients_(dx_TD, dweight_VD, here, logits_TV, x_TD, weight_VD)
        else:
            spread_T, chosen_T, _ = statistics(logits_TV, labels_T[here], softcap)
            losses_T[here] = (spread_T - chosen_T).where(labels_T[here] != IGNORED, 0.0)
    return losses_T.sum(), dx_TD, dweight_VD


@_loss_and_gradients.register_fake
def _(
    x_TD: Tensor,
    weight_VD: Tensor,
    _labels_T: Tensor,
    _softcap: float | None,
    _z_loss: float,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return x_TD.new_empty((), dtype=torch.float32), *_new_gradients(x_TD, weight_VD, wants_x, wants_weight)


@torch.library.custom_op("headway::summed_cross_entropy_backward", mutates_args=())
def _scaled(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return source times a float32 scalar of the device, multiplied in float32 and rounded once."""
    result, block = source.new_empty(source.shape, dtype=dtype), 4096
    if source.numel():
        _scaled_kernel[(-(-source.numel() // block),)](source, factor, result, source.numel(), BLOCK=block, num_warps=8)
    return result


@_scaled.register_fake
def _(source: Tensor, _factor: Tensor, dtype: torch.dtype) -> Tensor:
    return source.new_empty(source.shape, dtype=dtype)


@torch.library.custom_op("headway::token_scores", mutates_args=())
def _scores(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None, exact: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability, entropy and log-sum-exp of each token."""
    logprobs_T, entropy_T, spread_T = (labels_T.new_empty(len(x_TD), dtype=torch.float32) for _ in range(3))
    labels_T = labels_T.contiguous()
    for here, logits_TV in _exact_chunks(x_TD, weight_VD) if exact else _float32_chunks(x_TD, weight_VD):
        kept_T = labels_T[here] != IGNORED
        spread_T[here], chosen_T, entropies_T = statistics(logits_TV, labels_T[here], softcap, entropy=True)
        if exact:
            logprobs_T[here] = label_logprobs(logits_TV, labels_T[here])
        else:
            logprobs_T[here] = (chosen_T - spread_T[here]).where(kept_T, 0.0)
        entropy_T[here] = entropies_T.where(kept_T, 0.0)
    return logprobs_T, entropy_T, spread_T


@_scores.register_fake
def _(
    x_TD: Tensor, _weight_VD: Tensor, _labels_T: Tensor, _softcap: float | None, _exact: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    logprobs_T, entropy_T, spread_T = (x_TD.new_empty(len(x_TD), dtype=torch.float32) for _ in range(3))
    return logprobs_T, entropy_T, spread_T


@torch.library.custom_op("headway::token_scores_backward", mutates_args=())
def _scores_backward(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    entropy_T: Tensor,
    spread_T: Tensor,
    dlogprobs_T: Tensor | None,
    dentropy_T: Tensor | None,
    softcap: float | None,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, from recomputed logits."""
    labels_T, kept_T = labels_T.contiguous(), labels_T != IGNORED
    at_label_T = torch.zeros_like(spread_T) if dlogprobs_T is None else -dlogprobs_T.where(kept_T, 0.0)
    tilt_T = None if dentropy_T is None else -dentropy_T.where(kept_T, 0.0)
    level_T = at_label_T if tilt_T is None else at_label_T + tilt_T * entropy_T
    dx_TD, dweight_VD = _new_gradients(x_TD, weight_VD, wants_x, wants_weight)
    if not len(x_TD):
        dweight_VD.zero_()
    rounded_TV = None
    for here, logits_TV in _float32_chunks(x_TD, weight_VD):
        slopes_TV = slopes_(
            logits_TV, labels_T[here], spread_T[here], level_T=level_T[here], at_label_T=at_label_T[here],
            tilt_T=None if tilt_T is None else tilt_T[here], softcap=softcap,
        )  # fmt: skip
        if x_TD.dtype != torch.float32:
            if rounded_TV is None:
                rounded_TV = new_logits(len(slopes_TV), len(weight_VD), x_TD)
            slopes_TV = rounded_TV[: len(slopes_TV)].copy_(slopes_TV)
        _add_gradients_(dx_TD, dweight_VD, here, slopes_TV, x_TD, weight_VD)
    return dx_TD, dweight_VD.to(weight_VD.dtype)


@_scores_backward.register_fake
def _(
    x_TD: Tensor,
    weight_VD: Tensor,
    _labels_T: Tensor,
    _entropy_T: Tensor,
    _spread_T: Tensor,
    _dlogprobs_T: Tensor | None,
    _dentropy_T: Tensor | None,
    _softcap: float | None,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    dx_TD, dweight_VD = _new_gradients(x_TD, weight_VD, wants_x, wants_weight)
    return dx_TD, dweight_VD.to(weight_VD.dtype)


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        softcap: float | None,
        z_loss: float,
        wants_x: bool,
        wants_weight: bool,
    ) -> Tensor:
        loss, dx_TD, dweight_VD = _loss_and_gradients(x_TD, weight_VD, labels_T, softcap, z_loss, wants_x, wants_weight)
        ctx.save_for_backward(dx_TD, dweight_VD)
        ctx.wants, ctx.dtype = (wants_x, wants_weight), weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        dx_TD, dweight_VD = ctx.saved_tensors
        wants_x, wants_weight = ctx.wants
        dx_TD = _scaled(dx_TD, factor, dx_TD.dtype) if wants_x else None
        dweight_VD = _scaled(dweight_VD, factor, ctx.dtype) if wants_weight else None
        return dx_TD, dweight_VD, None, None, None, None, None


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        softcap: float | None,
        wants_x: bool,
        wants_weight: bool,
        exact: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs_T, entropy_T, spread_T = _scores(x_TD, weight_VD, labels_T, softcap, exact)
        ctx.save_for_backward(x_TD, weight_VD, labels_T, entropy_T, spread_T)
        ctx.softcap, ctx.wants = softcap, (wants_x, wants_weight)
        ctx.set_materialize_grads(False)  # a caller who uses one of the two pays for one
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, dlogprobs_T: Tensor | None, dentropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        wants_x, wants_weight = ctx.wants
        dx_TD, dweight_VD = _scores_backward(
            *ctx.saved_tensors, dlogprobs_T, dentropy_T, ctx.softcap, wants_x, wants_weight
        )
        return dx_TD if wants_x else None, dweight_VD if wants_weight else None, *[None] * 5


def summed_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None = None, z_loss: float = 0.0
) -> Tensor:
    """Return the cross-entropy of x @ weight.T summed over unmasked labels, as a float32 scalar.

    `z_loss` applies only with gradients: an evaluation measures the cross-entropy alone. A label that is neither
    IGNORED nor in the vocabulary makes the loss NaN.
    """
    x_TD, weight_VD = _taken(x_TD, weight_VD, labels_T, softcap)
    wants_x, wants_weight = _wanted(x_TD), _wanted(weight_VD)
    if not wants_x and not wants_weight:
        return _loss_and_gradients(x_TD, weight_VD, labels_T, softcap, 0.0, False, False)[0]
    loss: Tensor = _SummedCrossEntropy.apply(x_TD, weight_VD, labels_T, softcap, z_loss, wants_x, wants_weight)
    return loss


def token_scores(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None = None, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label and the entropy of each token, in float32, of x @ weight.T.

    Both are differentiable, and zero where the label is IGNORED. A label outside of the vocabulary has a
    log-probability of NaN. If `exact`, log-probabilities have the sampler's bits (`sampling.py`).
    """
    x_TD, weight_VD = _taken(x_TD, weight_VD, labels_T, softcap)
    wants_x, wants_weight = _wanted(x_TD), _wanted(weight_VD)
    if not wants_x and not wants_weight:
        logprobs_T, entropy_T, _ = _scores(x_TD, weight_VD, labels_T, softcap, exact)
    else:
        logprobs_T, entropy_T = _TokenScores.apply(x_TD, weight_VD, labels_T, softcap, wants_x, wants_weight, exact)
    return logprobs_T, entropy_T


def _taken(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return x and weight in the precision of an enclosing autocast, checked."""
    x_TD, weight_VD = autocast(x_TD), autocast(weight_VD)
    if x_TD.dtype not in DTYPES or x_TD.dtype != weight_VD.dtype:
        raise ValueError(f"x is {x_TD.dtype} and weight {weight_VD.dtype}: both must have the same dtype of {DTYPES}")
    if x_TD.dim() != 2 or weight_VD.dim() != 2 or x_TD.shape[1] != weight_VD.shape[1] or not len(weight_VD):
        raise ValueError(f"expected x [T, D] and weight [V, D], got {tuple(x_TD.shape)} and {tuple(weight_VD.shape)}")
    if labels_T.shape != x_TD.shape[:1] or labels_T.dtype != torch.int64:
        raise ValueError(f"expected one int64 label per token, got {labels_T.dtype} of {tuple(labels_T.shape)}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"the soft cap must be above 0, not {softcap}")
    return x_TD, weight_VD


def _wanted(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


AHEAD = (
    LaunchSpec(
        "linear_cross_entropy.scaled.bf16",
        _scaled_kernel,
        {"source": "*fp32", "factor": "*fp32", "result": "*bf16", "count": "i32"},
        {"BLOCK": 4096},
        warps=8,
    ),
)
