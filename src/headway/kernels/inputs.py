"""Inputs of a loss: masked labels, and the precision of products."""

import torch
from torch import Tensor

IGNORED = -100
"""The label that is masked from the loss."""


def autocast(x: Tensor) -> Tensor:
    """Cast to the precision of an enclosing autocast: inside a Function a cast is not recorded for the backward
    pass."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
