"""This worker's part of a tensor, and modules that compute with it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from headway.parallel.world import Axis

Forward = Callable[..., Tensor]


def to_local(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_of(length: int, axis: Axis) -> tuple[int, int]:
    """Return the begin and end of this worker's share of a split dim; the last shares may be smaller."""
    each = -(-length // axis.size)
    return min(each * axis.rank, length), min(each * (axis.rank + 1), length)


def placed(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh, axis: Axis) -> nn.Parameter:
    """Return a parameter as a DTensor of which this worker has its share."""
    local = parameter.detach()
    if isinstance(placement, Shard):
        begin, end = share_of(parameter.shape[placement.dim], axis)
        local = local.narrow(placement.dim, begin, end - begin).clone(memory_format=torch.contiguous_format)
    tensor = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def on_local(
    module: nn.Module,
    plain: Forward,
    values: Callable[[dict[str, Any]], dict[str, Any]],
    *args: Any,
    **named: Any,
) -> Tensor:
    """Run a module's own forward on the local values of its parameters."""
    parameters = dict(module._parameters)
    module._parameters.update(values(parameters))
    try:
        return plain(*args, **named)
    finally:
        module._parameters.update(parameters)


def local_values(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the local parts of a module's parameters."""
    # The gradient of a replicated parameter may be partial: `finish_gradients` reduces those once per step, and
    # autograd takes them for complete.
    return {key: None if parameter is None else to_local(parameter) for key, parameter in parameters.items()}
