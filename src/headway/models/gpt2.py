"""GPT-2: learned positions, LayerNorm, biases everywhere, a feed-forward of two matrices."""

import torch
from torch import Tensor, nn

from headway.errors import ModelError
from headway.models.attention import BlockContext, LayerKvCache, attend
from headway.models.decoder import Decoder, Embedding
from headway.models.layers import FeedForward, LayerNorm, Linear
from headway.recipe.families.gpt2 import GPT2

__all__ = ["Attention", "Block", "GPT2Decoder", "PositionedEmbedding", "Positions"]


class Positions(nn.Embedding):
    """A table of positions that draws no weights at construction."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(rows, dim, _weight=torch.empty(rows, dim))


class PositionedEmbedding(Embedding):
    """A table of tokens, and one of positions that is added: the first token of every document has the first."""

    def __init__(self, rows: int, positions: int, dim: int) -> None:
        super().__init__(rows, dim)
        self.positions = Positions(positions, dim)
        self.longest = positions

    def forward(self, tokens_BL: Tensor, documents_BL: Tensor | None = None, first: int = 0) -> Tensor:
        """The stream [B, L, D]."""
        length = first + tokens_BL.shape[1]
        if length > self.longest:
            raise ModelError(f"a sequence of {length} tokens, and the model has positions for {self.longest}")
        places = torch.arange(first, length, device=tokens_BL.device)
        if documents_BL is not None:
            places = places - _begins(documents_BL)
        added: Tensor = self.positions(places)
        return super().forward(tokens_BL) + added


def _begins(documents_BL: Tensor) -> Tensor:
    """For each token, where in its row its document begins."""
    places_L = torch.arange(documents_BL.shape[1], device=documents_BL.device)
    new_BL = documents_BL != documents_BL.roll(1, dims=1)
    return places_L.where(new_BL & (places_L > 0), 0).cummax(dim=1).values


class Attention(nn.Module):
    """Causal attention in which each head has keys and values of its own."""

    def __init__(self, model: GPT2, layer: int) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.scale = model.head_dim**-0.5 / (layer + 1 if model.scale_by_layer else 1)
        self.q = Linear(model.dim, model.dim)
        self.k = Linear(model.dim, model.dim)
        self.v = Linear(model.dim, model.dim)
        self.o = Linear(model.dim, model.dim)

    def forward(self, x_BLD: Tensor, context: BlockContext, cache: LayerKvCache | None = None) -> Tensor:
        """Mix each token with those before it."""
        q_BLNH, k_BLNH, v_BLNH = (part(x_BLD).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        if cache is not None:
            k_BLNH, v_BLNH = cache.extend(k_BLNH, v_BLNH)
        y_BLNH = attend(q_BLNH, k_BLNH, v_BLNH, context.masks.get(None), scale=self.scale)
        return self.o(y_BLNH.flatten(2))


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalized before and added to the residual stream."""

    def __init__(self, model: GPT2, layer: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(model.dim, model.norm_eps)
        self.attention = Attention(model, layer)
        self.mlp_norm = LayerNorm(model.dim, model.norm_eps)
        self.mlp = FeedForward(model.dim, model.hidden, model.activation)

    def forward(self, x_BLD: Tensor, context: BlockContext, cache: LayerKvCache | None = None) -> Tensor:
        """Pass the residual stream on, with what this layer adds."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), context, cache)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class GPT2Decoder(Decoder):
    """A decoder of the GPT-2 family."""

    model: GPT2

    def make_embedding(self) -> PositionedEmbedding:
        """Tokens and positions."""
        return PositionedEmbedding(self.model.vocabulary, self.model.positions, self.model.dim)

    def make_block(self, layer: int) -> Block:
        """One layer."""
        return Block(self.model, layer)

    def make_norm(self) -> LayerNorm:
        """Before the head."""
        return LayerNorm(self.model.dim, self.model.norm_eps)
