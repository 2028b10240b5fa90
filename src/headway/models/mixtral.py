"""Mixtral and Qwen3-MoE: Llama with a mixture-of-experts feed-forward."""

from functools import partial

from torch import Tensor, nn

from headway.models.attention import BlockContext
from headway.models.decoder import Decoder
from headway.models.experts import Experts, MoeFeedForward, softmax_top_k
from headway.models.layers import Linear, RMSNorm
from headway.models.llama import Attention
from headway.recipe.families.mixtral import Mixtral, MixtureLike


class Block(nn.Module):
    """A pre-norm block of attention and experts."""

    def __init__(self, model: MixtureLike, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.dim, model.norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(model.dim, model.norm_eps)
        self.mlp = mlp

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), context)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


def softmax_mixture(model: MixtureLike, renormalize: bool) -> MoeFeedForward:
    """Softmax-routed experts. The auxiliary loss is divided by the number of layers, so that `balance` weighs the
    mean."""
    return MoeFeedForward(
        Linear(model.dim, model.experts, bias=False),
        partial(softmax_top_k, count=model.top_k, renormalize=renormalize),
        Experts(model.experts, model.dim, model.expert_width),
        model.balance / model.mixtures,
    )


class MixtralDecoder(Decoder):
    """A decoder of the Mixtral family."""

    model: Mixtral

    def make_block(self, layer: int) -> Block:
        """Return a block."""
        return Block(self.model, Attention(self.model, layer), softmax_mixture(self.model, renormalize=True))
