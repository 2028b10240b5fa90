"""From window ids to batches: rows copied out of the maps, labels masked where nothing is to be learnt."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.data.order import Ids, Split, count_windows, order_at
from headway.data.shards import Dataset

__all__ = ["MASKED", "Batch", "Loader", "WindowReader"]

MASKED = -100
"""The label of a token that is not trained on; PyTorch's losses leave it out by default."""

_CHUNK_SAMPLES = 4096


class Batch(NamedTuple):
    """Rows of token ids and what should follow each of them."""

    inputs: Ids
    """[rows, seq]"""
    labels: Ids
    """[rows, seq]; MASKED where not trained on. Shares memory with the inputs when nothing can be masked."""
    trained: int
    """Labels that are not masked."""


class WindowReader:
    """Reads windows of a data set by id."""

    def __init__(self, dataset: Dataset, seq: int, mask_boundaries: bool = False) -> None:
        counts = count_windows(dataset.shard_tokens, seq)
        self.seq = seq
        self.windows = sum(counts)
        self.masks = mask_boundaries or dataset.manifest.prompt_tokens > 0
        """Whether any label can be masked."""
        self._mask_boundaries = mask_boundaries
        self._documents = [_with_ends(table) for table in dataset.documents] if self.masks else []
        self._first = np.array(list(accumulate(counts[:-1], initial=0)), dtype=np.int64)
        self._shards = [
            shard[: count * (seq + 1)].reshape(count, seq + 1)
            for shard, count in zip(dataset.tokens, counts, strict=True)
        ]

    def read(self, ids: Ids | Sequence[int]) -> Batch:
        """The windows of these ids, in this order."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.windows:
            raise IndexError(f"window ids go from 0 to {self.windows - 1}")
        return self.read_places(self.places(ids))

    def places(self, ids: Ids) -> list[tuple[int, int]]:
        """(shard, window in the shard) of each id."""
        shards = np.searchsorted(self._first, ids, side="right") - 1
        return list(zip(shards.tolist(), (ids - self._first[shards]).tolist(), strict=True))

    def read_places(self, places: Sequence[tuple[int, int]], out: Ids | None = None) -> Batch:
        """The windows at these places, in this order; into `out` ([rows, seq + 1]) if given."""
        rows = np.empty((len(places), self.seq + 1), dtype=np.int64) if out is None else out
        shards = self._shards
        for index, (shard, window) in enumerate(places):
            rows[index] = shards[shard][window]
        if not self.masks:
            return Batch(rows[:, :-1], rows[:, 1:], len(places) * self.seq)
        labels = rows[:, 1:].copy()
        masked = sum(
            self._mask(labels[index], shard, window * (self.seq + 1)) for index, (shard, window) in enumerate(places)
        )
        return Batch(rows[:, :-1], labels, labels.size - masked)

    def _mask(self, row: Ids, shard: int, start: int) -> int:
        """Mask one row of labels, label i being the shard's token start + 1 + i; how many were masked."""
        table, ends = self._documents[shard]
        first, last = start + 1, start + self.seq
        low = bisect_right(ends, first)
        high = bisect_right(ends, last, lo=low) + 1
        begin = ends[low - 1] if low else 0
        least = 1 if self._mask_boundaries else 0
        count = 0
        for end, prompt in table[low:high].tolist():
            # A document may begin before the row's first label, and a prompt end after its last.
            left = max(begin - first, 0)
            right = min(max(begin + max(prompt, least) - first, left), self.seq)
            row[left:right] = MASKED
            count += right - left
            begin = end
        return count


def _with_ends(table: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], Sequence[int]]:
    """A shard's documents, and their ends alone as something to bisect.

    A search touches a few pages of the map; np.searchsorted would first copy the whole column, and an array's
    items are slower to compare than a memory view's.
    """
    return table, table.reshape(-1).data[::2]


class Loader:
    """The batches of a run: any step at any time, from the run's cursor alone."""

    def __init__(
        self, reader: WindowReader, split: Split, seed: int, batch: int, rows: tuple[int, int] | None = None
    ) -> None:
        low, high = rows or (0, batch)
        assert split.windows == reader.windows, "the split is of other windows than the reader's"
        assert 0 <= low < high <= batch, "rows are a part of the batch"
        self.reader, self.split, self.seed, self.batch = reader, split, seed, batch
        self.rows = (low, high)
        self.masks = reader.masks
        """Whether any label can be masked."""
        self._width = high - low
        self._steps = max(_CHUNK_SAMPLES // self._width, 1)
        self._offsets = (np.arange(self._steps)[:, None] * batch + np.arange(low, high)).ravel()
        self._chunk: tuple[int, list[tuple[int, int]]] = (-1, [])

    def read(self, cursor: int, out: Ids | None = None) -> Batch:
        """This rank's rows of the step that starts when `cursor` samples have been seen; into `out` if given."""
        start, places = self._chunk
        step, rest = divmod(cursor - start, self.batch)
        if rest or not 0 <= step < self._steps or start < 0:
            # Many steps at once: evaluating the order costs some 100 us however few samples are asked for.
            ids = order_at(self.split, self.seed, cursor, self._offsets)
            places, step = self.reader.places(ids), 0
            self._chunk = (cursor, places)
        first = step * self._width
        return self.reader.read_places(places[first : first + self._width], out)
