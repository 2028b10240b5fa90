"""The data axes, by FSDP2: sharded and replicated weights, gradients and optimizer states."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from headway.models.experts import Experts
from headway.parallel.expert import experts_of
from headway.parallel.local_part import to_local
from headway.parallel.world import EXPERT_SHARD, World


def shard(model: nn.Module, blocks: Sequence[nn.Module], world: World, dtype: str, keep_weights: bool) -> None:
    """Shard a model over the data axes, by blocks; everything outside of blocks is one more unit, and so are the
    experts of a block if there is an axis of experts."""
    assert world.mesh is not None, "data axes need a mesh"
    copies = ("replicate",) if world.axis("replicate").size > 1 else ()
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # A model takes tokens, or a stream that has this precision; an objective's columns must keep theirs.
    outside = replace(policy, cast_forward_inputs=False)
    parts = {id(block): experts_of(block) if world.expert_mesh is not None else [] for block in blocks}
    for experts in chain.from_iterable(parts.values()):
        assert world.expert_mesh is not None
        mesh = world.expert_mesh[(*copies, EXPERT_SHARD)]
        placement = _placement_of(experts, mesh.size(-1))
        options: dict[str, Any] = {"mp_policy": outside, "reshard_after_forward": not keep_weights}
        _shard(experts, mesh=mesh, shard_placement_fn=placement, **options)
    mesh = world.mesh[(*copies, "shard")]
    for block in blocks:
        _shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_weights)
    _shard(model, mesh=mesh, mp_policy=outside)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following, *parts[id(following)]])  # type: ignore[operator]


def _shard(module: nn.Module, **options: Any) -> None:
    sharded = fully_shard(module, **options)
    # The loss is already divided by the tokens of all workers, so gradients are summed, never averaged.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _placement_of(experts: Experts, workers: int) -> Callable[[nn.Parameter], Shard | None]:
    """Shard a worker's experts over others that have the same ones: by expert, or each if there are fewer."""
    own = len(to_local(experts.gate))
    return lambda _: Shard(1) if own % workers else None


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
