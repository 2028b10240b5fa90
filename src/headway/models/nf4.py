"""4-bit NormalFloat (NF4): a frozen weight in half a byte per value, as QLoRA (arXiv 2305.14314) and bitsandbytes.

Each 64 values of a row share a float32 scale, their largest magnitude; a value is the nearest of 16 numbers between -1
and 1, which are quantiles of a normal distribution. Two codes share a byte, the first in its upper half.
"""

from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64
"""Values that share a scale."""
# Appendix E of the paper; float32, as bitsandbytes has them.
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""What each code stands for."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [out, in / 2] and scales [out, in / 64] of a weight [out, in]."""
    outputs, inputs = weight.shape
    blocks = weight.float().reshape(outputs, inputs // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=2)
    scaled = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
    table = torch.tensor(CODES, device=weight.device)
    bounds = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(scaled, bounds).to(torch.uint8).reshape(outputs, inputs // 2, 2)
    return codes[..., 0] << 4 | codes[..., 1], scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] of codes and scales."""
    table = torch.tensor(CODES, device=codes.device)
    pairs = torch.stack((codes >> 4, codes & 15), dim=-1)
    values = table[pairs.int()].view(*scales.shape, BLOCK) * scales.unsqueeze(-1)
    return values.flatten(1).to(dtype)


class _Nf4Linear(torch.autograd.Function):
    """y = W x + b, where W is dequantized in both passes and never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return nn.functional.linear(x, dequantize(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scales = ctx.saved_tensors
        return gradients[0] @ dequantize(codes, scales, gradients[0].dtype), None, None, None


def nf4_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a quantized linear layer whose weight and bias are frozen, in the precision of the pass."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    y: Tensor = _Nf4Linear.apply(x, codes, scales, None if bias is None else bias.to(x.dtype))
    return y
