"""Pack samples of chat into rows of `seq` tokens: best-fit decreasing, computed once and stored beside the dataset.

A row is samples one after another and padding at its end; the two answers of a pair are neighbours in one row. Held-out
conversations, chosen by the data version alone, have the first rows. The rows depend on the dataset and on `seq`,
`holdout`, `loss_on` and `over_length`, so runs of all seeds share them; the order of training rows is permuted per
epoch (`headway.data.order`), and the cursor counts rows.
"""

import hashlib
import os
import secrets
import zipfile
from bisect import bisect_left, insort
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headway.data.order import Ids, Split, held_out, split_windows
from headway.data.shards import Dataset
from headway.errors import DataError
from headway.recipe.data import Data

FOLDER = ".packed"
"""Folder inside a dataset with packings that were computed."""
_FORMAT = 1


@dataclass(frozen=True)
class PackCounts:
    """What became of the samples."""

    samples: int
    """Documents of the dataset."""
    packed: int
    """Documents, or parts of them, in rows."""
    dropped: int
    """Left out, since they are too long."""
    truncated: int
    """Shortened, since they are too long."""
    split: int
    """Divided into several parts."""
    untrained: int
    """Left out, since no token of them would be trained on."""
    tokens: int
    """Tokens in rows."""
    trained_tokens: int
    """Labels that the loss counts."""


@dataclass(frozen=True)
class Packing:
    """The rows of a dataset."""

    seq: int
    held_out: int
    """Rows of held-out conversations, which come first."""
    ends: Ids
    """Where each row ends in the list of parts."""
    parts: Ids
    """[parts, 3]: a document's number in the dataset, and the tokens of it from and to which."""
    counts: PackCounts

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.ends)

    @property
    def padding(self) -> float:
        """Share of the rows that is padding."""
        return 1 - self.counts.tokens / max(self.rows * self.seq, 1)

    @property
    def most_documents(self) -> int:
        """Documents in a row at most, padding included; even, so that documents can be taken in pairs."""
        most = int(np.diff(self.ends, prepend=0).max(initial=0)) + 1
        return most + most % 2

    def split(self, key: str) -> Split:
        """Return the division into held-out and training rows."""
        return Split(self.rows, self.held_out, key, by_number=True)


def pack_dataset(dataset: Dataset, data: Data) -> Packing:
    """Return the packing of a dataset with a recipe's settings, from its folder if it is stored there."""
    key = "/".join(
        str(part) for part in (_FORMAT, dataset.version, data.seq, repr(data.holdout), data.loss_on, data.over_length)
    )
    file = dataset.path / FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    packing = _stored(file, key)
    if packing is None:
        packing = compute_packing(dataset, data)
        _store(file, key, packing)
    return packing


def compute_packing(dataset: Dataset, data: Data) -> Packing:
    """Pack the samples of a dataset; raise DataError if no row is left to train on."""
    chat = dataset.manifest.chat
    assert chat is not None, "only chats are packed"
    width = chat.width
    spans, all_lengths = trained_spans(dataset, data.loss_on), _lengths(dataset)
    units, counts = _fitted(all_lengths, spans, width, data)
    split = split_windows(chat.conversations, data.holdout, dataset.version)
    is_held_out = np.zeros(chat.conversations, dtype=bool)
    is_held_out[held_out(split)] = True
    lengths = (units[:, :, 2] - units[:, :, 1]).sum(axis=1)
    kept_out = is_held_out[_conversations(dataset)[units[:, 0, 0]]]
    parts: list[Ids] = []
    sizes: list[Ids] = []
    rows = [0, 0]
    for index, chosen in enumerate((np.flatnonzero(kept_out), np.flatnonzero(~kept_out))):
        bins = fill_bins(lengths[chosen], data.seq)
        order = np.argsort(bins, kind="stable")
        parts.append(units[chosen[order]].reshape(-1, 3))
        sizes.append(np.bincount(bins) * width if bins.size else np.zeros(0, dtype=np.int64))
        rows[index] = len(sizes[-1])
    if not rows[1]:
        raise DataError(
            f"no sample of {dataset.path} is left to train on with data.seq = {data.seq}",
            hint=f"its longest has {int(all_lengths.max())} tokens; raise data.seq, or set data.over_length=truncate",
        )
    return Packing(data.seq, rows[0], np.cumsum(np.concatenate(sizes)), np.concatenate(parts), counts)


class TrainedSpans(NamedTuple):
    """The tokens that the loss counts, as spans of each document."""

    first: Ids
    """[documents + 1]: the number of each document's first span."""
    start: Ids
    end: Ids

    def labels(self, document: Ids, begin: Ids, end: Ids) -> Ids:
        """Return how many labels of these parts of documents are trained on; a part's first token is no label."""
        totals = np.zeros(len(document), dtype=np.int64)
        first, last = self.first[document], self.first[document + 1]
        for offset in range(int((last - first).max(initial=0))):
            has = np.flatnonzero(first + offset < last)
            span = first[has] + offset
            inside = np.minimum(self.end[span], end[has]) - np.maximum(self.start[span], begin[has] + 1)
            totals[has] += np.maximum(inside, 0)
        return totals


def trained_spans(dataset: Dataset, loss_on: str) -> TrainedSpans:
    """Return what of a dataset's documents is trained on; see `data.loss_on`."""
    chat = dataset.manifest.chat
    assert chat is not None, "only chats have spans"
    documents = dataset.manifest.documents
    if loss_on == "all":
        return TrainedSpans(np.arange(documents + 1), np.zeros(documents, dtype=np.int64), _lengths(dataset))
    counts = np.concatenate([np.diff(shard["spans_end"].astype(np.int64), prepend=0) for shard in dataset.samples])
    spans = np.concatenate(dataset.spans).astype(np.int64)
    document = np.repeat(np.arange(documents), counts)
    chosen = spans[:, 3] == 1
    if loss_on == "last":
        numbers = np.flatnonzero(chosen)
        chosen = np.zeros_like(chosen)
        chosen[numbers[np.diff(document[numbers], append=documents) > 0]] = True
        if chat.width == 1:  # of several samples of a conversation, the last one has the last turn
            last = np.diff(_conversations(dataset), append=chat.conversations) > 0
            chosen &= last[document]
    first = np.searchsorted(document[chosen], np.arange(documents + 1))
    return TrainedSpans(first, spans[chosen, 0], spans[chosen, 1])


def _lengths(dataset: Dataset) -> Ids:
    return np.concatenate([np.diff(table[:, 0].astype(np.int64), prepend=0) for table in dataset.documents])


def _conversations(dataset: Dataset) -> Ids:
    return np.concatenate([shard["conversation"] for shard in dataset.samples]).astype(np.int64)


def _fitted(lengths: Ids, spans: TrainedSpans, width: int, data: Data) -> tuple[Ids, PackCounts]:
    """Return [units, width, 3]: parts of at most `seq` tokens that have something to train on."""
    documents = np.arange(len(lengths)).reshape(-1, width)
    ends = lengths.reshape(-1, width)
    parts = np.stack([documents, np.zeros_like(ends), ends], axis=2)
    long = ends.sum(axis=1) > data.seq
    too_long = int(long.sum()) * width
    dropped = truncated = divided = 0
    if data.over_length == "drop" or not too_long:
        parts, dropped = parts[~long], too_long
    elif data.over_length == "truncate":
        parts[long, :, 2] = _shortened(ends[long], data.seq)
        truncated = too_long
    elif width == 2:
        raise DataError(
            "two answers that belong together cannot be split",
            hint="set data.over_length to drop or truncate, or raise data.seq",
        )
    else:
        pieces = -(-ends[:, 0] // data.seq)
        document = np.repeat(documents[:, 0], pieces)
        begin = (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * data.seq
        end = np.minimum(begin + data.seq, lengths[document])
        parts, divided = np.stack([document, begin, end], axis=1)[:, None], too_long
    flat = parts.reshape(-1, 3)
    trained = spans.labels(flat[:, 0], flat[:, 1], flat[:, 2]).reshape(-1, width)
    used = (trained > 0).all(axis=1)
    kept = parts[used]
    counts = PackCounts(
        samples=len(lengths),
        packed=kept.shape[0] * width,
        dropped=dropped,
        truncated=truncated,
        split=divided,
        untrained=int((~used).sum()) * width,
        tokens=int((kept[:, :, 2] - kept[:, :, 1]).sum()),
        trained_tokens=int(trained[used].sum()),
    )
    return kept, counts


def _shortened(ends: Ids, seq: int) -> Ids:
    """Return [units, width]: lengths that fit together; a shorter answer leaves its room to the longer one."""
    if ends.shape[1] == 1:
        return np.minimum(ends, seq)
    half = seq // 2
    room = np.maximum(half, seq - ends[:, ::-1])
    return np.minimum(ends, room)


def fill_bins(lengths: Ids, capacity: int) -> Ids:
    """Return the bin of each item by best-fit decreasing: the longest first, each into the fullest bin that has room.

    Items of one length that meet bins of one size are placed together, which gives the same bins as one at a time.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    free: dict[int, list[Ids]] = {}  # bins by the room that they have left
    sizes: list[int] = []  # the keys of `free`, ascending
    number = position = 0
    for length, count in zip(*_runs(lengths[order]), strict=True):
        items = order[position : position + count]
        position += count
        placed = 0
        while placed < count:
            at = bisect_left(sizes, length)
            if at < len(sizes):
                room = sizes[at]
                open_bins = free[room].pop()
                if not free[room]:
                    del free[room], sizes[at]
            else:
                room = capacity
                needed = -(-(count - placed) // (capacity // length))
                open_bins = np.arange(number, number + needed)
                number += needed
            fitting = room // length
            used = min(len(open_bins), -(-(count - placed) // fitting))
            if used < len(open_bins):
                _put(free, sizes, room, open_bins[used:])
            taken = min(count - placed, used * fitting)
            bins[items[placed : placed + taken]] = np.repeat(open_bins[:used], fitting)[:taken]
            full = taken // fitting
            _put(free, sizes, room - fitting * length, open_bins[:full])
            if full < used:
                _put(free, sizes, room - (taken - full * fitting) * length, open_bins[full:used])
            placed += taken
    return bins


def _runs(values: Ids) -> tuple[list[int], list[int]]:
    """Return the distinct values of a sorted array, and how often each occurs."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] + 1)) if values.size else np.zeros(0, dtype=np.int64)
    return values[starts].tolist(), np.diff(starts, append=len(values)).tolist()


def _put(free: dict[int, list[Ids]], sizes: list[int], room: int, bins: Ids) -> None:
    """Note bins that have so much room."""
    if not len(bins) or not room:
        return
    if room not in free:
        free[room] = []
        insort(sizes, room)
    free[room].append(bins)


# -- files


def _stored(file: Path, key: str) -> Packing | None:
    """Return a stored packing; None if there is none, or it is damaged."""
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            if str(stored["key"]) != key:
                return None
            counts = PackCounts(*(int(count) for count in stored["counts"]))
            seq, kept_out = (int(number) for number in stored["facts"])
            packing = Packing(seq, kept_out, stored["ends"], stored["parts"], counts)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
    return packing if packing.rows and packing.ends[-1] == len(packing.parts) else None


def _store(file: Path, key: str, packing: Packing) -> None:
    """Store a packing; in a read-only folder it is simply computed each time."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        try:
            with temporary.open("xb") as opened:
                np.savez(
                    opened,
                    key=np.array(key),
                    facts=np.array([packing.seq, packing.held_out]),
                    ends=packing.ends,
                    parts=packing.parts,
                    counts=np.array(astuple(packing.counts)),
                )
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
