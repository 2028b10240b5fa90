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


def float32_product(x_TD: Tensor, weight_VD: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x @ weight.T, accumulated and kept in float32 whatever the dtype of both, without gradients.

    A logit of 20 rounded to bfloat16 is off by up to 0.06, and so is the log-probability of its token.
    """
    with torch.autocast(x_TD.device.type, enabled=False):  # else it would be done in the lower precision after all
        if (
            x_TD.dtype == torch.float32 or not x_TD.is_cuda
        ):  # PyTorch has no half-precision product into float32 on CPUs
            return torch.mm(x_TD.float(), weight_VD.float().T, out=out)
        if out is None:
            return torch.mm(x_TD, weight_VD.T, out_dtype=torch.float32)
        return torch.mm(x_TD, weight_VD.T, out_dtype=torch.float32, out=out)
