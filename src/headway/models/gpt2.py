"""GPT-2: learned positions, LayerNorm, biases everywhere, an ungated feed-forward."""

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models.attention import BlockContext, attend
from headway.models.decoder import Decoder, Embedding
from headway.models.layers import FeedForward, LayerNorm, Linear
from headway.recipe.families.gpt2 import GPT2


class Positions(nn.Embedding):
    """Position embedding without initialization at construction."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(rows, dim, _weight=torch.empty(rows, dim))


class PositionedEmbedding(Embedding):
    """Token and position embeddings; positions restart with every document."""

    def __init__(self, rows: int, positions: int, dim: int) -> None:
        super().__init__(rows, dim)
        self.positions = Positions(positions, dim)
        self.longest = positions

    def forward(
        self, tokens_BL: Tensor, documents_BL: Tensor | None = None, positions_BL: Tensor | None = None
    ) -> Tensor:
        """Return the stream [B, L, D]."""
        if positions_BL is None:
            length = tokens_BL.shape[1]
            if length > self.longest:
                raise ModelError(f"sequence of {length} tokens, but the model has positions for {self.longest}")
            positions_BL = positions_within(documents_BL, length, tokens_BL.device)
        added: Tensor = self.positions(positions_BL)
        return super().forward(tokens_BL) + added


def positions_within(documents_BL: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return each token's position in its document [B, L], or in its row [L] without documents."""
    places_L = torch.arange(length, device=device)
    if documents_BL is None:
        return places_L
    new_BL = documents_BL != documents_BL.roll(1, dims=1)
    return places_L - places_L.where(new_BL & (places_L > 0), 0).cummax(dim=1).values


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, model: GPT2, layer: int) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.scale = model.head_dim**-0.5 / (layer + 1 if model.scale_by_layer else 1)
        self.q = Linear(model.dim, model.dim)
        self.k = Linear(model.dim, model.dim)
        self.v = Linear(model.dim, model.dim)
        self.o = Linear(model.dim, model.dim)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Attend causally."""
        q_BLNH, k_BLNH, v_BLNH = (part(x_BLD).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        y_BLNH = attend(q_BLNH, k_BLNH, v_BLNH, context, scale=self.scale)
        return self.o(y_BLNH.flatten(2))


class Block(nn.Module):
    """A pre-norm block of attention and feed-forward."""

    def __init__(self, model: GPT2, layer: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(model.dim, model.norm_eps)
        self.attention = Attention(model, layer)
        self.mlp_norm = LayerNorm(model.dim, model.norm_eps)
        self.mlp = FeedForward(model.dim, model.hidden, model.activation)

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        """Return the residual stream with this layer's contribution."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), context)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class GPT2Decoder(Decoder):
    """A decoder of the GPT-2 family."""

    model: GPT2

    def make_embedding(self) -> PositionedEmbedding:
        """Return the token and position embedding."""
        return PositionedEmbedding(self.model.vocabulary, self.model.positions, self.model.dim)

    def make_block(self, layer: int) -> Block:
        """Return a block."""
        return Block(self.model, layer)

    def make_norm(self) -> LayerNorm:
        """Return the norm before the head."""
        return LayerNorm(self.model.dim, self.model.norm_eps)
