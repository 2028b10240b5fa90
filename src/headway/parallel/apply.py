"""How a plain model is made to run on several devices: from outside, in one visible order.

The model's blocks are first told to recompute their activations, then compiled, then sharded, so that a compiled
block contains its recomputation and a gather of weights stays outside both. Only `forward` of each block is replaced;
parameter names stay those of the plain model.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from headway.parallel.world import World
from headway.recipe import Train

__all__ = ["apply", "precision", "reshard", "sync_gradients", "total_norm"]


def apply(model: nn.Module, blocks: Iterable[nn.Module], train: Train, world: World) -> nn.Module:
    """Put the recipe's choices onto a model; returns the same module."""
    blocks = list(blocks)
    for block in blocks:
        if train.checkpoint_activations:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if train.compile:
            block.forward = torch.compile(block.forward)
    if world.size > 1:
        _shard(model, blocks, train, world)
    return model


def precision(train: Train, world: World) -> Callable[[], torch.autocast]:
    """The context of a forward pass. Shards are gathered in the right precision already; one device casts here."""
    wanted = train.dtype == "bfloat16" and world.size == 1
    return partial(torch.autocast, world.device.type, dtype=torch.bfloat16, enabled=wanted)


def sync_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass reduces gradients over the workers; only a step's last one must."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def reshard(model: nn.Module) -> None:
    """Give gathered weights back after a forward pass that no backward pass follows."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _shard(model: nn.Module, blocks: list[nn.Module], train: Train, world: World) -> None:
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy()
    if train.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        # The loss is already divided by the tokens of all workers, so gradients are summed, never averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm over all gradients of all workers, as a plain scalar."""
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
