"""Qwen3-MoE: Mixtral with QK norms, narrow experts, and optional dense layers."""

from torch import nn

from headway.models.decoder import Decoder
from headway.models.layers import GatedFeedForward
from headway.models.llama import Attention
from headway.models.mixtral import Block, softmax_mixture
from headway.recipe.families.qwen3_moe import Qwen3Moe


class Qwen3MoeDecoder(Decoder):
    """A decoder of the Qwen3-MoE family."""

    model: Qwen3Moe

    def make_block(self, layer: int) -> Block:
        """Return a block with experts or a dense feed-forward."""
        mlp: nn.Module = GatedFeedForward(self.model.dim, self.model.hidden)
        if self.model.has_experts(layer):
            mlp = softmax_mixture(self.model, self.model.normalize_weights)
        return Block(self.model, Attention(self.model, layer), mlp)
