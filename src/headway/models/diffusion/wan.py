"""Wan 2.1: 3D patches, rotary positions along three axes, and cross-attention to a text and an image."""

import torch
from torch import Tensor, nn

from headway.kernels.modulated_norm import Modulation, ResidualBranch
from headway.models.attention import attend_fully
from headway.models.diffusion.conditioning import Conditioning
from headway.models.diffusion.layers import (
    FLOAT,
    FullAttention,
    TextProjection,
    TimeEmbedding,
    TwoLayers,
    add,
    add_then_modulate,
    add_then_norm,
    feed,
    feed_forward,
    modulate,
    project_heads,
)
from headway.models.diffusion.transformer import DiffusionTransformer, text_of
from headway.models.layers import LayerNorm, Linear, RMSNorm
from headway.models.rotary import rotate_pairs
from headway.recipe.families.wan import Wan

IMAGE_EPS = 1e-5
THETA = 10_000


class WideRMSNorm(RMSNorm):
    """RMSNorm over all heads at once; a tensor axis, which splits heads, sums its statistics."""


class SelfAttention(FullAttention):
    """Attention among all patches, with rotary positions."""

    def __init__(self, model: Wan) -> None:
        super().__init__(model.dim, model.head_dim)
        self.q_norm = WideRMSNorm(model.dim, model.norm_eps)
        self.k_norm = WideRMSNorm(model.dim, model.norm_eps)

    def forward(self, x_BLD: Tensor, bits: Tensor) -> ResidualBranch:  # type: ignore[override]
        """Attend; `bits` is a rotary table, viewed as int32 so that FSDP does not cast it."""
        table_2LR = bits.view(FLOAT)
        norms = (self.q_norm, self.k_norm, None)
        joined = project_heads((self.q, self.k, self.v), norms, x_BLD, self.head_dim, table_2LR)
        if joined is None:
            q = rotate_pairs(self.q_norm(self.q(x_BLD)).unflatten(-1, (-1, self.head_dim)), table_2LR)
            k = rotate_pairs(self.k_norm(self.k(x_BLD)).unflatten(-1, (-1, self.head_dim)), table_2LR)
            joined = (q, k, self.v(x_BLD).unflatten(-1, (-1, self.head_dim)))
        q, k, v = joined
        return self.leave(attend_fully(q, k, v))


class CrossAttention(FullAttention):
    """Attention to a text, and beside it to an image."""

    def __init__(self, model: Wan) -> None:
        super().__init__(model.dim, model.head_dim)
        self.q_norm = WideRMSNorm(model.dim, model.norm_eps)
        self.k_norm = WideRMSNorm(model.dim, model.norm_eps)
        image = model.image_dim is not None
        self.image_k = Linear(model.dim, model.dim) if image else None
        self.image_v = Linear(model.dim, model.dim) if image else None
        self.image_k_norm = WideRMSNorm(model.dim, model.norm_eps) if image else None

    def forward(self, x_BLD: Tensor, text_BSD: Tensor, image_BID: Tensor | None) -> ResidualBranch:  # type: ignore[override]
        """Attend to both; what they add is summed."""
        alone = project_heads((self.q,), (self.q_norm,), x_BLD, self.head_dim)
        q = self.q_norm(self.q(x_BLD)).unflatten(-1, (-1, self.head_dim)) if alone is None else alone[0]
        k = self.k_norm(self.k(text_BSD)).unflatten(-1, (-1, self.head_dim))
        v = self.v(text_BSD).unflatten(-1, (-1, self.head_dim))
        y_BLNH = attend_fully(q, k, v)
        if image_BID is not None:
            assert self.image_k is not None, "only a model of images gets one"
            assert self.image_v is not None
            assert self.image_k_norm is not None
            k = self.image_k_norm(self.image_k(image_BID)).unflatten(-1, (-1, self.head_dim))
            v = self.image_v(image_BID).unflatten(-1, (-1, self.head_dim))
            y_BLNH = y_BLNH + attend_fully(q, k, v)
        return self.leave(y_BLNH)


class Block(nn.Module):
    """Attention, cross-attention and feed-forward; a table of the block and the time's embedding modulate them."""

    def __init__(self, model: Wan) -> None:
        super().__init__()
        self.eps = model.norm_eps
        self.modulation = nn.Parameter(torch.empty(1, 6, model.dim))
        self.attention = SelfAttention(model)
        self.cross_norm = LayerNorm(model.dim, model.norm_eps) if model.cross_norm else None
        self.cross = CrossAttention(model)
        self.mlp = feed_forward(model.dim, model.hidden)

    def forward(
        self, x_BLD: Tensor, time_B6D: Tensor, text_BSD: Tensor, image_BID: Tensor | None, bits: Tensor
    ) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        table_B6D = self.modulation.to(FLOAT) + time_B6D.to(FLOAT)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = table_B6D.unbind(1)
        x_BLD, normal = modulate(x_BLD, Modulation(shift, scale), self.eps)
        branch = self.attention(normal, bits)
        x_BLD, normal = add_then_norm(x_BLD, branch._replace(gate_BD=gate), self.cross_norm)
        branch = self.cross(normal, text_BSD, image_BID)
        x_BLD, normal = add_then_modulate(x_BLD, branch, Modulation(mlp_shift, mlp_scale), self.eps)
        return add(x_BLD, feed(self.mlp, normal)._replace(gate_BD=mlp_gate))


class ImageProjection(TwoLayers):
    """From an image encoder's embeddings to the width of the model."""

    def __init__(self, model: Wan, width: int) -> None:
        super().__init__(width, width, model.dim)
        count = model.image_positions
        self.positions = None if count is None else nn.Parameter(torch.empty(1, count, width))
        self.norm = LayerNorm(width, IMAGE_EPS)
        self.out_norm = LayerNorm(model.dim, IMAGE_EPS)

    def forward(self, image_BIE: Tensor) -> Tensor:
        """Project each embedding [B, I, D]."""
        image_BIE = image_BIE.to(self.up.weight.dtype)
        if self.positions is not None:
            image_BIE = image_BIE + self.positions
        out_BID: Tensor = self.out_norm(self.down(nn.functional.gelu(self.up(self.norm(image_BIE)))))
        return out_BID


class VideoTimeEmbedding(TimeEmbedding):
    """A time's embedding, and the modulation that all blocks share."""

    def __init__(self, model: Wan) -> None:
        super().__init__(model.time_features, model.dim, shift=0)
        self.out = Linear(model.dim, 6 * model.dim)

    def forward(self, t_B: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return embeddings [B, D] and modulation [B, 6, D]."""
        c_BD = super().forward(t_B)
        return c_BD, self.out(nn.functional.silu(c_BD)).unflatten(1, (6, -1))


class Head(nn.Module):
    """From the stream to patches; a table and the time's embedding modulate its norm."""

    def __init__(self, model: Wan) -> None:
        super().__init__()
        self.eps = model.norm_eps
        self.modulation = nn.Parameter(torch.empty(1, 2, model.dim))
        t, y, x = model.patch
        self.out = Linear(model.dim, t * y * x * model.in_channels)

    def forward(self, x_BLD: Tensor, c_BD: Tensor) -> Tensor:
        """Return patches [B, L, P]."""
        shift, scale = (self.modulation.to(FLOAT) + c_BD.to(FLOAT).unsqueeze(1)).unbind(1)
        out_BLP: Tensor = self.out(modulate(x_BLD, Modulation(shift, scale), self.eps)[1])
        return out_BLP


class WanTransformer(DiffusionTransformer):
    """Wan 2.1's transformer, for text or an image to video."""

    model: Wan
    patch_dims = 3

    def make_first(self) -> None:
        """Time, text and image."""
        model = self.model
        assert model.text_dim is not None, "this family always takes a text"
        self.time = VideoTimeEmbedding(model)
        self.text = TextProjection(model.text_dim, model.dim)
        self.image = None if model.image_dim is None else ImageProjection(model, model.image_dim)

    def make_block(self, layer: int) -> Block:
        """Return a block."""
        return Block(self.model)

    def make_head(self) -> Head:
        """Return the head."""
        return Head(self.model)

    def stream(self, x_BLD: Tensor, grid: tuple[int, int, int], t_B: Tensor, conditioning: Conditioning) -> Tensor:
        """Return predicted patches. Padding of a text is zeros, and attended to, as in the published model."""
        states_BSE, mask_BS = text_of(conditioning)
        text_BSD = self.text(states_BSE.masked_fill(~mask_BS.unsqueeze(2), 0))
        image = conditioning.image_BIE
        image_BID = None if image is None or self.image is None else self.image(image)
        bits = video_table(grid, self.model.rotary_dims, x_BLD.device).view(torch.int32)
        c_BD, time_B6D = self.time(t_B)
        for block in self.layers:
            x_BLD = block(x_BLD, time_B6D, text_BSD, image_BID, bits)
        out_BLP: Tensor = self.head(x_BLD, c_BD)
        return out_BLP


def video_table(grid: tuple[int, int, int], dims: tuple[int, int, int], device: torch.device) -> Tensor:
    """Return cosines and sines [2, L, R] of a grid of patches: the pairs of a head are shared out over the axes."""
    angles = list[Tensor]()
    for axis, (count, dim) in enumerate(zip(grid, dims, strict=True)):
        exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim
        places = torch.arange(count, device=device, dtype=torch.float64)
        shape = [1, 1, 1, dim // 2]
        shape[axis] = count
        angles.append((places.unsqueeze(1) / THETA**exponents).view(shape).expand(*grid, -1))
    angles_LR = torch.cat(angles, dim=-1).flatten(0, 2)
    return torch.stack((angles_LR.cos(), angles_LR.sin())).to(FLOAT)
