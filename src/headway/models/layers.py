"""Layers that families share: linear maps without initialization, norms, feed-forwards.

Tensor names end in their shape, as everywhere in `models/`:

    B  sequences      L  tokens of a sequence     T  tokens of all sequences (B * L)
    D  width          N  query heads              K  key and value heads      H  size of a head
    V  vocabulary     S  capacity of a cache in tokens                        R  half of the rotary part of H
    E  experts        F  inner width of a feed-forward                        X  experts per token
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn

from headway.kernels import batch_invariant, few_rows
from headway.kernels.dispatch import exact_triton, uses_triton
from headway.kernels.gated import geglu, swiglu
from headway.kernels.inputs import autocast
from headway.kernels.rms_norm import rms_norm
from headway.models import fp8_linear
from headway.models.fp8_linear import Float8Weights

silu = nn.functional.silu
gelu = partial(nn.functional.gelu, approximate="tanh")
FUSED: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {silu: swiglu, gelu: geglu}
"""Fused kernels of gated activations."""


def gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """Return activation(gate) * up."""
    if activation is batch_invariant.silu and exact_triton(gate.device):
        return swiglu(gate, up)
    if uses_triton("gated", gate) and activation in FUSED:
        return FUSED[activation](gate, up)
    return activation(gate) * up


class Linear(nn.Linear):
    """`nn.Linear` without initialization at construction: weights are initialized by name or loaded."""

    exact = False
    """Whether a row has the same bits in every batch: see `models/exact.py`."""
    fp8: Float8Weights | None = None
    """Its weight as a factor of float8 products: see `models/fp8.py`."""
    fp8_together: Float8Weights | None = None
    """The same for the layers that share its input, of which it is the first."""

    def reset_parameters(self) -> None:
        """Do nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if self.fp8 is not None:
            y = fp8_linear.linear(x, self.fp8, (self.weight,))
            return y if self.bias is None else y + self.bias.to(y.dtype)
        if self.exact:
            bias = None if self.bias is None else autocast(self.bias)
            return batch_invariant.linear(autocast(x), autocast(self.weight), bias)
        if few_rows.takes(x, self.weight):
            return few_rows.linear(x, self.weight, self.bias)
        return super().forward(x)


def project(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Apply layers that share an input; in float8, where they are together, as one product."""
    together = getattr(layers[0], "fp8_together", None)
    if together is None:
        return tuple(layer(x) for layer in layers)
    weights = tuple(cast(Linear, layer).weight for layer in layers)
    parts = fp8_linear.linear(x, together, weights).split([len(weight) for weight in weights], dim=-1)
    biases = (cast(Linear, layer).bias for layer in layers)
    return tuple(y if bias is None else y + bias.to(y.dtype) for y, bias in zip(parts, biases, strict=True))


class RMSNorm(nn.Module):
    """RMSNorm with float32 statistics."""

    exact = False
    """Whether a row has the same bits in every batch: see `models/exact.py`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dim."""
        if (self.exact and exact_triton(x.device)) or uses_triton("rms_norm", x):
            return rms_norm(x, self.weight, self.eps)
        # rms_norm sums bfloat16 in float32 by itself; with two dtypes it would not use its fused kernel.
        return nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.Module):
    """LayerNorm with a bias."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dim."""
        return nn.functional.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class GatedFeedForward(nn.Module):
    """Gated feed-forward: SwiGLU, or another activation."""

    fp8_fused = False
    """Whether all of it is one function of float8 products: see `models/fp8.py`."""

    def __init__(
        self, dim: int, hidden: int, bias: bool = False, activation: Callable[[Tensor], Tensor] = silu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate = Linear(dim, hidden, bias=bias)
        self.up = Linear(dim, hidden, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Apply the feed-forward to each token."""
        together = self.gate.fp8_together
        if self.fp8_fused and together is not None and self.down.fp8 is not None:
            weights = (self.gate.weight, self.up.weight, self.down.weight)
            return fp8_linear.gated_feed_forward(x_BLD, together, self.down.fp8, weights, self.activation is gelu)
        return self.down(gated(self.activation, *project(x_BLD, self.gate, self.up)))


class FeedForward(nn.Module):
    """Ungated feed-forward with biases."""

    def __init__(self, dim: int, hidden: int, activation: Literal["gelu", "gelu_tanh"]) -> None:
        super().__init__()
        self.approximate = "tanh" if activation == "gelu_tanh" else "none"
        self.up = Linear(dim, hidden)
        self.down = Linear(hidden, dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Apply the feed-forward to each token."""
        return self.down(nn.functional.gelu(self.up(x_BLD), approximate=self.approximate))
