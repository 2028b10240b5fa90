"""RMSNorm of rows, alone or fused with an addition to the residual stream.

    y = x * rstd * (weight + offset)        rstd = 1 / sqrt(mean(x * x) + eps)

    with the gradient g of y, u = x * rstd and v = g * (weight + offset):
    dx = rstd * (v - u * mean(v * u))       dweight = sum over rows of g * u

Rounding is that of the families' norms: arithmetic is float32 and the result is rounded once. With an offset of 0 a
weight is first rounded to x's dtype (as in Llama); with another offset it keeps its precision (Gemma: bfloat16 would
round 1 + w to 8 bits). A residual sum is rounded to the stream's dtype before it is normalized. The weight's gradient
is summed in float32 and rounded once, to the weight's dtype.

It is memory-bound: forward reads x and writes y, backward reads x and g and writes dx, with a few operations per
element. A program of the forward pass holds whole rows in registers, several if they are short, so that each element is
read and written once. Backward has a fixed number of programs; each strides over groups of rows, prefetches the next
groups, and accumulates its own float32 sum of the weight's gradient. A second, small kernel adds those sums. All sums
have a fixed order.

Saved for backward: x (or the sum), the weight, and one float32 rstd per row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.eager_op import eager_op, eager_op_with_gradients
from headway.kernels.partial_sums import COLUMNS, ROWS, sum_kernel
from headway.kernels.triton_compat import launchable, tl, triton, triton_op

MAX_WIDTH = 16384
"""A row must fit in the registers of one program."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200; the same on all chips, so that the weight's gradient is summed in the same
order."""


def reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalize over the last dim, in PyTorch."""
    scale = weight.to(x.dtype) if offset == 0 else weight.float() + offset
    rows = x if offset == 0 else x.float()
    return torch.nn.functional.rms_norm(rows, weight.shape, scale, eps).to(x.dtype)


def reference_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add, then normalize, in PyTorch; return the normalized result and the sum."""
    total = x + residual
    return reference(total, weight, eps, offset), total


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalize over the last dim and multiply by weight + offset."""
    _check(x, weight)
    normalized: Tensor = _norm_op(x, weight, eps, offset)[0]
    return normalized


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Normalize x + residual; return the result and the sum, which continues the residual stream."""
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, the residual {residual.dtype} {tuple(residual.shape)}")
    normalized, total, _ = _add_norm_op(x, residual, weight, eps, offset)
    return normalized, total


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise ValueError(f"expected float32, float16 or bfloat16, got x in {x.dtype} and weight in {weight.dtype}")
    if weight.ndim != 1 or x.shape[-1:] != weight.shape:
        raise ValueError(f"rows of {tuple(x.shape)} cannot be normalized with a weight of {tuple(weight.shape)}")
    if not 0 < weight.shape[0] <= MAX_WIDTH:
        raise ValueError(f"expected rows of 1 to {MAX_WIDTH} elements, got {weight.shape[0]}")


# -- tiling


class RmsNormTiling(NamedTuple):
    """A program's share."""

    rows: int
    """Rows per iteration; a power of two."""
    block: int
    """The width, rounded up to a power of two."""
    warps: int
    programs: int
    stages: int = 1
    """Groups of rows in flight per program."""


def forward_cut(rows: int, width: int) -> RmsNormTiling:
    """16 elements per thread: two 16-byte loads of bfloat16 in flight, and room for over 1,000 threads."""
    block = _power_of_two(width)
    at_once = max(1, 4096 // block)
    warps = min(32, at_once * block // 512)
    return RmsNormTiling(at_once, block, warps, -(-rows // at_once))


def backward_cut(rows: int, width: int, column_bytes: int) -> RmsNormTiling:
    """Few programs, since each writes a row of sums, and enough prefetch to keep memory busy.

    `column_bytes` are those of one element of each input. Rows of more than 8192 spill 16 registers per thread.
    """
    block = _power_of_two(width)
    at_once = max(1, 2048 // block)
    warps = min(16, at_once * block // 512)
    each = 16 // warps
    # Of the 227 KiB of shared memory per multiprocessor.
    ahead = min(3, 200 * 1024 // (each * at_once * block * column_bytes))
    groups = -(-rows // at_once)
    turns = -(-groups // (each * MULTIPROCESSORS))
    return RmsNormTiling(at_once, block, warps, -(-groups // turns), ahead + 1)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


# -- kernels


@triton.jit
def _scale(weight_ptr, column, WIDTH: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0)
    if OFFSET == 0:
        return weight.to(DTYPE).to(tl.float32)
    return weight.to(tl.float32) + OFFSET


@triton.jit
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    out = row[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0).to(tl.float32)
    scale = _scale(weight_ptr, column, WIDTH, OFFSET, x_ptr.dtype.element_ty)
    if ADD:
        residual = tl.load(residual_ptr + row[:, None] * residual_stride + column[None, :], mask=inside, other=0)
        rounded = (x + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, rounded, mask=inside)
        x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    tl.store(y_ptr + out, x * rstd[:, None] * scale[None, :], mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr,
    grad_sum_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    grad_stride,
    grad_sum_stride,
    x_stride,
    WIDTH: tl.constexpr,
    OFFSET: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    scale = _scale(weight_ptr, column, WIDTH, OFFSET, x_ptr.dtype.element_ty)
    dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for group in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0).to(tl.float32)
        grad = tl.load(grad_ptr + row[:, None] * grad_stride + column[None, :], mask=inside, other=0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0)[:, None]
        unit = x * rstd
        dweight += grad * unit
        grad *= scale[None, :]
        dx = (grad - unit * (tl.sum(grad * unit, axis=1) / WIDTH)[:, None]) * rstd
        if ADD:
            grad_sum = tl.load(grad_sum_ptr + row[:, None] * grad_sum_stride + column[None, :], mask=inside, other=0)
            dx += grad_sum.to(tl.float32)
        tl.store(dx_ptr + row[:, None] * WIDTH + column[None, :], dx, mask=inside)
    # One row per program of a fixed grid: never past 2^31.
    tl.store(partial_ptr + tl.program_id(0) * WIDTH + column, tl.sum(dweight, axis=0), mask=column < WIDTH)


# -- operators


def _rows(x: Tensor) -> Tensor:
    """Return rows of any stride; copy only if no view exists."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the result and rstd."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _normalized(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    y, rstd = _outputs(x)
    _forward(x, None, weight, (y, None, rstd), eps, offset)
    return y, rstd


_rms_norm = triton_op("headway::rms_norm", mutates_args=())(_normalized)


@_rms_norm.register_fake
def _(x: Tensor, _weight: Tensor, _eps: float, _offset: float) -> tuple[Tensor, Tensor]:
    return _outputs(x)


def _added_and_normalized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _outputs(x)
    total = torch.empty_like(y)
    _forward(x, residual, weight, (y, total, rstd), eps, offset)
    return y, total, rstd


_add_rms_norm = triton_op("headway::add_rms_norm", mutates_args=())(_added_and_normalized)


@_add_rms_norm.register_fake
def _(x: Tensor, _residual: Tensor, _weight: Tensor, _eps: float, _offset: float) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _outputs(x)
    return y, torch.empty_like(y), rstd


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    outputs: tuple[Tensor, Tensor | None, Tensor],
    eps: float,
    offset: float,
) -> None:
    y, total, rstd = outputs
    inputs = _rows(x)
    if inputs.shape[0] == 0:
        return
    others = inputs if residual is None else _rows(residual)
    cut = forward_cut(inputs.shape[0], weight.shape[0])
    launchable(_forward_kernel)[(cut.programs,)](
        inputs,
        others,
        weight.contiguous(),
        y,
        inputs if total is None else total,
        rstd,
        inputs.shape[0],
        inputs.stride(0),
        others.stride(0),
        eps,
        WIDTH=weight.shape[0],
        OFFSET=offset,
        ADD=residual is not None,
        ROWS=cut.rows,
        BLOCK=cut.block,
        EARLY=False,
        num_warps=cut.warps,
    )


def forward_early(x_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `rms_norm` without gradients, launched while the kernel before it ends; both keep to its order."""
    y, rstd = _outputs(x_TD)
    cut = forward_cut(len(x_TD), weight.shape[0])
    _forward_kernel[(cut.programs,)](
        x_TD, x_TD, weight, y, x_TD, rstd, len(x_TD), x_TD.stride(0), x_TD.stride(0), eps,
        WIDTH=weight.shape[0], OFFSET=0.0, ADD=False, ROWS=cut.rows, BLOCK=cut.block, EARLY=True,
        num_warps=cut.warps, launch_pdl=True,
    )  # fmt: skip
    return y


def _gradients(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, including that of the residual sum if there is one, and of the weight."""
    width = weight.shape[0]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inputs, grads = _rows(x), _rows(grad)
    if inputs.shape[0] == 0:
        return dx, torch.zeros_like(weight)
    more = grads if grad_sum is None else _rows(grad_sum)
    cut = backward_cut(inputs.shape[0], width, (2 if grad_sum is None else 3) * x.element_size())
    partial = torch.empty((cut.programs, width), dtype=torch.float32, device=x.device)
    dweight = torch.empty((width,), dtype=weight.dtype, device=x.device)
    launchable(_backward_kernel)[(cut.programs,)](
        grads,
        more,
        inputs,
        weight.contiguous(),
        rstd,
        dx,
        partial,
        inputs.shape[0],
        grads.stride(0),
        more.stride(0),
        inputs.stride(0),
        WIDTH=width,
        OFFSET=offset,
        ADD=grad_sum is not None,
        ROWS=cut.rows,
        BLOCK=cut.block,
        STAGES=cut.stages,
        num_warps=cut.warps,
    )
    launchable(sum_kernel)[(-(-width // COLUMNS), 1)](
        partial, dweight, cut.programs, WIDTH=width, ROWS=ROWS, BLOCK=COLUMNS, num_warps=4
    )
    return dx, dweight


_rms_norm_backward = triton_op("headway::rms_norm_backward", mutates_args=())(_gradients)


@_rms_norm_backward.register_fake
def _(
    _grad: Tensor, _grad_sum: Tensor | None, x: Tensor, weight: Tensor, _rstd: Tensor, _offset: float
) -> tuple[Tensor, Tensor]:
    return _outputs(x)[0], torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


# -- gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.offset = inputs[3]
    ctx.set_materialize_grads(False)  # rstd never has a gradient: write no zeros for it


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    return *_backward_op(grad, None, x, weight, rstd, ctx.offset), None, None


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.offset = inputs[4]
    ctx.set_materialize_grads(False)  # nor has the sum after the last layer


def _backward_sum(
    ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return grad_sum, grad_sum, None, None, None
    total, weight, rstd = ctx.saved_tensors
    dx, dweight = _backward_op(grad, grad_sum, total, weight, rstd, ctx.offset)
    return dx, dx, dweight, None, None


_norm_op = eager_op_with_gradients(_rms_norm, _normalized, _keep, _backward)
_add_norm_op = eager_op_with_gradients(_add_rms_norm, _added_and_normalized, _keep_sum, _backward_sum)
_backward_op = eager_op(_rms_norm_backward, _gradients)


# -- launches to compile ahead of time


def _launches(
    width: int, dtype: str, weight: str, *, add: bool = False, offset: float = 0.0
) -> tuple[LaunchSpec, LaunchSpec]:
    """Launches of both passes over 16,384 rows."""
    x, scale, single, count = f"*{dtype}", f"*{weight}", "*fp32", "i32"
    name = f"{'add_' if add else ''}rms_norm_{width}_{dtype}_{weight}"
    forward = {"x_ptr": x, "residual_ptr": x, "weight_ptr": scale, "y_ptr": x, "sum_ptr": x, "rstd_ptr": single}
    forward |= {"rows": count, "x_stride": count, "residual_stride": count, "eps": "fp32"}
    backward = {"grad_ptr": x, "grad_sum_ptr": x, "x_ptr": x, "weight_ptr": scale, "rstd_ptr": single, "dx_ptr": x}
    backward |= {"partial_ptr": single, "rows": count}
    backward |= {"grad_stride": count, "grad_sum_stride": count, "x_stride": count}
    shared = {"WIDTH": width, "OFFSET": offset, "ADD": add}
    cut = forward_cut(16384, width)
    constants = {**shared, "ROWS": cut.rows, "BLOCK": cut.block, "EARLY": False}
    back = backward_cut(16384, width, (3 if add else 2) * (4 if dtype == "fp32" else 2))
    back_constants = {**shared, "ROWS": back.rows, "BLOCK": back.block, "STAGES": back.stages}
    return (
        LaunchSpec(name, _forward_kernel, forward, constants, warps=cut.warps),
        LaunchSpec(f"{name}_backward", _backward_kernel, backward, back_constants, warps=back.warps),
    )


AHEAD: tuple[LaunchSpec, ...] = (
    *_launches(128, "bf16", "bf16"),
    *_launches(2048, "bf16", "fp32"),
    *_launches(4096, "bf16", "bf16"),
    *_launches(4096, "bf16", "bf16", add=True),
    *_launches(3072, "bf16", "fp32", offset=1.0),
    *_launches(8192, "fp32", "fp32"),
    _launches(16384, "bf16", "bf16")[0],
)
