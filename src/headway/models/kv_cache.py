"""What a decoder asks of a KV cache: the positions of a pass's tokens, and attention over what each layer keeps.

A pass with a cache takes tokens [1, T] of any number of sequences, one after another, each with any number of new
tokens: prefill, decode and both at once are the same pass. Where keys and values are kept, and by which kernel they
are attended to, is the cache's own affair (`inference/kv_cache.py` has pages).
"""

from typing import Protocol

from torch import Tensor


class LayerCache(Protocol):
    """The keys and values of one layer."""

    def attend(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor | None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
        value_dim: int | None = None,
    ) -> Tensor:
        """Keep the new keys and values; return each query's attention to its own sequence up to itself.

        Without values, the first `value_dim` entries of the keys are the values (latent attention).
        """
        ...


class KvCache(Protocol):
    """The keys and values of all layers, for the tokens of one pass."""

    positions_BL: Tensor
    """The position of each token in its sequence, from 0."""
    long_BL: Tensor | None
    """Whether each token's sequence is past the length at which LongRoPE changes its frequencies; None: none is."""

    def layer(self, index: int) -> LayerCache:
        """Return the cache of a layer."""
        ...
