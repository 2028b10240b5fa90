"""Attention: masks, and one function that computes it with the best kernel for the device and mask.

    device  documents or window  soft cap or sinks   kernel
    GPU     no                   no                  cuDNN in half precision; else SDPA, which picks flash or its own;
                                                     full attention in deterministic mode: both cuDNN and flash
    CPU     no                   no                  SDPA, causal
    CPU     yes                  no                  SDPA with a mask
    GPU     documents            no                  cuDNN over ragged rows, if nvidia-cudnn-frontend is installed
    GPU     yes, or              yes                 flex attention, which skips fully masked blocks
    CPU     any                  yes                 plain: products and a softmax

In exact mode, training and inference have one kernel of their own: `kernels/batch_invariant_attention.py` on CPUs,
`kernels/exact_attention.py` on GPUs.

Tokens of different documents in a row never attend to each other. `kernels.dispatch.attention` is that table.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.kernels import batch_invariant_attention, document_attention, exact_attention, repeatable_attention
from headway.kernels import dispatch as table
from headway.kernels.batch_invariant_attention import TilePlan
from headway.kernels.document_attention import DocumentStarts
from headway.kernels.exact_attention import DocumentPlan
from headway.models.kv_cache import LayerCache
from headway.recipe.model import Model

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mask: TypeAlias = "Tensor | BlockMask | DocumentStarts | None"
"""Who attends to whom; None for plain causal attention."""
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""In order of preference: a shape that cuDNN does not support goes to the next."""
KEY_TILE, PROGRAMS, LEAST_QUERIES = 128, 132, 1024
"""Of attention to few keys: see `query_parts`. Programs are one per multiprocessor of an H200."""


class SplitAttention(Protocol):
    """Attention of sequences that several workers have parts of: see `parallel/context.py`."""

    def attend(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Return attention [B, L, N, H] of this worker's part."""
        ...


@dataclass(frozen=True)
class BlockContext:
    """What every block of a pass gets besides the stream."""

    bits: tuple[Tensor, ...]
    """Rotary tables viewed as int32: FSDP casts every floating-point argument of a block, but not integers."""
    masks: dict[int | None, "Mask"]
    """Masks by window."""
    cache: LayerCache | None = None
    """Keys and values of earlier tokens, in inference."""
    tiles: TilePlan | DocumentPlan | None = None
    """Of attention in exact mode, whose backward pass uses the masks, except on GPUs."""
    exact: bool = False
    """Whether a token has the same bits in every batch: see `models/exact.py`."""
    split: SplitAttention | None = None
    """Takes the place of attention where sequences are split over workers; it has masks of its own."""

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Return the family's rotary tables [2, L, R] in float32."""
        return tuple(table.view(torch.float32) for table in self.bits)


def choose(x: Tensor, head: int, masked: bool, capped: bool, sinks: bool, *, full: bool = False) -> str:
    """Return the kernel for a tensor, head size and attention features; `full` attention is not causal."""
    kind = x.device.type
    casts = kind == "cuda" and torch.is_autocast_enabled(kind)  # raises for the meta device
    dtype = torch.get_autocast_dtype(kind) if casts else x.dtype
    exact = torch.are_deterministic_algorithms_enabled()
    return table.attention(kind, dtype, head, masked=masked, capped=capped, sinks=sinks, exact=exact, full=full).kernel


def see(
    length: int,
    windows: Collection[int | None],
    documents_BL: Tensor | None,
    device: torch.device,
    kernel: str,
    first: int = 0,
    places: int | None = None,
) -> "dict[int | None, Mask]":
    """Return masks by window: of sequences, or of their queries from `first` on. A window as long as the sequence is
    none. `places` are for the documents of all rows, if cuDNN keeps them apart."""
    masks: dict[int | None, Mask] = {}
    for window in windows:
        everything = first == 0 and (window is None or window >= length)
        if documents_BL is None and everything:
            masks[window] = None
        elif documents_BL is not None and everything and places is not None:
            masks[window] = document_attention.document_starts(documents_BL, places)
        elif kernel == "flex":
            masks[window] = _block_mask(length, window, documents_BL, device, first)
        else:
            masks[window] = _mask(length, window, documents_BL, device, first)
    return masks


def _mask(length: int, window: int | None, documents_BL: Tensor | None, device: torch.device, first: int = 0) -> Tensor:
    """Return the mask of sequences, or of their queries from `first` on."""
    positions = torch.arange(length, device=device)
    of_queries = None if documents_BL is None else documents_BL[:, first:]
    return attention_mask(positions[first:], positions, window, of_queries, documents_BL)


def attention_mask(
    queries_L: Tensor, keys_S: Tensor, window: int | None, documents_BL: Tensor | None, documents_BS: Tensor | None
) -> Tensor:
    """Return a mask [B, 1, L, S], or [1, 1, L, S] if all rows are alike: true where a token attends; by positions of
    queries and keys, and their documents."""
    back_LS = queries_L.unsqueeze(1) - keys_S
    seen = back_LS >= 0 if window is None else (back_LS >= 0) & (back_LS < window)
    if documents_BL is None or documents_BS is None:
        return seen.view(1, 1, *seen.shape)
    return (seen & (documents_BL.unsqueeze(2) == documents_BS.unsqueeze(1))).unsqueeze(1)


def _block_mask(
    length: int, window: int | None, documents_BL: Tensor | None, device: torch.device, first: int = 0
) -> "BlockMask":
    def seen(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q + first
        fine = q >= k
        if window is not None:
            fine = fine & (q - k < window)
        return fine if documents_BL is None else fine & (documents_BL[b, q] == documents_BL[b, k])

    from torch.nn.attention.flex_attention import create_block_mask

    rows = None if documents_BL is None else documents_BL.shape[0]
    return create_block_mask(seen, rows, None, length - first, length, device=device, _compile=True)


def attend(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    context: BlockContext,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return attention [B, L, N, H], in training and inference. Several query heads may share a key and value head."""
    elsewhere = context.split if context.cache is None else context.cache
    if elsewhere is not None:
        return elsewhere.attend(q_BLNH, k_BLKH, v_BLKH, scale=scale, window=window, softcap=softcap, sinks_N=sinks_N)
    plain = partial(attend_all, mask=context.masks.get(window), scale=scale, softcap=softcap, sinks_N=sinks_N)
    if isinstance(context.tiles, DocumentPlan):
        return exact_attention.attention(q_BLNH, k_BLKH, v_BLKH, context.tiles, plain, scale=scale, window=window)
    if context.tiles is not None:
        return batch_invariant_attention.attention(
            q_BLNH, k_BLKH, v_BLKH, context.tiles, plain, scale=scale, window=window
        )
    return plain(q_BLNH, k_BLKH, v_BLKH)


def attend_all(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    mask: "Mask",
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attention among the tokens of each sequence, causal without a mask."""
    if isinstance(mask, DocumentStarts):
        halves = (x if x.dtype in table.HALVES else x.to(torch.bfloat16) for x in (q_BLNH, k_BLKH, v_BLKH))
        return document_attention.attention(*halves, mask, scale)
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
    kernel = choose(q, q.shape[-1], mask is not None, softcap is not None, sinks_N is not None)
    grouped = q.shape[1] != k.shape[1]
    if kernel == "flex":
        y = _flex(q, k, v, mask, scale, softcap, sinks_N, grouped)
    elif kernel == "plain":
        y = _plain(q, k, v, mask, scale, softcap, sinks_N)
    elif kernel == "cudnn":
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):
            y = _sdpa(q, k, v, None, scale, grouped)
    else:
        y = _sdpa(q, k, v, mask, scale, grouped)
    return y.transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, grouped: bool) -> Tensor:
    causal = mask is None and q.shape[2] > 1
    if mask is not None and grouped and q.is_cuda:
        # With a mask, only PyTorch's plain path takes grouped heads: scores of all pairs in float32.
        share = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1), False
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def attend_fully(q_BLNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of every token to all tokens of the same or another sequence [B, L, N, H]; never causal.

    A mask [B, 1, 1, S] is true where a token may be attended to.
    """
    head, attention = q_BLNH.shape[-1], nn.functional.scaled_dot_product_attention
    kernel = "sdpa" if mask is not None else choose(q_BLNH, head, masked=False, capped=False, sinks=False, full=True)
    parts = query_parts(*q_BLNH.shape[:3], keys=k_BSNH.shape[1]) if kernel in ("cudnn", "cudnn-flash") else 1
    if parts > 1:
        rows = q_BLNH.unflatten(1, (parts, -1)).flatten(0, 1)
        k_BSNH, v_BSNH = (x.repeat_interleave(parts, dim=0) for x in (k_BSNH, v_BSNH))
        return attend_fully(rows, k_BSNH, v_BSNH).unflatten(0, (-1, parts)).flatten(1, 2)
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BSNH, v_BSNH))
    if kernel == "cudnn":
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):
            return attention(q, k, v).transpose(1, 2)
    if kernel == "cudnn-flash" and repeatable_attention.works(head):
        q, k, v = (x if x.dtype in table.HALVES else x.to(torch.bfloat16) for x in (q_BLNH, k_BSNH, v_BSNH))
        return repeatable_attention.attention(q, k, v)
    y: Tensor = attention(q, k, v, attn_mask=mask)
    return y.transpose(1, 2)


def query_parts(samples: int, queries: int, heads: int, keys: int) -> int:
    """Return the number of equal parts in which queries attend, each as a sample of its own.

    The backward pass has a program per KEY_TILE keys, head and sample, which goes over all queries: few keys, as those
    of a text, leave most of a GPU idle. On an H200, it has 193 TFLOP/s with 17,160 queries of 512 keys and 12 heads,
    where self-attention has 565. Each part stores its own copy of the keys and values, 3 MB of those; so there are no
    more than run at once.
    """
    programs = samples * heads * -(-keys // KEY_TILE)
    most = min(PROGRAMS // programs, queries // LEAST_QUERIES)
    return next((parts for parts in range(most, 1, -1) if queries % parts == 0), 1)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    scale: float | None,
    softcap: float | None,
    sinks_N: Tensor | None,
    grouped: bool,
) -> Tensor:
    """Flex attention. Without a mask flex attends to everything, so a causal one is created where needed.

    With s the sum of a query's exponentials, a sink makes it s + exp(sink): the output is scaled by their quotient.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    if mask is None and q.shape[2] > 1:
        mask = _block_mask(q.shape[2], None, None, q.device)
    options = {
        "score_mod": None if softcap is None else _capped(softcap),
        "block_mask": mask,
        "scale": scale,
        "enable_gqa": grouped,
    }
    if sinks_N is None:
        out: Tensor = _compiled_flex()(q, k, v, **options)
        return out
    seen, aux = _compiled_flex()(q, k, v, **options, return_aux=AuxRequest(lse=True))
    kept_BNL: Tensor = torch.sigmoid(aux.lse - sinks_N.float().view(1, -1, 1))
    return (seen * kept_BNL.unsqueeze(-1)).to(seen.dtype)


def _capped(softcap: float) -> Any:
    def score(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, softcap: float | None, sinks_N: Tensor | None
) -> Tensor:
    """Attention with all scores in memory: the reference of all other kernels."""
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and q.shape[2] > 1:
        mask = _mask(q.shape[2], None, None, q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks_N is not None:
        sinks = sinks_N.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1].to(v.dtype) @ v
    return scores.softmax(dim=-1).to(v.dtype) @ v


def windows_of(model: Model) -> set[int | None]:
    """Return the sliding windows of a model's layers."""
    return {model.window_of(layer) for layer in range(model.layers)}
