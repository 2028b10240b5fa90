"""The service's database: transactions, fenced by an epoch, and the record with a checksum per line.

Each transaction first proves that no newer service has taken over the database. Lines of the record are written in the
transaction of the change that they describe, so the tables and the record never disagree.
"""

import json
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import xxhash
from sqlalchemy import Connection, Engine, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from headway.cluster.service.audit import Action, unrecorded_action
from headway.cluster.service.faults import WritePoints
from headway.cluster.service.record_lines import Fold, RecordLines
from headway.cluster.service.tables import FORMAT, audit, database_error, facts, folds, record
from headway.errors import EngineError


class Superseded(EngineError):
    """A newer service has taken over the database."""


class DamagedRecord(EngineError):
    """A line of the record is not as it was written."""


class ServiceStore:
    """Transactions on a database, by one service at a time."""

    def __init__(self, engine: Engine, points: WritePoints | None = None) -> None:
        """Take over the database: services before this one can write no more."""
        self._engine, self._points = engine, points or WritePoints()
        self.lock = threading.RLock()
        with self.lock, self._guarded(), engine.begin() as connection:
            known = {row.name: row.value for row in connection.execute(select(facts))}
            if not known:
                known = {"format": str(FORMAT), "cluster": secrets.token_hex(8), "epoch": "0"}
                connection.execute(insert(facts), [{"name": name, "value": value} for name, value in known.items()])
            if known["format"] != str(FORMAT):
                raise EngineError(
                    f"the database has format {known['format']}, this version reads {FORMAT}",
                    hint="use the version of Headway that wrote it",
                )
            self.cluster, self.epoch = known["cluster"], int(known["epoch"]) + 1
            connection.execute(update(facts).where(facts.c.name == "epoch").values(value=str(self.epoch)))
            fold = _newest_fold(connection)
            after = 0 if fold is None else fold.seq
            columns = select(record.c.seq, record.c.line, record.c.sum)
            rows = connection.execute(columns.where(record.c.seq > after).order_by(record.c.seq)).all()
        self._points.reach("epoch taken")
        self.lines = RecordLines(fold)
        """The record, in order."""
        self.sum, self._in_doubt = "" if fold is None else fold.sum, False
        """Checksum of its last line."""
        self._append(rows)

    def _append(self, rows: Sequence[Any]) -> None:
        """Check lines that were read, and remember them."""
        for seq, line, digest in rows:
            if seq != len(self.lines) + 1 or checksum(self.sum, line) != digest:
                raise DamagedRecord(
                    f"line {len(self.lines) + 1} of the record is damaged or missing",
                    hint="restore the database from a backup",
                )
            self.sum = digest
            self.lines.extend([json.loads(line)])

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with self._guarded(), self._engine.connect().execution_options(reads=True) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator["Transaction"]:
        """A transaction: it is committed as a whole at the end, or leaves nothing."""
        with self.lock, self._guarded():
            with self._engine.begin() as connection:
                mine = (facts.c.name == "epoch") & (facts.c.value == str(self.epoch))
                if not connection.execute(update(facts).where(mine).values(value=facts.c.value)).rowcount:
                    raise Superseded("a newer service has taken over the database", hint="stop this one")
                if self._in_doubt:  # the last commit failed, and may have happened all the same
                    columns = select(record.c.seq, record.c.line, record.c.sum)
                    later = columns.where(record.c.seq > len(self.lines)).order_by(record.c.seq)
                    self._append(connection.execute(later).all())
                self._in_doubt = True
                transaction = Transaction(connection, self.sum, len(self.lines))
                yield transaction
                action = transaction.note_action()
                self._points.reach("before commit")
            if action is not None:
                action.recorded = True
            self.sum, self._in_doubt = transaction.sum, False
            self.lines.extend(transaction.lines)
            self._points.reach("after commit")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise database_error(error) from error

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


class Transaction:
    """A transaction, and the lines that it adds to the record."""

    def __init__(self, connection: Connection, digest: str, count: int) -> None:
        self.execute, self._connection = connection.execute, connection
        self.sum, self._count = digest, count
        self.lines: list[dict[str, Any]] = []
        self.lost = False
        """Whether the database has ended it: nothing more may be written."""
        self.nodes = set[str]()
        """Nodes that must hear of it."""

    def add_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to the record."""
        rows = []
        for line in lines:
            text = json.dumps(line, separators=(",", ":"), allow_nan=False)
            self._count += 1
            self.sum = checksum(self.sum, text)
            rows.append({"seq": self._count, "line": text, "sum": self.sum})
            self.lines.append(json.loads(text))
        if rows:
            self.execute(insert(record), rows)

    def note_action(self) -> Action | None:
        """Add the entry of the current action to the audit log, and return the action; None if it needs none."""
        action = unrecorded_action()
        if action is not None:
            self.execute(insert(audit), [action.entry()])
        return action

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part of the transaction: if it fails, nothing of it is left, and the others are not concerned."""
        digest, count, lines, nodes = self.sum, self._count, len(self.lines), set(self.nodes)
        nested = self._connection.begin_nested()
        try:
            yield
            nested.commit()
        except BaseException:
            self.sum, self._count, self.nodes = digest, count, nodes
            del self.lines[lines:]
            try:
                nested.rollback()
            except SQLAlchemyError:  # SQLite, if its disk is full
                self.lost = True
            raise


def _newest_fold(connection: Connection) -> Fold | None:
    """Return the newest fold that is as it was written."""
    for row in connection.execute(select(folds).order_by(folds.c.seq.desc())):
        if xxhash.xxh3_64(row.state).hexdigest() == row.digest:
            return Fold(row.seq, row.at, row.sum, json.loads(row.cluster), row.state)
    return None


def checksum(before: str, line: str) -> str:
    """The checksum of a line: it covers the one before, so that no line can be changed or removed unnoticed."""
    return xxhash.xxh3_64(f"{before}\n{line}".encode()).hexdigest()
