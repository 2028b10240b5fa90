"""Rows of logits: their statistics, and slopes in place, with one Triton program per row.

With logits z of a row, spread s = log sum exp z and probabilities p = exp(z - s): `statistics` reads a row once, for s,
the label's logit and the entropy; `slopes_` writes p * (level + tilt * (z - s)) - at_label * [label] in place of the
logits; `loss_rows_` does both at once for cross-entropy. `linear_cross_entropy.py` says what they are for.

All three are memory-bound: each reads a row, and the latter two write it. In the first pass every thread folds its
elements into its own maximum and sum, so that a single reduction, in a fixed order, is left at the end of the row. The
second pass runs backward: much of the row (256 KB for a vocabulary of 128k in bfloat16) is still in the L2 cache. The
references are in `linear_cross_entropy.py`.
"""

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.inputs import IGNORED
from headway.kernels.triton_compat import tl, triton

ROW_TILE = 64
"""A row of logits is padded to a multiple of this, so that every row is aligned for 16-byte loads."""

TILE = tl.constexpr(ROW_TILE)
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-(2.0**100))
"""Below any logit, and finite: times zero it is zero. A power of two, whose products are exact: rounded and fused
results are the same, and their difference is zero."""


# ---- a row of logits


@triton.jit
def _logits_at(row, columns, stride, softcap, CAPPED: tl.constexpr, KEEP: tl.constexpr):
    """Return logits in float32, and the derivative of the soft cap."""
    # The mask ends with the padding, not with the vocabulary: only then is it uniform over 16 bytes, which are then one
    # load.
    logits = tl.load(row + columns, mask=columns < stride, other=0.0, eviction_policy=KEEP).to(tl.float32)
    cap_slope = 1.0
    if CAPPED:
        bent = 1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E / softcap)) + 1.0)  # tanh
        logits = softcap * bent
        cap_slope = 1.0 - bent * bent
    return logits, cap_slope


@triton.jit
def _row_statistics(
    row, stride, vocabulary, softcap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the log-sum-exp of a row, and its entropy (0 if not requested)."""
    indices = tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    largest = tl.full((LANES,), LOWEST, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    spent = tl.zeros((LANES,), tl.float32)  # sum of exp(z - largest) * (z - largest)
    for start in tl.range(0, stride, LANES * WIDE, num_stages=STAGES):
        columns = start + indices
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
    row_total = tl.sum(shrunk * total, axis=0)
    entropy = 0.0
    if ENTROPY:
        entropy = tl.log(row_total) - tl.sum(shrunk * (spent + total * (largest - peak)), axis=0) / row_total
    return peak + tl.log(row_total), entropy


@triton.jit
def _at_label(row, label, vocabulary, softcap, CAPPED: tl.constexpr):
    """Return the label's logit, or NaN if the label is out of range: a wrong label must show."""
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
    """Write p * (level + tilt * (z - spread)) - at_label * [label] in place of logits; the padding is arbitrary."""
    label = label.to(tl.int32)  # like columns: half the instructions of a 64-bit comparison
    # Backward: what the first pass read last is most likely still in the L2 cache.
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
    """Return the start of this program's row, and the row stride; a product shows the compiler its divisibility."""
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
    """Both passes over a row: its loss, and the slope in place of the logits."""
    token = tl.program_id(0)
    row, stride = _row(logits, tiles)
    label = tl.load(labels + token)
    if label == IGNORED:
        tl.store(losses + token, 0.0)
        _write_zeros(row, stride, LANES * WIDE)
    else:
        # Before the row's reductions, whose barriers order every thread's load before another's store.
        chosen = _at_label(row, label, vocabulary, softcap, CAPPED)
        spread, _ = _row_statistics(row, stride, vocabulary, softcap, CAPPED, False, LANES, WIDE, STAGES)
        tl.store(losses + token, spread - chosen + z_loss * spread * spread)
        level = 1.0 + 2.0 * z_loss * spread
        _write_slopes(row, label, spread, level, 0.0, 1.0, stride, softcap, CAPPED, False, LANES * WIDE, STAGES)


# ---- launches


def _sizes(logits_TV: Tensor) -> dict[str, int]:
    """Return the tiling of a row: threads, elements per load (16 bytes), and blocks in flight."""
    assert logits_TV.stride(1) == 1, "logits are made by new_logits"
    assert logits_TV.stride(0) % ROW_TILE == 0, "logits are made by new_logits"
    row_bytes = logits_TV.shape[1] * logits_TV.element_size()
    # Few and large programs for long rows: between the passes, the rows of all running programs should stay in the L2
    # cache (50 MB), and three blocks of 16 KB in flight keep a multiprocessor busy.
    warps = 4 if row_bytes <= 2**13 else 16 if row_bytes <= 2**17 else 32
    return {"LANES": 32 * warps, "WIDE": 16 // logits_TV.element_size(), "STAGES": 4, "num_warps": warps}


def new_logits(rows: int, vocabulary: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a matrix [rows, vocabulary] with the row alignment of the kernels, by default in the dtype of `like`."""
    buffer = like.new_empty(rows, -(-vocabulary // ROW_TILE) * ROW_TILE, dtype=dtype)
    buffer[:, vocabulary:] = 0  # read and masked, but uninitialized values could overflow
    return buffer[:, :vocabulary]


def statistics(
    logits_TV: Tensor, labels_T: Tensor, softcap: float | None = None, entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row of `new_logits` the log-sum-exp, the label's logit and the entropy, in float32.

    Without `entropy` the last is uninitialized. A label out of range has a logit of NaN.

    With a split vocabulary, pass labels minus the first column of a worker's share. The log-sum-exps s_k and entropies
    h_k of shares combine to s = logsumexp s_k, entropy = s - sum exp(s_k - s) * (s_k - h_k).
    """
    spread_T, chosen_T, entropy_T = (labels_T.new_empty(len(logits_TV), dtype=torch.float32) for _ in range(3))
    if len(logits_TV):
        _statistics_kernel[(len(logits_TV),)](
            logits_TV, labels_T, spread_T, chosen_T, entropy_T, logits_TV.stride(0) // ROW_TILE, logits_TV.shape[1],
            softcap or 1.0, CAPPED=softcap is not None, ENTROPY=entropy, **_sizes(logits_TV),
        )  # fmt: skip
    return spread_T, chosen_T, entropy_T


def loss_rows_(logits_TV: Tensor, labels_T: Tensor, softcap: float | None = None, z_loss: float = 0.0) -> Tensor:
    """Return the loss of each row of `new_logits` in float32, and write its slope in place of the logits."""
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
    """Write p * (level + tilt * (z - spread)) - at_label * [label] in place of logits from `new_logits`.

    Rows with all three zero are not read. A label out of range has no effect.
    """
    if len(logits_TV):
        _slopes_kernel[(len(logits_TV),)](
            logits_TV, labels_T, spread_T, level_T, level_T if tilt_T is None else tilt_T, at_label_T,
            logits_TV.stride(0) // ROW_TILE, softcap or 1.0, CAPPED=softcap is not None, TILTED=tilt_T is not None,
            **_sizes(logits_TV),
        )  # fmt: skip
    return logits_TV


_VECTORS = {"labels": "*i64", "spreads": "*fp32"}
_SHAPE = {"tiles": "i32", "vocabulary": "i32", "softcap": "fp32"}
_HALF = {"LANES": 1024, "WIDE": 8, "STAGES": 4}
_FULL = {"LANES": 1024, "WIDE": 4, "STAGES": 4}

AHEAD = (
    *(
        LaunchSpec(
            f"logits.loss.{name}{'.capped' if capped else ''}",
            _loss_kernel,
            {"logits": f"*{name}", "labels": "*i64", "losses": "*fp32"} | _SHAPE | {"z_loss": "fp32"},
            {"IGNORED": IGNORED, "CAPPED": capped} | cut,
            warps=32,
        )
        for name, cut in (("bf16", _HALF), ("fp32", _FULL))
        for capped in (False, True)
    ),
    *(
        LaunchSpec(
            f"logits.statistics.{name}",
            _statistics_kernel,
            {"logits": f"*{name}"} | _VECTORS | {"chosen": "*fp32", "entropies": "*fp32"} | _SHAPE,
            {"CAPPED": False, "ENTROPY": True} | cut,
            warps=32,
        )
        for name, cut in (("bf16", _HALF), ("fp32", _FULL))
    ),
    LaunchSpec(
        "logits.slopes.fp32",
        _slopes_kernel,
        {"logits": "*fp32"}
        | _VECTORS
        | dict.fromkeys(("levels", "tilts", "at_labels"), "*fp32")
        | {"tiles": "i32", "softcap": "fp32"},
        {"CAPPED": False, "TILTED": True} | _FULL,
        warps=32,
    ),
)
"""At a vocabulary of 128256."""
