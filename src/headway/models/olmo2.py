"""OLMo 2: norms after attention and feed-forward instead of before, and QK norms over all heads."""

from torch import Tensor, nn

from headway.models.attention import BlockContext, attend
from headway.models.decoder import Decoder
from headway.models.layers import GatedFeedForward, Linear, RMSNorm
from headway.models.rotary import rotate
from headway.recipe.families.olmo2 import OLMo2


class Attention(nn.Module):
    """Causal attention with rotary positions and QK norms over all heads."""

    def __init__(self, model: OLMo2) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q = Linear(model.dim, width, bias=model.attention_bias)
        self.k = Linear(model.dim, kv_width, bias=model.attention_bias)
        self.v = Linear(model.dim, kv_width, bias=model.attention_bias)
        self.o = Linear(width, model.dim, bias=model.attention_bias)
        self.q_norm = RMSNorm(width, model.norm_eps)
        self.k_norm = RMSNorm(kv_width, model.norm_eps)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Attend causally."""
        q_BLNH = self.q_norm(self.q(x_BLD)).unflatten(-1, (-1, self.head_dim))
        k_BLKH = self.k_norm(self.k(x_BLD)).unflatten(-1, (-1, self.head_dim))
        v_BLKH = self.v(x_BLD).unflatten(-1, (-1, self.head_dim))
        q_BLNH, k_BLKH = (rotate(x, context.tables[0], exact=context.exact) for x in (q_BLNH, k_BLKH))
        y_BLNH = attend(q_BLNH, k_BLKH, v_BLKH, context)
        out_BLD: Tensor = self.o(y_BLNH.flatten(2))
        return out_BLD


class Block(nn.Module):
    """A post-norm block: the outputs of attention and feed-forward are normalized before they are added."""

    def __init__(self, model: OLMo2) -> None:
        super().__init__()
        self.attention = Attention(model)
        self.attention_out_norm = RMSNorm(model.dim, model.norm_eps)
        self.mlp = GatedFeedForward(model.dim, model.hidden)
        self.mlp_out_norm = RMSNorm(model.dim, model.norm_eps)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        x_BLD = x_BLD + self.attention_out_norm(self.attention(x_BLD, context))
        out_BLD: Tensor = x_BLD + self.mlp_out_norm(self.mlp(x_BLD))
        return out_BLD


class OLMo2Decoder(Decoder):
    """A decoder of the OLMo 2 family."""

    model: OLMo2

    def make_block(self, layer: int) -> Block:
        """Return a block."""
        return Block(self.model)
