"""A parameter as the optimizer sees it: its local part, and the storage of its weight and states.

Rules compute in float32. float32 tensors are updated in place; others are converted, and rounded when stored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from headway.parallel.local_part import to_local
from headway.state.box import Box
from headway.state.tensors import box_of, boxes_of
from headway.train.optim.rounding import RoundingBits, to_bfloat16

State = dict[str, Tensor]


@dataclass(frozen=True)
class ParameterState:
    """A parameter, its states, and the position of its local part in the whole tensor."""

    name: str
    """Name in the plain model; the owner's name for a parameter that a stage borrows."""
    parameter: nn.Parameter
    state: State
    box: Box
    boxes: Mapping[int, Box]
    """Boxes of all workers with a part of it, by rank."""
    shape: tuple[int, ...]

    @property
    def weight(self) -> Tensor:
        """The local tensor that is updated: the master copy, or the parameter."""
        return _row(to_local(self.state.get("master", self.parameter)))

    @property
    def shown(self) -> Tensor | None:
        """The local parameter, if a master copy is updated instead."""
        return _row(to_local(self.parameter)).detach() if "master" in self.state else None

    @property
    def gradient(self) -> Tensor:
        """The local gradient."""
        assert self.parameter.grad is not None, "only parameters with gradients are updated"
        return _row(to_local(self.parameter.grad))

    def moment(self, key: str) -> Tensor:
        """Return a local state, as stored."""
        return _row(to_local(self.state[key]))

    @property
    def elements(self) -> int:
        """Of this worker."""
        return self.box.volume

    def put(self, key: str, stored: Tensor, value: Tensor, dice: RoundingBits, first: int = 0) -> None:
        """Store a new value, rounded; `stored` has the rows from `first` on of this worker's part."""
        if stored.dtype == torch.float32:
            if stored.data_ptr() != value.data_ptr():
                stored.copy_(value)
            return
        start = (self.box.start[0] + first, *self.box.start[1:])
        bits = dice.bits(self.name, Box(start, tuple(stored.shape)), self.shape, stored.device, key)
        stored.copy_(to_bfloat16(value, bits))

    def show_master(self) -> None:
        """Set the parameter to its master copy, rounded to nearest."""
        if self.shown is not None:
            self.shown.copy_(self.weight)


def trained(name: str, parameter: nn.Parameter) -> ParameterState:
    """Return a parameter without states."""
    boxes = boxes_of(parameter)
    if parameter.ndim == 0:
        box = Box((0,), (1,))
        return ParameterState(name, parameter, {}, box, dict.fromkeys(boxes, box), (1,))
    return ParameterState(name, parameter, {}, box_of(parameter), boxes, tuple(parameter.shape))


def _row(tensor: Tensor) -> Tensor:
    """Return a scalar as a view with one row."""
    return tensor.view(1) if tensor.ndim == 0 else tensor


def opened(stored: Tensor) -> Tensor:
    """Return a float32 tensor itself, and any other converted to float32."""
    return stored if stored.dtype == torch.float32 else stored.float()


def zeros_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros laid out like a parameter."""
    here = torch.zeros_like(to_local(parameter), dtype=dtype, requires_grad=False)
    return laid_out(here, tuple(parameter.shape), parameter)


def laid_out(here: Tensor, shape: tuple[int, ...], parameter: Tensor, copies: bool = False) -> Tensor:
    """Return a tensor of another shape on a parameter's mesh, sharded likewise or replicated."""
    if not isinstance(parameter, DTensor):
        return here
    mesh = parameter.device_mesh
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), stride, here.dtype)
    placements = (Replicate(),) * mesh.ndim if copies else parameter.placements
    tensor: Tensor = DTensor(here, DTensorSpec(mesh, placements, meta), requires_grad=False)  # type: ignore[no-untyped-call]
    return tensor


def sharded_axes(parameter: Tensor) -> tuple[int, ...]:
    """Return the mesh axes that shard a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    sizes = parameter.device_mesh.shape
    cuts = enumerate(parameter.placements)
    return tuple(axis for axis, p in cuts if isinstance(p, Shard | _StridedShard) and sizes[axis] > 1)


def shard_group(parameter: Tensor, both: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group over which a parameter is sharded; None if it is not.

    `both` is the group over two axes, for a parameter that both shard.
    """
    axes = sharded_axes(parameter)
    if not axes or not isinstance(parameter, DTensor):
        return None
    if len(axes) == 1:
        return parameter.device_mesh.get_group(axes[0])
    assert both is not None, "a parameter sharded over two axes needs a group of both"
    return both


def add_up(tensor: Tensor, parameter: Tensor) -> None:
    """Sum over all shards of a parameter, in place, axis by axis."""
    for axis in sharded_axes(parameter):
        assert isinstance(parameter, DTensor)
        dist.all_reduce(tensor, group=parameter.device_mesh.get_group(axis))
