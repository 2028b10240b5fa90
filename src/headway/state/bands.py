"""A tensor of a checkpoint, a bounded number of its elements at a time: for what must not need memory for all of it."""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from headway.state.box import Box
from headway.state.restore import Checkpoint, read_box
from headway.state.safetensors_file import bits_dtype

__all__ = ["band_bytes", "bands", "read_bands"]

BAND_BYTES = 32 << 20


def bands(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[Box]:
    """Boxes of at most `limit` bytes (or one element) that follow each other in memory and together are the tensor."""
    if 0 in shape:
        return
    if not shape:
        yield Box((), ())
        return
    inner = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]  # bytes of one index of each dim
    cut = next((dim for dim, size in enumerate(inner) if size <= limit), len(shape) - 1)
    rows, below = max(1, limit // inner[cut]), shape[cut + 1 :]
    for outer in product(*map(range, shape[:cut])):
        for begin in range(0, shape[cut], rows):
            count = min(rows, shape[cut] - begin)
            yield Box((*outer, begin, *(0,) * len(below)), (*(1,) * cut, count, *below))


def band_bytes(*checkpoints: Checkpoint) -> int:
    """How much of a tensor to read at a time; one of format 1 whole: each part of a piece costs reading all of it."""
    old = any(checkpoint.manifest.digest_function == 1 for checkpoint in checkpoints)
    return 1 << 62 if old else BAND_BYTES


def read_bands(checkpoint: Checkpoint, name: str, limit: int) -> Iterator[NDArray[np.unsignedinteger]]:
    """A tensor's bits, checked, band by band in row-major order; each is valid until the next one is asked for."""
    entry = checkpoint.manifest.tensors[name]
    buffer = np.empty(0, bits_dtype(entry.dtype))
    for box in bands(entry.shape, buffer.itemsize, limit):
        if buffer.size < box.volume:
            buffer = np.empty(box.volume, buffer.dtype)
        bits = buffer[: box.volume].reshape(box.shape)
        read_box(checkpoint, name, box.start, box.shape, out=bits)
        yield bits.reshape(-1)
