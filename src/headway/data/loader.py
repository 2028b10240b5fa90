"""Read batches of windows from memory-mapped shards, and mask labels that are not trained on."""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.data.mixture import DataMixture, mixed_order_at, shuffled_rows
from headway.data.order import Ids, Split, count_windows, order_at
from headway.data.shards import Dataset

MASKED = -100
"""Label of a token that is not trained on; PyTorch's losses ignore it by default."""

Documents = npt.NDArray[np.int32]
"""The number of each input token's document within its row: 0, 1, 2, ..."""

_CHUNK_SAMPLES = 4096


class Batch(NamedTuple):
    """Rows of input token ids and their labels."""

    inputs: Ids
    """[rows, seq]"""
    labels: Ids
    """[rows, seq]; MASKED if not trained on. Shares memory with the inputs if nothing can be masked."""
    trained: int
    """Labels that are not masked."""
    documents: Documents | None = None
    """[rows, seq]: each input token's document within its row, if the reader numbers documents."""
    columns: Mapping[str, npt.NDArray[Any]] = MappingProxyType({})
    """[rows, documents of a row at most]: further values of each document by name, 0 where there is none."""


class RowReader(ABC):
    """Reads rows of a dataset, or of several whose rows are numbered consecutively."""

    seq: int
    windows: int
    """Rows that there are."""
    masks: bool
    """Whether any label can be masked."""
    documents: bool
    """Whether batches number the documents of each row."""

    def read(self, ids: Ids | Sequence[int]) -> Batch:
        """Read the rows with these ids, in this order."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.windows:
            raise IndexError(f"window ids go from 0 to {self.windows - 1}")
        return self.read_at(self.locate(ids))

    @abstractmethod
    def locate(self, ids: Ids) -> list[tuple[int, int]]:
        """Return where each id is; see `read_at`."""

    @abstractmethod
    def read_at(
        self, locations: Sequence[tuple[int, int]], out: Ids | None = None, documents: Documents | None = None
    ) -> Batch:
        """Read the rows at these locations, in this order, into `out` ([rows, seq + 1]) and `documents` if given."""


class WindowReader(RowReader):
    """Reads windows by id, from a dataset or from several whose windows are numbered consecutively.

    With `documents`, batches number the documents of each row.
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
        self.documents = documents
        self._mask_boundaries = mask_boundaries
        needed = datasets if self.masks or documents else []
        self._documents = [_with_ends(table) for dataset in needed for table in dataset.documents]
        self._first = np.array(list(accumulate(counts[:-1], initial=0)), dtype=np.int64)
        self._shards = [
            shard[: count * (seq + 1)].reshape(count, seq + 1) for shard, count in zip(tokens, counts, strict=True)
        ]

    def locate(self, ids: Ids) -> list[tuple[int, int]]:
        """Return (shard, window in the shard) of each id."""
        shards = np.searchsorted(self._first, ids, side="right") - 1
        return list(zip(shards.tolist(), (ids - self._first[shards]).tolist(), strict=True))

    def read_at(
        self, locations: Sequence[tuple[int, int]], out: Ids | None = None, documents: Documents | None = None
    ) -> Batch:
        """Read the windows at (shard, window), in this order, into `out` ([rows, seq + 1]) and `documents` if given."""
        rows = np.empty((len(locations), self.seq + 1), dtype=np.int64) if out is None else out
        shards = self._shards
        for index, (shard, window) in enumerate(locations):
            rows[index] = shards[shard][window]
        numbered = self._number_documents(locations, documents) if self.documents else None
        if not self.masks:
            return Batch(rows[:, :-1], rows[:, 1:], len(locations) * self.seq, numbered)
        labels = rows[:, 1:].copy()
        masked = sum(
            self._mask(labels[index], shard, window * (self.seq + 1)) for index, (shard, window) in enumerate(locations)
        )
        return Batch(rows[:, :-1], labels, labels.size - masked, numbered)

    def _number_documents(self, locations: Sequence[tuple[int, int]], out: Documents | None) -> Documents:
        """For each input token, count the documents that ended before it in its row."""
        begins: list[int] = []  # where, in the concatenated rows, a new number begins
        numbers: list[int] = []
        for index, (shard, window) in enumerate(locations):
            table, ends = self._documents[shard]
            start = window * (self.seq + 1)
            low = bisect_right(ends, start)
            # A document has at least one token, so at most seq of them end in a row.
            high = bisect_left(ends, start + self.seq, lo=low, hi=min(low + self.seq, len(ends)))
            shift = index * self.seq - start
            begins.append(index * self.seq)
            begins.extend([end + shift for end in table[low:high, 0].tolist()])
            numbers.extend(range(high - low + 1))
        # One call for all rows: a slice per document would cost a microsecond each.
        edges = np.array([*begins, len(locations) * self.seq])
        flat = np.repeat(np.array(numbers, dtype=np.int32), edges[1:] - edges[:-1])
        numbered = flat.reshape(len(locations), self.seq)
        if out is None:
            return numbered
        out[:] = numbered
        return out

    def _mask(self, row: Ids, shard: int, start: int) -> int:
        """Mask one row of labels, label i being the shard's token start + 1 + i; return how many were masked."""
        table, ends = self._documents[shard]
        first, last = start + 1, start + self.seq
        low = bisect_right(ends, first)
        high = bisect_right(ends, last, lo=low) + 1
        begin = ends[low - 1] if low else 0
        least = 1 if self._mask_boundaries else 0
        count = 0
        for end, prompt in table[low:high].tolist():
            # A document may begin before the row's first label, and a prompt may end after its last.
            left = max(begin - first, 0)
            right = min(max(begin + max(prompt, least) - first, left), self.seq)
            row[left:right] = MASKED
            count += right - left
            begin = end
        return count


def _with_ends(table: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], Sequence[int]]:
    """Return a shard's documents, and their ends as a sequence for bisect.

    A bisection touches a few pages of the map; np.searchsorted would first copy the whole column, and comparing items
    of an array is slower than of a memory view.
    """
    return table, table.reshape(-1).data[::2]


class Loader:
    """The batches of a run, each a function of the run's cursor alone."""

    def __init__(
        self,
        reader: RowReader,
        split: Split | DataMixture,
        seed: int,
        batch: int,
        rows: tuple[int, int] | None = None,
    ) -> None:
        low, high = rows or (0, batch)
        assert split.windows == reader.windows, "the split and the reader have different windows"
        assert 0 <= low < high <= batch, "rows are outside the batch"
        self.reader, self.split, self.seed, self.batch = reader, split, seed, batch
        self.rows = (low, high)
        """This rank's rows of a batch of size `batch`, the largest of the run."""
        self.masks = reader.masks
        """Whether any label can be masked."""
        self._chunk = _Chunk(-1, 0, 1, [])

    def read(
        self, cursor: int, out: Ids | None = None, documents: Documents | None = None, *, batch: int | None = None
    ) -> Batch:
        """Read this rank's rows of the step that begins at `cursor`, into the arrays if given.

        `batch` is the size of that step's batch, if it differs from the loader's.
        """
        batch = batch or self.batch
        chunk = self._chunk
        step, rest = divmod(cursor - chunk.cursor, max(chunk.batch, 1))
        if rest or chunk.batch != batch or not 0 <= step * chunk.width < len(chunk.locations):
            chunk, step = self._order(cursor, batch), 0
            self._chunk = chunk
        first = step * chunk.width
        return self.reader.read_at(chunk.locations[first : first + chunk.width], out, documents)

    def _order(self, cursor: int, batch: int) -> "_Chunk":
        """Compute the order of many steps at once: one evaluation takes some 100 us for any number of samples."""
        (low, left), (high, right) = (divmod(row * batch, self.batch) for row in self.rows)
        assert (left, right) == (0, 0), "the rows do not divide this batch evenly"
        steps = max(_CHUNK_SAMPLES // (high - low), 1)
        starts, rows = np.arange(steps) * batch, np.arange(low, high)
        if isinstance(self.split, DataMixture):
            rows = shuffled_rows(self.split, cursor + starts, batch, rows)
            ids = mixed_order_at(self.split, self.seed, cursor, (starts[:, None] + rows).ravel())
        else:
            ids = order_at(self.split, self.seed, cursor, (starts[:, None] + rows).ravel())
        return _Chunk(cursor, batch, high - low, self.reader.locate(ids))


class _Chunk(NamedTuple):
    """The locations of the rows of consecutive steps from a cursor on."""

    cursor: int
    batch: int
    width: int
    """Rows per step."""
    locations: list[tuple[int, int]]
