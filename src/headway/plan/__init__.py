"""Planning: how a recipe runs on a cluster, how fast, and what it costs. Pure arithmetic.

Only what other packages use at every start is here; `plan.plan`, `plan.against` and the rest are imported where they
are needed.
"""

from headway.plan.architecture import Architecture, architecture_of
from headway.plan.flops import flops_per_token, flops_per_token_full_attention, matmul_parameters, parameters

__all__ = [
    "Architecture",
    "architecture_of",
    "flops_per_token",
    "flops_per_token_full_attention",
    "matmul_parameters",
    "parameters",
]
