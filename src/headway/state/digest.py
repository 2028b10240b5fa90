"""The digest of a state: equal states have equal digests, whatever mesh they lie on. Pure NumPy.

A tensor's digest is the sum modulo 2**64, over its elements, of a hash of (bits, flat index in the whole
tensor). A sum does not care how elements are dealt out: boxes that tile a tensor add up to its digest.

The hash of one element is two rounds of multiply and xor-shift over 64 bits:

    x = bits * MULTIPLIER + index * STRIDE;  x ^= x >> 32;  x *= MULTIPLIER;  x ^= x >> 32

Eight-byte elements fold their high half first (bits ^= bits >> 32): a lone top bit would otherwise pass the
first multiplication unspread, and two such flips might cancel. The hash guards against accidents, not against
an adversary.
"""

import hashlib
import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headway.state.box import Box

__all__ = ["digest_box", "state_digest"]

MASK = 2**64 - 1
MULTIPLIER = 0xD6E8FEB86659FD93
STRIDE = 0x9E3779B97F4A7C15
# Measured best of 2**12 to 2**17: larger leaves the cache, smaller loses to NumPy's cost per call.
BLOCK = 1 << 16

Bits = NDArray[np.unsignedinteger]
Words = NDArray[np.uint64]

_HALF = np.uint64(32)
_MULTIPLIER = np.uint64(MULTIPLIER)
_STRIDE = np.uint64(STRIDE)


def digest_box(bits: Bits, shape: tuple[int, ...], box: Box) -> int:
    """What one box of a tensor adds to the tensor's digest.

    `bits` holds the box's elements in row-major order as unsigned integers of the elements' size (any shape);
    `shape` is the whole tensor's.
    """
    assert box.inside(shape), f"{box} is outside {shape}"
    assert bits.size == box.volume, f"{bits.size} elements for {box}"
    if bits.size == 0:
        return 0
    length = _run_length(shape, box)
    runs = np.ascontiguousarray(bits).reshape(-1, length)
    if length > BLOCK // 8:
        total = sum(
            _digest_range(run, first)
            for run, first in zip(runs, map(int, _run_starts(shape, box, length, 0, len(runs))), strict=True)
        )
        return total & MASK
    return _digest_short_runs(runs, shape, box)


def state_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> str:
    """One digest for a whole state, of (name, dtype, shape, tensor digest) in any order."""
    lines = sorted(
        f"{name} {dtype} {'x'.join(map(str, shape))} {digest:016x}\n" for name, dtype, shape, digest in tensors
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _digest_range(bits: Bits, first: int) -> int:
    """The digest of elements that follow each other in the whole tensor from flat index `first` on."""
    size = min(bits.size, BLOCK)
    offsets = np.arange(size, dtype=np.uint64) * _STRIDE
    words, spare = np.empty(size, np.uint64), np.empty(size, np.uint64)
    total = 0
    for done in range(0, bits.size, size):
        block = bits[done : done + size]
        count = block.size
        base = np.uint64((first + done) * STRIDE & MASK)
        total += _digest_block(block, offsets[:count], base, words[:count], spare[:count])
    return total


def _digest_short_runs(runs: Bits, shape: tuple[int, ...], box: Box) -> int:
    """The digest of a box that is cut into many short runs, several runs to a block."""
    length = runs.shape[1]
    rows = min(BLOCK // length, len(runs))
    words, spare = np.empty(rows * length, np.uint64), np.empty(rows * length, np.uint64)
    within = np.arange(length, dtype=np.uint64)
    total = 0
    for done in range(0, len(runs), rows):
        block = runs[done : done + rows]
        starts = _run_starts(shape, box, length, done, done + len(block))
        offsets = ((starts[:, None] + within) * _STRIDE).reshape(-1)
        total += _digest_block(block.reshape(-1), offsets, np.uint64(0), words[: block.size], spare[: block.size])
    return total & MASK


def _digest_block(bits: Bits, offsets: Words, base: np.uint64, words: Words, spare: Words) -> int:
    """Hash a block in place in `words` and sum it; each pass stays in the cache."""
    np.copyto(words, bits)
    if bits.itemsize == 8:
        _fold(words, spare)
    np.multiply(words, _MULTIPLIER, out=words)
    np.add(words, offsets, out=words)
    np.add(words, base, out=words)
    _fold(words, spare)
    np.multiply(words, _MULTIPLIER, out=words)
    _fold(words, spare)
    return int(np.add.reduce(words))


def _fold(words: Words, spare: Words) -> None:
    np.right_shift(words, _HALF, out=spare)
    np.bitwise_xor(words, spare, out=words)


def _run_length(shape: tuple[int, ...], box: Box) -> int:
    """How many elements of the box follow each other in the whole tensor without a gap."""
    length = 1
    for size, whole in zip(reversed(box.shape), reversed(shape), strict=True):
        length *= size
        if size != whole:
            break
    return length


def _run_starts(shape: tuple[int, ...], box: Box, length: int, first: int, last: int) -> Words:
    """Flat index in the whole tensor of the first element of runs first to last of the box."""
    local = np.arange(first, last, dtype=np.uint64) * np.uint64(length)
    flat = np.zeros(last - first, dtype=np.uint64)
    for dim in reversed(range(len(shape))):
        local, here = np.divmod(local, np.uint64(box.shape[dim]))
        flat += (here + np.uint64(box.start[dim])) * np.uint64(math.prod(shape[dim + 1 :]))
    return flat
