"""What a loss is given: labels that it leaves out, and the precision that products are made in."""

import torch
from torch import Tensor

__all__ = ["IGNORED", "autocast"]

IGNORED = -100
"""A label that is left out of the loss."""


def autocast(x: Tensor) -> Tensor:
    """In the precision of an enclosing autocast: inside a Function no cast would be recorded for the backward pass."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
