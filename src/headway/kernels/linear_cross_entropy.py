"""Cross-entropy, log-probabilities and entropy of x @ weight.T, without all logits in memory.

With logits z = softcap(x @ weight.T), spread s = log sum exp z, probabilities p = exp(z - s) and a label y:

    loss     s - z_y + z_loss * s^2     slope over z:  p * (1 + 2 * z_loss * s) - [y]
    logprob  z_y - s                                   [y] - p
    entropy  s - sum p * z                             -p * (z - s + entropy)

Three products with the largest matrix of a model bind it: 6 * T * V * D FLOPs. What is left to save is everything
around them. Tokens are cut into a few equal chunks. Of each, cuBLAS makes the logits in one buffer that is used again,
one Triton program a row turns them into the slope in place, and cuBLAS makes both gradients of the slope. A program
reads its row twice, the second time backwards: much of it (256 KB for a vocabulary of 128k in bfloat16) is then still
in the second-level cache. In the first pass every thread folds what it sees into a maximum and a sum of its own, so
that threads meet in one reduction, in a fixed order, at the end of the row.

The loss is a plain sum, so that its gradients are known in the forward pass, up to the factor that backward brings.
They are kept for backward: dx in its own dtype, dweight in float32, where cuBLAS adds up the chunks. The factor is
applied in float32 in the one pass that brings dweight into its dtype. Taking a scale in forward would save nothing:
that pass is there anyhow, the factor on the device must not be looked at, and slopes times 1 / tokens vanish in
float16. Log-probabilities and entropies bring a factor for each token: for them backward makes the logits again.

A whole pass is one opaque operation to torch.compile, with the logits inside: there is nothing around a product of
cuBLAS that it could fuse, and a buffer that it sees is one that it may copy.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headway.kernels.ahead import Ahead
from headway.kernels.language import tl, triton

__all__ = [
    "AHEAD",
    "IGNORED",
    "chunk_rows",
    "loss_rows_",
    "new_logits",
    "reference_summed_cross_entropy",
    "reference_token_scores",
    "slopes_",
    "statistics",
    "summed_cross_entropy",
    "token_scores",
]

IGNORED = -100
"""A label that is left out."""

LOGITS_BYTES = 2**30
"""Of one chunk's logits: 4096 tokens of a vocabulary of 128k in bfloat16."""

CHUNK_TILE = 128
"""Tokens of a chunk are a multiple of this: what cuBLAS cuts a product into."""

ROW_TILE = 64
"""Elements that a row of logits is padded to a multiple of: every row begins where 16 bytes can be loaded at once."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

TILE = tl.constexpr(ROW_TILE)
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Below any logit, and finite: times zero it is zero."""


# ---- in plain PyTorch


def reference_summed_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None = None, z_loss: float = 0.0
) -> Tensor:
    """What `summed_cross_entropy` computes, with all logits in memory."""
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
    """What `token_scores` computes, with all logits in memory."""
    kept_T = labels_T != IGNORED
    scores_TV = torch.log_softmax(_capped(x_TD @ weight_VD.T, softcap), dim=-1, dtype=torch.float32)
    logprobs_T = scores_TV.gather(1, labels_T.where(kept_T, 0).unsqueeze(1)).squeeze(1)
    entropy_T = -(scores_TV.exp() * scores_TV).sum(dim=1)
    return logprobs_T.where(kept_T, 0.0), entropy_T.where(kept_T, 0.0)


def _capped(logits_TV: Tensor, softcap: float | None) -> Tensor:
    return logits_TV if softcap is None else softcap * torch.tanh(logits_TV.float() / softcap)


# ---- a row of logits


@triton.jit
def _logits_at(row, columns, stride, softcap, CAPPED: tl.constexpr, KEEP: tl.constexpr):
    """Logits in float32, and the slope of the soft cap there."""
    # The mask ends with the padding, not with the vocabulary: only then is it the same for all of 16 bytes, whatever
    # the vocabulary, and they are one load.
    logits = tl.load(row + columns, mask=columns < stride, other=0.0, eviction_policy=KEEP).to(tl.float32)
    cap_slope = 1.0
    if CAPPED:
        bent = 1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E / softcap)) + 1.0)  # the hyperbolic tangent
        logits = softcap * bent
        cap_slope = 1.0 - bent * bent
    return logits, cap_slope


@triton.jit
def _row_statistics(
    row, stride, vocabulary, softcap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The logarithm of the sum of exponentials of a row, and its entropy (0 where it is not asked for)."""
    places = tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    largest = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    spent = tl.zeros((LANES,), tl.float32)  # sum of exp(z - largest) * (z - largest)
    for start in tl.range(0, stride, LANES * WIDE, num_stages=STAGES):
        columns = start + places
        logits, _ = _logits_at(row, columns, stride, softcap, CAPPED, "evict_last")
        logits = tl.where(columns < vocabulary, logits, LOWEST)
        before, largest = largest, tl.maximum(largest, tl.max(logits, axis=1))
        shrunk = tl.exp2((before - largest) * LOG2_E)
        raised = tl.exp2(logits * LOG2_E - (largest * LOG2_E)[:, None])
        if ENTROPY:
            spent = shrunk * (spent + total * (before - largest)) + tl.sum(raised * (logits - largest[:, None]), axis=1)
        total = shrunk * total + tl.sum(raised, axis=1)
    peak = tl.max(largest, axis=0)
    shrunk = tl.exp2((largest - peak) * LOG2_E)
    whole = tl.sum(shrunk * total, axis=0)
    entropy = 0.0
    if ENTROPY:
        entropy = tl.log(whole) - tl.sum(shrunk * (spent + total * (largest - peak)), axis=0) / whole
    return peak + tl.log(whole), entropy


@triton.jit
def _at_label(row, label, vocabulary, softcap, CAPPED: tl.constexpr):
    """The label's logit, NaN where the label is none of the columns: a wrong label must show."""
    here = (label >= 0) & (label < vocabulary)
    chosen = tl.load(row + tl.where(here, label, 0)).to(tl.float32)
    if CAPPED:
        chosen = softcap * (1.0 - 2.0 / (tl.exp2(chosen * (2.0 * LOG2_E / softcap)) + 1.0))
    return tl.where(here, chosen, float("nan"))


@triton.jit
def _write_slopes(
    row, label, spread, level, tilt, at_label, stride, softcap,
    CAPPED: tl.constexpr, TILTED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """p * (level + tilt * (z - spread)) - at_label * [label] in place of each logit; of the padding, anything."""
    label = label.to(tl.int32)  # as columns are: half the instructions of a comparison in 64 bits
    # Backwards: what the first pass read last is most likely still in the second-level cache.
    for block in tl.range(0, tl.cdiv(stride, BLOCK), num_stages=STAGES):
        columns = (tl.cdiv(stride, BLOCK) - 1 - block) * BLOCK + tl.arange(0, BLOCK)
        logits, cap_slope = _logits_at(row, columns, stride, softcap, CAPPED, "evict_first")
        slopes = tl.exp2(logits * LOG2_E - spread * LOG2_E)
        if TILTED:
            slopes *= level + tilt * (logits - spread)
        else:
            slopes *= level
        slopes = tl.where(columns == label, slopes - at_label, slopes) * cap_slope
        tl.store(row + columns, slopes.to(row.dtype.element_ty), mask=columns < stride, eviction_policy="evict_first")


@triton.jit
def _write_zeros(row, stride, BLOCK: tl.constexpr):
    for start in tl.range(0, stride, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), row.dtype.element_ty)
        tl.store(row + columns, zeros, mask=columns < stride, eviction_policy="evict_first")


@triton.jit
def _row(logits, tiles):
    """Where this program's row begins, and the elements to the next; a product shows the compiler what divides it."""
    stride = tiles * TILE
    return tl.multiple_of(logits + tl.program_id(0).to(tl.int64) * stride, 16), stride


@triton.jit
def _statistics_kernel(
    logits, labels, spreads, chosen, entropies, tiles, vocabulary, softcap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row, stride = _row(logits, tiles)
    spread, entropy = _row_statistics(row, stride, vocabulary, softcap, CAPPED, ENTROPY, LANES, WIDE, STAGES)
    tl.store(spreads + token, spread)
    tl.store(chosen + token, _at_label(row, tl.load(labels + token), vocabulary, softcap, CAPPED))
    if ENTROPY:
        tl.store(entropies + token, entropy)


@triton.jit
def _slopes_kernel(
    logits, labels, spreads, levels, tilts, at_labels, tiles, softcap,
    CAPPED: tl.constexpr, TILTED: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row, stride = _row(logits, tiles)
    level, at_label, tilt = tl.load(levels + token), tl.load(at_labels + token), 0.0
    if TILTED:
        tilt = tl.load(tilts + token)
    if (level == 0.0) & (at_label == 0.0) & (tilt == 0.0):
        _write_zeros(row, stride, LANES * WIDE)
    else:
        label, spread = tl.load(labels + token), tl.load(spreads + token)
        _write_slopes(row, label, spread, level, tilt, at_label, stride, softcap, CAPPED, TILTED, LANES * WIDE, STAGES)


@triton.jit
def _loss_kernel(
    logits, labels, losses, tiles, vocabulary, softcap, z_loss,
    IGNORED: tl.constexpr, CAPPED: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both passes over a row: its loss, and the loss's slope in place of the logits."""
    token = tl.program_id(0)
    row, stride = _row(logits, tiles)
    label = tl.load(labels + token)
    if label == IGNORED:
        tl.store(losses + token, 0.0)
        _write_zeros(row, stride, LANES * WIDE)
    else:
        # Before the row's reductions, whose barriers keep every thread's load ahead of another's store.
        chosen = _at_label(row, label, vocabulary, softcap, CAPPED)
        spread, _ = _row_statistics(row, stride, vocabulary, softcap, CAPPED, False, LANES, WIDE, STAGES)
        tl.store(losses + token, spread - chosen + z_loss * spread * spread)
        level = 1.0 + 2.0 * z_loss * spread
        _write_slopes(row, label, spread, level, 0.0, 1.0, stride, softcap, CAPPED, False, LANES * WIDE, STAGES)


@triton.jit
def _scaled_kernel(source, factor, result, count, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = tl.arange(0, BLOCK)
    scaled = tl.load(source + first + places, mask=places < count - first, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(result + first + places, scaled.to(result.dtype.element_ty), mask=places < count - first)


# ---- launches


def _sizes(logits_TV: Tensor) -> dict[str, int]:
    """How a row is cut: threads, elements that a thread loads at once (16 bytes), and blocks of them under way."""
    assert logits_TV.stride(1) == 1, "logits are made by new_logits"
    assert logits_TV.stride(0) % ROW_TILE == 0, "logits are made by new_logits"
    row_bytes = logits_TV.shape[1] * logits_TV.element_size()
    # Few and large programs for long rows: between the passes, the rows of all programs that run should stay in the
    # second-level cache (50 MB), and three blocks of 16 KB under way are what a multiprocessor needs to be kept busy.
    warps = 4 if row_bytes <= 2**13 else 16 if row_bytes <= 2**17 else 32
    return {"LANES": 32 * warps, "WIDE": 16 // logits_TV.element_size(), "STAGES": 4, "num_warps": warps}


def new_logits(rows: int, vocabulary: int, like: Tensor) -> Tensor:
    """An uninitialized matrix [rows, vocabulary] whose rows begin where the kernels want them to."""
    buffer = like.new_empty(rows, -(-vocabulary // ROW_TILE) * ROW_TILE)
    buffer[:, vocabulary:] = 0  # read and left out, but nothing that memory happened to hold may overflow on the way
    return buffer[:, :vocabulary]


def statistics(
    logits_TV: Tensor, labels_T: Tensor, softcap: float | None = None, entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of `new_logits`: log of the sum of exponentials, the label's logit, and entropy, in float32.

    Without `entropy` the last is uninitialized. A label that is no column has a logit of NaN.

    Of a vocabulary that is shared out, this is one worker's share: labels minus its first column go in. Spreads s_k and
    entropies h_k of shares make those of the whole: s = logsumexp s_k, entropy = s - sum exp(s_k - s) * (s_k - h_k).
    """
    spread_T, chosen_T, entropy_T = (labels_T.new_empty(len(logits_TV), dtype=torch.float32) for _ in range(3))
    if len(logits_TV):
        _statistics_kernel[(len(logits_TV),)](
            logits_TV, labels_T, spread_T, chosen_T, entropy_T, logits_TV.stride(0) // ROW_TILE, logits_TV.shape[1],
            softcap or 1.0, CAPPED=softcap is not None, ENTROPY=entropy, **_sizes(logits_TV),
        )  # fmt: skip
    return spread_T, chosen_T, entropy_T


def loss_rows_(logits_TV: Tensor, labels_T: Tensor, softcap: float | None = None, z_loss: float = 0.0) -> Tensor:
    """The loss of each row of `new_logits`, in float32, and its slope in place of the logits: both passes at once."""
    losses_T = labels_T.new_empty(len(logits_TV), dtype=torch.float32)
    if len(logits_TV):
        _loss_kernel[(len(logits_TV),)](
            logits_TV, labels_T, losses_T, logits_TV.stride(0) // ROW_TILE, logits_TV.shape[1],
            softcap or 1.0, z_loss, IGNORED=IGNORED, CAPPED=softcap is not None, **_sizes(logits_TV),
        )  # fmt: skip
    return losses_T


def slopes_(
    logits_TV: Tensor,
    labels_T: Tensor,
    spread_T: Tensor,
    *,
    level_T: Tensor,
    at_label_T: Tensor,
    tilt_T: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Put p * (level + tilt * (z - spread)) - at_label * [label] in place of logits that `new_logits` made.

    Rows of which all three are zero are not read. A label that is no column gets nothing.
    """
    if len(logits_TV):
        _slopes_kernel[(len(logits_TV),)](
            logits_TV, labels_T, spread_T, level_T, level_T if tilt_T is None else tilt_T, at_label_T,
            logits_TV.stride(0) // ROW_TILE, softcap or 1.0, CAPPED=softcap is not None, TILTED=tilt_T is not None,
            **_sizes(logits_TV),
        )  # fmt: skip
    return logits_TV


def chunk_rows(tokens: int, vocabulary: int, element_size: int) -> int:
    """Tokens whose logits are held at once: equal chunks, as few as the bound on bytes allows."""
    most = max(LOGITS_BYTES // (vocabulary * element_size) // CHUNK_TILE, 1)
    tiles = -(-tokens // CHUNK_TILE)
    chunks = max(-(-tiles // most), 1)
    return -(-tiles // chunks) * CHUNK_TILE


def _chunks(x_TD: Tensor, weight_VD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of tokens and their logits, all in the same memory."""
    tokens, vocabulary = len(x_TD), len(weight_VD)
    rows = min(chunk_rows(tokens, vocabulary, x_TD.element_size()), tokens)
    buffer = new_logits(rows, vocabulary, x_TD)
    for first in range(0, tokens, max(rows, 1)):
        x = x_TD[first : first + rows]
        yield slice(first, first + len(x)), torch.mm(x, weight_VD.T, out=buffer[: len(x)])


def _new_gradients(x_TD: Tensor, weight_VD: Tensor, wants_x: bool, wants_weight: bool) -> tuple[Tensor, Tensor]:
    """Uninitialized: of x in its dtype, of weight in float32; empty vectors where they are not wanted."""
    dx_TD = x_TD.new_empty(x_TD.shape if wants_x else 0)
    return dx_TD, weight_VD.new_empty(weight_VD.shape if wants_weight else 0, dtype=torch.float32)


def _add_gradients_(
    dx_TD: Tensor, dweight_VD: Tensor, here: slice, slopes_TV: Tensor, x_TD: Tensor, weight_VD: Tensor
) -> None:
    """What one chunk's slopes over logits bring: its rows of dx, and a share of dweight."""
    if dx_TD.dim() == 2:
        torch.mm(slopes_TV, weight_VD, out=dx_TD[here])
    if dweight_VD.dim() == 2:
        x_TD, beta = x_TD[here], 0 if here.start == 0 else 1  # the first overwrites: no pass to zero, none to read
        if slopes_TV.dtype == torch.float32:
            torch.addmm(dweight_VD, slopes_TV.T, x_TD, beta=beta, out=dweight_VD)
        elif slopes_TV.is_cuda:
            torch.addmm(dweight_VD, slopes_TV.T, x_TD, out_dtype=torch.float32, beta=beta, out=dweight_VD)
        else:  # PyTorch has no product of half precision into float32 on CPUs
            torch.addmm(dweight_VD, slopes_TV.T.float(), x_TD.float(), beta=beta, out=dweight_VD)


# ---- operations


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
    """The loss, and its gradients where they are wanted, that of weight in float32."""
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
    """Source times a float32 scalar of the device, multiplied in float32 and rounded once."""
    result, block = source.new_empty(source.shape, dtype=dtype), 4096
    if source.numel():
        _scaled_kernel[(-(-source.numel() // block),)](source, factor, result, source.numel(), BLOCK=block, num_warps=8)
    return result


@_scaled.register_fake
def _(source: Tensor, _factor: Tensor, dtype: torch.dtype) -> Tensor:
    return source.new_empty(source.shape, dtype=dtype)


@torch.library.custom_op("headway::token_scores", mutates_args=())
def _scores(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and spread of each token."""
    logprobs_T, entropy_T, spread_T = (labels_T.new_empty(len(x_TD), dtype=torch.float32) for _ in range(3))
    labels_T = labels_T.contiguous()
    for here, logits_TV in _chunks(x_TD, weight_VD):
        kept_T = labels_T[here] != IGNORED
        spread_T[here], chosen_T, entropies_T = statistics(logits_TV, labels_T[here], softcap, entropy=True)
        logprobs_T[here] = (chosen_T - spread_T[here]).where(kept_T, 0.0)
        entropy_T[here] = entropies_T.where(kept_T, 0.0)
    return logprobs_T, entropy_T, spread_T


@_scores.register_fake
def _(x_TD: Tensor, _weight_VD: Tensor, _labels_T: Tensor, _softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
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
    """The gradients of x and weight, of logits that are made again."""
    labels_T, kept_T = labels_T.contiguous(), labels_T != IGNORED
    at_label_T = torch.zeros_like(spread_T) if dlogprobs_T is None else -dlogprobs_T.where(kept_T, 0.0)
    tilt_T = None if dentropy_T is None else -dentropy_T.where(kept_T, 0.0)
    level_T = at_label_T if tilt_T is None else at_label_T + tilt_T * entropy_T
    dx_TD, dweight_VD = _new_gradients(x_TD, weight_VD, wants_x, wants_weight)
    if not len(x_TD):
        dweight_VD.zero_()
    for here, logits_TV in _chunks(x_TD, weight_VD):
        slopes_(
            logits_TV, labels_T[here], spread_T[here], level_T=level_T[here], at_label_T=at_label_T[here],
            tilt_T=None if tilt_T is None else tilt_T[here], softcap=softcap,
        )  # fmt: skip
        _add_gradients_(dx_TD, dweight_VD, here, logits_TV, x_TD, weight_VD)
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
    ) -> tuple[Tensor, Tensor]:
        logprobs_T, entropy_T, spread_T = _scores(x_TD, weight_VD, labels_T, softcap)
        ctx.save_for_backward(x_TD, weight_VD, labels_T, entropy_T, spread_T)
        ctx.softcap, ctx.wants = softcap, (wants_x, wants_weight)
        ctx.set_materialize_grads(False)  # who asks for one of the two pays for one
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, dlogprobs_T: Tensor | None, dentropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        wants_x, wants_weight = ctx.wants
        dx_TD, dweight_VD = _scores_backward(
            *ctx.saved_tensors, dlogprobs_T, dentropy_T, ctx.softcap, wants_x, wants_weight
        )
        return dx_TD if wants_x else None, dweight_VD if wants_weight else None, None, None, None, None


def summed_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None = None, z_loss: float = 0.0
) -> Tensor:
    """Sum over unmasked labels of the cross-entropy of x @ weight.T: a float32 scalar.

    `z_loss` counts where gradients are wanted: an evaluation measures the cross-entropy alone. A label that is neither
    IGNORED nor of the vocabulary makes the loss NaN.
    """
    x_TD, weight_VD = _taken(x_TD, weight_VD, labels_T, softcap)
    wants_x, wants_weight = _wanted(x_TD), _wanted(weight_VD)
    if not wants_x and not wants_weight:
        return _loss_and_gradients(x_TD, weight_VD, labels_T, softcap, 0.0, False, False)[0]
    loss: Tensor = _SummedCrossEntropy.apply(x_TD, weight_VD, labels_T, softcap, z_loss, wants_x, wants_weight)
    return loss


def token_scores(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The log-probability of each label and the entropy of each token's distribution, in float32, of x @ weight.T.

    Both are differentiable, and both are zero where the label is IGNORED. A label that is not of the vocabulary has
    a log-probability of NaN.
    """
    x_TD, weight_VD = _taken(x_TD, weight_VD, labels_T, softcap)
    wants_x, wants_weight = _wanted(x_TD), _wanted(weight_VD)
    if not wants_x and not wants_weight:
        logprobs_T, entropy_T, _ = _scores(x_TD, weight_VD, labels_T, softcap)
    else:
        logprobs_T, entropy_T = _TokenScores.apply(x_TD, weight_VD, labels_T, softcap, wants_x, wants_weight)
    return logprobs_T, entropy_T


def _taken(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """x and weight in the precision of an enclosing autocast, checked."""
    kind = x_TD.device.type
    if torch.is_autocast_enabled(kind):  # here, since inside a Function no cast would be recorded for backward
        x_TD, weight_VD = (x.to(torch.get_autocast_dtype(kind)) for x in (x_TD, weight_VD))
    if x_TD.dtype not in DTYPES or x_TD.dtype != weight_VD.dtype:
        raise ValueError(f"x is {x_TD.dtype} and weight {weight_VD.dtype}: both must be the same of {DTYPES}")
    if x_TD.dim() != 2 or weight_VD.dim() != 2 or x_TD.shape[1] != weight_VD.shape[1] or not len(weight_VD):
        raise ValueError(f"no product of {tuple(x_TD.shape)} with {tuple(weight_VD.shape)}: want [T, D] and [V, D]")
    if labels_T.shape != x_TD.shape[:1] or labels_T.dtype != torch.int64:
        raise ValueError(f"labels are {labels_T.dtype} of {tuple(labels_T.shape)}: want one int64 for each token")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"a soft cap of {softcap} squeezes logits into nothing: it must be above 0")
    return x_TD, weight_VD


def _wanted(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


_VECTORS = {"labels": "*i64", "spreads": "*fp32"}
_SHAPE = {"tiles": "i32", "vocabulary": "i32", "softcap": "fp32"}
_HALF = {"LANES": 1024, "WIDE": 8, "STAGES": 4}
_FULL = {"LANES": 1024, "WIDE": 4, "STAGES": 4}

AHEAD = (
    *(
        Ahead(
            f"linear_cross_entropy.loss.{name}{'.capped' if capped else ''}",
            _loss_kernel,
            {"logits": f"*{name}", "labels": "*i64", "losses": "*fp32"} | _SHAPE | {"z_loss": "fp32"},
            {"IGNORED": IGNORED, "CAPPED": capped} | cut,
            warps=32,
        )
        for name, cut in (("bf16", _HALF), ("fp32", _FULL))
        for capped in (False, True)
    ),
    *(
        Ahead(
            f"linear_cross_entropy.statistics.{name}",
            _statistics_kernel,
            {"logits": f"*{name}"} | _VECTORS | {"chosen": "*fp32", "entropies": "*fp32"} | _SHAPE,
            {"CAPPED": False, "ENTROPY": True} | cut,
            warps=32,
        )
        for name, cut in (("bf16", _HALF), ("fp32", _FULL))
    ),
    Ahead(
        "linear_cross_entropy.slopes.bf16",
        _slopes_kernel,
        {"logits": "*bf16"}
        | _VECTORS
        | dict.fromkeys(("levels", "tilts", "at_labels"), "*fp32")
        | {"tiles": "i32", "softcap": "fp32"},
        {"CAPPED": False, "TILTED": True} | _HALF,
        warps=32,
    ),
    Ahead(
        "linear_cross_entropy.scaled.bf16",
        _scaled_kernel,
        {"source": "*fp32", "factor": "*fp32", "result": "*bf16", "count": "i32"},
        {"BLOCK": 4096},
        warps=8,
    ),
)
"""At a vocabulary of 128256."""
