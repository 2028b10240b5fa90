"""The digest of a state: equal states have equal digests on any mesh. Pure NumPy.

A tensor's digest is the sum modulo 2**64, over its elements, of a function of (bits, flat index in the whole tensor).
A sum does not depend on sharding: the digests of boxes that tile a tensor add up to its digest.

The tensor is read as words. Elements of up to four bytes are packed into little-endian 32-bit words as in memory, the
last one padded with zeros; a word is read as a signed number. An element of eight bytes is a word of its own,
bits ^ (bits >> 32). Then, all modulo 2**64,

    word j adds  word * R(j % 128) * S(j // 128)
    R(k) = mix(1 + k) >> 33 | 1      S(k) = mix(2**32 + k) | 1
    mix(n):  x = n * STRIDE;  x ^= x >> 32;  x *= MULTIPLIER;  x ^= x >> 32

R and S are odd, so one changed element always changes the digest; so do two flipped signs in one row of 128 words, as
all R differ. Other changes cancel by chance: two signs elsewhere or two swapped elements at most once in 2**32, four
signs at the corners of a rectangle of rows and columns once in 2**27, changes of many bits once in about 2**60. Top
bits are the weak ones, since their multiples keep few bits modulo 2**64; those of eight-byte elements would keep
none, hence the fold. The hash protects against accidents, not against an adversary.

Why this one: R has two 16-bit digits, and 128 products of a word and a digit add up exactly in the 53 bits of a
float64. So BLAS sums the rows, with the same result in any order and on any machine, and S is applied once per row.
"""

import hashlib
import math
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from headway.state.box import Box

MASK = 2**64 - 1
MULTIPLIER = 0xD6E8FEB86659FD93
STRIDE = 0x9E3779B97F4A7C15
# Words per row; tied to R and its digits, see above.
ROW = 128
# Words converted to floats at a time. Measured from 2**13 to 2**18: smaller loses to NumPy's overhead per call,
# larger gains nothing.
BLOCK = 1 << 16
# Words whose rows are weighted together, for the same reason; longer runs are cut.
GROUP = 1 << 20
# Runs of fewer elements are hashed element by element: padding them to rows would cost more.
SHORT = 32
# Rows per BLAS product: larger ones use BLAS's own threads, and callers already have theirs.
STACK = 64

Bits = NDArray[np.unsignedinteger]
Words = NDArray[np.uint64]

_HALF = np.uint64(32)
_DIGIT = np.uint64(16)


def digest_box(bits: Bits, shape: tuple[int, ...], box: Box) -> int:
    """Return what one box of a tensor adds to the tensor's digest.

    `bits` holds the box's elements in row-major order as unsigned integers of the elements' size (any shape);
    `shape` is the whole tensor's.
    """
    assert box.inside(shape), f"{box} is outside {shape}"
    assert bits.size == box.volume, f"{bits.size} elements for {box}"
    if bits.size == 0:
        return 0
    length = _run_length(shape, box)
    runs = np.ascontiguousarray(bits).reshape(-1, length)
    per_word = _per_word(runs)
    many = BLOCK // length if length < SHORT else max(1, GROUP * per_word // (length + ROW * per_word))
    total = 0
    for done in range(0, len(runs), many):
        some = runs[done : done + many]
        starts = _run_starts(shape, box, length, done, done + len(some))
        if length < SHORT:
            total += _digest_elements(some, starts)
        elif many > 1:
            total += _digest_runs(some, starts)
        else:
            total += _digest_long_run(some[0], int(starts[0]))
    return total & MASK


def state_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> str:
    """Return the digest of a whole state from (name, dtype, shape, tensor digest) in any order."""
    lines = sorted(
        f"{name} {dtype} {'x'.join(map(str, shape))} {digest:016x}\n" for name, dtype, shape, digest in tensors
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _digest_long_run(run: Bits, start: int) -> int:
    """The digest of one long run of elements from flat index `start` on; full rows are not copied."""
    row = ROW * _per_word(run)
    head = -start % row
    body = (run.size - head) // row * row
    cuts = [0, *range(head, head + body, GROUP * _per_word(run)), head + body, run.size]
    return sum(
        _digest_runs(run[None, first:last], np.array([start + first], np.uint64))
        for first, last in pairwise(cuts)
        if first < last
    )


def _digest_runs(runs: Bits, starts: Words) -> int:
    """The digest of runs of elements, each from its flat index on, by rows of words."""
    row = ROW * _per_word(runs)
    first, offset = np.divmod(starts, np.uint64(row))
    rows = -(-(int(offset.max()) + runs.shape[1]) // row)
    full = runs.reshape(-1) if runs.shape[1] == rows * row else _padded(runs, offset.astype(np.intp), rows * row)
    if runs.itemsize == 8:
        sums = _sum_wide_rows(full.view(np.uint64).reshape(-1, ROW))
    else:
        sums = _sum_rows(full.view(np.int32).reshape(-1, ROW))
    numbers = first[:, None] + np.arange(rows, dtype=np.uint64)
    return int(np.dot(sums, _row_weights(numbers.reshape(-1))))


def _padded(runs: Bits, offset: NDArray[np.intp], size: int) -> Bits:
    """Each run at its offset in its own `size` elements, padded with zeros."""
    length, step = runs.shape[1], runs.itemsize
    full = np.zeros(len(runs) * size, runs.dtype)
    windows = as_strided(full, (full.size - length + 1, length), (step, step))
    windows[np.arange(len(runs)) * size + offset] = runs
    return full


def _sum_rows(words: NDArray[np.int32]) -> Words:
    """The sum over each row of word * R."""
    stacks = -(-len(words) // STACK)
    block = BLOCK // ROW // STACK
    floats = np.zeros((min(block, stacks), 1, STACK, ROW))
    sums = np.empty((stacks, 2, STACK, 1))
    for done in range(0, stacks, block):
        some = words[done * STACK : (done + block) * STACK]
        np.copyto(floats.reshape(-1, ROW)[: len(some)], some)
        out = sums[done : done + block]
        np.matmul(floats[: len(out)], _digits(), out=out)
    low, high = sums.astype(np.int64).view(np.uint64).transpose(1, 0, 2, 3)
    return (low + (high << _DIGIT)).reshape(-1)[: len(words)]


def _sum_wide_rows(words: Words) -> Words:
    """The same for 64-bit words, which a float64 cannot hold."""
    block = BLOCK // ROW
    sums = np.empty(len(words), np.uint64)
    for done in range(0, len(words), block):
        some = words[done : done + block]
        np.einsum("ri,i->r", _folded(some), _word_weights(), out=sums[done : done + block])
    return sums


def _digest_elements(runs: Bits, starts: Words) -> int:
    """The digest of runs that touch at most two rows: the definition, element by element."""
    per_word, row = _per_word(runs), ROW * _per_word(runs)
    first = starts // np.uint64(row)
    offset = (starts - first * np.uint64(row)).view(np.int64)[:, None] + np.arange(runs.shape[1])
    weights = np.where(offset < row, _row_weights(first)[:, None], _row_weights(first + np.uint64(1))[:, None])
    weights *= _element_weights(per_word).take(offset)
    if runs.itemsize == 8:
        values = _folded(runs)
    elif runs.itemsize == 4:
        values = runs.view(np.int32).astype(np.int64).view(np.uint64)
    else:
        shift = ((offset & (per_word - 1)) * (8 * runs.itemsize)).astype(np.uint32)
        values = np.left_shift(runs, shift, dtype=np.uint32).view(np.int32).astype(np.int64).view(np.uint64)
    return int(np.dot(values.reshape(-1), weights.reshape(-1)))


@cache
def _element_weights(per_word: int) -> Words:
    """R of each element's word, for a row and the first elements of the next."""
    return np.resize(_word_weights().repeat(per_word), ROW * per_word + SHORT)


def _per_word(bits: Bits) -> int:
    return max(1, 4 // bits.itemsize)


def _folded(words: Words) -> Words:
    folded = words >> _HALF
    folded ^= words
    return folded


def _mix(numbers: Words) -> Words:
    x = _folded(numbers * np.uint64(STRIDE))
    x *= np.uint64(MULTIPLIER)
    return _folded(x)


def _row_weights(rows: Words) -> Words:
    """S of the definition."""
    weights = _mix(rows + np.uint64(2**32))
    weights |= np.uint64(1)
    return weights


@cache
def _word_weights() -> Words:
    """R of the definition."""
    return _mix(np.arange(1, 1 + ROW, dtype=np.uint64)) >> np.uint64(33) | np.uint64(1)


@cache
def _digits() -> NDArray[np.float64]:
    """R as two columns: R = low + 65536 * high, with low from -2**15 to 2**15 - 1 and high from 0 to 2**15."""
    weights = _word_weights().astype(np.int64)
    low = (weights + 2**15) % 2**16 - 2**15
    return np.stack([low, (weights - low) >> 16]).astype(np.float64)[:, :, None]


def _run_length(shape: tuple[int, ...], box: Box) -> int:
    """Return how many elements of the box are contiguous in the whole tensor."""
    length = 1
    for size, full_size in zip(reversed(box.shape), reversed(shape), strict=True):
        length *= size
        if size != full_size:
            break
    return length


def _run_starts(shape: tuple[int, ...], box: Box, length: int, first: int, last: int) -> Words:
    """Return the flat index in the whole tensor where each of the box's runs `first` to `last` starts."""
    local = np.arange(first, last, dtype=np.uint64) * np.uint64(length)
    flat = np.zeros(last - first, dtype=np.uint64)
    for dim in reversed(range(len(shape))):
        local, here = np.divmod(local, np.uint64(box.shape[dim]))
        flat += (here + np.uint64(box.start[dim])) * np.uint64(math.prod(shape[dim + 1 :]))
    return flat
