"""What this worker has of a tensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["to_local"]


def to_local(tensor: Tensor) -> Tensor:
    """Its own part of one that is laid out on a mesh; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
