"""Gemma 1, 2 and 3 (text): norms with 1 + w, embeddings scaled by sqrt(D), gated GELU.

Gemma 2 has a norm on both sides of each part, sliding windows in every other layer, and soft caps; Gemma 3 has QK norms
instead of score caps, and a separate RoPE base in windowed layers. Tensor names end in their shape: see
`models/layers.py`.
"""

import torch
from torch import Tensor, nn

from headway.kernels.dispatch import uses_triton
from headway.kernels.rms_norm import rms_norm
from headway.models.attention import BlockContext, attend
from headway.models.decoder import ContextBuilder, Decoder, Embedding
from headway.models.layers import GatedFeedForward, Linear, gelu
from headway.models.rotary import rotary_table, rotate
from headway.recipe.families.gemma import Gemma2, Gemma3, GemmaLike, GemmaWindowed


class Norm(nn.Module):
    """RMSNorm that multiplies by 1 + w."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dim; all in float32, since bfloat16 would round 1 + w to 8 bits."""
        if uses_triton("rms_norm", x):
            return rms_norm(x, self.weight, self.eps, offset=1.0)
        return nn.functional.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, model: GemmaLike, layer: int) -> None:
        super().__init__()
        self.head_dim, self.window, self.scale = model.head_dim, model.window_of(layer), model.score_scale
        self.cap = model.attention_cap or None if isinstance(model, Gemma2) else None
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q = Linear(model.dim, width, bias=model.attention_bias)
        self.k = Linear(model.dim, kv_width, bias=model.attention_bias)
        self.v = Linear(model.dim, kv_width, bias=model.attention_bias)
        self.o = Linear(width, model.dim, bias=model.attention_bias)
        normed = isinstance(model, Gemma3)
        self.q_norm = Norm(model.head_dim, model.norm_eps) if normed else None
        self.k_norm = Norm(model.head_dim, model.norm_eps) if normed else None

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Attend causally."""
        q_BLNH = self.q(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLKH = self.k(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLKH = self.v(x_BLD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        # The first table is for full-attention layers, the last for windowed ones; most families have one for both.
        table = context.tables[0 if self.window is None else -1]
        q_BLNH, k_BLKH = rotate(q_BLNH, table), rotate(k_BLKH, table)
        y_BLNH = attend(q_BLNH, k_BLKH, v_BLKH, context, scale=self.scale, window=self.window, softcap=self.cap)
        out_BLD: Tensor = self.o(y_BLNH.flatten(2))
        return out_BLD


class Block(nn.Module):
    """A pre-norm block of Gemma 1."""

    def __init__(self, model: GemmaLike, layer: int) -> None:
        super().__init__()
        self.attention_norm = Norm(model.dim, model.norm_eps)
        self.attention = Attention(model, layer)
        self.mlp_norm = Norm(model.dim, model.norm_eps)
        self.mlp = GatedFeedForward(model.dim, model.hidden, activation=gelu)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), context)
        out_BLD: Tensor = x_BLD + self.mlp(self.mlp_norm(x_BLD))
        return out_BLD


class WindowedBlock(nn.Module):
    """A block of Gemma 2 or 3, with norms before and after attention and feed-forward."""

    def __init__(self, model: GemmaWindowed, layer: int) -> None:
        super().__init__()
        self.attention_norm = Norm(model.dim, model.norm_eps)
        self.attention = Attention(model, layer)
        self.attention_out_norm = Norm(model.dim, model.norm_eps)
        self.mlp_norm = Norm(model.dim, model.norm_eps)
        self.mlp = GatedFeedForward(model.dim, model.hidden, activation=gelu)
        self.mlp_out_norm = Norm(model.dim, model.norm_eps)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        x_BLD = x_BLD + self.attention_out_norm(self.attention(self.attention_norm(x_BLD), context))
        out_BLD: Tensor = x_BLD + self.mlp_out_norm(self.mlp(self.mlp_norm(x_BLD)))
        return out_BLD


class GemmaDecoder(Decoder):
    """Gemma 1."""

    model: GemmaLike

    def make_embedding(self) -> nn.Module:
        """Return the embedding, scaled by sqrt(D) in its own precision; the head is not scaled."""
        return Embedding(self.model.vocabulary, self.model.dim, scale=self.model.embedding_scale)

    def make_block(self, layer: int) -> nn.Module:
        """Return a block."""
        return Block(self.model, layer)

    def make_norm(self) -> nn.Module:
        """Return the norm before the head."""
        return Norm(self.model.dim, self.model.norm_eps)


class Gemma2Decoder(GemmaDecoder):
    """Gemma 2."""

    model: Gemma2

    def __init__(self, model: Gemma2) -> None:
        self.softcap = model.logit_cap or None  # used by the loss of the base class
        super().__init__(model)

    def make_contexts(self) -> nn.Module:
        """Return the context builder; a cap decides the attention kernel, and so the kind of masks."""
        contexts = ContextBuilder(self.model)
        contexts.capped = self.model.attention_cap > 0
        return contexts

    def make_block(self, layer: int) -> nn.Module:
        """Return a block."""
        return WindowedBlock(self.model, layer)


class Gemma3Decoder(GemmaDecoder):
    """Gemma 3, text only."""

    model: Gemma3

    def __init__(self, model: Gemma3) -> None:
        self.softcap = model.logit_cap or None
        super().__init__(model)

    def make_contexts(self) -> nn.Module:
        """Return the context builder with both rotary tables."""
        return TwoTables(self.model)

    def make_block(self, layer: int) -> nn.Module:
        """Return a block."""
        return WindowedBlock(self.model, layer)


class TwoTables(ContextBuilder):
    """Builds rotary tables of full-attention and of windowed layers."""

    def tables(self, positions_L: Tensor, long: Tensor | bool) -> tuple[Tensor, ...]:
        """Return scaled tables for the former, and tables with `local_theta` for the latter."""
        model = self.model
        assert isinstance(model, Gemma3)
        return *super().tables(positions_L, long), rotary_table(positions_L, model.rotary_dim, model.local_theta)
