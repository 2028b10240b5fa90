"""The sums of attention over tiles of keys, the same operations in every kernel that has to give the same bits.

A softmax over keys is summed tile by tile, relative to the largest score so far. In exact mode the order of all sums
is a matter of a key's place in its sequence alone: tiles of `EXACT_KEYS` keys add up to spans of `EXACT_SPAN`, each
from zero, and spans are joined in their order. So programs may share a sequence out at the ends of its spans.
"""

from headway.kernels.triton_compat import tl, triton

EXACT_KEYS = 64
"""Keys of a tile in exact mode, where training and every pass of inference sum in the same order."""
EXACT_SPAN = 512
"""Keys of a span in exact mode: each is summed from zero, then joined to those before it."""


@triton.jit
def weigh(scores, peak, factor):
    """Return the weights of a tile's scores, what earlier sums shrink by, and the largest score."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # nothing seen yet
    # Written as one operation: else the compiler joins them here or there, and bits differ between loops.
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, tl.zeros_like(scores) - base[:, None]))
    return weights, tl.exp2(peak - base), new_peak


@triton.jit
def add_tile(acc, total, weights, shrink, v, IEEE: tl.constexpr, ORDERED: tl.constexpr):
    """Add a tile to sums; if ORDERED, `total` has a column per place in a tile, for `sum_of_pairs` at the end."""
    if ORDERED:
        total = tl.fma(total, tl.zeros_like(total) + shrink[:, None], weights)
    else:
        total = total * shrink + tl.sum(weights, 1)
    if IEEE:
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, total


@triton.jit
def sum_of_pairs(x):
    """Sum rows by adding their halves, again and again: a reduction's order depends on how threads share a tile out."""
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def join_span(acc, total, peak, more_acc, more_total, more_peak):
    """Join sums over later keys to those over earlier ones: each operation is written out, so that none is fused in one
    kernel and not in another."""
    new_peak = tl.maximum(peak, more_peak)
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # nothing seen yet
    shrink, more_shrink = tl.exp2(peak - base), tl.exp2(more_peak - base)
    acc = tl.fma(acc, tl.zeros_like(acc) + shrink[:, None], more_acc * more_shrink[:, None])
    return acc, tl.fma(total, shrink, more_total * more_shrink), new_peak
