"""The architecture of a decoder, as far as it determines cost: dense or MoE, grouped-query or latent attention.

Every family provides it (`Model.architecture`), as does each row of the table of published runs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertShape:
    """A mixture-of-experts feed-forward."""

    count: int
    top_k: int
    hidden: int
    """Inner width of one expert."""
    shared: int = 0
    """Shared experts, of the same width."""
    dense_layers: int = 0
    """Number of first layers with a dense feed-forward instead."""
    bias: bool = False
    """Biases in the experts."""
    router_bias: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are cached as one latent vector per token."""

    q_rank: int
    """Low rank of queries; 0 for a direct projection."""
    kv_rank: int
    rope_dim: int
    """Rotary part of a head, whose keys all heads share."""
    value_dim: int
    """Size of a value head."""


@dataclass(frozen=True)
class Architecture:
    """The dimensions of a decoder."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    """Size of a query and key head, including the rotary part."""
    hidden: int
    """Inner width of the dense feed-forward."""
    vocab: int
    tied: bool = True
    """Whether the input embedding is also the output head."""
    gated: bool = True
    """Whether the feed-forward is gated (three matrices) or plain (two)."""
    rotary: bool = True
    positions: int = 0
    """Rows of a learned position embedding."""
    layer_norm: bool = False
    """LayerNorm, with biases; otherwise RMSNorm."""
    norms: int = 2
    """Norms per layer over the residual stream."""
    qk_norm: bool = False
    """Norms over each head's queries and keys."""
    qk_norm_whole: bool = False
    """QK norm over all heads at once, with a weight per element."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False
    """Attention sinks: a learned score per head that takes attention from all tokens."""
    window: int | None = None
    """Sliding window of windowed layers, in tokens."""
    windowed_layers: int = 0
    """Number of layers with a sliding window."""
    experts: ExpertShape | None = None
    latent: LatentAttention | None = None

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim
