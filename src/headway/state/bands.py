"""A tensor of a checkpoint, a bounded number of its elements at a time: for what must not need memory for all of it."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headway.state.box import Box, bands
from headway.state.read_checkpoint import OpenCheckpoint, read_box
from headway.state.safetensors_file import bits_dtype

__all__ = ["band_bytes", "read_bands"]

BAND_BYTES = 32 << 20


def band_bytes(*checkpoints: OpenCheckpoint) -> int:
    """How much of a tensor to read at a time; one of format 1 whole: each part of a piece costs reading all of it."""
    old = any(checkpoint.manifest.digest_function == 1 for checkpoint in checkpoints)
    return 1 << 62 if old else BAND_BYTES


def read_bands(checkpoint: OpenCheckpoint, name: str, limit: int) -> Iterator[NDArray[np.unsignedinteger]]:
    """A tensor's bits, checked, band by band in row-major order; each is valid until the next one is asked for."""
    entry = checkpoint.manifest.tensors[name]
    buffer = np.empty(0, bits_dtype(entry.dtype))
    for box in bands(Box((0,) * len(entry.shape), entry.shape), buffer.itemsize, limit):
        if buffer.size < box.volume:
            buffer = np.empty(box.volume, buffer.dtype)
        bits = buffer[: box.volume].reshape(box.shape)
        read_box(checkpoint, name, box.start, box.shape, out=bits)
        yield bits.reshape(-1)
