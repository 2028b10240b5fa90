"""Parameters and model FLOPs of a diffusion transformer.

A sample is the unit: matrices of its condition are multiplied with one row, or with the tokens of its text, however
many patches it has. Attention is not causal.
"""

from functools import lru_cache

from headway.plan.architecture import Architecture, Matrix, layer_matrices, outer_matrices


@lru_cache(maxsize=1024)
def layer_counts(arch: Architecture) -> tuple[int, int]:
    """Parameters of a layer that the tensor axis splits, and those that it replicates."""
    shape, matrices = arch.diffusion, layer_matrices(arch, False)
    assert shape is not None, "of a diffusion transformer"
    split = sum(matrix.size for matrix in matrices if matrix.split)
    split += sum(matrix.outputs for matrix in matrices if matrix.split == "outputs")  # biases
    whole = sum(matrix.size for matrix in matrices if not matrix.split)
    whole += sum(matrix.outputs for matrix in matrices if matrix.split != "outputs")
    if arch.qk_norm_whole:
        split += arch.dim * (2 + 2 * bool(shape.text_tokens) + bool(shape.image_tokens))
    if not shape.modulates_layers:
        whole += 6 * arch.dim
    return split, whole + 2 * arch.dim * shape.cross_norm


def layer_parameters(arch: Architecture) -> int:
    """Parameters of a layer."""
    return sum(layer_counts(arch))


def outer_parameters(arch: Architecture) -> int:
    """Parameters outside of layers."""
    shape = arch.diffusion
    assert shape is not None, "of a diffusion transformer"
    matrices = [matrix for part in outer_matrices(arch) for matrix in part]
    count = sum(matrix.size + matrix.outputs for matrix in matrices) + shape.classes * arch.dim
    count += 0 if shape.modulates_layers else 2 * arch.dim
    if shape.image_tokens:
        count += 2 * shape.image_dim + 2 * arch.dim + shape.image_positions * shape.image_dim
    return count


def matmul_flops(arch: Architecture, tokens: int) -> int:
    """FLOPs of a forward pass of one sample of so many patches, in products with weights."""
    first, last = outer_matrices(arch)
    return 2 * sum(
        count * matrix.size * _rows(matrix, tokens)
        for count, matrices in ((1, first), (arch.layers, layer_matrices(arch, False)), (1, last))
        for matrix in matrices
    )


def attention_flops(arch: Architecture, tokens: int) -> int:
    """FLOPs of a forward pass of one sample, in attention: to patches, text and image."""
    shape = arch.diffusion
    assert shape is not None, "of a diffusion transformer"
    return 4 * arch.layers * arch.dim * tokens * (tokens + shape.text_tokens + shape.image_tokens)


def flops_per_sample(arch: Architecture, tokens: int) -> int:
    """Model FLOPs of training on one sample: three times its forward pass."""
    return 3 * (matmul_flops(arch, tokens) + attention_flops(arch, tokens))


def _rows(matrix: Matrix, tokens: int) -> int:
    return tokens if matrix.rows is None else matrix.rows
