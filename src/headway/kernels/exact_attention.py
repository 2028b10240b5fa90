"""Attention of exact mode on GPUs, in training: the kernel that inference has, over whole documents.

`paged_triton.causal_attention` goes through the keys of a document in tiles cut at absolute positions, as the pages
of a sequence are gone through, so a token has the same bits in both. The backward pass is cuDNN's for whole rows and
flash attention's for documents or a window, given the output and the log-sum-exps of this forward pass; without a GPU,
that of PyTorch's attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headway.kernels.batch_invariant_attention import document_spans
from headway.kernels.paged_triton import causal_attention
from headway.kernels.pointer_table import uploaded


@dataclass(frozen=True)
class DocumentPlan:
    """The documents of a batch's rows, laid one after another, and the programs of their attention."""

    starts_S1: Tensor
    """First token of each document; at the end, all tokens. int32."""
    longest: int
    """Tokens of the longest document."""
    programs: tuple[Tensor, Tensor]
    """The document and the first query of each program, int32."""
    rows: int | None
    """Documents, if all are whole rows of the batch."""


def plan_documents(
    documents_BL: Tensor | None, rows: int, length: int, queries: int, device: torch.device
) -> tuple[DocumentPlan, Tensor]:
    """Plan attention in programs of so many queries; also return each token's position in its document [B, L].

    With documents that lie on a device the host waits for their numbers, once per pass.
    """
    if documents_BL is None:
        return _whole_rows(rows, length, queries, device)
    return _planned(documents_BL, rows, length, queries, device)


@lru_cache(maxsize=8)  # also keeps it for replays of a CUDA graph
def _whole_rows(rows: int, length: int, queries: int, device: torch.device) -> tuple[DocumentPlan, Tensor]:
    return _planned(None, rows, length, queries, device)


def _planned(
    documents_BL: Tensor | None, rows: int, length: int, queries: int, device: torch.device
) -> tuple[DocumentPlan, Tensor]:
    starts, lengths, positions_T = document_spans(documents_BL, rows, length)
    counts = -(-lengths // queries)
    document_P = np.repeat(np.arange(len(counts)), counts)
    first_P = (np.arange(len(document_P)) - np.repeat(counts.cumsum() - counts, counts)) * queries
    order = np.argsort(-first_P, kind="stable")  # those with the most keys first
    programs = uploaded(np.stack((document_P[order], first_P[order])).astype(np.int32), device)
    ends = np.append(starts, rows * length).astype(np.int32)
    whole = rows if documents_BL is None else None
    plan = DocumentPlan(uploaded(ends, device), int(lengths.max()), (programs[0], programs[1]), whole)
    return plan, uploaded(positions_T, device).view(rows, length)


Plain = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    plan: DocumentPlan,
    plain: Plain,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return attention [B, L, N, H] within documents; `plain` computes the same otherwise, and has the gradients where
    flash attention is not to be had."""
    scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
    y: Tensor = _Attention.apply(q_BLNH, k_BLKH, v_BLKH, plan, plain, scale, window)
    return y


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        plan: DocumentPlan,
        plain: Plain,
        scale: float,
        window: int | None,
    ) -> Tensor:
        flat = [x.flatten(0, 1) for x in (q_BLNH, k_BLKH, v_BLKH)]
        y_TNH, sums_NT = causal_attention(*flat, plan.starts_S1, plan.programs, scale, window)
        ctx.save_for_backward(q_BLNH, k_BLKH, v_BLKH, y_TNH, sums_NT)
        ctx.plan, ctx.plain, ctx.scale, ctx.window = plan, plain, scale, window
        return y_TNH.view(q_BLNH.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BLNH: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, y_TNH, sums_NT = ctx.saved_tensors
        if dy_BLNH.is_cuda and ctx.plan.rows is not None and ctx.window is None:
            return (*cudnn_backward(dy_BLNH, *inputs, y_TNH, sums_NT, ctx.scale), None, None, None, None)
        if dy_BLNH.is_cuda:
            flat = [x.flatten(0, 1) for x in inputs]
            gradients = flash_backward(
                dy_BLNH.flatten(0, 1).contiguous(), *flat, y_TNH, sums_NT, ctx.plan, ctx.scale, ctx.window
            )
            return (*(g.view(x.shape) for g, x in zip(gradients, inputs, strict=True)), None, None, None, None)
        inputs = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            y_BLNH = ctx.plain(*inputs)
        return (*torch.autograd.grad(y_BLNH, inputs, dy_BLNH), None, None, None, None)


def cudnn_backward(
    dy_BLNH: Tensor,
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    y_TNH: Tensor,
    sums_NT: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values of whole rows, by cuDNN's causal backward pass."""
    rows, length = q_BLNH.shape[:2]
    unused = torch.empty(0, dtype=torch.int64, device=q_BLNH.device)  # the state of dropout
    heads_first = [x.transpose(1, 2) for x in (dy_BLNH, q_BLNH, k_BLKH, v_BLKH, y_TNH.view(q_BLNH.shape))]
    sums_BNL1 = sums_NT.unflatten(1, (rows, length)).transpose(0, 1).contiguous().unsqueeze(3)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first, sums_BNL1, unused, unused, None, None, None, length, length, 0.0, True, scale=scale
    )
    return tuple(x.transpose(1, 2) for x in gradients)


def flash_backward(
    dy_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    y_TNH: Tensor,
    sums_NT: Tensor,
    plan: DocumentPlan,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, by flash attention's backward pass."""
    unused = torch.empty(2, dtype=torch.uint64, device=q_TNH.device)  # the state of dropout
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        dy_TNH, q_TNH, k_TKH, v_TKH, y_TNH, sums_NT, plan.starts_S1, plan.starts_S1, plan.longest, plan.longest,
        0.0, True, unused, unused, scale=scale, window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )  # fmt: skip
    return gradients
