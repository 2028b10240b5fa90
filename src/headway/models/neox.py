"""GPT-NeoX and Pythia: parallel attention and feed-forward, partial rotary positions, LayerNorm."""

from torch import Tensor, nn

from headway.models.attention import BlockContext, attend
from headway.models.decoder import Decoder
from headway.models.layers import FeedForward, LayerNorm, Linear
from headway.models.rotary import rotate
from headway.recipe.families.neox import NeoX


class Attention(nn.Module):
    """Causal attention with partial rotary positions."""

    def __init__(self, model: NeoX) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.q = Linear(model.dim, model.dim, bias=model.attention_bias)
        self.k = Linear(model.dim, model.dim, bias=model.attention_bias)
        self.v = Linear(model.dim, model.dim, bias=model.attention_bias)
        self.o = Linear(model.dim, model.dim, bias=model.attention_bias)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Attend causally."""
        q_BLNH, k_BLNH, v_BLNH = (part(x_BLD).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        q_BLNH, k_BLNH = rotate(q_BLNH, context.tables[0]), rotate(k_BLNH, context.tables[0])
        return self.o(attend(q_BLNH, k_BLNH, v_BLNH, context).flatten(2))


class Block(nn.Module):
    """A block of attention and feed-forward, in parallel or in sequence."""

    def __init__(self, model: NeoX) -> None:
        super().__init__()
        self.side_by_side = model.parallel_residual
        self.attention_norm = LayerNorm(model.dim, model.norm_eps)
        self.attention = Attention(model)
        self.mlp_norm = LayerNorm(model.dim, model.norm_eps)
        self.mlp = FeedForward(model.dim, model.hidden, model.activation)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        mixed_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), context)
        return mixed_BLD + self.mlp(self.mlp_norm(x_BLD if self.side_by_side else mixed_BLD))


class NeoXDecoder(Decoder):
    """A decoder of the GPT-NeoX family."""

    model: NeoX

    def make_block(self, layer: int) -> Block:
        """Return a block."""
        return Block(self.model)

    def make_norm(self) -> LayerNorm:
        """Return the norm before the head."""
        return LayerNorm(self.model.dim, self.model.norm_eps)
