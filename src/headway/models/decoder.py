"""The base of all decoders: embedding, blocks on a residual stream, and a head.

A family (`models/llama.py` and others) brings its block. All are plain modules for one device, independent of
parallelism. Tensor names end in their shape: see `models/layers.py`.
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


class ContextBuilder(nn.Module):
    """Builds the context of a batch for blocks; a module, so that sequence parallelism can pass the full length.

    A family with several rotary tables has its own subclass.
    """

    capped = False
    """Whether the family's attention has a soft cap."""
    sinks = False
    """Whether it has sinks."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, like_BL: Tensor, documents_BL: Tensor | None = None, first: int = 0) -> BlockContext:
        """Build the context of `like`'s L positions from `first` on, with document masks."""
        length, device = like_BL.shape[1], like_BL.device
        kernel = choose(like_BL, self.model.head_dim, masked=True, capped=self.capped, sinks=self.sinks)
        masks = see(length, windows_of(self.model), documents_BL, device, kernel) if length > 1 else {}
        tables = self.tables(first, length, device)
        return BlockContext(tuple(table.view(torch.int32) for table in tables), masks)

    def tables(self, first: int, length: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return the rotary tables of the positions from `first` on."""
        if not isinstance(self.model, RotaryModel):
            return ()
        model = self.model
        return (rotary_table(first, length, model.rotary_dim, model.rope_theta, device, model.rope_scaling),)


class Decoder(nn.Module):
    """A decoder, configured by a recipe's model section with vocab_size set.

    Its weights are uninitialized until `init_weights` or a load fills them.
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

    # -- overridden by families

    softcap: float | None = None
    """Soft cap of logits."""

    def make_embedding(self) -> nn.Module:
        """Return the embedding; its `weight` [V, D] is also the head's if they are tied."""
        return Embedding(self.model.vocabulary, self.model.dim)

    def make_contexts(self) -> nn.Module:
        """Return the context builder."""
        return ContextBuilder(self.model)

    def make_block(self, layer: int) -> nn.Module:
        """Return a block."""
        raise NotImplementedError

    def make_norm(self) -> nn.Module:
        """Return the norm before the head."""
        return RMSNorm(self.model.dim, self.model.norm_eps)

    # -- forward

    def forward(self, tokens_BL: Tensor, labels_BL: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return logits [B, L, V]; or, with labels, the summed cross-entropy as a float32 scalar.

        Labels of -100 are masked. It is the sum, so that the caller divides by the count over all microbatches and
        ranks. `documents` numbers the documents packed into a row: attention stays within them.
        """
        x_BLD = self.hidden(tokens_BL, documents)
        if labels_BL is None:
            return self.logits(x_BLD)
        loss: Tensor = self.loss(x_BLD, self.output_weight, labels_BL)
        return loss

    def hidden(
        self, tokens_BL: Tensor, documents_BL: Tensor | None = None, cache: Sequence[LayerKvCache] | None = None
    ) -> Tensor:
        """Return the normalized residual stream after the last block; `cache` holds earlier tokens."""
        first = cache[0].length if cache else 0
        assert first == 0 or tokens_BL.shape[1] == 1, "after prefill, a cache takes one token at a time"
        context = self.context(tokens_BL, documents_BL, first)
        x_BLD = self.embed(tokens_BL, documents_BL, first)
        for i, block in enumerate(self.layers):
            x_BLD = block(x_BLD, context, cache[i]) if cache else block(x_BLD, context)
        out: Tensor = self.norm(x_BLD)
        return out

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Return logits."""
        scores = nn.functional.linear(x_BLD, self.output_weight)
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    @property
    def output_weight(self) -> Tensor:
        """The head's matrix [V, D]: its own, or the embedding's."""
        weight = self.embed.weight if self.head is None else self.head.weight
        assert isinstance(weight, Tensor)
        return weight

    # -- KV cache

    def cache_shape(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Number and size of heads that a layer caches per token, for keys and values."""
        return (self.model.kv_heads, self.model.head_dim), (self.model.kv_heads, self.model.head_dim)


class Embedding(nn.Embedding):
    """Token embedding without initialization at construction."""

    def __init__(self, rows: int, dim: int, scale: float = 1.0) -> None:
        super().__init__(rows, dim, _weight=torch.empty(rows, dim))
        self.scale = scale
        """Factor of the stream."""

    def forward(self, tokens_BL: Tensor, documents_BL: Tensor | None = None, first: int = 0) -> Tensor:
        """Return the stream [B, L, D]; positions have no effect here."""
        x_BLD = super().forward(tokens_BL)
        return x_BLD if self.scale == 1 else x_BLD * torch.full((), self.scale, dtype=x_BLD.dtype, device=x_BLD.device)


def empty_cache(decoder: Decoder, capacity: int, batch: int = 1) -> list[LayerKvCache]:
    """Allocate a KV cache of `capacity` tokens, in the decoder's compute precision."""
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
    """Initialize every weight; see `initial_weight`."""
    for name, parameter in decoder.named_parameters():
        parameter.copy_(initial_weight(decoder.model, name, tuple(parameter.shape), seed))


def initial_weight(model: Model, name: str, shape: tuple[int, ...], seed: int, into: Tensor | None = None) -> Tensor:
    """Return a parameter's initial value: float32, on the CPU, a pure function of the arguments; `into` is its memory.

    Each parameter has its own generator, so that neither order nor other parameters matter.
    """
    weight = torch.empty(shape) if into is None else into
    mean, std = model.initial(name)
    if std == 0:
        return weight.fill_(mean)
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return weight.normal_(mean, std, generator=generator)
