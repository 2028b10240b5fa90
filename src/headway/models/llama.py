"""Llama, SmolLM2, Qwen2, Qwen3, Mistral, SmolLM3: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from torch import Tensor, nn

from headway.models.attention import BlockContext, attend
from headway.models.decoder import Decoder
from headway.models.layers import GatedFeedForward, Linear, RMSNorm, project
from headway.models.rotary import rotate
from headway.recipe.families.llama import LlamaLike
from headway.recipe.families.smollm3 import SmolLM3


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, model: LlamaLike, layer: int) -> None:
        super().__init__()
        self.head_dim, self.window = model.head_dim, model.window_of(layer)
        self.rotates = not isinstance(model, SmolLM3) or model.rotates(layer)
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q = Linear(model.dim, width, bias=model.qkv_bias)
        self.k = Linear(model.dim, kv_width, bias=model.qkv_bias)
        self.v = Linear(model.dim, kv_width, bias=model.qkv_bias)
        self.o = Linear(width, model.dim, bias=model.output_bias)
        self.q_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Attend causally."""
        projected = project(x_BLD, self.q, self.k, self.v)
        q_BLNH, k_BLKH, v_BLKH = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        if self.rotates:
            q_BLNH, k_BLKH = (rotate(x, context.tables[0], exact=context.exact) for x in (q_BLNH, k_BLKH))
        y_BLNH = attend(q_BLNH, k_BLKH, v_BLKH, context, window=self.window)
        out_BLD: Tensor = self.o(y_BLNH.flatten(2))
        return out_BLD


class Block(nn.Module):
    """A pre-norm block of attention and feed-forward."""

    def __init__(self, model: LlamaLike, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = Attention(model, layer)
        self.mlp_norm = RMSNorm(model.dim, model.norm_eps)
        self.mlp = GatedFeedForward(model.dim, model.hidden, model.mlp_bias)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), context)
        out_BLD: Tensor = x_BLD + self.mlp(self.mlp_norm(x_BLD))
        return out_BLD


class LlamaDecoder(Decoder):
    """A decoder of the Llama family."""

    model: LlamaLike

    def make_block(self, layer: int) -> Block:
        """Return a block."""
        return Block(self.model, layer)
