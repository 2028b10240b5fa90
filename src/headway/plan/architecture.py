"""The weight matrices of a model's layers, as the cost model counts them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from headway.recipe.architecture import Architecture, DiffusionShape, ExpertShape, LatentAttention

__all__ = [
    "Architecture",
    "DiffusionShape",
    "ExpertShape",
    "LatentAttention",
    "Matrix",
    "Widths",
    "cache_widths",
    "cached_elements",
    "layer_kinds",
    "layer_matrices",
]

Widths = tuple[tuple[int, int], tuple[int, int]]
"""Number and size of the heads that a layer caches per token, of keys and of values."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of a layer."""

    name: str
    inputs: int
    outputs: int
    split: str
    """What tensor parallelism splits: outputs (column), inputs (row), or nothing."""
    copies: int = 1
    """One per expert."""
    uses: int = 1
    """Copies that each token uses."""
    rows: int | None = None
    """Rows per sample that it is multiplied with; None for the sample's tokens."""

    @property
    def size(self) -> int:
        """Weights of one copy."""
        return self.inputs * self.outputs


def layer_kinds(arch: Architecture) -> Iterator[tuple[bool, int]]:
    """Yield (has experts, number of layers), dense layers first."""
    dense = arch.layers if arch.experts is None else min(arch.experts.dense_layers, arch.layers)
    if dense:
        yield False, dense
    if arch.layers > dense:
        yield True, arch.layers - dense


@lru_cache(maxsize=1024)
def layer_matrices(arch: Architecture, with_experts: bool) -> tuple[Matrix, ...]:
    """Every matrix of a layer, in the order of the forward pass."""
    feed_forward = _experts(arch) if with_experts else _feed_forward(arch, "mlp", arch.hidden)
    return (*_attention(arch), *(_conditioned(arch, arch.diffusion) if arch.diffusion else ()), *feed_forward)


def _attention(arch: Architecture) -> tuple[Matrix, ...]:
    width = arch.heads * arch.head_dim
    out = Matrix("attention.o", arch.heads * arch.value_dim, arch.dim, "inputs")
    if arch.latent is None:
        # One GEMM for all three, as in fast trainers; separate ones are within a few percent.
        return Matrix("attention.qkv", arch.dim, width + 2 * arch.kv_heads * arch.head_dim, "outputs"), out
    latent = arch.latent
    queries: tuple[Matrix, ...] = (Matrix("attention.q", arch.dim, width, "outputs"),)
    if latent.q_rank:
        queries = (
            Matrix("attention.q_down", arch.dim, latent.q_rank, ""),
            Matrix("attention.q_up", latent.q_rank, width, "outputs"),
        )
    keys = arch.heads * (arch.head_dim - latent.rope_dim + latent.value_dim)
    return (
        *queries,
        Matrix("attention.kv_down", arch.dim, latent.kv_rank + latent.rope_dim, ""),
        Matrix("attention.kv_up", latent.kv_rank, keys, "outputs"),
        out,
    )  # fmt: skip


def _conditioned(arch: Architecture, shape: DiffusionShape) -> tuple[Matrix, ...]:
    """What a layer of a diffusion transformer has for its condition: modulation, and attention to text and image."""
    dim, matrices = arch.dim, list[Matrix]()
    if shape.modulates_layers:
        matrices.append(Matrix("modulation", dim, 6 * dim, "", rows=1))
    if shape.text_tokens:
        matrices.append(Matrix("cross.q", dim, dim, "outputs"))
        matrices.append(Matrix("cross.kv", dim, 2 * dim, "outputs", rows=shape.text_tokens))
        if shape.image_tokens:
            matrices.append(Matrix("cross.image_kv", dim, 2 * dim, "outputs", rows=shape.image_tokens))
        matrices.append(Matrix("cross.o", dim, dim, "inputs"))
    return tuple(matrices)


@lru_cache(maxsize=1024)
def outer_matrices(arch: Architecture) -> tuple[tuple[Matrix, ...], tuple[Matrix, ...]]:
    """Every matrix of a diffusion transformer before and after its layers; none is split."""
    shape, dim = arch.diffusion, arch.dim
    assert shape is not None, "a decoder has an embedding and a head"

    def maps(name: str, inputs: int, hidden: int, rows: int) -> list[Matrix]:
        return [Matrix(f"{name}.up", inputs, hidden, "", rows=rows), Matrix(f"{name}.down", hidden, dim, "", rows=rows)]

    first = [Matrix("patch", shape.inputs, dim, ""), *maps("time", shape.time_features, dim, 1)]
    last = [Matrix("head.out", dim, shape.outputs, "")]
    if shape.modulates_layers:
        last.insert(0, Matrix("head.modulation", dim, 2 * dim, "", rows=1))
    else:
        first.append(Matrix("time.out", dim, 6 * dim, "", rows=1))
    if shape.text_tokens:
        first += maps("text", shape.text_dim, dim, shape.text_tokens)
    if shape.image_tokens:
        first += maps("image", shape.image_dim, shape.image_dim, shape.image_tokens)
    return tuple(first), tuple(last)


def _feed_forward(arch: Architecture, name: str, hidden: int, copies: int = 1, uses: int = 1) -> tuple[Matrix, ...]:
    first = Matrix(f"{name}.up", arch.dim, hidden * (2 if arch.gated else 1), "outputs", copies, uses)
    return first, Matrix(f"{name}.down", hidden, arch.dim, "inputs", copies, uses)


def _experts(arch: Architecture) -> tuple[Matrix, ...]:
    experts = arch.experts
    assert experts is not None, "a dense model has no experts"
    router = Matrix("router", arch.dim, experts.count, "")
    routed = _feed_forward(arch, "experts", experts.hidden, experts.count, experts.top_k)
    shared = _feed_forward(arch, "shared", experts.hidden * experts.shared) if experts.shared else ()
    return router, *routed, *shared


def cache_widths(arch: Architecture) -> Widths:
    """What a layer caches per token, as `Decoder.cache_widths`; latent attention keeps one narrow vector."""
    if arch.latent is not None:
        return (1, arch.latent.kv_rank + arch.latent.rope_dim), (1, 0)
    return (arch.kv_heads, arch.head_dim), (arch.kv_heads, arch.head_dim)


def cached_elements(arch: Architecture) -> int:
    """Elements that one layer caches per token."""
    return sum(heads * size for heads, size in cache_widths(arch))
