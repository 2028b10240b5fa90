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

`gated_pair` takes gate and up as the halves of one product's rows, in one tensor, and also returns the largest
magnitude that each program wrote: a cast to float8 then needs no pass of its own over the result (`kernels/fp8.py`).
"""

import math
from typing import Any

import torch
from torch import Tensor

from headway.kernels.compile_ahead import LaunchSpec
from headway.kernels.dispatch import uses_triton
from headway.kernels.eager_op import eager_op, eager_op_with_gradients
from headway.kernels.triton_compat import launchable, tl, triton, triton_op

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
    result: Tensor = _gated_op(gate, up, False)
    return result


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with GELU's tanh form."""
    _check(gate, up)
    result: Tensor = _gated_op(gate, up, True)
    return result


def gated_pair(pair: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Return activation(gate) * up of rows [gate, up], and the largest magnitudes of parts of it; without gradients."""
    if uses_triton("fp8", pair):
        result: tuple[Tensor, Tensor] = _gated_pair(pair, gelu)
        return result
    out = (reference_geglu if gelu else reference_swiglu)(*pair.chunk(2, dim=-1))
    return out, amax_of_all(out)


def gated_pair_backward(grad: Tensor, pair: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of the rows [gate, up], and the largest magnitudes of parts of it."""
    if uses_triton("fp8", pair):
        result: tuple[Tensor, Tensor] = _gated_pair_backward(grad, pair, gelu)
        return result
    gate, up = (x.float() for x in pair.chunk(2, dim=-1))
    sigmoid = torch.sigmoid(SLOPE * gate * (1 + CUBIC * gate * gate) if gelu else gate)
    steepness = sigmoid * (1 - sigmoid) * (SLOPE * (1 + 3 * CUBIC * gate * gate) if gelu else 1)
    dgate, dup = grad * up * (sigmoid + gate * steepness), grad * gate * sigmoid
    dpair = torch.cat((dgate, dup), dim=-1).to(pair.dtype)
    return dpair, amax_of_all(dpair)


def amax_of_all(x: Tensor) -> Tensor:
    """Return the largest magnitude [1], in float32."""
    if x.numel() == 0:
        return torch.zeros(1, device=x.device)
    return torch.linalg.vector_norm(x, float("inf")).float().reshape(1)


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
    amaxes_ptr,
    GELU: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBIC: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if PAIR:
        up_ptr = gate_ptr + width
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0).to(tl.float32)
    out = (gate * _sigmoid(gate, GELU, SLOPE, CUBIC) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, out, mask=inside)
    if PAIR:
        tl.store(amaxes_ptr + tl.program_id(0), tl.max(tl.abs(out.to(tl.float32)), axis=0))


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
    out_stride,
    amaxes_ptr,
    GELU: tl.constexpr,
    SLOPE: tl.constexpr,
    CUBIC: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if PAIR:
        up_ptr = gate_ptr + width
        dup_ptr = dgate_ptr + width
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
    dgate = (grad * up * (sigmoid + gate * steepness)).to(dgate_ptr.dtype.element_ty)
    dup = (grad * gate * sigmoid).to(dgate_ptr.dtype.element_ty)
    tl.store(dgate_ptr + row * out_stride + column, dgate, mask=inside)
    tl.store(dup_ptr + row * out_stride + column, dup, mask=inside)
    if PAIR:
        larger = tl.maximum(tl.abs(dgate.to(tl.float32)), tl.abs(dup.to(tl.float32)))
        tl.store(amaxes_ptr + tl.program_id(0), tl.max(larger, axis=0))


# -- operators


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return rows of any stride: one long row if all tensors are contiguous; copy only if no view exists."""
    if all(x.is_contiguous() for x in tensors):
        return tuple(x.view(1, -1) for x in tensors)
    rows = (x.reshape(-1, x.shape[-1]) for x in tensors)
    return tuple(x if x.stride(1) == 1 else x.contiguous() for x in rows)


def _output(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _activated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    out = _output(gate)
    if out.numel():
        gates, ups = _rows(gate, up)
        _forward(gates, ups, out, None, gelu)
    return out


_gated = triton_op("headway::gated", mutates_args=())(_activated)


@_gated.register_fake
def _(gate: Tensor, _up: Tensor, _gelu: bool) -> Tensor:
    return _output(gate)


def _gradients(grad: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = _output(gate), _output(gate)
    if dgate.numel():
        grads, gates, ups = _rows(grad, gate, up)
        _slopes(grads, (gates, ups), (dgate, dup), None, gelu)
    return dgate, dup


_gated_backward = triton_op("headway::gated_backward", mutates_args=())(_gradients)


@_gated_backward.register_fake
def _(_grad: Tensor, gate: Tensor, _up: Tensor, _gelu: bool) -> tuple[Tensor, Tensor]:
    return _output(gate), _output(gate)


def _amaxes(pair: Tensor) -> Tensor:
    """Allocate one number per program."""
    width = pair.shape[-1] // 2
    return pair.new_empty(max(1, pair.shape[:-1].numel() * -(-width // BLOCK)), dtype=torch.float32)


def _pair_outputs(pair: Tensor) -> tuple[Tensor, Tensor]:
    return pair.new_empty((*pair.shape[:-1], pair.shape[-1] // 2)), _amaxes(pair)


@triton_op("headway::gated_pair", mutates_args=())
def _gated_pair(pair: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    out, amaxes = _pair_outputs(pair)
    if out.numel() == 0:
        return out, amaxes.zero_()
    _forward(pair.contiguous(), None, out, amaxes, gelu)
    return out, amaxes


@_gated_pair.register_fake
def _(pair: Tensor, _gelu: bool) -> tuple[Tensor, Tensor]:
    return _pair_outputs(pair)


@triton_op("headway::gated_pair_backward", mutates_args=())
def _gated_pair_backward(grad: Tensor, pair: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    dpair, amaxes = torch.empty(pair.shape, dtype=pair.dtype, device=pair.device), _amaxes(pair)
    if dpair.numel() == 0:
        return dpair, amaxes.zero_()
    _slopes(grad.reshape(-1, grad.shape[-1]).contiguous(), (pair.contiguous(), None), (dpair, None), amaxes, gelu)
    return dpair, amaxes


@_gated_pair_backward.register_fake
def _(_grad: Tensor, pair: Tensor, _gelu: bool) -> tuple[Tensor, Tensor]:
    return torch.empty(pair.shape, dtype=pair.dtype, device=pair.device), _amaxes(pair)


def _forward(gates: Tensor, ups: Tensor | None, out: Tensor, amaxes: Tensor | None, gelu: bool) -> None:
    """Launch; without `ups`, gates are pairs. A view of each half would be copied by a compiler."""
    width = out.shape[-1] if ups is None else gates.shape[-1]
    stride = gates.shape[-1] if ups is None else gates.stride(0)
    launchable(_forward_kernel)[(out.numel() // width * -(-width // BLOCK),)](
        gates,
        gates if ups is None else ups,
        out,
        width,
        stride,
        stride if ups is None else ups.stride(0),
        out if amaxes is None else amaxes,
        GELU=gelu,
        SLOPE=SLOPE,
        CUBIC=CUBIC,
        PAIR=ups is None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def _slopes(
    grads: Tensor,
    inputs: tuple[Tensor, Tensor | None],
    outputs: tuple[Tensor, Tensor | None],
    amaxes: Tensor | None,
    gelu: bool,
) -> None:
    """Launch; inputs and outputs are gates and ups, or pairs and None."""
    (gates, ups), (dgate, dup), width = inputs, outputs, grads.shape[1]
    stride = gates.shape[-1] if ups is None else gates.stride(0)
    launchable(_backward_kernel)[(len(grads) * -(-width // BLOCK),)](
        grads,
        gates,
        gates if ups is None else ups,
        dgate,
        dgate if dup is None else dup,
        width,
        grads.stride(0),
        stride,
        stride if ups is None else ups.stride(0),
        2 * width if dup is None else width,
        dgate if amaxes is None else amaxes,
        GELU=gelu,
        SLOPE=SLOPE,
        CUBIC=CUBIC,
        PAIR=dup is None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


# -- gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.gelu = inputs[2]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward_op(grad, *ctx.saved_tensors, ctx.gelu), None


_gated_op = eager_op_with_gradients(_gated, _activated, _keep, _backward)
_backward_op = eager_op(_gated_backward, _gradients)


# -- launches to compile ahead of time


def _launches(name: str, dtype: str, *, gelu: bool, pair: bool = False) -> tuple[LaunchSpec, LaunchSpec]:
    x, count, amax = f"*{dtype}", "i32", "*fp32"
    constants = {"GELU": gelu, "SLOPE": SLOPE, "CUBIC": CUBIC, "PAIR": pair, "BLOCK": BLOCK}
    forward = {"gate_ptr": x, "up_ptr": x, "out_ptr": x, "width": count, "gate_stride": count, "up_stride": count}
    forward |= {"amaxes_ptr": amax}
    backward = {"grad_ptr": x, "gate_ptr": x, "up_ptr": x, "dgate_ptr": x, "dup_ptr": x, "width": count}
    backward |= {"grad_stride": count, "gate_stride": count, "up_stride": count, "out_stride": count}
    backward |= {"amaxes_ptr": amax}
    return (
        LaunchSpec(f"{name}_{dtype}", _forward_kernel, forward, constants, warps=WARPS),
        LaunchSpec(f"{name}_{dtype}_backward", _backward_kernel, backward, constants, warps=WARPS),
    )


AHEAD: tuple[LaunchSpec, ...] = (
    *_launches("swiglu", "bf16", gelu=False),
    *_launches("swiglu", "fp32", gelu=False),
    *_launches("geglu", "bf16", gelu=True),
    *_launches("geglu", "fp32", gelu=True),
    *_launches("swiglu_pair", "bf16", gelu=False, pair=True),
)
