"""How many parameters a decoder has, and how many floating-point operations a token of training costs.

Model FLOPs, the useful ones: a multiplication and an addition for each weight of each matrix product, in the
forward pass, and twice that in the backward. Recomputation is no part of it. Of experts only the active ones count.
"""

from functools import lru_cache

from headway.plan.architecture import Architecture, layer_kinds, layer_matrices
from headway.recipe import Model

__all__ = [
    "active_parameters",
    "flops_per_token",
    "flops_per_token_full_attention",
    "layer_parameters",
    "matmul_parameters",
    "parameter_shapes",
    "parameters",
    "routed_parameters",
]

Shape = tuple[int, ...]


def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Every parameter of the decoder by name, in the module's order, with its shape."""
    assert model.vocab_size is not None, "the vocabulary's size is settled before parameters are counted"
    shapes: dict[str, Shape] = {"embed.weight": (model.vocab_size, model.dim)}
    for layer in range(model.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _block_shapes(model).items()}
    shapes["norm.weight"] = (model.dim,)
    if not model.tie_embeddings:
        shapes["head.weight"] = (model.vocab_size, model.dim)
    return shapes


def _block_shapes(model: Model) -> dict[str, Shape]:
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, Shape] = {"attention_norm.weight": (model.dim,)}
    shapes |= _linear("attention.q", model.dim, queries, model.qkv_bias)
    shapes |= _linear("attention.k", model.dim, keys, model.qkv_bias)
    shapes |= _linear("attention.v", model.dim, keys, model.qkv_bias)
    shapes |= _linear("attention.o", queries, model.dim, model.output_bias)
    if model.qk_norm:
        shapes |= {"attention.q_norm.weight": (model.head_dim,), "attention.k_norm.weight": (model.head_dim,)}
    shapes["mlp_norm.weight"] = (model.dim,)
    shapes |= _linear("mlp.gate", model.dim, model.hidden, model.mlp_bias)
    shapes |= _linear("mlp.up", model.dim, model.hidden, model.mlp_bias)
    shapes |= _linear("mlp.down", model.hidden, model.dim, model.mlp_bias)
    return shapes


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return shapes | {f"{name}.bias": (outputs,)} if bias else shapes


def parameters(arch: Architecture) -> int:
    """Number of parameters; a tied head's are the embedding's and counted once."""
    layers = sum(count * layer_parameters(arch, experts) for experts, count in layer_kinds(arch))
    return layers + _outside_layers(arch)


def active_parameters(arch: Architecture) -> int:
    """Parameters that one token's pass uses: all but the experts it is not sent to."""
    layers = sum(count * layer_parameters(arch, experts, active=True) for experts, count in layer_kinds(arch))
    return layers + _outside_layers(arch)


def _outside_layers(arch: Architecture) -> int:
    tables = arch.vocab * arch.dim * (1 if arch.tied else 2) + arch.positions * arch.dim
    return tables + arch.dim * (2 if arch.layer_norm else 1)


@lru_cache(maxsize=1024)
def layer_parameters(arch: Architecture, with_experts: bool, active: bool = False) -> int:
    """Parameters of one layer: matrices, biases and norms; of experts all, or those a token uses."""
    count = sum(
        matrix.inputs * matrix.outputs * (matrix.uses if active else matrix.copies)
        for matrix in layer_matrices(arch, with_experts)
    )
    return count + _norms(arch) + _biases(arch, with_experts)


@lru_cache(maxsize=1024)
def routed_parameters(arch: Architecture) -> int:
    """Parameters of one layer's experts that tokens are sent to."""
    return (
        sum(m.inputs * m.outputs * m.copies for m in layer_matrices(arch, True) if m.copies > 1) if arch.experts else 0
    )


def _norms(arch: Architecture) -> int:
    heads = 2 * arch.head_dim if arch.qk_norm else 0
    latent = (arch.latent.q_rank + arch.latent.kv_rank) if arch.latent else 0
    return 2 * arch.dim * (2 if arch.layer_norm else 1) + heads + latent


def _biases(arch: Architecture, with_experts: bool) -> int:
    biases = {
        "attention.qkv": arch.qkv_bias,
        "attention.o": arch.output_bias,
        "mlp.up": arch.mlp_bias,
        "mlp.down": arch.mlp_bias,
    }
    return sum(matrix.outputs for matrix in layer_matrices(arch, with_experts) if biases.get(matrix.name))


def matmul_parameters(arch: Architecture) -> int:
    """Parameters that a token is multiplied with in matrix products.

    All matrices but the input embedding, which is only looked up; tied, it is the head too and counts. Norms
    and biases are no matrix products, and experts count as often as a token uses them.
    """
    layers = sum(
        count * matrix.inputs * matrix.outputs * matrix.uses
        for experts, count in layer_kinds(arch)
        for matrix in layer_matrices(arch, experts)
    )
    return layers + arch.vocab * arch.dim


def flops_per_token(arch: Architecture, seq: int) -> int:
    """Model FLOPs of one token of training in sequences of `seq`; causal attention counts half."""
    return 6 * matmul_parameters(arch) + 3 * _attention_products(arch, seq)


def flops_per_token_full_attention(arch: Architecture, seq: int) -> int:
    """The same with attention counted as if it were not causal: the convention of many published figures."""
    return 6 * matmul_parameters(arch) + 6 * _attention_products(arch, seq)


def _attention_products(arch: Architecture, seq: int) -> int:
    return arch.layers * arch.heads * (arch.head_dim + arch.value_dim) * seq
