"""From window ids to batches: rows copied out of the maps, labels masked where nothing is to be learnt."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.data.mixture import DataMixture, dealt_rows, mixed_order_at
from headway.data.order import Ids, Split, count_windows, order_at
from headway.data.shards import Dataset

__all__ = ["MASKED", "Batch", "Loader", "WindowReader"]

MASKED = -100
"""The label of a token that is not trained on; PyTorch's losses leave it out by default."""

Documents = npt.NDArray[np.int32]
"""Which document of its row each input token belongs to, 0, 1, 2, ... along the row."""

_CHUNK_SAMPLES = 4096


class Batch(NamedTuple):
    """Rows of token ids and what should follow each of them."""

    inputs: Ids
    """[rows, seq]"""
    labels: Ids
    """[rows, seq]; MASKED where not trained on. Shares memory with the inputs when nothing can be masked."""
    trained: int
    """Labels that are not masked."""
    documents: Documents | None = None
    """[rows, seq]: which document of the row each input token is of; None when the reader was not asked for it."""


class WindowReader:
    """Reads windows by id, of a data set or of several whose windows are numbered through.

    With `documents`, batches say which document of its row each token is of.
    """

    def __init__(
        self,
        data: Dataset | Sequence[Dataset],
        seq: int,
        mask_boundaries: bool = False,
        *,
        documents: bool = False,
    ) -> None:
        datasets = [data] if isinstance(data, Dataset) else data
        tokens = [shard for dataset in datasets for shard in dataset.tokens]
        counts = count_windows([len(shard) for shard in tokens], seq)
        self.seq = seq
        self.windows = sum(counts)
        self.masks = mask_boundaries or any(dataset.manifest.prompt_tokens for dataset in datasets)
        """Whether any label can be masked."""
        self.documents = documents
        """Whether batches say which document each token is of."""
        self._mask_boundaries = mask_boundaries
        asked = datasets if self.masks or documents else []
        self._documents = [_with_ends(table) for dataset in asked for table in dataset.documents]
        self._first = np.array(list(accumulate(counts[:-1], initial=0)), dtype=np.int64)
        self._shards = [
            shard[: count * (seq + 1)].reshape(count, seq + 1) for shard, count in zip(tokens, counts, strict=True)
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

    def read_places(
        self, places: Sequence[tuple[int, int]], out: Ids | None = None, documents: Documents | None = None
    ) -> Batch:
        """The windows at these places, in this order; into `out` ([rows, seq + 1]) and `documents` if given."""
        rows = np.empty((len(places), self.seq + 1), dtype=np.int64) if out is None else out
        shards = self._shards
        for index, (shard, window) in enumerate(places):
            rows[index] = shards[shard][window]
        numbered = self._number_documents(places, documents) if self.documents else None
        if not self.masks:
            return Batch(rows[:, :-1], rows[:, 1:], len(places) * self.seq, numbered)
        labels = rows[:, 1:].copy()
        masked = sum(
            self._mask(labels[index], shard, window * (self.seq + 1)) for index, (shard, window) in enumerate(places)
        )
        return Batch(rows[:, :-1], labels, labels.size - masked, numbered)

    def _number_documents(self, places: Sequence[tuple[int, int]], out: Documents | None) -> Documents:
        """For each input token of the rows at these places, how many documents ended before it in its row."""
        begins: list[int] = []  # where in the rows, laid end to end, another number begins
        numbers: list[int] = []
        for index, (shard, window) in enumerate(places):
            table, ends = self._documents[shard]
            start = window * (self.seq + 1)
            low = bisect_right(ends, start)
            # A document has one token at least, so that a row sees at most seq of them end.
            high = bisect_left(ends, start + self.seq, lo=low, hi=min(low + self.seq, len(ends)))
            shift = index * self.seq - start
            begins.append(index * self.seq)
            begins.extend([end + shift for end in table[low:high, 0].tolist()])
            numbers.extend(range(high - low + 1))
        # One call for all rows: slices of single documents would cost a microsecond each.
        edges = np.array([*begins, len(places) * self.seq])
        laid = np.repeat(np.array(numbers, dtype=np.int32), edges[1:] - edges[:-1]).reshape(len(places), self.seq)
        if out is None:
            return laid
        out[:] = laid
        return out

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
        self,
        reader: WindowReader,
        split: Split | DataMixture,
        seed: int,
        batch: int,
        rows: tuple[int, int] | None = None,
    ) -> None:
        low, high = rows or (0, batch)
        assert split.windows == reader.windows, "the split is of other windows than the reader's"
        assert 0 <= low < high <= batch, "rows are a part of the batch"
        self.reader, self.split, self.seed, self.batch = reader, split, seed, batch
        self.rows = (low, high)
        """This rank's rows of a batch of the size that it was made for, the largest of the run."""
        self.masks = reader.masks
        """Whether any label can be masked."""
        self._chunk = _Chunk(-1, 0, 1, [])

    def read(
        self, cursor: int, out: Ids | None = None, documents: Documents | None = None, *, batch: int | None = None
    ) -> Batch:
        """This rank's rows of the step that starts when `cursor` samples have been seen; into the arrays if given.

        `batch` is the size of that step's batch, where it is another than the loader's own.
        """
        batch = batch or self.batch
        chunk = self._chunk
        step, rest = divmod(cursor - chunk.cursor, max(chunk.batch, 1))
        if rest or chunk.batch != batch or not 0 <= step * chunk.width < len(chunk.places):
            chunk, step = self._order(cursor, batch), 0
            self._chunk = chunk
        first = step * chunk.width
        return self.reader.read_places(chunk.places[first : first + chunk.width], out, documents)

    def _order(self, cursor: int, batch: int) -> "_Chunk":
        """Many steps at once: evaluating the order costs some 100 us however few samples are asked for."""
        (low, left), (high, right) = (divmod(row * batch, self.batch) for row in self.rows)
        assert (left, right) == (0, 0), "the rows are a whole part of this batch too"
        steps = max(_CHUNK_SAMPLES // (high - low), 1)
        starts, rows = np.arange(steps) * batch, np.arange(low, high)
        if isinstance(self.split, DataMixture):
            rows = dealt_rows(self.split, cursor + starts, batch, rows)
            ids = mixed_order_at(self.split, self.seed, cursor, (starts[:, None] + rows).ravel())
        else:
            ids = order_at(self.split, self.seed, cursor, (starts[:, None] + rows).ravel())
        return _Chunk(cursor, batch, high - low, self.reader.places(ids))


class _Chunk(NamedTuple):
    """Where the rows of some steps lie, from a cursor on."""

    cursor: int
    batch: int
    width: int
    """Rows a step."""
    places: list[tuple[int, int]]
