"""Read rows of packed chats, with labels only where the loss counts, and the values of each sample."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.loader import MASKED, Batch, Documents, RowReader
from headway.data.order import Ids
from headway.data.packing import Packing, trained_spans
from headway.data.shards import Dataset


class PackedReader(RowReader):
    """Reads the rows of packings, whose datasets are numbered consecutively.

    A row has its samples as documents 0, 1, 2, ... and padding, if any, as the last. The columns are `weight`, `sample`
    (the document's number across all datasets) and, of labelled samples, `desirable`; they are 0 for padding.
    """

    masks = True
    documents = True

    def __init__(self, datasets: Sequence[Dataset], packings: Sequence[Packing], loss_on: str) -> None:
        self.seq = packings[0].seq
        self.windows = sum(packing.rows for packing in packings)
        self._first = np.array([0, *accumulate(packing.rows for packing in packings[:-1])], dtype=np.int64)
        first_samples = accumulate((dataset.manifest.documents for dataset in datasets[:-1]), initial=0)
        self._packed = [
            _Packed(dataset, packing, loss_on, first)
            for dataset, packing, first in zip(datasets, packings, first_samples, strict=True)
        ]
        self._width = max(packing.most_documents for packing in packings)
        chat = datasets[0].manifest.chat
        self._labelled = chat is not None and chat.kind == "labelled"

    def locate(self, ids: Ids) -> list[tuple[int, int]]:
        """Return (dataset, row) of each id."""
        which = np.searchsorted(self._first, ids, side="right") - 1
        return list(zip(which.tolist(), (ids - self._first[which]).tolist(), strict=True))

    def read_at(
        self, locations: Sequence[tuple[int, int]], out: Ids | None = None, documents: Documents | None = None
    ) -> Batch:
        """See RowReader; locations are (dataset, row)."""
        shape = (len(locations), self.seq)
        rows = np.empty((shape[0], self.seq + 1), dtype=np.int64) if out is None else out
        numbers = np.empty(shape, dtype=np.int32) if documents is None else documents
        rows[:] = 0
        labels = np.full(shape, MASKED, dtype=np.int64)
        columns: dict[str, npt.NDArray[Any]] = {
            "weight": np.zeros((shape[0], self._width), dtype=np.float32),
            "sample": np.zeros((shape[0], self._width), dtype=np.int64),
        }
        if self._labelled:
            columns["desirable"] = np.zeros((shape[0], self._width), dtype=np.int64)
        trained = 0
        for index, (dataset, row) in enumerate(locations):
            packed = self._packed[dataset]
            trained += packed.read(row, rows[index], labels[index], numbers[index])
            chosen = packed.documents_of(row)
            columns["weight"][index, : len(chosen)] = packed.weight[chosen]
            columns["sample"][index, : len(chosen)] = chosen + packed.first_sample
            if self._labelled:
                columns["desirable"][index, : len(chosen)] = packed.desirable[chosen]
        return Batch(rows[:, :-1], labels, trained, numbers, columns)


class _Packed:
    """The rows of one dataset."""

    def __init__(self, dataset: Dataset, packing: Packing, loss_on: str, first_sample: int) -> None:
        self._tokens, self._packing = dataset.tokens, packing
        self.first_sample = first_sample
        ends = [table[:, 0].astype(np.int64) for table in dataset.documents]
        self._starts = np.concatenate([np.concatenate([[0], shard[:-1]]) for shard in ends])
        self._shards = np.repeat(np.arange(len(ends)), [len(shard) for shard in ends])
        spans = trained_spans(dataset, loss_on)
        self._first_span, self._span_start, self._span_end = spans.first, spans.start, spans.end
        self.weight = np.concatenate([shard["weight"] for shard in dataset.samples])
        self.desirable = np.concatenate([shard["desirable"] for shard in dataset.samples])

    def documents_of(self, row: int) -> Ids:
        """Return the documents of a row."""
        ends = self._packing.ends
        chosen: Ids = self._packing.parts[ends[row - 1] if row else 0 : ends[row], 0]
        return chosen

    def read(self, row: int, tokens: Ids, labels: Ids, numbers: Documents) -> int:
        """Write a row; return how many labels are trained on."""
        ends = self._packing.ends
        position = trained = 0
        parts = self._packing.parts[ends[row - 1] if row else 0 : ends[row]].tolist()
        for number, (document, begin, end) in enumerate(parts):
            start = int(self._starts[document])
            length = end - begin
            ids = self._tokens[self._shards[document]][start + begin : start + end]
            tokens[position : position + length] = ids
            numbers[position : position + length] = number
            low, high = self._first_span[document], self._first_span[document + 1]
            spans = zip(self._span_start[low:high].tolist(), self._span_end[low:high].tolist(), strict=True)
            for left, right in spans:
                first, last = max(left - begin, 1), min(right - begin, length)
                if first < last:
                    labels[position + first - 1 : position + last - 1] = ids[first:last]
                    trained += last - first
            position += length
        numbers[position:] = len(parts)
        return trained
