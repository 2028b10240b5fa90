"""The architecture of a model, as far as it determines cost: dense or MoE, grouped-query or latent attention.

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
class DiffusionShape:
    """What a diffusion transformer has besides attention among its patches and a feed-forward."""

    inputs: int
    """Numbers of a patch of the input."""
    outputs: int
    """Numbers of a patch of the output."""
    time_features: int
    classes: int = 0
    """Rows of the class embedding."""
    text_tokens: int = 0
    """Tokens of a text that every patch attends to."""
    text_dim: int = 0
    """Width of the text encoder's output."""
    image_tokens: int = 0
    """Embeddings of an image that every patch attends to."""
    image_dim: int = 0
    """Width of these embeddings."""
    image_positions: int = 0
    """Learned positions of these embeddings."""
    cross_norm: bool = False
    """A norm with weights before cross-attention."""
    modulates_layers: bool = True
    """A matrix in each layer makes its shifts, scales and gates from the condition; otherwise one matrix for all layers
    and a table in each."""


@dataclass(frozen=True)
class Architecture:
    """The dimensions of a decoder, or of a diffusion transformer."""

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
    diffusion: DiffusionShape | None = None
    """Of a diffusion transformer, whose tokens are patches and whose attention is not causal."""

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.latent.value_dim if self.latent else self.head_dim
