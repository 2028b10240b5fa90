"""How many parameters a decoder has, and how many floating-point operations a token of training costs.

Model FLOPs, the useful ones: a multiplication and an addition for each weight of each matrix product, in the
forward pass, and twice that in the backward. Recomputation is no part of it.
"""

from math import prod

from headway.recipe import Model

__all__ = [
    "flops_per_token",
    "flops_per_token_full_attention",
    "matmul_parameters",
    "parameter_shapes",
    "parameters",
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


def parameters(model: Model) -> int:
    """Number of parameters; a tied head's are the embedding's and counted once."""
    return sum(prod(shape) for shape in parameter_shapes(model).values())


def matmul_parameters(model: Model) -> int:
    """Parameters that a token is multiplied with in matrix products.

    All matrices but the input embedding, which is only looked up; tied, it is the head too and counts. Norms
    and biases are no matrix products.
    """
    shapes = parameter_shapes(model)
    if not model.tie_embeddings:
        del shapes["embed.weight"]
    return sum(prod(shape) for shape in shapes.values() if len(shape) == 2)


def flops_per_token(model: Model, seq: int) -> int:
    """Model FLOPs of one token of training in sequences of `seq`; causal attention counts half."""
    return 6 * matmul_parameters(model) + 6 * _attention_products(model, seq)


def flops_per_token_full_attention(model: Model, seq: int) -> int:
    """The same with attention counted as if it were not causal: the convention of many published figures."""
    return 6 * matmul_parameters(model) + 12 * _attention_products(model, seq)


def _attention_products(model: Model, seq: int) -> int:
    return model.layers * model.heads * model.head_dim * seq
