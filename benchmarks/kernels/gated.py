"""Gated activations of models of 1B and 8B."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from case import Case
from torch import Tensor

from headway.kernels.gated import geglu, reference_geglu, reference_swiglu, swiglu

SHAPES = ((16384, 8192), (8192, 14336))
WAYS = {"swiglu": (swiglu, reference_swiglu), "geglu": (geglu, reference_geglu)}


def cases() -> Iterator[Case]:
    for operation in WAYS:
        for rows, width in SHAPES:
            for backward in (False, True):
                yield gated(operation, rows, width, backward)


def gated(operation: str, rows: int, width: int, backward: bool) -> Case:
    torch.compiler.reset()
    gate, up, grad = drawn(rows, width), drawn(rows, width), drawn(rows, width).detach()
    fused, reference = WAYS[operation]
    compiled = torch.compile(reference, dynamic=False)
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"headway": fused, "eager": reference, "compiled": compiled}
    inputs = dict.fromkeys(calls, (gate, up))
    peer = liger(operation)
    if peer is not None:
        calls["liger"] = peer
        # Its backward overwrites what it was given.
        inputs["liger"] = (gate.detach().clone().requires_grad_(), up.detach().clone().requires_grad_())
    ways = {way: whole(call, inputs[way], grad, backward) for way, call in calls.items()}
    name = f"{rows} x {width} bf16, {'both passes' if backward else 'forward'}"
    return Case(operation, name, ways, bytes=(8 if backward else 3) * gate.nbytes)


def liger(operation: str) -> Any:
    """Its function of that operation, where it is installed."""
    try:
        if operation == "swiglu":
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Function
        else:
            from liger_kernel.ops.geglu import LigerGELUMulFunction as Function
    except ImportError:
        return None
    return Function.apply


def whole(
    call: Callable[[Tensor, Tensor], Tensor], inputs: tuple[Tensor, Tensor], grad: Tensor, backward: bool
) -> Callable[[], object]:
    """Forward alone, as where nothing is trained, or both passes."""
    if backward:
        return lambda: torch.autograd.grad(call(*inputs), inputs, grad)

    def forward() -> object:
        with torch.no_grad():
            return call(*inputs)

    return forward


def drawn(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()
