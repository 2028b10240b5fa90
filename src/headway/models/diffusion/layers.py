"""Layers of diffusion transformers: patches, times, modulation and attention to all tokens.

Tensor names end in their shape, as everywhere in `models/`; besides those of `models/layers.py`:

    C  channels   T, Y, X  frames, rows, columns   P  numbers of a patch (channels included)
    S  tokens of a text   E  width of what a text or image encoder returns
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from headway.kernels import gelu, heads, modulated_norm
from headway.kernels.dispatch import uses_triton
from headway.kernels.inputs import autocast
from headway.kernels.modulated_norm import Modulation, ResidualBranch
from headway.models.attention import attend_fully
from headway.models.layers import FeedForward, LayerNorm, Linear, RMSNorm
from headway.recipe.train import Operation

TIMESTEPS = 1000
"""Both families' time embeddings were made for timesteps up to this."""
FLOAT = torch.float32


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, as a linear map of each patch."""

    def __init__(self, dim: int, channels: int, patch: tuple[int, int, int], weight_dims: int) -> None:
        super().__init__()
        self.patch = patch
        self.weight = nn.Parameter(torch.empty(dim, channels, *patch[-weight_dims:]))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        """Return the stream [B, L, D], in the weights' precision."""
        patches_BLP = patches_of(x_BCTYX.to(self.weight.dtype), self.patch)
        return nn.functional.linear(patches_BLP, self.weight.flatten(1), self.bias)


def patches_of(x_BCTYX: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Return patches in reading order [B, L, P]; within a patch, channels are the slowest."""
    t, y, x = patch
    blocks = x_BCTYX.unflatten(4, (-1, x)).unflatten(3, (-1, y)).unflatten(2, (-1, t))  # B C T t Y y X x
    return blocks.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def samples_of(patches_BLP: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int], channels: int) -> Tensor:
    """Put predicted patches together [B, C, T, Y, X]: their first channels, which are the fastest within one."""
    blocks = patches_BLP.unflatten(2, (*patch, -1)).unflatten(1, grid)[..., :channels]  # B T Y X t y x C
    sizes = [count * size for count, size in zip(grid, patch, strict=True)]
    return blocks.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(len(blocks), channels, *sizes)


class TwoLayers(nn.Module):
    """Two linear maps with an activation between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.up = Linear(inputs, hidden)
        self.down = Linear(hidden, outputs)


class TimeEmbedding(TwoLayers):
    """Sinusoidal features of a time, and two linear maps."""

    def __init__(self, features: int, dim: int, shift: float) -> None:
        super().__init__(features, dim, dim)
        self.features, self.shift = features, shift

    def forward(self, t_B: Tensor) -> Tensor:
        """Return embeddings [B, D] of times from 0 to 1."""
        features = time_features(t_B, self.features, self.shift).to(self.up.weight.dtype)
        out_BD: Tensor = self.down(nn.functional.silu(self.up(features)))
        return out_BD


def time_features(t_B: Tensor, size: int, shift: float) -> Tensor:
    """Return cosines and sines of times from 0 to 1 at frequencies from 1 to about 1/10,000, per timestep."""
    half = size // 2
    steps = torch.arange(half, device=t_B.device, dtype=FLOAT)
    frequencies = torch.exp(-math.log(10_000) * steps / (half - shift))
    angles = (t_B.to(FLOAT) * TIMESTEPS).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


class TextProjection(TwoLayers):
    """From a text encoder's states to the width of the model."""

    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__(inputs, dim, dim)

    def forward(self, text_BSE: Tensor) -> Tensor:
        """Project each token [B, S, D]."""
        hidden = nn.functional.gelu(self.up(text_BSE.to(self.up.weight.dtype)), approximate="tanh")
        out_BSD: Tensor = self.down(hidden)
        return out_BSD


def modulate(x_BLD: Tensor, modulation: Modulation, eps: float) -> tuple[Tensor, Tensor]:
    """Return the stream, and it normalized without weights, then shifted and scaled, in float32."""
    if _fuses("modulation", x_BLD):
        return modulated_norm.modulated_norm(x_BLD, modulation, eps)
    return x_BLD, modulated_norm.reference_norm(x_BLD, modulation, eps)


def add(x_BLD: Tensor, branch: ResidualBranch) -> Tensor:
    """Return the stream with a branch; a gated one is added in float32."""
    if _fuses("modulation", x_BLD):
        return modulated_norm.add(x_BLD, branch)
    return modulated_norm.reference_add(x_BLD, branch)


def add_then_modulate(
    x_BLD: Tensor, branch: ResidualBranch, modulation: Modulation, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the stream with a branch, and it modulated."""
    if _fuses("modulation", x_BLD):
        return modulated_norm.add_modulated_norm(x_BLD, branch, modulation, eps)
    return modulate(add(x_BLD, branch), modulation, eps)


def add_then_norm(x_BLD: Tensor, branch: ResidualBranch, norm: LayerNorm | None) -> tuple[Tensor, Tensor]:
    """Return the stream with a branch, and it normalized with weights, if there is a norm."""
    if norm is not None and _fuses("modulation", x_BLD) and _is_plain(norm, LayerNorm):
        modulation = Modulation(norm.bias.unsqueeze(0), norm.weight.unsqueeze(0), base=0.0)
        return modulated_norm.add_modulated_norm(x_BLD, branch, modulation, norm.eps)
    x_BLD = add(x_BLD, branch)
    return x_BLD, x_BLD if norm is None else norm(x_BLD)


def _fuses(operation: Operation, x_BLD: Tensor) -> bool:
    """Whether an operation on the stream, or on tokens of its width, runs as a kernel of its own."""
    return x_BLD.shape[-1] <= modulated_norm.MAX_WIDTH and uses_triton(operation, x_BLD)


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is as it was made: without an adapter, and whole on every worker."""
    return type(module) is kind and "forward" not in vars(module)


def project(layer: Linear, x_BLD: Tensor, fuses: bool) -> tuple[Tensor, Tensor | None]:
    """Apply a layer; also return its bias where what `fuses` with it computes the bias's gradient."""
    if layer.bias is None or not fuses or not _is_plain(layer, Linear):
        return layer(x_BLD), None
    outputs, inputs = layer.weight.shape
    if inputs > outputs and outputs % TILE:
        bias = autocast(layer.bias).detach()
        return _Narrowing.apply(x_BLD.to(bias.dtype), autocast(layer.weight), bias), layer.bias
    return nn.functional.linear(x_BLD, layer.weight, layer.bias.detach()), layer.bias


TILE = 256
"""Of outputs, in cuBLAS's products for weights' gradients."""


class _Narrowing(torch.autograd.Function):
    """A linear map to fewer outputs, with the weight's gradient computed transposed: on an H200 cuBLAS takes 0.87 ms
    for [4608, 1152] from 65,536 tokens, and 1.05 for [1152, 4608]. Where tiles divide the outputs, both are as fast."""

    @staticmethod
    def forward(ctx: Any, x_BLI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        ctx.save_for_backward(x_BLI, weight_OI)
        return nn.functional.linear(x_BLI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_BLO: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x_BLI, weight_OI = ctx.saved_tensors
        weight_IO = x_BLI.flatten(0, 1).t() @ grad_BLO.flatten(0, 1)
        return grad_BLO @ weight_OI, weight_IO.t(), None


def project_heads(
    layers: tuple[Linear, ...], norms: tuple[RMSNorm | None, ...], x_BLD: Tensor, head: int, table: Tensor | None = None
) -> tuple[Tensor, ...] | None:
    """Return heads [B, L, N, H] of several layers by one product; None where each must run by itself."""
    plain = all(_is_plain(layer, Linear) for layer in layers)
    plain &= all(norm is None or "forward" not in vars(norm) for norm in norms)
    if not plain or not _fuses("heads", x_BLD):
        return None
    weight = torch.cat([autocast(layer.weight) for layer in layers])
    bias = torch.cat([layer.bias for layer in layers])
    product = nn.functional.linear(x_BLD, weight, autocast(bias).detach())
    parts = tuple(None if norm is None else heads.PartNorm(norm.weight, norm.eps, table is not None) for norm in norms)
    return heads.heads_of(product, bias, parts, head, table)


class FullAttention(nn.Module):
    """Attention from all tokens to all tokens, or to those of a text."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = Linear(dim, dim)
        self.k = Linear(dim, dim)
        self.v = Linear(dim, dim)
        self.o = Linear(dim, dim)

    def forward(self, x_BLD: Tensor, text_BSD: Tensor | None = None, mask: Tensor | None = None) -> ResidualBranch:
        """Attend; a mask [B, 1, 1, S] is true where a token may be attended to."""
        joined = None
        if text_BSD is None:
            joined = project_heads((self.q, self.k, self.v), (None, None, None), x_BLD, self.head_dim)
        source = x_BLD if text_BSD is None else text_BSD
        if joined is None:
            products = (self.q(x_BLD), self.k(source), self.v(source))
            joined = tuple(y.unflatten(-1, (-1, self.head_dim)) for y in products)
        q, k, v = joined
        return self.leave(attend_fully(q, k, v, mask))

    def leave(self, y_BLNH: Tensor) -> ResidualBranch:
        """Return what attention adds to the stream."""
        y_BLD = y_BLNH.flatten(2)
        out_BLD, bias = project(self.o, y_BLD, _fuses("modulation", y_BLD))
        return ResidualBranch(out_BLD, bias_D=bias)


def feed_forward(dim: int, hidden: int) -> FeedForward:
    """Return the feed-forward of a block: GELU with the tanh approximation, and biases."""
    return FeedForward(dim, hidden, "gelu_tanh")


def feed(mlp: FeedForward, x_BLD: Tensor) -> ResidualBranch:
    """Return what a feed-forward adds to the stream."""
    if not _is_plain(mlp, FeedForward) or not all(_is_plain(layer, Linear) for layer in (mlp.up, mlp.down)):
        return ResidualBranch(mlp(x_BLD))
    inner, bias = project(mlp.up, x_BLD, _fuses("gelu", x_BLD))
    bent = nn.functional.gelu(inner, approximate="tanh") if bias is None else gelu.gelu(inner, bias)
    out_BLD, down_bias = project(mlp.down, bent, _fuses("modulation", x_BLD))
    return ResidualBranch(out_BLD, bias_D=down_bias)
