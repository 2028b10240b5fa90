"""What all decoders have in common: tokens become a stream, blocks add to it, a head makes scores of it.

A family (`models/llama.py` and its neighbours) brings its block. All are plain modules that run on one device and know
nothing of parallelism. Tensor names end in their shape: see `models/layers.py`.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headway.models.attention import BlockContext, LayerKvCache, choose, see, windows_of
from headway.models.layers import Linear, RMSNorm
from headway.models.loss import Loss
from headway.models.rotary import rotary_table
from headway.recipe import Model
from headway.recipe.rope import RotaryModel

__all__ = ["ContextBuilder", "Decoder", "empty_cache", "init_weights", "initial_weight"]


class ContextBuilder(nn.Module):
    """Makes what every block is told of a batch; a module, so that who shares sequences out can say how long they are.

    A family with other rotary tables than one brings a Contexts of its own.
    """

    capped = False
    """Whether the family's attention has a soft cap."""
    sinks = False
    """Whether it has sinks."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, like_BL: Tensor, documents_BL: Tensor | None = None, first: int = 0) -> BlockContext:
        """That of `like`'s L positions, from `first` on; tokens of different documents do not see each other."""
        length, device = like_BL.shape[1], like_BL.device
        kernel = choose(like_BL, self.model.head_dim, masked=True, capped=self.capped, sinks=self.sinks)
        masks = see(length, windows_of(self.model), documents_BL, device, kernel) if length > 1 else {}
        tables = self.tables(first, length, device)
        return BlockContext(tuple(table.view(torch.int32) for table in tables), masks)

    def tables(self, first: int, length: int, device: torch.device) -> tuple[Tensor, ...]:
        """Rotary tables of the positions from `first` on."""
        if not isinstance(self.model, RotaryModel):
            return ()
        model = self.model
        return (rotary_table(first, length, model.rotary_dim, model.rope_theta, device, model.rope_scaling),)


class Decoder(nn.Module):
    """A decoder, configured by a recipe's model section with vocab_size set.

    Its weights are mere memory until `init_weights` or a load fills them.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.embed: nn.Module = self.make_embedding()
        self.context: nn.Module = self.make_contexts()
        self.layers = nn.ModuleList(self.make_block(layer) for layer in range(model.layers))
        self.norm: nn.Module = self.make_norm()
        self.head = None if model.tie_embeddings else Linear(model.dim, model.vocabulary, bias=False)
        self.loss = Loss(self.softcap)

    # -- what a family may bring

    softcap: float | None = None
    """Logits are squeezed smoothly into this range."""

    def make_embedding(self) -> nn.Module:
        """From tokens to the stream; its `weight` [V, D] is the head's too, where they are tied."""
        return Embedding(self.model.vocabulary, self.model.dim)

    def make_contexts(self) -> nn.Module:
        """What blocks are told of a batch."""
        return ContextBuilder(self.model)

    def make_block(self, layer: int) -> nn.Module:
        """One layer."""
        raise NotImplementedError

    def make_norm(self) -> nn.Module:
        """Before the head."""
        return RMSNorm(self.model.dim, self.model.norm_eps)

    # -- a pass

    def forward(self, tokens_BL: Tensor, labels_BL: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits [B, L, V]; or, given what follows each token, the summed cross-entropy, a float32 scalar.

        Labels of -100 are left out. The sum and not the mean, so that the caller divides by the count over
        all microbatches and ranks. `documents` number the documents that a row is packed of: attention stays within.
        """
        x_BLD = self.hidden(tokens_BL, documents)
        if labels_BL is None:
            return self.logits(x_BLD)
        loss: Tensor = self.loss(x_BLD, self.output_weight, labels_BL)
        return loss

    def hidden(
        self, tokens_BL: Tensor, documents_BL: Tensor | None = None, cache: Sequence[LayerKvCache] | None = None
    ) -> Tensor:
        """The normalized residual stream after the last block; `cache` holds what came before."""
        first = cache[0].length if cache else 0
        assert first == 0 or tokens_BL.shape[1] == 1, "after its first tokens, a cache takes one at a time"
        context = self.context(tokens_BL, documents_BL, first)
        x_BLD = self.embed(tokens_BL, documents_BL, first)
        for i, block in enumerate(self.layers):
            x_BLD = block(x_BLD, context, cache[i]) if cache else block(x_BLD, context)
        out: Tensor = self.norm(x_BLD)
        return out

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Scores of every token of the vocabulary."""
        scores = nn.functional.linear(x_BLD, self.output_weight)
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    @property
    def output_weight(self) -> Tensor:
        """The matrix [V, D] of the head: its own, or the embedding's."""
        weight = self.embed.weight if self.head is None else self.head.weight
        assert isinstance(weight, Tensor)
        return weight

    # -- its cache

    def cache_shape(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and their size, of the keys and of the values that a layer keeps of each token."""
        return (self.model.kv_heads, self.model.head_dim), (self.model.kv_heads, self.model.head_dim)


class Embedding(nn.Embedding):
    """A table of tokens that draws no weights at construction."""

    def __init__(self, rows: int, dim: int, scale: float = 1.0) -> None:
        super().__init__(rows, dim, _weight=torch.empty(rows, dim))
        self.scale = scale
        """What the stream is multiplied by."""

    def forward(self, tokens_BL: Tensor, documents_BL: Tensor | None = None, first: int = 0) -> Tensor:
        """The stream [B, L, D]; where tokens stand says nothing here."""
        x_BLD = super().forward(tokens_BL)
        return x_BLD if self.scale == 1 else x_BLD * torch.full((), self.scale, dtype=x_BLD.dtype, device=x_BLD.device)


def empty_cache(decoder: Decoder, capacity: int, batch: int = 1) -> list[LayerKvCache]:
    """Room for the keys and values of `capacity` tokens, in the precision the decoder computes in."""
    like = decoder.output_weight
    kind = like.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
    shapes = [(batch, capacity, *heads) for heads in decoder.cache_shape()]
    return [
        LayerKvCache(*(torch.empty(shape, dtype=dtype, device=like.device) for shape in shapes))
        for _ in range(decoder.model.layers)
    ]


@torch.no_grad()
def init_weights(decoder: Decoder, seed: int) -> None:
    """Draw every weight afresh; see `initial_weight`."""
    for name, parameter in decoder.named_parameters():
        parameter.copy_(initial_weight(decoder.model, name, tuple(parameter.shape), seed))


def initial_weight(model: Model, name: str, shape: tuple[int, ...], seed: int, into: Tensor | None = None) -> Tensor:
    """The fresh value of one parameter: float32, on the CPU, a function of the arguments alone; `into` is its memory.

    Each has a generator of its own, so that neither the order nor the other parameters matter.
    """
    made = torch.empty(shape) if into is None else into
    mean, std = model.initial(name)
    if std == 0:
        return made.fill_(mean)
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return made.normal_(mean, std, generator=generator)
