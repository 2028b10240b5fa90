"""Gathers sharded weights of float8 layers in float8: one byte per weight on the wire, not two.

Each worker casts its shard by the scale of the whole weight, and the gathered codes become bfloat16 again. That is
exact, since scales are powers of two, and the layer's own cast then finds the same codes: a sharded layer multiplies
what one process does. Codes travel as bytes, since not every backend sends float8.

FSDP2 calls two functions of a shard where it has them, before and after the gather. Other tensors, and weights whose
rows the shard axis does not divide, are gathered as ever.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from headway.kernels.fp8 import E4M3, inverse_of, scale_of
from headway.models.fp8 import Float8Model
from headway.models.layers import Linear
from headway.parallel.world import Axis


class ShardScale:
    """The scale of a whole weight."""

    def __init__(self) -> None:
        self.scale = torch.ones(())


class Float8Gather:
    """The sharded weights that are gathered in float8."""

    def __init__(self, model: nn.Module, float8: Float8Model, shard: Axis) -> None:
        assert shard.group is not None, "an axis of one place gathers nothing"
        self._group = shard.group
        self._weights = list[tuple[Tensor, ShardScale]]()
        layers = [layer for group in float8.groups for layer in group.layers if isinstance(layer, Linear)]
        for layer in layers:
            local = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight
            if layer.weight.shape[0] % shard.size == 0:
                scale = ShardScale()
                self._weights.append((local, scale))
                _extend(layer.weight, scale)
        _renew_extensions(model)

    @torch.no_grad()
    def refresh(self) -> None:
        """Find the scales of weights that have changed, over all shards."""
        if not self._weights:
            return
        amaxes = torch.stack(torch._foreach_norm([weight for weight, _ in self._weights], float("inf")))
        amaxes = amaxes.bfloat16().float()  # the largest of rounded numbers
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=self._group)
        for (_, holder), scale in zip(self._weights, scale_of(amaxes, e5m2=False).unbind(), strict=True):
            holder.scale = scale


def _extend(weight: Tensor, scale: ShardScale) -> None:
    """Give a weight's shard the functions that FSDP2 looks for."""
    local: Any = weight._local_tensor  # type: ignore[attr-defined]
    local.fsdp_pre_all_gather = partial(_before, local, scale)
    local.fsdp_post_all_gather = _after


def _before(local: Tensor, holder: ShardScale, mesh: DeviceMesh) -> tuple[tuple[Tensor], Tensor]:  # noqa: ARG001
    """Return the bytes to gather, and what the other side needs."""
    codes = (local.bfloat16().float() * inverse_of(holder.scale)).to(E4M3)
    return (codes.view(torch.uint8),), holder.scale


def _after(
    outputs: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor]] | None:
    """Write the weight that gathered codes stand for."""
    codes = outputs[0].view(E4M3)
    if out is None:
        weight = codes.to(dtype) * scale.to(dtype)
        return weight, (weight,)
    out = out._local_tensor if isinstance(out, DTensor) else out  # of a weight that is also split
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        torch.mul(codes.to(dtype), scale.to(dtype), out=out)
    return None


def _renew_extensions(model: nn.Module) -> None:
    """Have FSDP2 look at the shards again: it did so when it made them, before they had memory."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if state._fsdp_param_group is not None:
                for parameter in state._fsdp_param_group.fsdp_params:
                    parameter._init_extensions()
