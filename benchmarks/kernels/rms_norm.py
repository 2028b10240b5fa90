"""Normalization of the streams and heads of models of 1B and 8B, alone and with the residual addition before it."""

from collections.abc import Callable, Iterator

import torch
from case import Case
from torch import Tensor

from headway.kernels.rms_norm import add_rms_norm, reference, reference_add, rms_norm

EPS = 1e-5
SHAPES = ((16384, 2048), (8192, 4096), (8192 * 32, 128))
"""The last: the queries' heads of Qwen3 8B."""


def cases() -> Iterator[Case]:
    for rows, width in SHAPES:
        for backward in (False, True):
            yield alone(rows, width, backward)
            if width > 128:
                yield after_addition(rows, width, backward)


def alone(rows: int, width: int, backward: bool) -> Case:
    torch.compiler.reset()
    x, weight, grad = drawn(rows, width), drawn(width), drawn(rows, width).detach()
    compiled = torch.compile(reference, dynamic=False)
    calls: dict[str, Callable[[], Tensor]] = {
        "headway": lambda: rms_norm(x, weight, EPS),
        "eager": lambda: reference(x, weight, EPS),
        "compiled": lambda: compiled(x, weight, EPS),
    }
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        calls["liger"] = lambda: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)
    except ImportError:
        pass
    ways = {way: whole(call, (x, weight), (grad,), backward) for way, call in calls.items()}
    # Forward: x in, y out; backward: x and the gradient in, one out; rstd goes out and comes back.
    least = (5 if backward else 2) * x.nbytes + (2 if backward else 1) * 4 * rows
    return Case("rms_norm", shape(rows, width, backward), ways, bytes=least)


def after_addition(rows: int, width: int, backward: bool) -> Case:
    torch.compiler.reset()
    x, residual, weight = drawn(rows, width), drawn(rows, width), drawn(width)
    grads = (drawn(rows, width).detach(), drawn(rows, width).detach())
    compiled = torch.compile(reference_add, dynamic=False)
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "headway": lambda: add_rms_norm(x, residual, weight, EPS),
        "eager": lambda: reference_add(x, residual, weight, EPS),
        "compiled": lambda: compiled(x, residual, weight, EPS),
    }
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        calls["liger"] = lambda: LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", False)
    except ImportError:
        pass
    ways = {way: whole(call, (x, residual, weight), grads, backward) for way, call in calls.items()}
    least = (8 if backward else 4) * x.nbytes + (2 if backward else 1) * 4 * rows
    return Case("add_rms_norm", shape(rows, width, backward), ways, bytes=least)


def whole(
    call: Callable[[], Tensor | tuple[Tensor, ...]],
    leaves: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    backward: bool,
) -> Callable[[], object]:
    """Forward alone, as where nothing is trained, or both passes."""
    if backward:
        return lambda: torch.autograd.grad(call(), leaves, grads if len(grads) > 1 else grads[0])

    def forward() -> object:
        with torch.no_grad():
            return call()

    return forward


def drawn(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()


def shape(rows: int, width: int, backward: bool) -> str:
    return f"{rows} x {width} bf16, {'both passes' if backward else 'forward'}"
