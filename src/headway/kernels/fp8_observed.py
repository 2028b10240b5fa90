"""What a cast to float8 does to a sample of its numbers: the shares that become zero and that do not fit.

    [1, amax, share of zeros, share over], summed over rows: each of 16 rows, spread over a batch, writes its part

One launch of 16 programs per cast: a compiler makes three or four of the same reductions, which take longer to launch
than to run. Sums over rows are left to whoever reads them, once in a hundred steps.
"""

import torch
from torch import Tensor
from torch.library import wrap_triton

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.dispatch import uses_triton
from headway.kernels.fp8 import Float8, largest, smallest
from headway.kernels.triton_compat import tl, triton, triton_op

SAMPLED_ROWS = 16
"""65,536 numbers at a width of 4,096."""
WIDTH = 4
"""Numbers that a cast observes."""
BLOCK = 4096
"""Numbers of a row at a time."""
WARPS = 8


def observe(x_MK: Tensor, x8: Float8, *, e5m2: bool, before: Tensor | None = None) -> Tensor:
    """Return 1, the largest magnitude, and the shares of a sample that become zero and that do not fit [16, 4].

    After those of `before`, all but the 1 follow: [16, 7]. Sums over dim 0 are what was observed.
    """
    if uses_triton("fp8", x_MK):
        seen: Tensor = _observe(x_MK, x8.scale, x8.amax, before, e5m2)
        return seen
    return reference(x_MK, x8.scale, x8.amax, before, e5m2)


def reference(x_MK: Tensor, scale: Tensor, amax: Tensor, before: Tensor | None, e5m2: bool) -> Tensor:
    """The same, in PyTorch."""
    rows, step = sampled(len(x_MK))
    scale = scale if scale.numel() == 1 else scale[: rows * step : step]
    size = x_MK[: rows * step : step].float().abs() / scale
    zero, over = (size > 0) & (size <= smallest(e5m2) / 2), ~(size <= largest(e5m2))
    seen = amax.new_zeros(SAMPLED_ROWS, WIDTH)
    seen[0, 0], seen[0, 1] = 1, amax
    if size.numel():
        seen[:rows, 2:] = torch.stack((zero.sum(dim=1), over.sum(dim=1)), dim=1) / size.numel()
    return seen if before is None else torch.cat((before, seen[:, 1:]), dim=1)


def sampled(count: int) -> tuple[int, int]:
    """Return how many of some rows are sampled, and the step from one to the next."""
    return min(count, SAMPLED_ROWS), max(1, count // SAMPLED_ROWS)


# -- the kernel


@triton.jit
def _observe_kernel(
    x_ptr,
    scale_ptr,
    amax_ptr,
    before_ptr,
    out_ptr,
    rows,
    step,
    width,
    row_stride,
    column_stride,
    numbers,
    ROWWISE: tl.constexpr,
    AFTER: tl.constexpr,
    HALF: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    row = (number * step).to(tl.int64)
    inverse = 1.0 / tl.load(scale_ptr + (row if ROWWISE else 0), mask=number < rows, other=1.0)
    zeros = tl.zeros([BLOCK], tl.int32)
    over = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = (column < width) & (number < rows)
        x = tl.load(x_ptr + row * row_stride + column * column_stride, mask=inside, other=0).to(tl.float32)
        size = tl.abs(x) * inverse
        zeros += ((size > 0) & (size <= HALF)).to(tl.int32)
        over += (inside & ((size <= LARGEST) == 0)).to(tl.int32)
    zero_share = tl.sum(zeros, axis=0).to(tl.float32) / numbers
    over_share = tl.sum(over, axis=0).to(tl.float32) / numbers
    amax = tl.load(amax_ptr, mask=number == 0, other=0.0)
    is_first = (number == 0).to(tl.float32)
    column = tl.arange(0, 2 * WIDTH)
    SHIFT: tl.constexpr = WIDTH - 1 if AFTER else 0
    seen = tl.where(column == SHIFT + 1, amax, tl.where(column == SHIFT + 2, zero_share, over_share))
    if AFTER:
        before = tl.load(before_ptr + number * WIDTH + column, mask=column < WIDTH, other=0.0)
        seen = tl.where(column < WIDTH, before, seen)
    else:
        seen = tl.where(column == 0, is_first, seen)
    tl.store(out_ptr + number * (SHIFT + WIDTH) + column, seen, mask=column < SHIFT + WIDTH)


def _output(amax: Tensor, before: Tensor | None) -> Tensor:
    return amax.new_empty(SAMPLED_ROWS, WIDTH if before is None else 2 * WIDTH - 1)


@triton_op("headway::fp8_observe", mutates_args=())
def _observe(x_MK: Tensor, scale: Tensor, amax: Tensor, before: Tensor | None, e5m2: bool) -> Tensor:
    seen, (rows, step) = _output(amax, before), sampled(len(x_MK))
    width = x_MK.shape[1]
    wrap_triton(_observe_kernel)[(SAMPLED_ROWS,)](
        x_MK,
        scale,
        amax,
        amax if before is None else before.contiguous(),
        seen,
        rows,
        step,
        width,
        x_MK.stride(0),
        x_MK.stride(1),
        max(1, rows * width),
        ROWWISE=scale.numel() > 1,
        AFTER=before is not None,
        HALF=smallest(e5m2) / 2,
        LARGEST=largest(e5m2),
        WIDTH=WIDTH,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return seen


@_observe.register_fake
def _(_x_MK: Tensor, _scale: Tensor, amax: Tensor, before: Tensor | None, _e5m2: bool) -> Tensor:
    return _output(amax, before)


# -- launches to compile ahead of time


def _ahead(name: str, *, rowwise: bool, after: bool, e5m2: bool) -> LaunchSpec:
    types = {"x_ptr": "*bf16"} | dict.fromkeys(("scale_ptr", "amax_ptr", "before_ptr", "out_ptr"), "*fp32")
    types |= dict.fromkeys(("rows", "step", "width", "row_stride", "column_stride", "numbers"), "i32")
    constants = {"ROWWISE": rowwise, "AFTER": after, "HALF": smallest(e5m2) / 2, "LARGEST": largest(e5m2)}
    odd = frozenset({"rows", "step", "column_stride"})
    return LaunchSpec(name, _observe_kernel, types, constants | {"WIDTH": WIDTH, "BLOCK": BLOCK}, WARPS, odd=odd)


AHEAD: tuple[LaunchSpec, ...] = (
    _ahead("fp8_observe", rowwise=False, after=False, e5m2=False),
    _ahead("fp8_observe_gradient", rowwise=False, after=True, e5m2=True),
    _ahead("fp8_observe_rowwise", rowwise=True, after=True, e5m2=False),
)
