"""The data axes, by FSDP2: sharded and replicated weights, gradients and optimizer states."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from headway.parallel.world import World


def shard(model: nn.Module, blocks: Sequence[nn.Module], world: World, dtype: str, keep_weights: bool) -> None:
    """Shard a model over the data axes, by blocks; everything outside of blocks is one more unit."""
    assert world.mesh is not None, "data axes need a mesh"
    copies = world.axis("replicate").size > 1
    mesh = world.mesh["replicate", "shard"] if copies else world.mesh["shard"]
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # A model takes tokens, or a stream that has this precision; an objective's columns must keep theirs.
    outside = replace(policy, cast_forward_inputs=False)
    for module in (*blocks, model):
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": outside if module is model else policy}
        if module is not model:
            options["reshard_after_forward"] = not keep_weights
        sharded = fully_shard(module, **options)
        # The loss is already divided by the tokens of all workers, so gradients are summed, never averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def hold_gradients(model: nn.Module, last: bool, copies: bool, reduce_each: bool) -> None:
    """Set whether the next backward pass accumulates gradients locally, as all but the last of a step may.

    With `reduce_each`, shards reduce every time, and only replicas wait for the last. With only `copies`, unsharded
    weights are not gathered again either.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or reduce_each)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or not copies)


def release_weights(model: nn.Module) -> None:
    """Free gathered weights after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def forget_copies(model: nn.Module) -> None:
    """Deliberate bug: gradients are never reduced over replicas."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(False)
