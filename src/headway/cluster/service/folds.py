"""Bounded starts: now and then the state is stored that the record leads to, and older lines move to files.

A fold is made by a process of its own from the fold before it and the lines since, while the service goes on. Two are
kept: if the newest is damaged, the one before it serves. Lines that only the older one still needs move to compressed
files, each with the checksums that tie it to the file before it and to the database, so that the whole history can be
read and decided again.
"""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from sqlalchemy import delete, func, insert, select

from headway.cluster.service.decider import DeciderProcess
from headway.cluster.service.record_lines import Fold
from headway.cluster.service.store import DamagedRecord, ServiceStore, checksum
from headway.cluster.service.tables import folds, record
from headway.errors import UsageError

EVERY_LINES = 20_000
"""Lines from one fold to the next: at most twice as many are read at a start."""
CHUNK = 10_000
"""Lines that are read at a time."""


def take_fold(store: ServiceStore) -> Fold | None:
    """Store the state that the record leads to now; None if it has no new lines."""
    with store.lock:
        lines, seq, digest = store.lines, len(store.lines), store.sum
        at, cluster = lines.last_at, lines.cluster
    if cluster is None or seq == lines.first:
        return None
    decider = DeciderProcess()
    try:
        state = decider.fold(lines, seq)
    finally:
        decider.close()
    fold = Fold(seq, at, digest, cluster, state)
    row = {"seq": seq, "at": at, "sum": digest, "cluster": json.dumps(cluster), "state": state}
    with store.write() as transaction:
        transaction.execute(insert(folds), [row | {"digest": xxhash.xxh3_64(state).hexdigest()}])
    with store.lock:
        store.lines.fold_until(fold)
    return fold


def move_history(store: ServiceStore, folder: Path) -> Path | None:
    """Move the lines before the older of the newest two folds to a file; None if there are none."""
    with store.read() as connection:
        kept = connection.execute(select(folds.c.seq).order_by(folds.c.seq.desc()).limit(2)).scalars().all()
        first = connection.execute(select(func.min(record.c.seq))).scalar()
        if len(kept) < 2 or first is None or first > kept[1]:
            return None
        last = kept[1]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{first:010}-{last:010}.jsonl.gz"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as raw, gzip.open(raw, "wt", encoding="utf-8", compresslevel=6) as file:
            for begin in range(first, last + 1, CHUNK):
                some = record.c.seq.between(begin, min(begin + CHUNK - 1, last))
                for row in connection.execute(select(record).where(some).order_by(record.c.seq)):
                    file.write(json.dumps([row.seq, row.line, row.sum]) + "\n")
            file.close()
            raw.flush()
            os.fsync(raw.fileno())
    partial.replace(path)
    with store.write() as transaction:
        transaction.execute(delete(record).where(record.c.seq <= last))
        transaction.execute(delete(folds).where(folds.c.seq < last))
    return path


def read_history(store: ServiceStore, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield all lines from the very first, from files and database; DamagedRecord where the chain is broken."""
    seq, digest = 0, ""
    for number, line, own in _stored(store, folder):
        if number <= seq:  # moved, and not yet removed from the database
            continue
        if number != seq + 1 or checksum(digest, line) != own:
            raise DamagedRecord(f"line {seq + 1} of the record is damaged or missing", hint=f"see {folder}")
        seq, digest = number, own
        yield json.loads(line)


def _stored(store: ServiceStore, folder: Path) -> Iterator[tuple[int, str, str]]:
    for path in sorted(folder.glob("*.jsonl.gz")):
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for text in file:
                    number, line, own = json.loads(text)
                    yield number, line, own
        except (OSError, EOFError, ValueError) as error:
            raise UsageError(f"{path} is not a part of a record, or damaged: {error}") from None
    with store.read() as connection:
        for row in connection.execute(select(record).order_by(record.c.seq)):
            yield row.seq, row.line, row.sum
