"""Planning: how a recipe runs on a cluster, how fast, and what it costs. Pure arithmetic."""

from headway.plan.flops import (
    flops_per_token,
    flops_per_token_full_attention,
    matmul_parameters,
    parameter_shapes,
    parameters,
)

__all__ = [
    "flops_per_token",
    "flops_per_token_full_attention",
    "matmul_parameters",
    "parameter_shapes",
    "parameters",
]
