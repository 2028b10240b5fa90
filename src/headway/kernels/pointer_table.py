"""Many tensors in one launch: tables of addresses, and of which piece of which tensor each program handles."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.triton_compat import tl


def uploaded(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy numbers to a device asynchronously."""
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    # The pinned-memory allocator holds the memory until the copy is done, even if it is freed before.
    return tensor.pin_memory().to(device, non_blocking=True)


def map_of(counts: Sequence[int]) -> np.ndarray:
    """Return for each piece, by tensor, the index of its tensor and its own index there."""
    whose = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.cumsum([0, *counts])[:-1]
    return np.stack([whose, np.arange(len(whose), dtype=np.int64) - firsts[whose]], axis=1).astype(np.int32)


def named_type(dtype: torch.dtype) -> Any:
    """Return Triton's name of a floating-point type; raise ValueError for others."""
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    if dtype not in names:
        raise ValueError(f"expected float32, bfloat16 or float16, got {dtype}")
    return getattr(tl, names[dtype])
