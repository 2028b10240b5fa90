"""Activation checkpointing: what a block recomputes in the backward pass instead of storing it."""

from collections.abc import Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from headway.kernels import document_attention, repeatable_attention  # noqa: F401  (define operations)
from headway.recipe.train import Recompute

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.headway.document_attention.default,
    torch.ops.headway.repeatable_attention.default,
}
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
    aten._scaled_grouped_mm.default,
}
KEPT = {"selective": ATTENTION | PRODUCTS, "except-attention": ATTENTION}
"""Operations whose results are stored, by policy; all others are recomputed."""


def recompute(blocks: Sequence[nn.Module], kind: Recompute | None, count: int | None) -> None:
    """Have the first `count` blocks, or all, recompute activations."""
    if kind in (None, "none"):
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind != "full":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, KEPT[kind]))
    for block in blocks[:count]:
        block.forward = partial(checkpoint, block.forward, **options)


def _policy(kept: Set[Any], _: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    # a compiler may otherwise store what it is only asked to recompute
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.MUST_RECOMPUTE
