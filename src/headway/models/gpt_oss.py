"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, and a sliding window in every other layer."""

from functools import partial

import torch
from torch import Tensor, nn

from headway.models.attention import BlockContext, attend
from headway.models.decoder import ContextBuilder, Decoder
from headway.models.experts import Experts, MoeFeedForward, top_k_softmax
from headway.models.layers import Linear
from headway.models.mixtral import Block
from headway.models.rotary import rotate
from headway.recipe.families.gpt_oss import GptOss


class Attention(nn.Module):
    """Causal attention with a learned sink per head."""

    def __init__(self, model: GptOss, layer: int) -> None:
        super().__init__()
        self.head_dim, self.window = model.head_dim, model.window_of(layer)
        width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.sinks = nn.Parameter(torch.empty(model.heads))
        self.q = Linear(model.dim, width, bias=model.qkv_bias)
        self.k = Linear(model.dim, kv_width, bias=model.qkv_bias)
        self.v = Linear(model.dim, kv_width, bias=model.qkv_bias)
        self.o = Linear(width, model.dim, bias=model.output_bias)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Attend causally."""
        q_BLNH = rotate(self.q(x_BLD).unflatten(-1, (-1, self.head_dim)), context.tables[0])
        k_BLKH = rotate(self.k(x_BLD).unflatten(-1, (-1, self.head_dim)), context.tables[0])
        v_BLKH = self.v(x_BLD).unflatten(-1, (-1, self.head_dim))
        y_BLNH = attend(q_BLNH, k_BLKH, v_BLKH, context, window=self.window, sinks_N=self.sinks)
        return self.o(y_BLNH.flatten(2))


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Clamped SwiGLU with its own slope and (up + 1)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


class GptOssContexts(ContextBuilder):
    """Attention has sinks."""

    sinks = True


class GptOssDecoder(Decoder):
    """A decoder of the gpt-oss family."""

    model: GptOss

    def make_contexts(self) -> GptOssContexts:
        """Return the context builder."""
        return GptOssContexts(self.model)

    def make_block(self, layer: int) -> Block:
        """Return a block."""
        model = self.model
        activation = partial(clamped_swiglu, alpha=model.swiglu_alpha, limit=model.swiglu_limit)
        mixture = MoeFeedForward(
            Linear(model.dim, model.experts),
            partial(top_k_softmax, count=model.top_k),
            Experts(model.experts, model.dim, model.expert_width, bias=True, activation=activation),
            model.balance / model.mixtures,
        )
        return Block(model, Attention(model, layer), mixture)
