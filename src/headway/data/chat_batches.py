"""Rows of chat data to encoded samples, a batch of rows at a time, in this process or in several.

A batch is `BATCH_ROWS` consecutive records of the sources; what becomes of it depends on the sources alone, so that any
number of processes gives the same samples in the same order. A process parses only the records of its own batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headway.data.chat_rows import ROW_KEYS, BadRow, ChatRow, Kind, parse_row, with_other_answers
from headway.data.chat_tokens import EncodedSample, SampleEncoder
from headway.data.prompt_rows import parse_prompt
from headway.data.sources import BadRecordError, ReadOptions, SourceFile, read_objects
from headway.data.template_layout import Refused, SampleMaker, make_samples

BATCH_ROWS = 2048
KINDS: dict[str, str] = {
    "chat": "a conversation",
    "pairs": "a pair of answers",
    "labelled": "a labelled answer",
    "prompts": "a prompt",
}


class PlacedRow(NamedTuple):
    """A row that has conversations, its number in its batch, and where it is."""

    number: int
    where: str
    row: ChatRow


class Refusal(NamedTuple):
    """A record that cannot be used."""

    number: int
    where: str
    reason: str


class RowBatch(NamedTuple):
    """Consecutive records."""

    rows: list[PlacedRow]
    refused: list[Refusal]
    before: ChatRow | None
    """The row before the first, if it can be used."""
    position: int
    """Bytes of the sources up to its end."""


class EncodedUnit(NamedTuple):
    """A sample, or two that belong together, with the columns of their row."""

    samples: list[EncodedSample]
    first: bool
    """Whether it is the first of its conversation."""
    weight: float
    desirable: bool
    line: str = ""
    """Of a prompt, what is stored beside its tokens."""


class EncodedBatch(NamedTuple):
    """What became of a batch of rows."""

    kind: Kind
    units: list[EncodedUnit]
    refused: list[Refusal]
    position: int


def read_batches(
    files: Sequence[SourceFile],
    reading: ReadOptions,
    mine: Callable[[int], bool] = lambda _: True,
    *,
    prompts: bool = False,
) -> Iterator[RowBatch]:
    """Yield the batches whose numbers are `mine`, in order; rows of `prompts` are read whole."""
    parse, keys = (parse_prompt, None) if prompts else (parse_row, ROW_KEYS)
    kind: tuple[Kind, str] | None = None  # of the first row that can be used, and where that is
    previous: ChatRow | None = None  # the row before this one, if it can be used
    batch = RowBatch([], [], None, 0)

    def is_wanted(index: int) -> bool:
        # The record before a batch may lend its answer to the first one in it.
        return kind is None or mine(index // BATCH_ROWS) or mine((index + 1) // BATCH_ROWS)

    for index, (place, record, position) in enumerate(_records(files, reading, keys, is_wanted)):
        own = mine(index // BATCH_ROWS)
        if index % BATCH_ROWS == 0:
            if batch.rows or batch.refused:
                yield batch
            batch = RowBatch([], [], previous, 0)
        batch = batch._replace(position=position)
        previous = None
        if record is None:
            continue
        try:
            row = _parsed(record, parse, kind)
        except BadRow as bad:
            if own:
                batch.refused.append(Refusal(index % BATCH_ROWS, place, str(bad)))
            continue
        kind = kind or (row.kind, place)
        previous = row
        if own:
            batch.rows.append(PlacedRow(index % BATCH_ROWS, place, row))
    if batch.rows or batch.refused:
        yield batch


_Record = dict[str, object] | BadRecordError | None


def _records(
    files: Sequence[SourceFile], reading: ReadOptions, keys: Sequence[str] | None, wanted: Callable[[int], bool]
) -> Iterator[tuple[str, _Record, int]]:
    """Yield (place, record if it is wanted, position) of all sources."""
    first = start = 0

    def is_wanted(number: int) -> bool:
        return wanted(first + number)

    for source in files:
        count = 0
        for where, record, offset in read_objects(source, reading, keys, is_wanted):
            count += 1
            yield f"{source.path} {where}", record, start + offset
        first, start = first + count, start + source.bytes


def _parsed(
    record: dict[str, object] | BadRecordError,
    parse: Callable[[Mapping[str, object]], ChatRow],
    kind: tuple[Kind, str] | None,
) -> ChatRow:
    if isinstance(record, BadRecordError):
        raise BadRow(str(record))
    row = parse(record)
    if kind is not None and row.kind != kind[0]:
        raise BadRow(f"{KINDS[row.kind]}, but {kind[1]} is {KINDS[kind[0]]}")
    return row


@dataclass
class BatchEncoder:
    """Renders and encodes batches of rows."""

    maker: SampleMaker
    encoder: SampleEncoder

    def encode(self, batch: RowBatch) -> EncodedBatch:
        """Return the samples of a batch, and the rows that have none."""
        rows = _with_other_answers(batch)
        kind: Kind = rows[0].row.kind if rows else "chat"
        refused = list(batch.refused)
        results = iter(make_samples(self.maker, [c for placed in rows for c in placed.row.conversations]))
        rendered = [(placed, [next(results) for _ in placed.row.conversations]) for placed in rows]
        flat = [
            sample
            for _, conversations in rendered
            for samples in conversations
            if not isinstance(samples, Refused)
            for sample in samples
        ]
        encoded = iter(self.encoder.encode_all(flat))
        units: list[EncodedUnit] = []
        for placed, conversations in rendered:
            samples = [
                result if isinstance(result, Refused) else [part for _ in result for part in next(encoded)]
                for result in conversations
            ]
            reason = _why_unusable(samples, kind)
            if reason is not None:
                refused.append(Refusal(placed.number, placed.where, reason))
            else:
                units += _units([entry for entry in samples if not isinstance(entry, Refused)], placed.row)
        return EncodedBatch(kind, units, sorted(refused), batch.position)


def _with_other_answers(batch: RowBatch) -> list[PlacedRow]:
    if not batch.rows or batch.rows[0].row.kind != "labelled":
        return batch.rows
    answered = with_other_answers([placed.row for placed in batch.rows], batch.before)
    return [placed._replace(row=row) for placed, row in zip(batch.rows, answered, strict=True)]


def _units(conversations: list[list[EncodedSample]], row: ChatRow) -> list[EncodedUnit]:
    """Return a row's samples as they are stored: two conversations together, several samples of one by themselves."""
    if len(conversations) == 2:
        return [EncodedUnit([samples[0] for samples in conversations], True, row.weight, row.desirable)]
    return [
        EncodedUnit([sample], number == 0, row.weight, row.desirable, row.line)
        for number, sample in enumerate(conversations[0])
    ]


def _why_unusable(conversations: Sequence[list[EncodedSample] | Refused], kind: Kind) -> str | None:
    """Return why the conversations of a row cannot be trained on."""
    for samples in conversations:
        if isinstance(samples, Refused):
            return samples.reason
        for sample in samples:
            if kind == "prompts":
                if not sample.length:
                    return "the prompt has no tokens"
            elif not any(trained for _, _, _, trained in sample.spans):
                return "an assistant turn has no tokens"
    if len(conversations) == 2:
        first, second = conversations
        assert not isinstance(first, Refused), "which was returned above"
        assert not isinstance(second, Refused), "which was returned above"
        if len(first) != 1 or len(second) != 1:
            return "the answers have several turns, which this template does not write as one text"
        if kind == "pairs" and np.array_equal(np.concatenate(first[0].ids), np.concatenate(second[0].ids)):
            return "chosen and rejected have equal tokens"
    return None
