"""The planner: finds the fastest mesh and settings for a recipe on a cluster, with its speed, memory and cost.

Pure arithmetic. Only what other packages need at every start is imported here.
"""

import headway.callable_package
from headway.plan.flops import flops_per_token, flops_per_token_full_attention, matmul_parameters, parameters

__all__ = [
    "flops_per_token",
    "flops_per_token_full_attention",
    "matmul_parameters",
    "parameters",
]

headway.callable_package.make_callable(__name__)
