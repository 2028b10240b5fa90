"""Small parts that families share: linear maps that draw nothing, norms, feed-forwards.

Tensor names end in their shape, as everywhere in `models/`:

    B  sequences      L  tokens of a sequence     T  tokens of all sequences (B * L)
    D  width          N  query heads              K  key and value heads      H  size of a head
    V  vocabulary     S  tokens a cache has room for                          R  half of the part of H that turns
    E  experts        F  inner width of a feed-forward                        X  experts that a token sees
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from headway.kernels.dispatch import uses_triton
from headway.kernels.gated import geglu, swiglu
from headway.kernels.rms_norm import rms_norm

__all__ = ["FeedForward", "GatedFeedForward", "LayerNorm", "Linear", "RMSNorm", "gated", "gelu", "silu"]

silu = nn.functional.silu
gelu = partial(nn.functional.gelu, approximate="tanh")
FUSED: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {silu: swiglu, gelu: geglu}
"""Kernels that bend a gate and multiply by it."""


def gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """A bent gate times what it lets through."""
    if uses_triton("gated", gate) and activation in FUSED:
        return FUSED[activation](gate, up)
    return activation(gate) * up


class Linear(nn.Linear):
    """`nn.Linear` that draws no weights at construction: they are drawn by name or loaded, and once is enough."""

    def reset_parameters(self) -> None:
        """Leave memory as it is."""


class RMSNorm(nn.Module):
    """Root-mean-square normalization; its statistics are float32 whatever comes in."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dim."""
        if uses_triton("rms_norm", x):
            return rms_norm(x, self.weight, self.eps)
        # rms_norm sums bfloat16 in float32 by itself; given two dtypes it would leave its fused kernel.
        return nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.Module):
    """Normalization of mean and variance, with a bias."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dim."""
        return nn.functional.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class GatedFeedForward(nn.Module):
    """SwiGLU, or another activation of the gate."""

    def __init__(
        self, dim: int, hidden: int, bias: bool = False, activation: Callable[[Tensor], Tensor] = silu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate = Linear(dim, hidden, bias=bias)
        self.up = Linear(dim, hidden, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transform each token by itself."""
        return self.down(gated(self.activation, self.gate(x_BLD), self.up(x_BLD)))


class FeedForward(nn.Module):
    """Two matrices with biases, and what bends the numbers between them."""

    def __init__(self, dim: int, hidden: int, activation: Literal["gelu", "gelu_tanh"]) -> None:
        super().__init__()
        self.approximate = "tanh" if activation == "gelu_tanh" else "none"
        self.up = Linear(dim, hidden)
        self.down = Linear(hidden, dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Transform each token by itself."""
        return self.down(nn.functional.gelu(self.up(x_BLD), approximate=self.approximate))
