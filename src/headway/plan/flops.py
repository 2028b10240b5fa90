"""Parameters of a model, and model FLOPs per token of training.

Model FLOPs count a multiply-add per weight of each GEMM in the forward pass and twice that in the backward pass;
recomputation does not count, and of experts only the active ones do.
"""

from functools import lru_cache

from headway.plan import diffusion
from headway.plan.architecture import Architecture, layer_kinds, layer_matrices


def parameters(arch: Architecture) -> int:
    """Number of parameters; a tied head counts once."""
    layers = sum(count * layer_parameters(arch, experts) for experts, count in layer_kinds(arch))
    return layers + _outside_layers(arch)


def active_parameters(arch: Architecture) -> int:
    """Parameters that a token uses: all but the experts it is not routed to."""
    layers = sum(count * layer_parameters(arch, experts, active=True) for experts, count in layer_kinds(arch))
    return layers + _outside_layers(arch)


def _outside_layers(arch: Architecture) -> int:
    if arch.diffusion is not None:
        return diffusion.outer_parameters(arch)
    tables = arch.vocab * arch.dim * (1 if arch.tied else 2) + arch.positions * arch.dim
    return tables + arch.dim * (2 if arch.layer_norm else 1)


@lru_cache(maxsize=1024)
def layer_parameters(arch: Architecture, with_experts: bool, active: bool = False) -> int:
    """Parameters of a layer: matrices, biases and norms; with `active`, only the experts that a token uses."""
    if arch.diffusion is not None:
        return diffusion.layer_parameters(arch)
    count = sum(
        matrix.inputs * matrix.outputs * (matrix.uses if active else matrix.copies)
        for matrix in layer_matrices(arch, with_experts)
    )
    return count + _norms(arch) + _biases(arch, with_experts, active)


@lru_cache(maxsize=1024)
def routed_parameters(arch: Architecture) -> int:
    """Parameters of the routed experts of a layer."""
    return (
        sum(m.inputs * m.outputs * m.copies for m in layer_matrices(arch, True) if m.copies > 1) if arch.experts else 0
    )


def _norms(arch: Architecture) -> int:
    heads = arch.head_dim * ((arch.heads + arch.kv_heads) if arch.qk_norm_whole else 2) if arch.qk_norm else 0
    latent = (arch.latent.q_rank + arch.latent.kv_rank) if arch.latent else 0
    return arch.norms * arch.dim * (2 if arch.layer_norm else 1) + heads + latent


def _biases(arch: Architecture, with_experts: bool, active: bool) -> int:
    """Biases of matrices, and attention sinks."""
    experts = arch.experts
    biases = {
        "attention.qkv": arch.qkv_bias,
        "attention.q_down": arch.qkv_bias,
        "attention.kv_down": arch.qkv_bias,
        "attention.o": arch.output_bias,
        "mlp.up": arch.mlp_bias,
        "mlp.down": arch.mlp_bias,
        "router": experts is not None and experts.router_bias,
        "experts.up": experts is not None and experts.bias,
        "experts.down": experts is not None and experts.bias,
    }
    count = sum(
        matrix.outputs * (matrix.uses if active else matrix.copies)
        for matrix in layer_matrices(arch, with_experts)
        if biases.get(matrix.name)
    )
    return count + (arch.heads if arch.sinks else 0)


def matmul_parameters(arch: Architecture) -> int:
    """Parameters that a token is multiplied with in GEMMs.

    All matrices but the input embedding, which is a lookup unless it is tied to the head. Norms and biases do not
    count, and of experts only the active ones do.
    """
    layers = sum(
        count * matrix.inputs * matrix.outputs * matrix.uses
        for experts, count in layer_kinds(arch)
        for matrix in layer_matrices(arch, experts)
    )
    return layers + arch.vocab * arch.dim


def flops_per_token(arch: Architecture, seq: int) -> int:
    """Model FLOPs per token of training in sequences of `seq`; causal attention counts half."""
    if arch.diffusion is not None:
        return round(diffusion.flops_per_sample(arch, seq) / seq)
    return 6 * matmul_parameters(arch) + 3 * _attention_products(arch, seq)


def flops_per_token_full_attention(arch: Architecture, seq: int) -> int:
    """The same with attention counted as non-causal, the convention of many published figures."""
    if arch.diffusion is not None:
        return flops_per_token(arch, seq)
    return 6 * matmul_parameters(arch) + 6 * _attention_products(arch, seq)


def weight_gradient_flops(arch: Architecture, seq: int) -> int:
    """FLOPs per token of the gradients of all matrices, which a frozen base does not have."""
    if arch.diffusion is not None:
        return round(diffusion.matmul_flops(arch, seq) / seq)
    return 2 * matmul_parameters(arch)


def _attention_products(arch: Architecture, seq: int) -> int:
    total = arch.layers * arch.heads * (arch.head_dim + arch.value_dim) * seq
    return total if not arch.windowed_layers else round(total * attended_share(arch, seq))


def attended_share(arch: Architecture, seq: int) -> float:
    """Share of token pairs that sliding windows leave, averaged over layers."""
    if arch.window is None or arch.window >= seq:
        return 1.0
    through = arch.window * (2 * seq - arch.window + 1) / (seq * (seq + 1))
    return 1 - (arch.windowed_layers / arch.layers) * (1 - through)
