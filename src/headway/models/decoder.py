"""The base of all decoders: embedding, blocks on a residual stream, and a head.

A family (`models/llama.py` and others) brings its block. All are plain modules for one device, independent of
parallelism. Tensor names end in their shape: see `models/layers.py`.
"""

import hashlib
from dataclasses import replace

import torch
from torch import Tensor, nn

from headway.kernels import batch_invariant, exact_attention, few_rows
from headway.kernels.batch_invariant_attention import plan_documents
from headway.kernels.dispatch import exact_triton
from headway.kernels.inputs import autocast, float32_product
from headway.kernels.paged_triton import exact_tiling
from headway.models.attention import BlockContext, Mask, choose, see, windows_of
from headway.models.kv_cache import KvCache
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
    exact = False
    """Whether positions restart in each document and attention is in tiles: see `models/exact.py`."""
    host_documents: Tensor | None = None
    """The documents of a pass [B, L] on the host, if it has them there: exact mode plans its attention by them."""
    document_places: int | None = None
    """Places for the documents of a pass, where cuDNN keeps them apart: see `kernels/document_attention.py`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, like_BL: Tensor, documents_BL: Tensor | None = None, cache: KvCache | None = None
    ) -> BlockContext:
        """Build the context of a whole sequence of `like`'s length, with document masks; or of a pass with a cache."""
        if cache is not None:
            long_L = False if cache.long_BL is None else cache.long_BL[0]
            return BlockContext(self._bits(cache.positions_BL[0], long_L), {}, exact=self.exact)
        length, device = like_BL.shape[1], like_BL.device
        if self.exact and exact_triton(device):
            return self._exact(like_BL, documents_BL)
        masks = self.masks(like_BL, length, documents_BL) if length > 1 else {}
        if self.exact:
            share = self.model.heads // self.model.kv_heads
            tiles, positions_BL = plan_documents(self._on_host(documents_BL), len(like_BL), length, share)
            bits = tuple(x.unflatten(1, positions_BL.shape) for x in self.bits_at(positions_BL.flatten(), length))
            return BlockContext(bits, masks, tiles=tiles, exact=True)
        return BlockContext(self.bits_at(torch.arange(length, device=device), length), masks)

    def masks(
        self, like_BL: Tensor, length: int, documents_BL: Tensor | None, first: int = 0
    ) -> dict[int | None, Mask]:
        """Return the masks of sequences of a length by window, or of their queries from `first` on."""
        kernel = choose(like_BL, self.model.head_dim, masked=True, capped=self.capped, sinks=self.sinks)
        return see(length, windows_of(self.model), documents_BL, like_BL.device, kernel, first, self.document_places)

    def bits_at(self, positions_L: Tensor, length: int) -> tuple[Tensor, ...]:
        """Return the rotary tables of some positions in sequences of a length, as `BlockContext.bits`."""
        switch = self.model.switch_length if isinstance(self.model, RotaryModel) else None
        return self._bits(positions_L, switch is not None and length > switch)

    def _exact(self, like_BL: Tensor, documents_BL: Tensor | None) -> BlockContext:
        """Build the context of exact mode's Triton kernels."""
        (rows, length), device, model = like_BL.shape, like_BL.device, self.model
        queries = exact_tiling(model.heads // model.kv_heads).queries
        plan, positions_BL = exact_attention.plan_documents(self._on_host(documents_BL), rows, length, queries, device)
        masks = {} if device.type == "cuda" else see(length, windows_of(model), documents_BL, device, "masked")
        bits = tuple(x.unflatten(1, positions_BL.shape) for x in self._bits(positions_BL.flatten(), False))
        return BlockContext(bits, masks, tiles=plan, exact=True)

    def _on_host(self, documents_BL: Tensor | None) -> Tensor | None:
        return documents_BL if documents_BL is None or self.host_documents is None else self.host_documents

    def _bits(self, positions_L: Tensor, long: Tensor | bool) -> tuple[Tensor, ...]:
        return tuple(table.view(torch.int32) for table in self.tables(positions_L, long))

    def tables(self, positions_L: Tensor, long: Tensor | bool) -> tuple[Tensor, ...]:
        """Return the rotary tables of positions; `long` as in `models.rotary.scaled`."""
        if not isinstance(self.model, RotaryModel):
            return ()
        model = self.model
        return (rotary_table(positions_L, model.rotary_dim, model.rope_theta, model.rope_scaling, long),)


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
        tokens = not model.tie_embeddings and not model.reward
        self.head = Linear(model.dim, model.vocabulary, bias=False) if tokens else None
        self.score = Score(model.dim) if model.reward else None
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

        A reward model returns rewards [B, L]. Labels of -100 are masked. It is the sum, so that the caller divides by
        the count over all microbatches and ranks. `documents` numbers the documents packed into a row: attention stays
        within them.
        """
        x_BLD = self.hidden(tokens_BL, documents)
        if labels_BL is None:
            return self.logits(x_BLD) if self.score is None else self.score(x_BLD)
        loss: Tensor = self.loss(x_BLD, self.output_weight, labels_BL)
        return loss

    def logprobs(
        self, tokens_BL: Tensor, labels_BL: Tensor, documents: Tensor | None = None, temperature: float = 1.0
    ) -> Tensor:
        """Return the log-probability of each label at a temperature [B, L], in float32; 0 where it is -100."""
        x_BLD = self.hidden(tokens_BL, documents)
        scores_BL: Tensor = self.loss.logprobs(x_BLD, self.output_weight, labels_BL, temperature)
        return scores_BL

    def logprobs_and_entropy(
        self, tokens_BL: Tensor, labels_BL: Tensor, documents: Tensor | None = None, temperature: float = 1.0
    ) -> Tensor:
        """Return the log-probability of each label, and the entropy of the distribution there [B, L, 2]."""
        x_BLD = self.hidden(tokens_BL, documents)
        return self.loss.logprobs_and_entropy(x_BLD, self.output_weight, labels_BL, temperature)

    def rewards(self, tokens_BL: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the reward at each position [B, L], in float32; a document's is that of its last token."""
        assert self.score is not None, "only a reward model has them"
        rewards_BL: Tensor = self.score(self.hidden(tokens_BL, documents))
        return rewards_BL

    def logprobs_among(
        self, tokens_BL: Tensor, labels_BL: Tensor, ids_BLK: Tensor, temperature: float, documents: Tensor | None = None
    ) -> Tensor:
        """Return the log-probabilities of labels, of ids, and of all other tokens together: see `models/top_k.py`."""
        x_BLD = self.hidden(tokens_BL, documents)
        return self.loss.logprobs_among(x_BLD, self.output_weight, labels_BL, ids_BLK, temperature)

    def top_k(
        self, tokens_BL: Tensor, count: int, temperature: float, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest next tokens and log-probabilities of each position: see `models/top_k.py`."""
        return self.loss.top_k(self.hidden(tokens_BL, documents), self.output_weight, count, temperature)

    def hidden(self, tokens_BL: Tensor, documents_BL: Tensor | None = None, cache: KvCache | None = None) -> Tensor:
        """Return the normalized residual stream after the last block.

        With a cache, tokens [1, T] are the next ones of any number of sequences.
        """
        context = self.context(tokens_BL, documents_BL, cache)
        x_BLD = self.embed(tokens_BL, documents_BL, None if cache is None else cache.positions_BL)
        if self.loss.exact:
            x_BLD = autocast(x_BLD)  # the stream of an engine has the precision of products
        for i, block in enumerate(self.layers):
            x_BLD = block(x_BLD, context if cache is None else replace(context, cache=cache.layer(i)))
        out: Tensor = self.norm(x_BLD)
        return out

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Return logits."""
        if self.loss.exact:
            scores = batch_invariant.linear(x_BLD, self.output_weight)
        elif few_rows.takes(x_BLD, self.output_weight):
            scores = few_rows.linear(x_BLD, self.output_weight).contiguous()  # sampling goes row by row
        else:
            scores = nn.functional.linear(x_BLD, self.output_weight)
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    @torch.no_grad()
    def float32_logits(self, x_TD: Tensor) -> Tensor:
        """Return logits in float32, as the log-probabilities of `Loss.logprobs` are of: never rounded to the precision
        of products."""
        if x_TD.dtype == torch.float32:
            return self.logits(x_TD)
        product = batch_invariant.float32_product if self.loss.exact else float32_product
        scores = product(x_TD, self.output_weight)
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    @property
    def output_weight(self) -> Tensor:
        """The head's matrix [V, D]: its own, or the embedding's."""
        weight = self.embed.weight if self.head is None else self.head.weight
        assert isinstance(weight, Tensor)
        return weight

    def cache_widths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Number and size of the heads that a layer caches per token, of keys and of values."""
        return (self.model.kv_heads, self.model.head_dim), (self.model.kv_heads, self.model.head_dim)


class Score(Linear):
    """The head of a reward model: a scalar for each position, in float32 whatever the precision of products."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the rewards [B, L]."""
        return (x_BLD.float() * self.weight.float()).sum(dim=-1)


class Embedding(nn.Embedding):
    """Token embedding without initialization at construction."""

    def __init__(self, rows: int, dim: int, scale: float = 1.0) -> None:
        super().__init__(rows, dim, _weight=torch.empty(rows, dim))
        self.scale = scale
        """Factor of the stream."""

    def forward(
        self, tokens_BL: Tensor, documents_BL: Tensor | None = None, positions_BL: Tensor | None = None
    ) -> Tensor:
        """Return the stream [B, L, D]; positions have no effect here."""
        x_BLD = super().forward(tokens_BL)
        return x_BLD if self.scale == 1 else x_BLD * torch.full((), self.scale, dtype=x_BLD.dtype, device=x_BLD.device)


@torch.no_grad()
def init_weights(decoder: nn.Module, seed: int) -> None:
    """Initialize every weight of a decoder or diffusion transformer; see `initial_weight`."""
    section = decoder.model
    assert isinstance(section, Model)
    for name, parameter in decoder.named_parameters():
        parameter.copy_(initial_weight(section, name, tuple(parameter.shape), seed))


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
