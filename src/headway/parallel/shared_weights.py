"""A model's weights in one allocation that other processes read: a memfd on CPUs, memory opened by its handle on GPUs.

The owner fills it, and others have their model's tensors in the same memory: nothing is sent, and nothing is copied but
by the owner. When it may change is for them to agree on.
"""

import base64
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.parallel.whole import replace_tensors

ALIGN = 256
"""Bytes that a tensor's place is a multiple of."""


class _Place(NamedTuple):
    tensor: Tensor
    dtype: torch.dtype
    start: int
    bytes: int


@dataclass(frozen=True)
class SharedWeights:
    """The allocation, as its owner has it."""

    flat: Tensor
    descriptor: int | None
    """Of the memfd."""

    def handle(self) -> dict[str, Any]:
        """Return what another process opens it with, as JSON; on a CPU, the descriptor travels beside it."""
        if self.descriptor is not None:
            return {"bytes": self.flat.numel()}
        shared = self.flat.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return {"bytes": self.flat.numel(), "cuda": [_packed(part) for part in shared]}

    @property
    def descriptors(self) -> list[int]:
        """What travels beside the handle."""
        return [] if self.descriptor is None else [self.descriptor]

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as somebody's tensors are in it."""
        if self.descriptor is not None:
            os.close(self.descriptor)


def share_weights(model: nn.Module, device: torch.device) -> SharedWeights:
    """Move a model's tensors into an allocation of its own that other processes can open."""
    places = _places(model, None)
    count = _bytes_of(places)
    descriptor = None
    if device.type == "cuda":
        flat = torch.empty(count, dtype=torch.uint8, device=device)
    else:
        descriptor = os.memfd_create("headway-weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, count)
        flat = torch.frombuffer(mmap.mmap(descriptor, count), dtype=torch.uint8)
    _put_into(model, flat, places, copy=True)
    return SharedWeights(flat, descriptor)


def open_weights(
    model: nn.Module, dtype: torch.dtype, handle: Mapping[str, Any], descriptors: Sequence[int], device: torch.device
) -> None:
    """Give a model on the meta device the tensors that its owner shares; `dtype` is that of the owner's parameters."""
    places = _places(model, dtype)
    assert _bytes_of(places) == handle["bytes"], "both have the same model"
    if "cuda" in handle:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage = torch.UntypedStorage._new_shared_cuda(*map(_unpacked, handle["cuda"]))
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[: handle["bytes"]]
    else:
        (descriptor,) = descriptors
        flat = torch.frombuffer(mmap.mmap(descriptor, handle["bytes"]), dtype=torch.uint8)
        os.close(descriptor)
    _put_into(model, flat, places, copy=False)


def _places(model: nn.Module, dtype: torch.dtype | None) -> list[_Place]:
    """Return where each tensor is, in the order of names; tied ones have one place."""
    places, start = dict[int, _Place](), 0
    for _, tensor in sorted((*model.named_parameters(), *model.named_buffers())):
        if id(tensor) not in places:
            kind = dtype if dtype is not None and isinstance(tensor, nn.Parameter) else tensor.dtype
            count = math.prod(tensor.shape) * kind.itemsize
            places[id(tensor)] = _Place(tensor, kind, start, count)
            start += -(-count // ALIGN) * ALIGN
    return list(places.values())


def _bytes_of(places: Sequence[_Place]) -> int:
    last = places[-1]
    return last.start + -(-last.bytes // ALIGN) * ALIGN


@torch.no_grad()
def _put_into(model: nn.Module, flat: Tensor, places: Sequence[_Place], *, copy: bool) -> None:
    tensors = dict[int, Tensor]()
    for place in places:
        view = flat[place.start : place.start + place.bytes].view(place.dtype).view(place.tensor.shape)
        if copy:
            view.copy_(place.tensor)
        tensors[id(place.tensor)] = view
    replace_tensors(model, tensors)


def _packed(part: Any) -> Any:
    return {"base64": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _unpacked(part: Any) -> Any:
    return base64.b64decode(part["base64"]) if isinstance(part, Mapping) else part
