"""The order of samples: a pure function of the data version, the seed and the run's cursor.

A shard is cut into disjoint windows of seq + 1 tokens, numbered across all shards. A fixed permutation, keyed by the
data version alone, holds some windows out for evaluation; each epoch then visits the others in an order keyed by
(version, seed, epoch). Samples of chat are packed into rows first (`headway.data.packing`), those of held-out
conversations into the first ones, which are then held out by number. Sample n of a run is position n % training of
epoch n // training. The cursor is the number of samples consumed so far; ranks and workers only choose rows of a step.
The cursor jumps over samples that a recipe skips (`data.skip`).

The permutations are Feistel networks over a grid slightly larger than the number of windows: each sample costs a few
multiplications, and no index is stored.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np
import numpy.typing as npt

from headway.errors import DataError

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 6


@dataclass(frozen=True)
class Split:
    """The division of a dataset's windows into training and held-out ones."""

    windows: int
    held_out: int
    key: str
    """The data version: the division does not depend on the run's seed."""
    by_number: bool = False
    """Whether the first windows are held out, as of packed samples, instead of a permutation's choice."""

    def __post_init__(self) -> None:
        assert 0 <= self.held_out < self.windows, "a split has at least one training window"

    @property
    def training(self) -> int:
        """Windows in one epoch."""
        return self.windows - self.held_out


def count_windows(shard_tokens: Sequence[int], seq: int) -> list[int]:
    """Return the number of windows of seq inputs and seq labels per shard."""
    if seq < 1:
        raise DataError(f"seq is {seq}", hint="use at least 1")
    counts = [tokens // (seq + 1) for tokens in shard_tokens]
    if not any(counts):
        longest = max(shard_tokens, default=0)
        raise DataError(
            f"no window of {seq} + 1 tokens fits: the longest shard has {longest}",
            hint=f"lower data.seq to {longest - 1} or less, or add text" if longest > 1 else "add text",
        )
    return counts


def split_windows(windows: int, fraction: float, key: str) -> Split:
    """Hold out a fraction of the windows: at least one unless it is 0, and never all of them."""
    if windows < 1:
        raise DataError("there is no window to train on", hint="lower data.seq, or add text")
    if not 0 <= fraction < 1:
        raise DataError(f"the held-out fraction is {fraction}", hint="use 0 or more, and less than 1")
    count = max(int(windows * fraction), 1) if fraction > 0 else 0
    return Split(windows, min(count, windows - 1), key)


def window_order(split: Split, seed: int, first: int, count: int) -> Ids:
    """Return the window ids of training samples first to first + count - 1."""
    return order_at(split, seed, first, np.arange(count, dtype=np.int64))


def order_at(split: Split, seed: int, first: int, offsets: Ids) -> Ids:
    """Return the window ids of training samples first + `offsets`, which are 0 or more."""
    assert first >= 0, "a run's first sample is number 0"
    epoch, within = divmod(first, split.training)
    later, position = np.divmod(offsets + within, split.training)
    last = int(later.max(initial=0))
    if last == 0:
        keys = _keys(split.key, "epoch", seed, epoch)
    else:
        needed, which = np.unique(later, return_inverse=True)
        keys = np.concatenate([_keys(split.key, "epoch", seed, epoch + int(e)) for e in needed], axis=1)[:, which]
    return _divide(split, _permute(position, split.training, keys) + split.held_out)


def after_skips(cursor: int, batch: int, skips: Iterable[tuple[int, int]]) -> int:
    """Return where a batch begins that would begin at `cursor`, if it must not contain samples of `skips`.

    A batch is consecutive samples: if it would overlap a range [first, end), it begins at `end`. The ranges are sorted
    and disjoint, so that one pass is enough.
    """
    for first, end in skips:
        if cursor < end and first < cursor + batch:
            cursor = end
    return cursor


def held_out(split: Split, most: int | None = None) -> Ids:
    """Return held-out window ids, at most `most`, in a fixed shuffled order."""
    count = split.held_out if most is None else min(most, split.held_out)
    return _divide(split, np.arange(count, dtype=np.int64))


def shuffled(positions: Ids, size: int, numbers: Ids, *key: object) -> Ids:
    """Return [numbers, positions]: each position under the permutation of range(size) of the key and a number."""
    odd = np.arange(1, 2 * _ROUNDS, 2, dtype=np.uint64)[:, None] * np.uint64(0xD1342543DE82EF95)
    keys = np.repeat(_keys(*key) + odd * numbers.astype(np.uint64), len(positions), axis=1)
    return _permute(np.tile(positions, len(numbers)), size, keys).reshape(len(numbers), len(positions))


def _divide(split: Split, position: Ids) -> Ids:
    """Apply the split's permutation: positions below held_out are for evaluation, the others for training."""
    if split.by_number:
        return position
    return _permute(position, split.windows, _keys(split.key, "split"))


def _keys(*parts: object) -> _Words:
    """Return a column of round keys from the hash of the parts."""
    digest = hashlib.sha256("/".join(map(str, ("headway-order-1", *parts))).encode()).digest()
    words = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    rounds = np.arange(_ROUNDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (np.resize(words, _ROUNDS) + rounds)[:, None]


def _permute(position: Ids, size: int, keys: _Words) -> Ids:
    """Apply a permutation of range(size) to each position; `keys` has one column, or one per position."""
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    result = _feistel(position.astype(np.uint64), rows, columns, keys)
    # Cycle walking: the grid has up to a row more than size, so permute positions outside again until they are
    # inside. Following the cycles of a permutation of the grid gives a permutation of the inside.
    outside = np.flatnonzero(result >= size)
    while outside.size:
        walked = _feistel(result[outside], rows, columns, keys if keys.shape[1] == 1 else keys[:, outside])
        result[outside] = walked
        outside = outside[walked >= size]
    return result.astype(np.int64)


def _feistel(x: _Words, rows: int, columns: int, keys: _Words) -> _Words:
    """Permute range(rows * columns): each round rotates one coordinate by a hash of the other."""
    height, width = np.uint64(rows), np.uint64(columns)
    row, column = np.divmod(x, width)
    for index in range(0, _ROUNDS, 2):
        row = _rotate(row, column + keys[index], height)
        column = _rotate(column, row + keys[index + 1], width)
    grid: _Words = row * width + column
    return grid


def _rotate(x: _Words, by: _Words, size: np.uint64) -> _Words:
    """Return (x + a hash of `by`) modulo size, which is below 2**32; overwrites `by`."""
    by *= np.uint64(0x9E3779B97F4A7C15)
    by ^= by >> np.uint64(29)
    by *= np.uint64(0xBF58476D1CE4E5B9)
    by >>= np.uint64(32)
    by *= size  # the hash's upper half as a fraction of size
    by >>= np.uint64(32)
    by += x
    rotated: _Words = np.minimum(by, by - size)  # the remainder: values below zero wrap to huge ones
    return rotated
