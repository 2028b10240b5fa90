"""The data axes, by FSDP2: shards of weights, gradients and optimizer states, and copies of them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from headway.parallel.world import World

__all__ = ["forget_copies", "hold_gradients", "release_weights", "shard"]


def shard(model: nn.Module, blocks: Sequence[nn.Module], world: World, dtype: str, keep_weights: bool) -> None:
    """Spread a model over the data axes, a block at a time, and what is left as one more."""
    assert world.mesh is not None, "data axes are a mesh's"
    copies = world.axis("replicate").size > 1
    mesh = world.mesh["replicate", "shard"] if copies else world.mesh["shard"]
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if module is not model:
            options["reshard_after_forward"] = not keep_weights
        sharded = fully_shard(module, **options)
        # The loss is already divided by the tokens of all workers, so gradients are summed, never averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def hold_gradients(model: nn.Module, last: bool, copies: bool, reduce_each: bool) -> None:
    """Whether the next backward pass keeps its gradients to itself: any but a step's last one may.

    With `reduce_each` shards add theirs up every time, and only copies wait for the last. Where all workers have
    `copies` of the whole, weights that are not shared are not gathered anew either.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or reduce_each)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or not copies)


def release_weights(model: nn.Module) -> None:
    """Give gathered weights back after a forward pass that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def forget_copies(model: nn.Module) -> None:
    """A mistake on purpose: gradients are never added up over copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(False)
