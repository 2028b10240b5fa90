"""What a decoder is made of, as far as its cost goes: dense or with experts, with grouped or latent attention.

A recipe's model section becomes one of these, and so does a line of a table of published runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from headway.recipe import Model

__all__ = ["Architecture", "Experts", "LatentAttention", "Matrix", "architecture_of", "layer_kinds", "layer_matrices"]


@dataclass(frozen=True)
class Experts:
    """A feed-forward of which each token sees a few experts."""

    count: int
    top_k: int
    hidden: int
    """Inner width of one expert."""
    shared: int = 0
    """Experts of the same width that every token sees."""
    dense_layers: int = 0
    """First layers that have a plain feed-forward instead."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are kept as one narrow vector a token."""

    q_rank: int
    """Width queries pass through; 0 where they are projected at once."""
    kv_rank: int
    rope_dim: int
    """Part of a head that carries the position, shared by all keys."""
    value_dim: int
    """Size of a value head."""


@dataclass(frozen=True)
class Architecture:
    """A decoder in plain numbers."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    """Size of a query and key head, positions included."""
    hidden: int
    """Inner width of the plain feed-forward."""
    vocab: int
    tied: bool = True
    """The input embedding is the output head too."""
    gated: bool = True
    """SwiGLU: three matrices; otherwise two."""
    rotary: bool = True
    positions: int = 0
    """Rows of a learned position embedding."""
    layer_norm: bool = False
    """LayerNorm, with biases; otherwise RMSNorm."""
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of a layer that tokens are multiplied with."""

    name: str
    inputs: int
    outputs: int
    split: str
    """What tensor parallelism splits: outputs (column), inputs (row), or nothing."""
    copies: int = 1
    """Experts hold one each."""
    uses: int = 1
    """Copies that one token is multiplied with."""


def architecture_of(model: Model) -> Architecture:
    """A recipe's model, whose vocabulary is settled."""
    assert model.vocab_size is not None, "the vocabulary's size is settled before a model is planned"
    return Architecture(
        layers=model.layers, dim=model.dim, heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim,
        hidden=model.hidden, vocab=model.vocab_size, tied=model.tie_embeddings, qk_norm=model.qk_norm,
        qkv_bias=model.qkv_bias, output_bias=model.output_bias, mlp_bias=model.mlp_bias,
    )  # fmt: skip


def layer_kinds(arch: Architecture) -> Iterator[tuple[bool, int]]:
    """Whether layers have experts, and how many layers are so; first the dense ones."""
    dense = arch.layers if arch.experts is None else min(arch.experts.dense_layers, arch.layers)
    if dense:
        yield False, dense
    if arch.layers > dense:
        yield True, arch.layers - dense


@lru_cache(maxsize=1024)
def layer_matrices(arch: Architecture, with_experts: bool) -> tuple[Matrix, ...]:
    """Every matrix of one layer, in the order a token meets them."""
    feed_forward = _experts(arch) if with_experts else _feed_forward(arch, "mlp", arch.hidden)
    return (*_attention(arch), *feed_forward)


def _attention(arch: Architecture) -> tuple[Matrix, ...]:
    width = arch.heads * arch.head_dim
    out = Matrix("attention.o", arch.heads * arch.value_dim, arch.dim, "inputs")
    if arch.latent is None:
        # One product for all three: what trainers that care about speed do, and within a few percent of those that do
        # not.
        return Matrix("attention.qkv", arch.dim, width + 2 * arch.kv_heads * arch.head_dim, "outputs"), out
    low = arch.latent
    queries: tuple[Matrix, ...] = (Matrix("attention.q", arch.dim, width, "outputs"),)
    if low.q_rank:
        queries = (
            Matrix("attention.q_down", arch.dim, low.q_rank, ""),
            Matrix("attention.q_up", low.q_rank, width, "outputs"),
        )
    keys = arch.heads * (arch.head_dim - low.rope_dim + low.value_dim)
    return (
        *queries,
        Matrix("attention.kv_down", arch.dim, low.kv_rank + low.rope_dim, ""),
        Matrix("attention.kv_up", low.kv_rank, keys, "outputs"),
        out,
    )  # fmt: skip


def _feed_forward(arch: Architecture, name: str, hidden: int, copies: int = 1, uses: int = 1) -> tuple[Matrix, ...]:
    first = Matrix(f"{name}.up", arch.dim, hidden * (2 if arch.gated else 1), "outputs", copies, uses)
    return first, Matrix(f"{name}.down", hidden, arch.dim, "inputs", copies, uses)


def _experts(arch: Architecture) -> tuple[Matrix, ...]:
    experts = arch.experts
    assert experts is not None, "asked for the experts of a dense model"
    router = Matrix("router", arch.dim, experts.count, "")
    routed = _feed_forward(arch, "experts", experts.hidden, experts.count, experts.top_k)
    shared = _feed_forward(arch, "shared", experts.hidden * experts.shared) if experts.shared else ()
    return router, *routed, *shared
