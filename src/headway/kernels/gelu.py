"""GELU's tanh form between two linear maps, with the gradient of the first one's bias.

    gelu(x) = x * s         s = sigmoid(z)          z = 2 * sqrt(2 / pi) * (x + 0.044715 * x^3)
    dx = grad * (s + x * s * (1 - s) * z')          dbias = sum dx

The bias is part of x already, and its gradient is the sum of dx over all rows: whoever writes dx sums it on the way. A
compiler reads dx once more for it, or makes both one reduction per column, which leaves most of a GPU idle.

Arithmetic is float32 and each result is rounded once. It is memory-bound: forward reads x and writes the result,
backward reads grad and x and writes dx. A program of the backward pass takes a strip of columns and every n-th group of
rows, and accumulates its own float32 sum (`partial_sums.py`).

Saved for backward: x.
"""

from typing import Any

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.gated import CUBIC, SLOPE
from headway.kernels.partial_sums import sum_partials
from headway.kernels.triton_compat import tl, triton

MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK, WARPS = 2048, 4
"""Of the forward pass: 16 elements per thread."""
ROWS, COLUMNS = 16, 128
"""Of a group of the backward pass: whole 128-byte lines, 16 elements per thread."""
PROGRAMS = 4224
"""Of a backward pass, about: 32 per multiprocessor of an H200, where fewer were slower, and the same on all chips, so
that sums have the same order."""


def reference(x: Tensor) -> Tensor:
    """GELU's tanh form, in PyTorch."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """GELU's tanh form of the last dim; the bias is part of x already, and its gradient is computed here."""
    if x.dtype not in DTYPES or x.ndim == 0 or (bias is not None and bias.shape != x.shape[-1:]):
        shape = None if bias is None else tuple(bias.shape)
        raise ValueError(f"expected floats and a bias per column, got {x.dtype} {tuple(x.shape)} and {shape}")
    result: Tensor = _gelu(x.contiguous(), bias)
    return result


# -- kernels


@triton.jit
def _bend(x, square, SLOPE: tl.constexpr, CUBIC: tl.constexpr):
    """Return s, of x and x * x. On a GPU `exp2` and `rsqrt` are one instruction each; `sigmoid` and its division guard
    against numbers that do not occur here, which takes eight more: enough to bind both passes."""
    root = tl.rsqrt(1 + tl.exp2(x * (MINUS_LOG2_E * SLOPE + square * (MINUS_LOG2_E * SLOPE * CUBIC))))
    return root * root


@triton.jit
def _forward_kernel(x_ptr, out_ptr, count, SLOPE: tl.constexpr, CUBIC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0).to(tl.float32)
    tl.store(out_ptr + at, x * _bend(x, x * x, SLOPE, CUBIC), mask=at < count)


@triton.jit
def _backward_kernel(
    grad_ptr,
    x_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    width,
    SLOPE: tl.constexpr,
    CUBIC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for group in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=3):
        row = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * width + column[None, :]
        inside = (row < rows)[:, None] & (column < width)[None, :]
        grad = tl.load(grad_ptr + at, mask=inside, other=0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
        square = x * x
        bend = _bend(x, square, SLOPE, CUBIC)
        # far out the bend is 0 or 1, and the slope of its argument may be infinite: their product is 0
        steep = bend - bend * bend
        slope = tl.where(steep == 0, 0.0, steep * (x * (SLOPE + square * (3 * SLOPE * CUBIC))))
        dx = grad * (bend + slope)
        total += dx
        tl.store(dx_ptr + at, dx, mask=inside)
    out = partial_ptr + tl.program_id(1).to(tl.int64) * width + column
    tl.store(out, tl.sum(total, axis=0), mask=column < width)


# -- operators: opaque to a compiler, so that it does not split the backward pass


@torch.library.custom_op("headway::gelu", mutates_args=())
def _gelu(x: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001 (part of x; only its gradient is made here)
    out = torch.empty_like(x)
    if x.numel():
        _forward_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, out, x.numel(), SLOPE=SLOPE, CUBIC=CUBIC, BLOCK=BLOCK, num_warps=WARPS
        )
    return out


@_gelu.register_fake
def _(x: Tensor, _bias: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("headway::gelu_backward", mutates_args=())
def _gelu_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and its sum over all rows."""
    dx, total = _dx_and_total(grad, x)
    width = x.shape[-1]
    if not x.numel():
        return dx, total.zero_()
    rows, strips = x.numel() // width, triton.cdiv(width, COLUMNS)
    shares = max(1, min(triton.cdiv(rows, ROWS), triton.cdiv(PROGRAMS, strips)))
    partial = torch.empty((shares, width), dtype=torch.float32, device=x.device)
    _backward_kernel[(strips, shares)](
        grad.contiguous(), x, dx, partial, rows, width,
        SLOPE=SLOPE, CUBIC=CUBIC, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    sum_partials(partial.unsqueeze(0), total.unsqueeze(0))
    return dx, total


@_gelu_backward.register_fake
def _dx_and_total(_grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[-1:], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[0])
    ctx.bias = None if inputs[1] is None else inputs[1].dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    dx, total = _gelu_backward(grad, *ctx.saved_tensors)
    return dx, None if ctx.bias is None else total.to(ctx.bias)


_gelu.register_autograd(_backward, setup_context=_keep)

_BENT = {"SLOPE": SLOPE, "CUBIC": CUBIC}
AHEAD: tuple[LaunchSpec, ...] = (
    LaunchSpec(
        "gelu", _forward_kernel, {"x_ptr": "*bf16", "out_ptr": "*bf16", "count": "i32"}, {**_BENT, "BLOCK": BLOCK}
    ),
    LaunchSpec(
        "gelu_backward",
        _backward_kernel,
        {
            "grad_ptr": "*bf16",
            "x_ptr": "*bf16",
            "dx_ptr": "*bf16",
            "partial_ptr": "*fp32",
            "rows": "i32",
            "width": "i32",
        },
        {**_BENT, "ROWS": ROWS, "COLUMNS": COLUMNS},
    ),
)
