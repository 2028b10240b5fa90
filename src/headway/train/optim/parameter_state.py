"""A parameter in an optimizer's hands: its part here, and how its weight and states are kept.

Rules compute in float32. What is kept in float32 they change in place; what is kept in less is brought up to it, and
rounded when it is put back.
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

__all__ = [
    "ParameterState",
    "State",
    "add_up",
    "laid_out",
    "opened",
    "shard_group",
    "sharded_axes",
    "trained",
    "zeros_like",
]

State = dict[str, Tensor]


@dataclass(frozen=True)
class ParameterState:
    """A parameter, its states, and where what this worker has of it lies in the whole."""

    name: str
    """Of the plain model, with the owner's name for what a stage has borrowed."""
    parameter: nn.Parameter
    state: State
    box: Box
    boxes: Mapping[int, Box]
    """Of everyone who has a part of it, by rank."""
    shape: tuple[int, ...]

    @property
    def weight(self) -> Tensor:
        """What updates are made on, as it is kept here."""
        return _row(to_local(self.state.get("master", self.parameter)))

    @property
    def shown(self) -> Tensor | None:
        """The parameter here, where updates are made on a master copy of it."""
        return _row(to_local(self.parameter)).detach() if "master" in self.state else None

    @property
    def gradient(self) -> Tensor:
        """As the passes left it here."""
        assert self.parameter.grad is not None, "who has no gradient is not updated"
        return _row(to_local(self.parameter.grad))

    def moment(self, key: str) -> Tensor:
        """A state, as it is kept here."""
        return _row(to_local(self.state[key]))

    @property
    def elements(self) -> int:
        """Of this worker."""
        return self.box.volume

    def put(self, key: str, kept: Tensor, value: Tensor, dice: RoundingBits, first: int = 0) -> None:
        """Put a new value where the old one is kept; `kept` are the rows from `first` on of what this worker has."""
        if kept.dtype == torch.float32:
            if kept.data_ptr() != value.data_ptr():
                kept.copy_(value)
            return
        start = (self.box.start[0] + first, *self.box.start[1:])
        bits = dice.bits(self.name, Box(start, tuple(kept.shape)), self.shape, kept.device, key)
        kept.copy_(to_bfloat16(value, bits))

    def show_master(self) -> None:
        """Have the parameter be its master copy, rounded to the nearest."""
        if self.shown is not None:
            self.shown.copy_(self.weight)


def trained(name: str, parameter: nn.Parameter) -> ParameterState:
    """A parameter without states yet."""
    boxes = boxes_of(parameter)
    if parameter.ndim == 0:
        box = Box((0,), (1,))
        return ParameterState(name, parameter, {}, box, dict.fromkeys(boxes, box), (1,))
    return ParameterState(name, parameter, {}, box_of(parameter), boxes, tuple(parameter.shape))


def _row(tensor: Tensor) -> Tensor:
    """A scalar as a row of one, sharing its memory."""
    return tensor.view(1) if tensor.ndim == 0 else tensor


def opened(kept: Tensor) -> Tensor:
    """What a rule computes on: a float32 tensor itself, a copy of any other."""
    return kept if kept.dtype == torch.float32 else kept.float()


def zeros_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros that lie as a parameter does."""
    here = torch.zeros_like(to_local(parameter), dtype=dtype, requires_grad=False)
    return laid_out(here, tuple(parameter.shape), parameter)


def laid_out(here: Tensor, shape: tuple[int, ...], parameter: Tensor, copies: bool = False) -> Tensor:
    """A tensor of another shape that lies on a parameter's mesh as it does, or as copies of the whole."""
    if not isinstance(parameter, DTensor):
        return here
    mesh = parameter.device_mesh
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), stride, here.dtype)
    placements = (Replicate(),) * mesh.ndim if copies else parameter.placements
    made: Tensor = DTensor(here, DTensorSpec(mesh, placements, meta), requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def sharded_axes(parameter: Tensor) -> tuple[int, ...]:
    """The axes of its mesh that cut a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    sizes = parameter.device_mesh.shape
    cuts = enumerate(parameter.placements)
    return tuple(axis for axis, p in cuts if isinstance(p, Shard | _StridedShard) and sizes[axis] > 1)


def shard_group(parameter: Tensor, both: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The workers that have the parts of a parameter; None where one has all of it.

    `both` are those that differ in their places on two axes, for a parameter that both cut.
    """
    axes = sharded_axes(parameter)
    if not axes or not isinstance(parameter, DTensor):
        return None
    if len(axes) == 1:
        return parameter.device_mesh.get_group(axes[0])
    assert both is not None, "where two axes cut a parameter there is a group of both"
    return both


def add_up(tensor: Tensor, parameter: Tensor) -> None:
    """The sum over all parts of a parameter, in place, one axis after the other."""
    for axis in sharded_axes(parameter):
        assert isinstance(parameter, DTensor)
        dist.all_reduce(tensor, group=parameter.device_mesh.get_group(axis))
