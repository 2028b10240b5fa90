"""Attention of all tokens to all, whose bits repeat: cuDNN's forward pass with flash attention's backward pass.

cuDNN's forward pass is almost twice as fast as flash's and always gives the same bits, but its backward pass does not,
so that PyTorch excludes both in deterministic mode. Both kernels store the same row statistic, the logarithm of the sum
of a query's exponentials, from which flash's deterministic backward pass continues.

`works` tries a small case once per process, against flash's own passes: where a version of PyTorch or a device cannot
do it, attention stays with SDPA.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
MULTIPLE, LARGEST = 8, 128
"""Head sizes that both kernels take."""
TOLERANCE = 0.02
"""Of outputs and gradients in bfloat16, relative to the largest."""


def attention(q_BLNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor) -> Tensor:
    """Return attention of every token to all tokens [B, L, N, H]."""
    out_BLNH: Tensor = _attention(q_BLNH, k_BSNH, v_BSNH)[0]
    return out_BLNH


def takes(head: int) -> bool:
    """Whether both kernels take a head size."""
    return head % MULTIPLE == 0 and head <= LARGEST


# -- the two kernels


def forward_pass(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return cuDNN's output [B, N, L, H] and row statistic."""
    out, statistic, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return out, statistic


def backward_pass(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistic: Tensor) -> Any:
    """Return flash's gradients; they repeat where PyTorch is in deterministic mode."""
    lengths = (q.shape[2], k.shape[2])
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # random state of dropout
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, statistic, None, None, *lengths, 0.0, False, unused, unused[0]
    )


# -- as an operation


@torch.library.custom_op("headway::repeatable_attention", mutates_args=())
def _attention(q_BLNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor) -> tuple[Tensor, Tensor]:
    out, statistic = forward_pass(*(x.transpose(1, 2) for x in (q_BLNH, k_BSNH, v_BSNH)))
    return out.transpose(1, 2).contiguous(), statistic.reshape(out.shape[:3]).contiguous()


@_attention.register_fake
def _(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    q_BLNH = tensors[0]
    b, length, heads, _ = q_BLNH.shape
    return q_BLNH.new_empty(q_BLNH.shape), q_BLNH.new_empty((b, heads, length), dtype=torch.float32)


@torch.library.custom_op("headway::repeatable_attention_backward", mutates_args=())
def _attention_backward(
    grad_BLNH: Tensor, q_BLNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, out_BLNH: Tensor, statistic_BNL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad_BLNH, q_BLNH, k_BSNH, v_BSNH, out_BLNH))
    gradients = backward_pass(grad, q, k, v, out, statistic_BNL)
    dq, dk, dv = (gradient.transpose(1, 2).contiguous() for gradient in gradients)
    return dq, dk, dv


@_attention_backward.register_fake
def _(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in tensors[1:4])
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = _attention_backward(grad, *ctx.saved_tensors)
    return gradients


_attention.register_autograd(_backward, setup_context=_keep)


# -- whether it works here


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@cache
def works(head: int) -> bool:
    """Whether this process's GPU and PyTorch can do it, with the same results as flash's passes."""
    try:
        with torch.no_grad():
            difference = _difference(head, torch.device("cuda"))
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        first = str(error).partition("\n")[0]
        logging.getLogger(__name__).warning("attention with repeatable bits stays with SDPA: %s", first)
        return False
    return difference < TOLERANCE


def _difference(head: int, device: torch.device) -> float:
    """Return the largest difference of output and gradients from flash's, relative to the largest."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, 2, 192, head), (1, 2, 128, head), (1, 2, 128, head), (1, 2, 192, head))
    q, k, v, grad = (torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16) for shape in shapes)
    out, statistic = forward_pass(q, k, v)
    got = (out, *backward_pass(grad, q, k, v, out, statistic.reshape(out.shape[:3])))
    out, statistic, *_ = aten._scaled_dot_product_flash_attention(q, k, v)
    want = (out, *backward_pass(grad, q, k, v, out, statistic))
    pairs = [(x.float(), y.float()) for x, y in zip(got, want, strict=True)]
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)
