"""Many tensors in one launch: tables of their addresses, and of which piece of which tensor each program takes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.triton_compat import tl

__all__ = ["map_of", "named_type", "uploaded"]


def uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers on a device, without waiting for it."""
    made = torch.from_numpy(numbers)
    if device.type != "cuda":
        return made.to(device)
    # The allocator of pinned memory keeps it until the copy is done, whoever lets go of it before.
    return made.pin_memory().to(device, non_blocking=True)


def map_of(counts: Sequence[int]) -> np.ndarray:
    """For each piece, in the order of their tensors, the number of its tensor and its own number there."""
    whose = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.cumsum([0, *counts])[:-1]
    return np.stack([whose, np.arange(len(whose), dtype=np.int64) - firsts[whose]], axis=1).astype(np.int32)


def named_type(dtype: torch.dtype) -> Any:
    """Triton's name of a floating-point type; ValueError for others."""
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    if dtype not in names:
        raise ValueError(f"gradients, weights and moments are float32, bfloat16 or float16, not {dtype}")
    return getattr(tl, names[dtype])
