"""Attention over a paged KV cache, for the tokens of a pass: prefill, decode and both at once.

Keys and values of a layer are pages of a fixed number of tokens, shared by all sequences; each sequence has a list of
pages. A pass brings T new tokens of S sequences, one sequence after another; each query attends to its sequence's
tokens up to its own, or to the last `window` of them.

    paged_triton.py                 GPUs
    even_attention.py               GPUs, decoding of several sequences by fused kernels (`inference/fused_decoder.py`)
    latent_attention.py             GPUs, where keys and values are one latent vector per token
    batch_invariant_attention.py    CPUs in exact mode; on GPUs, the first has the bits of training, too
    paged_reference.py              everything else
    fresh_attention                 long prompts of one length, whose pass has all of their keys: PyTorch's, no pages

Shapes are those of `paged_batch.py`.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.kernels import dispatch
from headway.kernels.batch_invariant_attention import tiled_attention
from headway.kernels.dispatch import DispatchRow, KernelChoice
from headway.kernels.latent_attention import is_latent, latent_attention, takes_latent
from headway.kernels.paged_batch import PagedBatch
from headway.kernels.paged_reference import reference
from headway.kernels.paged_triton import takes_heads, triton_attention


def store(k_TKH: Tensor, pages_PZKH: Tensor, slots_T: Tensor) -> None:
    """Write keys or values of a pass into their pages."""
    k_TKH, size = k_TKH.to(pages_PZKH.dtype), pages_PZKH.shape[1]
    if pages_PZKH.is_contiguous():
        pages_PZKH.flatten(0, 1).index_copy_(0, slots_T, k_TKH)
    else:
        pages_PZKH[slots_T // size, slots_T % size] = k_TKH


def paged_attention(
    q_TNH: Tensor,
    keys_PZKH: Tensor,
    values_PZKU: Tensor,
    batch: PagedBatch,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """Return attention [T, N, U] of the pass's queries; their own keys and values are in the pages already.

    If `exact`, with the bits of attention in training: `batch_invariant_attention.py`.
    """
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
    if exact and dispatch.exact_triton(q_TNH.device):
        return triton_attention(q_TNH, keys_PZKH, values_PZKU, batch, scale, window, exact=True)
    if exact:
        plan = batch.tiles(q_TNH.shape[1] // keys_PZKH.shape[2], keys_PZKH.shape[1])
        return tiled_attention(q_TNH, keys_PZKH.flatten(0, 1), values_PZKU.flatten(0, 1), plan, scale, window)
    latent = is_latent(keys_PZKH, values_PZKU) and window is None and softcap is None and sinks_N is None
    kernel = choose(q_TNH.device, q_TNH.shape[-1], values_PZKU.shape[-1], latent=latent).kernel
    if kernel == "latent":
        return latent_attention(q_TNH, keys_PZKH, batch, scale, values_PZKU.shape[-1])
    if kernel == "triton":
        return triton_attention(q_TNH, keys_PZKH, values_PZKU, batch, scale, window, softcap, sinks_N)
    return reference(q_TNH, keys_PZKH, values_PZKU, batch, scale, window, softcap, sinks_N)


def choose(device: torch.device, key_dim: int, value_dim: int, *, latent: bool = False) -> KernelChoice:
    """Choose by device and sizes of a cached key and value; `latent` values are parts of the keys."""
    if device.type not in dispatch.devices:
        return KernelChoice("pytorch", "Triton's kernels are for GPUs")
    if latent and takes_latent(device, key_dim, value_dim):
        return KernelChoice("latent", "a vector is read once, as key and as value, for all heads")
    if takes_heads(device, key_dim, value_dim):
        return KernelChoice("triton", "a key is read once for the query heads that share it, where its page is")
    return KernelChoice("pytorch", "no kernel takes these sizes, or Triton is not installed")


def rows(device: str) -> list[DispatchRow]:
    """Return the choices for heads of 128, and for DeepSeek-V3's latent vectors."""
    of = torch.device(device)
    return [
        DispatchRow("attention", "pages of a cache", choose(of, 128, 128)),
        DispatchRow("attention", "latent vectors in pages", choose(of, 576, 512, latent=True)),
    ]


def fresh_attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """Return causal attention [T, N, H] of sequences that begin with this pass, all of the same length, by PyTorch's
    fastest kernel."""
    q, k, v = (x.unflatten(0, (len(batch.lengths), -1)).transpose(1, 2) for x in (q_TNH, k_TKH, v_TKH))
    return _causal(q, k, v, scale).transpose(1, 2).flatten(0, 1)


def _causal(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, scale: float) -> Tensor:
    with sdpa_kernel(list(FASTEST_CAUSAL), set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(
            q_BNLH, k_BKLH, v_BKLH, is_causal=True, scale=scale, enable_gqa=True
        )


FASTEST_CAUSAL = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
