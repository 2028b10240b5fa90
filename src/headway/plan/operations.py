"""Counts every operation of a training step: GEMMs, attention and memory-bound kernels.

Per microbatch and device. Forward, input gradient and weight gradient are separate, so that a schedule may reorder
them and recomputation may repeat the first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from headway.plan.architecture import Architecture, Matrix, layer_matrices, outer_matrices
from headway.plan.flops import attended_share
from headway.plan.settings import LOW, MicrobatchShape, Software

Phase = Literal["forward", "input_grad", "weight_grad"]
Kind = Literal["gemm", "attention", "memory"]

BF16 = 2
F32 = 4

LOSS_BYTES = {"stepwise": 85, "eager": 36, "sharded": 24, "chunked": 40, "fused": 10}
"""Bytes that the loss and its backward pass move per logit. `chunked` was measured on an H200 (39), `stepwise` follows
from A100 iterations; a fused loss reads and writes a few times."""


@dataclass(frozen=True)
class Operation:
    """A kernel, or several equal ones."""

    name: str
    kind: Kind
    phase: Phase
    flops: float = 0.0
    bytes: float = 0.0
    """Minimum traffic for this software: inputs read once, outputs written once."""
    m: float = 0
    n: float = 0
    k: float = 0
    count: float = 1
    """Equal GEMMs: experts on this device."""
    precision: str = "bf16"
    kernels: int = 1
    plain: bool = False
    """A framework's own elementwise kernels, with strides and casts: they reach less of the bandwidth."""
    seq: int = 0
    head_dim: int = 0


Part = tuple[Operation, ...]

_PASSES: tuple[tuple[Phase, int], ...] = (("forward", 1), ("input_grad", 2))
"""Of attention; the backward pass counts as two forward passes."""


def gemm(name: str, phase: Phase, m: float, n: float, k: float, count: float, precision: str) -> Operation:
    """A GEMM [m, k] x [k, n]."""
    size, out = {"fp8": (1, 2), "mxfp8": (1, 2), "nvfp4": (0.5625, 2), "float32": (4, 4)}.get(precision, (2, 2))
    moved = count * (size * (m * k + k * n) + out * m * n)
    return Operation(name, "gemm", phase, 2.0 * count * m * n * k, moved, m, n, k, count, precision)


@lru_cache(maxsize=65536)
def layer_operations(arch: Architecture, with_experts: bool, shape: MicrobatchShape, software: Software) -> Part:
    """The operations of one layer, forward and backward."""
    operations: list[Operation] = []
    for matrix in layer_matrices(arch, with_experts):
        operations += _gemms(matrix, shape, software.low_parts)
        if shape.precision in LOW and (software.low_parts is None or _is_low(matrix, software.low_parts)):
            operations += _quantize(matrix, shape, software)
        if software.casts_weights:
            operations += _cast(matrix, shape)
    operations += _attention(arch, shape, software)
    operations += _elementwise(arch, with_experts, shape, software)
    return tuple(_widened(operations, shape))


def _widened(operations: Sequence[Operation], shape: MicrobatchShape) -> Iterator[Operation]:
    """Scale the bytes of memory-bound operations, which are counted in bfloat16, to the width of activations."""
    for operation in operations:
        yield replace(operation, bytes=operation.bytes * shape.width / 2) if operation.kind == "memory" else operation


def _split(matrix: Matrix, shape: MicrobatchShape) -> tuple[float, float, float, float]:
    """Tokens, inputs, outputs and number of a matrix's GEMMs on this device."""
    inputs = matrix.inputs / (shape.tensor if matrix.split == "inputs" else 1)
    outputs = matrix.outputs / (shape.tensor if matrix.split == "outputs" else 1)
    if matrix.copies == 1:
        return shape.tokens if matrix.rows is None else shape.sequences * matrix.rows, inputs, outputs, 1
    # Experts are not split; the tensor axis splits their tokens instead.
    local = max(1.0, matrix.copies / shape.expert)
    tokens = shape.tokens / shape.tensor * matrix.uses / local * shape.imbalance
    return tokens, matrix.inputs, matrix.outputs, local


def _is_low(matrix: Matrix, low_parts: frozenset[str] | None) -> bool:
    """Whether a matrix's GEMMs are low where a layer's are."""
    part = matrix.name.partition(".")[0]
    return part != "router" and (low_parts is None or part in low_parts)


def low_share(matrices: Iterable[Matrix], low_parts: frozenset[str] | None) -> float:
    """Share of weights whose GEMMs are low where a layer's are; a router's are too few to tell."""
    if low_parts is None:
        return 1.0
    sizes = [(matrix.size * matrix.copies, _is_low(matrix, low_parts)) for matrix in matrices]
    return sum(size for size, low in sizes if low) / sum(size for size, _ in sizes)


def _gemms(matrix: Matrix, shape: MicrobatchShape, low_parts: frozenset[str] | None = None) -> Iterator[Operation]:
    tokens, inputs, outputs, count = _split(matrix, shape)
    precision = shape.precision if _is_low(matrix, low_parts) else shape.high_precision
    yield gemm(matrix.name, "forward", tokens, outputs, inputs, count, precision)
    yield gemm(matrix.name, "input_grad", tokens, inputs, outputs, count, precision)
    yield gemm(matrix.name, "weight_grad", outputs, inputs, tokens, count, precision)


def _quantize(matrix: Matrix, shape: MicrobatchShape, software: Software) -> Iterator[Operation]:
    """Quantize inputs, weights and output gradients, each in the two layouts that GEMMs need.

    Tensor-wise scales take one more pass to find the largest value; fusing the cast into the previous kernel saves
    the read.
    """
    tokens, inputs, outputs, count = _split(matrix, shape)
    read = BF16 * (1 if software.fusion == "eager" else 0.5) + (BF16 if software.scaling == "tensor" else 0)
    write = 2 if shape.precision != "nvfp4" else 1.125
    activations, weights, gradients = tokens * inputs * count, inputs * outputs * count, tokens * outputs * count
    forward = activations * (read + write) + weights * (BF16 + write) / max(1, software.weight_cast_reuse)
    yield Operation(f"{matrix.name}.quantize", "memory", "forward", bytes=forward, kernels=2)
    yield Operation(f"{matrix.name}.quantize", "memory", "input_grad", bytes=gradients * (read + write))


def _cast(matrix: Matrix, shape: MicrobatchShape) -> Iterator[Operation]:
    """Autocast: float32 weights cast down per forward pass, gradients cast up per backward pass."""
    _, inputs, outputs, count = _split(matrix, shape)
    weights = inputs * outputs * count
    yield Operation(f"{matrix.name}.cast", "memory", "forward", bytes=weights * (F32 + BF16))
    yield Operation(f"{matrix.name}.cast", "memory", "weight_grad", bytes=weights * (F32 + BF16))


def _attention(arch: Architecture, shape: MicrobatchShape, software: Software) -> Iterator[Operation]:
    """Attention: causal kernels skip what is masked, unfused GEMMs do not. Diffusion transformers mask nothing."""
    heads = arch.heads / shape.tensor
    pairs = shape.tokens * shape.seq * heads
    flops = 2.0 * pairs * (arch.head_dim + arch.value_dim)
    queries = shape.tokens * heads * (arch.head_dim + arch.value_dim)
    keys = shape.tokens * max(1.0, arch.kv_heads / shape.tensor) * (arch.head_dim + arch.value_dim)
    moved = BF16 * (queries + keys * shape.context)
    if software.attention != "unfused":
        if arch.diffusion is None:
            flops *= attended_share(arch, shape.seq) / 2
        elif arch.diffusion.text_tokens:
            others = arch.diffusion.text_tokens + arch.diffusion.image_tokens
            flops *= 1 + others / shape.seq
            moved += BF16 * (queries + shape.sequences * others * heads * 2 * arch.head_dim)
        for phase, times in _PASSES:
            yield Operation(
                "attention.core", "attention", phase, times * flops, times * moved, precision=shape.high_precision,
                seq=shape.seq // shape.context, head_dim=arch.head_dim,
            )  # fmt: skip
        return
    batch = shape.sequences * heads
    tokens = shape.seq / shape.context
    for phase, times in _PASSES:
        for name, width in (("scores", arch.head_dim), ("mix", arch.value_dim)):
            operation = gemm(f"attention.{name}", phase, tokens, shape.seq, width, batch, shape.high_precision)
            yield replace(operation, flops=times * operation.flops, bytes=times * operation.bytes, count=times * batch)
        # softmax reads and writes the scores; dropout reads, writes and stores a mask
        passes = (2 + 2.5 * software.dropout) if phase == "forward" else (3 + 2.5 * software.dropout)
        yield Operation("attention.softmax", "memory", phase, bytes=BF16 * pairs * passes, kernels=2)


def _elementwise(
    arch: Architecture, with_experts: bool, shape: MicrobatchShape, software: Software
) -> Iterator[Operation]:
    """Memory-bound kernels: norms, residuals, RoPE, activations, dropout, routing."""
    stream = shape.tokens * arch.dim / (shape.tensor if software.sequence_parallel else 1)
    forward, backward = _stream_bytes(arch, software)
    if arch.diffusion is not None and arch.diffusion.text_tokens:  # cross-attention is a third branch of two
        forward, backward = 1.5 * forward, 1.5 * backward
    yield from _memory("norms and residuals", stream * forward, stream * backward, software, 4)
    if software.dropout:
        yield from _memory("dropout", stream * 4, stream * 6, software, 2)
    heads = shape.tokens * (arch.heads + arch.kv_heads) * arch.head_dim * BF16 / shape.tensor
    if arch.rotary:
        passes = software.rotary_passes
        yield from _memory("rotary", heads * passes, heads * passes * 1.25, software, 2)
    if arch.qk_norm:
        yield from _memory("qk norm", heads * 2, heads * 3, software, 2)
    if arch.latent is not None:
        rank = (arch.latent.q_rank + arch.latent.kv_rank) * shape.tokens * BF16
        yield from _memory("latent norms", (rank + heads) * 3, (rank + heads) * 4, software, 2)
    if not with_experts:
        yield from _activation("activation", arch, shape.tokens * arch.hidden / shape.tensor, software)
        return
    experts = arch.experts
    assert experts is not None, "a dense model has no experts"
    routed = shape.tokens / shape.tensor * experts.top_k * shape.imbalance
    yield from _activation("activation", arch, routed * experts.hidden, software)
    if experts.shared:
        inner = shape.tokens * experts.hidden * experts.shared / shape.tensor
        yield from _activation("shared activation", arch, inner, software)
    # tokens are gathered for their experts, and summed with their weights
    moved = routed * arch.dim * BF16
    if software.fused_experts:  # each token is read or written once on the other side
        tokens = moved / experts.top_k
        again = routed * experts.hidden * BF16
        yield from _memory("permute", 2 * (moved + tokens), 3 * moved + 2 * tokens + again, software, 4)
        return
    yield from _memory("permute", moved * 5, moved * 5, software, 8)


def _stream_bytes(arch: Architecture, software: Software) -> tuple[float, float]:
    """Bytes per element of the residual stream in a layer, forward and backward: two norms, two additions.

    A compiler fuses an addition with the norm after it, forward and backward. Without fusion, every GEMM that reads a
    normalized copy adds a gradient; under autocast each reads its own cast copy, and its gradient is cast back.
    """
    wide = software.stream_bytes
    if software.fusion == "compiled":
        return 5 * wide + 8, 6 * wide + 16
    if software.fusion == "fused":
        return 8 * wide + 4, 14 * wide
    readers = (3 if software.separate_projections else 1) + (2 if software.separate_projections and arch.gated else 1)
    casts = 6 if software.casts_weights else 0
    forward = 8 * wide + 4 + casts * readers
    backward = 10 * wide + 3 * wide * readers + casts * (readers + 2)
    return forward, backward


def _memory(name: str, forward: float, backward: float, software: Software, kernels: int) -> Iterator[Operation]:
    plain = software.fusion == "eager"
    yield Operation(name, "memory", "forward", bytes=forward, kernels=kernels, plain=plain)
    yield Operation(name, "memory", "input_grad", bytes=backward, kernels=kernels, plain=plain)


def _activation(name: str, arch: Architecture, elements: float, software: Software) -> Iterator[Operation]:
    size = elements * BF16
    if not arch.gated:
        return _memory(name, size * 2, size * 3, software, 1)
    eager = software.fusion == "eager"
    return _memory(name, size * (5 if eager else 3), size * (9 if eager else 6), software, 2 if eager else 1)


@lru_cache(maxsize=4096)
def head_operations(arch: Architecture, shape: MicrobatchShape, software: Software) -> tuple[Part, Part]:
    """The operations of the embedding, and of final norm, head and loss."""
    stream = shape.tokens * arch.dim * BF16
    if arch.diffusion is not None:
        return _outer_operations(arch, shape, software)
    embed = [Operation("embedding", "memory", "forward", bytes=2 * stream)]
    embed += [Operation("embedding", "memory", "weight_grad", bytes=4 * stream)]
    if arch.positions:
        embed += list(_memory("positions", stream * 3, stream * 2, software, 1))
    vocab = arch.vocab / shape.tensor
    head = [*_memory("final norm", stream * 2, stream * 3, software, 1)]
    logits = Matrix("head", arch.dim, arch.vocab, "outputs")
    head += list(_gemms(logits, replace(shape, precision=shape.high_precision)))
    if software.casts_weights:
        head += list(_cast(logits, shape))
    scores = shape.tokens * vocab
    head_bytes = scores * LOSS_BYTES[software.loss] / 2
    head.append(Operation("loss", "memory", "forward", bytes=head_bytes, kernels=4))
    head.append(Operation("loss", "memory", "input_grad", bytes=head_bytes, kernels=4))
    return tuple(_widened(embed, shape)), tuple(_widened(head, shape))


def _outer_operations(arch: Architecture, shape: MicrobatchShape, software: Software) -> tuple[Part, Part]:
    """The same of a diffusion transformer: patches, time, text and image, and the head; its loss is small."""
    parts = []
    for matrices in outer_matrices(arch):
        operations = [operation for matrix in matrices for operation in _gemms(matrix, shape)]
        operations += [cast for matrix in matrices for cast in _cast(matrix, shape) if software.casts_weights]
        parts.append(operations)
    stream = shape.tokens * arch.dim * BF16
    parts[0] += _memory("positions", stream * 2, stream, software, 1)
    parts[1] += _memory("final norm", stream * 2, stream * 3, software, 1)
    return tuple(_widened(parts[0], shape)), tuple(_widened(parts[1], shape))


def optimizer_bytes(software: Software) -> float:
    """Bytes that the update of one parameter moves, including gradient norm and clipping."""
    moved: float = (
        2 * software.master_bytes + software.weight_bytes if software.master_bytes else 2 * software.weight_bytes
    )
    states = software.states
    moved += 4 * software.moment_bytes if states is None else 2 * (states.block_bytes - software.master_bytes)
    moved += software.gradient_bytes
    return (moved + 3 * software.gradient_bytes) * software.optimizer_passes
