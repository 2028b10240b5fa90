"""DiT: 2D patches with fixed positions, adaLN-zero, and cross-attention to a text if it is conditioned on one."""

import torch
from torch import Tensor, nn

from headway.kernels.modulated_norm import Modulation
from headway.models.decoder import Embedding
from headway.models.diffusion.conditioning import Conditioning
from headway.models.diffusion.layers import (
    FLOAT,
    FullAttention,
    TextProjection,
    TimeEmbedding,
    add,
    add_then_modulate,
    add_then_norm,
    feed,
    feed_forward,
    modulate,
)
from headway.models.diffusion.transformer import DiffusionTransformer, text_of
from headway.models.layers import LayerNorm, Linear
from headway.recipe.families.diffusion import FEATURES
from headway.recipe.families.dit import DiT

EPS = 1e-6
"""Of the norms before attention and the head; `norm_eps` is that of the feed-forward's."""


class Block(nn.Module):
    """A block whose norms are shifted and scaled, and whose branches are gated, by the condition."""

    def __init__(self, model: DiT) -> None:
        super().__init__()
        self.eps = model.norm_eps
        self.modulation = Linear(model.dim, 6 * model.dim)
        self.attention = FullAttention(model.dim, model.head_dim)
        text = model.conditioning == "text"
        self.cross_norm = LayerNorm(model.dim, EPS) if text else None
        self.cross = FullAttention(model.dim, model.head_dim) if text else None
        self.mlp = feed_forward(model.dim, model.hidden)

    def forward(
        self, x_BLD: Tensor, c_BD: Tensor, text_BSD: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(c_BD).chunk(6, dim=-1)
        x_BLD, normal = modulate(x_BLD, Modulation(shift, scale), EPS)
        branch = self.attention(normal)._replace(gate_BD=gate)
        if self.cross is not None:
            x_BLD, normal = add_then_norm(x_BLD, branch, self.cross_norm)
            branch = self.cross(normal, text_BSD, mask)
        x_BLD, normal = add_then_modulate(x_BLD, branch, Modulation(mlp_shift, mlp_scale), self.eps)
        return add(x_BLD, feed(self.mlp, normal)._replace(gate_BD=mlp_gate))


class Head(nn.Module):
    """From the stream to patches, shifted and scaled by the condition."""

    def __init__(self, model: DiT) -> None:
        super().__init__()
        self.modulation = Linear(model.dim, 2 * model.dim)
        self.out = Linear(model.dim, model.patch**2 * model.output_channels)

    def forward(self, x_BLD: Tensor, c_BD: Tensor) -> Tensor:
        """Return patches [B, L, P]."""
        shift, scale = self.modulation(c_BD).chunk(2, dim=-1)
        out_BLP: Tensor = self.out(modulate(x_BLD, Modulation(shift, scale), EPS)[1])
        return out_BLP


class DiffusionDiT(DiffusionTransformer):
    """A DiT."""

    model: DiT
    patch_dims = 2

    def make_first(self) -> None:
        """Time, and classes or text."""
        model = self.model
        self.time = TimeEmbedding(FEATURES, model.dim, shift=1)
        self.classes = None if model.num_classes is None else Embedding(model.num_classes + 1, model.dim)
        self.text = None if model.text_dim is None else TextProjection(model.text_dim, model.dim)

    def make_block(self, layer: int) -> Block:
        """Return a block."""
        return Block(self.model)

    def make_head(self) -> Head:
        """Return the head."""
        return Head(self.model)

    def stream(self, x_BLD: Tensor, grid: tuple[int, int, int], t_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Return predicted patches; positions are added to embedded ones."""
        base = None if self.model.base_size is None else self.model.base_size // self.model.patch
        positions_LD = image_positions(grid[1:], self.model.dim, base, x_BLD.device)
        x_BLD = (x_BLD + positions_LD).to(x_BLD.dtype)
        c_BD = self.time(t_B)
        text_BSD = mask = None
        if self.classes is not None:
            c_BD = c_BD + self.classes(conditioning.labels_B)
        if self.text is not None:
            states_BSE, mask_BS = text_of(conditioning)
            text_BSD, mask = self.text(states_BSE), mask_BS[:, None, None]
        c_BD = nn.functional.silu(c_BD)
        for block in self.layers:
            x_BLD = block(x_BLD, c_BD, text_BSD, mask)
        out_BLP: Tensor = self.head(x_BLD, c_BD)
        return out_BLP


def image_positions(grid: tuple[int, ...], dim: int, base: int | None, device: torch.device) -> Tensor:
    """Return fixed positions [L, D] of a grid: sines and cosines of columns, then of rows.

    With a base, positions are interpolated to those of a square of `base` patches.
    """
    rows, columns = (
        torch.arange(count, device=device, dtype=FLOAT) / (1 if base is None else count / base) for count in grid
    )
    sides = (columns.repeat(len(rows)), rows.repeat_interleave(len(columns)))
    frequencies = 1 / 10_000 ** (torch.arange(dim // 4, device=device, dtype=torch.float64) / (dim / 4))
    angles = [side.to(torch.float64).unsqueeze(1) * frequencies for side in sides]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1).to(FLOAT)
