"""Which documents a step trained on, and which steps trained on a document: both follow from the data order.

Nothing is recorded during training for this: the samples of a step are a pure function of the data version, the seed
and the step, so it also answers for steps of old runs and of runs to come.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from headway.data.corpus import Corpus
from headway.data.mixture import DataMixture, mixed_order_at, shuffled_rows
from headway.data.order import Ids, count_windows, order_at
from headway.data.origins import Origin, Origins, read_origins
from headway.errors import DataError, UsageError

CHUNK = 1 << 18
"""Samples whose windows are computed at once."""


@dataclass(frozen=True)
class SeenDocument:
    """A part of a document in one row of a step."""

    row: int
    dataset: str
    document: int
    """Its number in the dataset."""
    first: int
    """Its first token in the row, counted in the document."""
    end: int
    tokens: int
    """All tokens of the document."""
    origin: Origin | None
    """None if the dataset was built without an index of its sources."""


@dataclass(frozen=True)
class Explainer:
    """The documents of a run's samples."""

    corpus: Corpus

    def __post_init__(self) -> None:
        if self.corpus.usable:
            raise DataError(
                "the steps of a policy sample their own answers: there is no document to name",
                hint="headway rl samples RUN --step N shows prompts and answers",
            )

    @cached_property
    def origins(self) -> list[Origins | None]:
        """The sources of each dataset."""
        return [read_origins(dataset.path, dataset.manifest.documents) for dataset in self.corpus.datasets]

    # -- a step's documents

    def step(self, step: int) -> list[SeenDocument]:
        """Return the documents of a step, row by row."""
        recipe = self.corpus.recipe
        if not 1 <= step <= recipe.train.steps:
            raise UsageError(f"there is no step {step}", hint=f"1 to {recipe.train.steps}")
        windows = self.windows(self.corpus.cursor_before(step), recipe.train.batch_at(step))
        return [seen for row, window in enumerate(windows.tolist()) for seen in self.documents(window, row)]

    def windows(self, cursor: int, batch: int) -> Ids:
        """Return the windows of the rows of a batch that begins at a cursor."""
        order, seed, rows = self.corpus.order, self.corpus.recipe.seed, np.arange(batch, dtype=np.int64)
        if isinstance(order, DataMixture):
            rows = shuffled_rows(order, np.array([cursor]), batch, rows)[0]
            return mixed_order_at(order, seed, cursor, rows)
        return order_at(order, seed, cursor, rows)

    def documents(self, window: int, row: int = 0) -> Iterator[SeenDocument]:
        """Yield the documents of a window."""
        index = bisect_right(self._first_windows, window) - 1
        for document, first, end in self._parts(index, window - self._first_windows[index]):
            origins = self.origins[index]
            yield SeenDocument(
                row, self.corpus.names[index], document, first, end,
                int(self._ends(index)[document] - self._starts(index)[document]),
                None if origins is None else origins[document],
            )  # fmt: skip

    def text(self, seen: SeenDocument, most: int = 64) -> str:
        """Return the beginning of a document's part as text."""
        dataset = self.corpus.datasets[self.corpus.names.index(seen.dataset)]
        ids = dataset.document(seen.document).ids[seen.first : min(seen.end, seen.first + most)]
        return dataset.tokenizer().decode(ids)

    # -- the steps of a document

    def steps(
        self,
        dataset: int,
        documents: npt.NDArray[np.int64],
        last_step: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> dict[int, list[int]]:
        """Return, for each step up to `last_step` that trained on any of these documents, which it did."""
        by_window = self._windows_of(dataset, documents)
        wanted = np.array(sorted(by_window), np.int64)
        by_step: dict[int, set[int]] = {}
        for first, ids, steps in self._in_order(last_step):
            hits = np.flatnonzero(np.isin(ids, wanted))
            for hit in hits.tolist():
                by_step.setdefault(int(steps[hit]), set()).update(by_window[int(ids[hit])])
            progress(first)
        return {step: sorted(by_step[step]) for step in sorted(by_step)}

    def _in_order(self, last_step: int) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield (last step, windows, their steps) of stretches of steps; of a step, the rows in any order."""
        recipe, step = self.corpus.recipe, 1
        while step <= last_step:
            batch = recipe.train.batch_at(step)
            count = max(1, min(CHUNK // batch, last_step - step + 1))
            steps = np.arange(step, step + count)
            same = [int(s) for s in steps if recipe.train.batch_at(int(s)) == batch]
            steps = np.array(same, np.int64)
            cursors = np.array([self.corpus.cursor_before(s) for s in same], np.int64)
            samples = (cursors[:, None] + np.arange(batch)).ravel()
            base = int(samples[0])
            order, seed = self.corpus.order, recipe.seed
            if isinstance(order, DataMixture):
                ids = mixed_order_at(order, seed, base, samples - base)
            else:
                ids = order_at(order, seed, base, samples - base)
            step = same[-1] + 1
            yield step - 1, ids, np.repeat(steps, batch)

    def _windows_of(self, dataset: int, documents: npt.NDArray[np.int64]) -> dict[int, set[int]]:
        """Return the windows that have parts of these documents, and of which."""
        result: dict[int, set[int]] = {}
        base = self._first_windows[dataset]
        if self.corpus.packings:
            packing = self.corpus.packings[dataset]
            parts = np.flatnonzero(np.isin(packing.parts[:, 0], documents))
            rows = np.searchsorted(packing.ends, parts, side="right")
            for part, row in zip(parts.tolist(), rows.tolist(), strict=True):
                result.setdefault(base + row, set()).add(int(packing.parts[part, 0]))
            return result
        width = self.corpus.recipe.data.seq + 1
        counts = count_windows(self.corpus.datasets[dataset].shard_tokens, width - 1)
        firsts = list(accumulate(counts, initial=0))
        shards, starts, ends = self._shards(dataset), self._starts(dataset), self._ends(dataset)
        for document in documents.tolist():
            shard = int(shards[document])
            low, high = int(starts[document]) // width, (int(ends[document]) - 1) // width
            for window in range(low, min(high, counts[shard] - 1) + 1):
                result.setdefault(base + firsts[shard] + window, set()).add(document)
        return result

    # -- where documents and windows are

    @cached_property
    def _first_windows(self) -> list[int]:
        return [0, *accumulate(split.windows for split in self.corpus.splits[:-1])]

    def _parts(self, dataset: int, window: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, its first token in the window, its end there) of a dataset's window."""
        if self.corpus.packings:
            packing = self.corpus.packings[dataset]
            begin = int(packing.ends[window - 1]) if window else 0
            for document, first, end in packing.parts[begin : int(packing.ends[window])].tolist():
                yield int(document), int(first), int(end)
            return
        width = self.corpus.recipe.data.seq + 1
        counts = count_windows(self.corpus.datasets[dataset].shard_tokens, width - 1)
        shard = bisect_right(list(accumulate(counts)), window)
        window -= sum(counts[:shard])
        first, end = window * width, (window + 1) * width
        tables = self.corpus.datasets[dataset].documents
        before = sum(len(table) for table in tables[:shard])
        ends = tables[shard][:, 0]
        number = int(np.searchsorted(ends, np.uint64(first), side="right"))
        start = int(ends[number - 1]) if number else 0
        while number < len(ends) and start < end:
            stop = int(ends[number])
            yield before + number, max(first - start, 0), min(end, stop) - start
            start, number = stop, number + 1

    @cached_property
    def _tables(self) -> list[tuple[Ids, Ids, Ids]]:
        """(shard, start in the shard, end in the shard) of each document, per dataset."""
        tables = []
        for dataset in self.corpus.datasets:
            ends = [table[:, 0].astype(np.int64) for table in dataset.documents]
            starts = [np.concatenate([[0], shard[:-1]]).astype(np.int64) for shard in ends]
            shards = np.repeat(np.arange(len(ends), dtype=np.int64), [len(shard) for shard in ends])
            tables.append((shards, np.concatenate(starts), np.concatenate(ends)))
        return tables

    def _shards(self, dataset: int) -> Ids:
        return self._tables[dataset][0]

    def _starts(self, dataset: int) -> Ids:
        return self._tables[dataset][1]

    def _ends(self, dataset: int) -> Ids:
        return self._tables[dataset][2]
