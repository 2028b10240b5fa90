"""What a decoder is made of, as far as its cost goes: dense or with experts, with grouped or latent attention.

Every family says what it comes to (`Model.architecture`), and so does a line of a table of published runs.
"""

from dataclasses import dataclass

__all__ = ["Architecture", "ExpertShape", "LatentAttention"]


@dataclass(frozen=True)
class ExpertShape:
    """A feed-forward of which each token sees a few experts."""

    count: int
    top_k: int
    hidden: int
    """Inner width of one expert."""
    shared: int = 0
    """Experts of the same width that every token sees."""
    dense_layers: int = 0
    """First layers that have a plain feed-forward instead."""
    bias: bool = False
    """Biases in the experts."""
    router_bias: bool = False


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
    norms: int = 2
    """Norms of a layer as wide as the stream."""
    qk_norm: bool = False
    """A norm of each head's queries and of its keys."""
    qk_norm_whole: bool = False
    """It is over all heads at once, with a weight for each number of each."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False
    """A learnt score for each head that takes attention from all tokens."""
    window: int | None = None
    """Tokens that windowed layers see."""
    windowed_layers: int = 0
    """How many layers see a window only."""
    experts: ExpertShape | None = None
    latent: LatentAttention | None = None

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim
