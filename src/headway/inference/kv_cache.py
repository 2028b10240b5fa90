"""The paged KV cache of a model, and its view for the tokens of one pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels.paged_attention import paged_attention, store
from headway.kernels.paged_batch import PagedBatch

Widths = tuple[tuple[int, int], tuple[int, int]]
"""Number and size of the heads that a layer caches per token, of keys and of values."""


class PagedKvCache:
    """Pages of keys and values of all layers. Which page belongs to whom is decided elsewhere (`blocks.py`)."""

    def __init__(
        self,
        layers: int,
        widths: Widths,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool = False,
    ) -> None:
        self.page_size, self.exact = page_size, exact
        """Whether attention has the bits of training."""
        self.scratch = pages
        """A page more, for tokens that only fill up a batch."""
        pages += 1
        self.keys, self.values = (
            [_new_pages(pages, page_size, heads, size, dtype, device) for _ in range(layers)] for heads, size in widths
        )


def _new_pages(pages: int, page_size: int, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate [P, Z, K, H]; on GPUs the tokens of a head lie next to each other, as its program reads them."""
    if device.type != "cuda":
        return torch.zeros(pages, page_size, heads, size, dtype=dtype, device=device)
    return torch.zeros(pages, heads, page_size, size, dtype=dtype, device=device).transpose(1, 2)


def bytes_per_token(layers: int, widths: Widths, dtype: torch.dtype) -> int:
    """Return the memory of a token in the cache."""
    return layers * sum(heads * size for heads, size in widths) * dtype.itemsize


@dataclass(frozen=True)
class PassCache:
    """The cache as the model sees it in one pass (`models.KvCache`)."""

    pages: PagedKvCache
    batch: PagedBatch
    positions_BL: Tensor
    long_BL: Tensor | None = None
    adapters_T: Tensor | None = None
    """Number of each token's adapter; None if no token has one."""

    def layer(self, index: int) -> "LayerPages":
        """Return the cache of a layer."""
        return LayerPages(self.pages.keys[index], self.pages.values[index], self.batch, self.pages.exact)


@dataclass(frozen=True)
class LayerPages:
    """Pages of one layer (`models.LayerCache`)."""

    keys_PZKH: Tensor
    values_PZKU: Tensor
    batch: PagedBatch
    exact: bool = False

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
        """Keep the new keys and values; return each query's attention to its own sequence up to itself."""
        store(k_BLKH[0], self.keys_PZKH, self.batch.slots_T)
        values = self.values_PZKU
        if v_BLKH is None:
            values = self.keys_PZKH[..., :value_dim]
        else:
            store(v_BLKH[0], values, self.batch.slots_T)
        y_TNU = paged_attention(
            q_BLNH[0].to(self.keys_PZKH.dtype),
            self.keys_PZKH,
            values,
            self.batch,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_N=sinks_N,
            exact=self.exact,
        )
        return y_TNU.unsqueeze(0)
