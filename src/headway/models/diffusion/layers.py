"""Layers of diffusion transformers: patches, times, modulation and attention to all tokens.

Tensor names end in their shape, as everywhere in `models/`; besides those of `models/layers.py`:

    C  channels   T, Y, X  frames, rows, columns   P  numbers of a patch (channels included)
    S  tokens of a text   E  width of what a text or image encoder returns
"""

import math

import torch
from torch import Tensor, nn

from headway.models.attention import attend_fully
from headway.models.layers import FeedForward, Linear

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


def modulate(x_BLD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor, eps: float) -> Tensor:
    """Normalize without weights, then shift and scale, in float32."""
    normal = nn.functional.layer_norm(x_BLD.to(FLOAT), x_BLD.shape[-1:], eps=eps)
    return (normal * (1 + scale_B1D.to(FLOAT)) + shift_B1D.to(FLOAT)).to(x_BLD.dtype)


def add_gated(x_BLD: Tensor, branch_BLD: Tensor, gate_B1D: Tensor) -> Tensor:
    """Return the stream with a gated branch, added in float32."""
    return (x_BLD.to(FLOAT) + branch_BLD.to(FLOAT) * gate_B1D.to(FLOAT)).to(x_BLD.dtype)


class FullAttention(nn.Module):
    """Attention from all tokens to all tokens, or to those of a text."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = Linear(dim, dim)
        self.k = Linear(dim, dim)
        self.v = Linear(dim, dim)
        self.o = Linear(dim, dim)

    def forward(self, x_BLD: Tensor, text_BSD: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend; a mask [B, 1, 1, S] is true where a token may be attended to."""
        source = x_BLD if text_BSD is None else text_BSD
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (self.q(x_BLD), self.k(source), self.v(source)))
        out_BLD: Tensor = self.o(attend_fully(q, k, v, mask).flatten(2))
        return out_BLD


def feed_forward(dim: int, hidden: int) -> FeedForward:
    """Return the feed-forward of a block: GELU with the tanh approximation, and biases."""
    return FeedForward(dim, hidden, "gelu_tanh")
