"""Products of few rows on a CPU, as in decoding of a batch: the weight is the left factor.

MKL takes long to pack a weight that is the right factor of a product with a dozen rows. W @ x.T of 8 rows takes 0.53 of
the time for SmolLM2's head, 0.67 to 0.72 for its feed-forward, and as long for 576 x 576 (one core). Up to 4 rows
x @ W.T is as fast or faster; at 64 rows 0.8 to 0.95 are left. Only in inference: training keeps its bits.
"""

import torch
from torch import Tensor

FEWEST, MOST = 6, 64
"""Rows."""


def takes(x: Tensor, weight_OD: Tensor) -> bool:
    """Whether the product of x and a weight is one of few rows, with a library that is faster this way."""
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()  # a compiler does not trace inference mode
        and FEWEST * x.shape[-1] <= x.numel() <= MOST * x.shape[-1]
        and x.dtype == weight_OD.dtype == torch.float32
        and torch.is_inference_mode_enabled()
        and torch.backends.mkl.is_available()
    )


def linear(x: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias."""
    y_OT = weight_OD @ x.flatten(0, -2).t()
    if bias_O is not None:
        y_OT += bias_O.unsqueeze(1)
    return y_OT.t().unflatten(0, x.shape[:-1])
