"""Gated activations of a feed-forward: SwiGLU and GeGLU.

    swiglu: silu(gate) * up                 silu(g) = g * sigmoid(g)
    geglu:  gelu(gate) * up                 gelu(g) = g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 * g^3))

The second is GELU's tanh form, since (1 + tanh(z)) / 2 = sigmoid(2z); both are g * s with s = sigmoid(z(g)), and

    dup = grad * g * s                      dgate = grad * up * (s + g * s * (1 - s) * z'(g))

Arithmetic is float32 and each result is rounded once. Eager PyTorch rounds the activation to bfloat16 before the
product: results differ from it by about one unit in the last place, and are more accurate.

It is memory-bound: forward reads two numbers and writes one, backward reads three and writes two; the arithmetic takes
less than half the time of those bytes. A program handles a part of a row; contiguous tensors count as one long row.
Rows may be strided, as when gate and up are the halves of one tensor.

Saved for backward: gate and up; the activation is recomputed.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.triton_compat import tl, triton, triton_op

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK = 2048
WARPS = 4
"""16 elements of each tensor per thread: two 16-byte loads of bfloat16 of each in flight."""


def reference_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in PyTorch."""
    return torch.nn.functional.silu(gate) * up


def reference_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with GELU's tanh form, in PyTorch."""
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    _check(gate, up)
    result: Tensor = _gated(gate, up, False)
    return result


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with GELU's tanh form."""
    _check(gate, up)
    result: Tensor = _gated(gate, up, True)
    return result


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.dtype not in DTYPES:
        raise ValueError(f"expected a gate in float32, float16 or bfloat16, got {gate.dtype}")
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.ndim == 0:
        raise ValueError(f"gate {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)} differ")


# -- kernels


SLOPE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715


@triton.jit
def _sigmoid(gate, GELU: tl.constexpr, SLOPE: tl.constexpr, CUBIC: tl.constexpr):
    if GELU:
        return tl.sigmoid(SLOPE * gate * (1 + CUBIC * gate * gate))
    return tl.sigmoid(gate)


@triton.jit
def _forward_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    width,
    gate_stride,
    up_stride,
    GELU: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0).to(tl.float32)
    out = gate * _sigmoid(gate, GELU, SLOPE, CUBIC) * up
    tl.store(out_ptr + row * width + column, out, mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    width,
    grad_stride,
    gate_stride,
    up_stride,
    GELU: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0).to(tl.float32)
    sigmoid = _sigmoid(gate, GELU, SLOPE, CUBIC)
    steepness = sigmoid * (1 - sigmoid)
    if GELU:
        steepness *= SLOPE * (1 + 3 * CUBIC * gate * gate)
    tl.store(dgate_ptr + row * width + column, grad * up * (sigmoid + gate * steepness), mask=inside)
    tl.store(dup_ptr + row * width + column, grad * gate * sigmoid, mask=inside)


# -- operators


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return rows of any stride: one long row if all tensors are contiguous; copy only if no view exists."""
    if all(x.is_contiguous() for x in tensors):
        return tuple(x.view(1, -1) for x in tensors)
    rows = (x.reshape(-1, x.shape[-1]) for x in tensors)
    return tuple(x if x.stride(1) == 1 else x.contiguous() for x in rows)


def _output(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@triton_op("headway::gated", mutates_args=())
def _gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    out = _output(gate)
    if out.numel() == 0:
        return out
    gates, ups = _rows(gate, up)
    count, width = gates.shape
    wrap_triton(_forward_kernel)[(count * -(-width // BLOCK),)](
        gates,
        ups,
        out,
        width,
        gates.stride(0),
        ups.stride(0),
        GELU=gelu,
        SLOPE=SLOPE,
        CUBIC=CUBIC,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


@_gated.register_fake
def _(gate: Tensor, _up: Tensor, _gelu: bool) -> Tensor:
    return _output(gate)


@triton_op("headway::gated_backward", mutates_args=())
def _gated_backward(grad: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = _output(gate), _output(gate)
    if dgate.numel() == 0:
        return dgate, dup
    grads, gates, ups = _rows(grad, gate, up)
    count, width = gates.shape
    wrap_triton(_backward_kernel)[(count * -(-width // BLOCK),)](
        grads,
        gates,
        ups,
        dgate,
        dup,
        width,
        grads.stride(0),
        gates.stride(0),
        ups.stride(0),
        GELU=gelu,
        SLOPE=SLOPE,
        CUBIC=CUBIC,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return dgate, dup


@_gated_backward.register_fake
def _(_grad: Tensor, gate: Tensor, _up: Tensor, _gelu: bool) -> tuple[Tensor, Tensor]:
    return _output(gate), _output(gate)


# -- gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.gelu = inputs[2]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_gated_backward(grad, *ctx.saved_tensors, ctx.gelu), None


_gated.register_autograd(_backward, setup_context=_keep)


# -- launches to compile ahead of time


def _launches(name: str, dtype: str, *, gelu: bool) -> tuple[LaunchSpec, LaunchSpec]:
    x, count = f"*{dtype}", "i32"
    constants = {"GELU": gelu, "SLOPE": SLOPE, "CUBIC": CUBIC, "BLOCK": BLOCK}
    forward = {"gate_ptr": x, "up_ptr": x, "out_ptr": x, "width": count, "gate_stride": count, "up_stride": count}
    backward = {"grad_ptr": x, "gate_ptr": x, "up_ptr": x, "dgate_ptr": x, "dup_ptr": x, "width": count}
    backward |= {"grad_stride": count, "gate_stride": count, "up_stride": count}
    return (
        LaunchSpec(f"{name}_{dtype}", _forward_kernel, forward, constants, warps=WARPS),
        LaunchSpec(f"{name}_{dtype}_backward", _backward_kernel, backward, constants, warps=WARPS),
    )


AHEAD: tuple[LaunchSpec, ...] = (
    *_launches("swiglu", "bf16", gelu=False),
    *_launches("swiglu", "fp32", gelu=False),
    *_launches("geglu", "bf16", gelu=True),
    *_launches("geglu", "fp32", gelu=True),
)
