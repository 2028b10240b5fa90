"""Attention within packed documents by cuDNN over ragged rows, which does no work between documents.

`works` tries a small case once per process against attention of each document alone: where a version of cuDNN or a
device cannot do it, attention stays with flex attention.

B rows    L tokens of a row    S places for documents    N heads    K key and value heads    H head size
"""

import logging
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from headway.kernels import cudnn_ragged

MULTIPLE, LARGEST = 8, 128
"""Head sizes that cuDNN takes."""
FEWEST_PLACES = 16
TOLERANCE = 0.02
"""Of outputs and gradients in bfloat16, relative to their norm."""
MOST_ELEMENTS = 2**31
"""Offsets of documents are 32-bit integers."""


@dataclass(frozen=True)
class DocumentStarts:
    """Where the documents of a batch's rows begin, laid one after another."""

    starts_S1: Tensor
    """int32; empty documents and all tokens at the end."""
    longest: int
    """Tokens of a row, which no document exceeds."""


def document_starts(documents_BL: Tensor, places: int) -> DocumentStarts:
    """Return where documents begin, of `places` at most; the host does not wait for the device."""
    tokens, device = documents_BL.numel(), documents_BL.device
    new_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    new_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    index_T = new_BL.flatten().cumsum(0) - 1
    starts_S1 = torch.full((places + 1,), tokens, dtype=torch.int32, device=device)
    places_T = torch.arange(tokens, dtype=torch.int32, device=device)
    starts_S1.scatter_reduce_(0, index_T, places_T, "amin")
    torch._dynamo.maybe_mark_dynamic(starts_S1, 0)
    return DocumentStarts(starts_S1, documents_BL.shape[1])


def places_for(documents: int) -> int:
    """Return a number of places for some documents, of which there are few: each has plans of its own."""
    power = max(FEWEST_PLACES, 1 << (documents - 1).bit_length())
    return power * 3 // 4 if power > FEWEST_PLACES and documents <= power * 3 // 4 else power


def attention(
    q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, documents: DocumentStarts, scale: float | None = None
) -> Tensor:
    """Return causal attention [B, L, N, H] within documents."""
    scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    out_BLNH: Tensor = _attention(q_BLNH, k_BLKH, v_BLKH, documents.starts_S1, documents.longest, scale, deterministic)[
        0
    ]
    return out_BLNH


def takes(head: int) -> bool:
    """Whether cuDNN takes a head size."""
    return head % MULTIPLE == 0 and head <= LARGEST


def fits(tokens: int, heads: int, head: int) -> bool:
    """Whether the offsets of so many tokens' heads do."""
    return tokens * heads * head < MOST_ELEMENTS


def installed() -> bool:
    """Whether nvidia-cudnn-frontend is."""
    return find_spec("cudnn") is not None


# -- as an operation


@torch.library.custom_op("headway::document_attention", mutates_args=())
def _attention(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    starts_S1: Tensor,
    longest: int,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.flatten(0, 1).contiguous() for x in (q_BLNH, k_BLKH, v_BLKH))
    shape = cudnn_ragged.shape_of(q, k, starts_S1, longest, scale, deterministic)
    out_TNH, sums_TN = cudnn_ragged.forward_pass(q, k, v, starts_S1, shape)
    return out_TNH.view(q_BLNH.shape), sums_TN


@_attention.register_fake
def _(q_BLNH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, length, heads, _head = q_BLNH.shape
    return q_BLNH.new_empty(q_BLNH.shape), q_BLNH.new_empty((b * length, heads), dtype=torch.float32)


@torch.library.custom_op("headway::document_attention_backward", mutates_args=())
def _attention_backward(
    dout_BLNH: Tensor,
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    out_BLNH: Tensor,
    sums_TN: Tensor,
    starts_S1: Tensor,
    longest: int,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = (x.flatten(0, 1).contiguous() for x in (dout_BLNH, q_BLNH, k_BLKH, v_BLKH, out_BLNH))
    shape = cudnn_ragged.shape_of(q, k, starts_S1, longest, scale, deterministic)
    gradients = cudnn_ragged.backward_pass(dout, q, k, v, out, sums_TN, starts_S1, shape)
    dq, dk, dv = (gradient.view(x.shape) for gradient, x in zip(gradients, (q_BLNH, k_BLKH, v_BLKH), strict=True))
    return dq, dk, dv


@_attention_backward.register_fake
def _(_dout: Tensor, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_BLNH, k_BLKH, v_BLKH))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, starts)


def _backward(ctx: Any, dout_BLNH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(dout_BLNH, *ctx.saved_tensors, *ctx.options), None, None, None, None


_attention.register_autograd(_backward, setup_context=_keep)


# -- whether it works here


@cache
def works(head: int) -> bool:
    """Whether this process's GPU and cuDNN can do it, with the results of each document alone."""
    if not installed():
        return False
    try:
        difference = _difference(head, torch.device("cuda"))
    except Exception as error:  # whatever the library raises, attention has another way
        first = str(error).partition("\n")[0]
        logging.getLogger(__name__).warning("attention of packed documents stays with flex attention: %s", first)
        return False
    return difference < TOLERANCE


def _difference(head: int, device: torch.device) -> float:
    """Return the largest difference of output and gradients from those of each document alone, relative to their
    norm."""
    generator = torch.Generator(device).manual_seed(0)
    documents_BL = torch.tensor([[0] * 40 + [1] * 88, [0] * 128], dtype=torch.int32, device=device)
    shapes = ((2, 128, heads, head) for heads in (4, 2, 2, 4))
    q, k, v, dout = (torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16) for shape in shapes)
    with torch.enable_grad():
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, document_starts(documents_BL, FEWEST_PLACES))
        got = (out, *torch.autograd.grad(out, leaves, dout))
        mask = documents_BL.unsqueeze(2) == documents_BL.unsqueeze(1)
        heads_first = [x.float().transpose(1, 2) for x in leaves]
        want_out = nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=mask.tril().unsqueeze(1), enable_gqa=True
        ).transpose(1, 2)
        want = (want_out, *torch.autograd.grad(want_out, leaves, dout.float()))
    pairs = ((x.detach().float(), y.detach().float()) for x, y in zip(got, want, strict=True))
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)
