"""Counts the work of an inference pass: FLOPs and bytes of products, attention and the head.

Bytes are those of weights and KV cache: activations stay in the chip's caches.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headway.plan.architecture import Architecture, cached_elements, layer_kinds, layer_matrices
from headway.plan.operations import Operation

DTYPES = {"bfloat16": ("bf16", 2), "float16": ("fp16", 2), "float32": ("float32", 4)}
"""Precisions that models are served in: the planner's name, and bytes per weight and per element of the KV cache."""
GROUPS = {
    "attention": "projections", "mlp": "feed-forward", "router": "router", "experts": "experts",
    "shared": "shared experts",
}  # fmt: skip
"""Matrices by the first part of their name, and what rooflines call them."""


@dataclass(frozen=True)
class Span:
    """Sequences of a pass, each with the same number of new tokens."""

    sequences: float
    start: float
    """Tokens of each that are in the cache already, on average."""
    tokens: float
    """New tokens of each."""
    ends: bool = True
    """Whether each gets a token sampled, so that the head runs."""

    @property
    def rows(self) -> float:
        """New tokens of all."""
        return self.sequences * self.tokens

    @property
    def decodes(self) -> bool:
        """Whether each has one new token."""
        return self.tokens == 1


def distinct_experts(count: int, top_k: int, tokens: float) -> float:
    """Expected number of experts that some token is routed to, if all are equally likely."""
    return count * (1 - math.pow(1 - top_k / count, tokens))


def pass_operations(arch: Architecture, dtype: str, *spans: Span) -> Iterator[tuple[str, int, Operation]]:
    """Every operation of a pass: the group it belongs to, in how many layers it is, and one layer's."""
    precision, width = DTYPES[dtype]
    tokens = sum(span.rows for span in spans)

    def gemm(name: str, rows: float, inputs: int, outputs: int, copies: float = 1.0) -> Operation:
        """Copies of a GEMM whose weights are read once."""
        flops, moved = 2.0 * rows * inputs * outputs * copies, width * inputs * outputs * copies
        return Operation(name, "gemm", "forward", flops, moved, rows, outputs, inputs, copies, precision)

    for experts, layers in layer_kinds(arch):
        for matrix in layer_matrices(arch, experts):
            used = distinct_experts(matrix.copies, matrix.uses, tokens) if matrix.copies > 1 else 1.0
            rows = tokens * matrix.uses / used
            group = GROUPS[matrix.name.partition(".")[0]]
            yield group, layers, gemm(matrix.name, rows, matrix.inputs, matrix.outputs, used)
    windowed = arch.windowed_layers if arch.window is not None else 0
    for span in spans:
        for layers, window in ((arch.layers - windowed, None), (windowed, arch.window)):
            if layers:
                yield "attention", layers, _attention(arch, dtype, span, window)
    sampled = sampled_rows(spans)
    if sampled:
        yield "head", 1, gemm("head", sampled, arch.dim, arch.vocab)


def sampled_rows(spans: tuple[Span, ...]) -> float:
    """Sequences that get a token sampled."""
    return sum(span.sequences for span in spans if span.ends)


def _attention(arch: Architecture, dtype: str, span: Span, window: int | None) -> Operation:
    """Attention of one layer to the cache, whose tokens are read once per sequence."""
    precision, width = DTYPES[dtype]
    end = span.start + span.tokens
    pairs = _pairs(end, window) - _pairs(span.start, window)
    read = end if window is None else min(end, window - 1 + span.tokens)
    # With latent attention, queries are projected to the cached vectors, whose latent part is also the values.
    sizes = arch.head_dim + arch.value_dim
    if arch.latent is not None:
        sizes = 2 * arch.latent.kv_rank + arch.latent.rope_dim
    return Operation(
        "attention.core",
        "memory" if span.decodes else "attention",
        "forward",
        flops=2.0 * span.sequences * pairs * arch.heads * sizes,
        bytes=span.sequences * read * cached_elements(arch) * width,
        precision=precision,
        seq=math.ceil(end),
        head_dim=arch.head_dim,
    )


def _pairs(length: float, window: int | None) -> float:
    """Pairs of a token and one that it attends to, in a sequence of this length."""
    inside = length if window is None else min(length, window)
    return inside * (inside + 1) / 2 + (length - inside) * inside
