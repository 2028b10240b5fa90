"""Writes of several callers in one transaction: a commit waits for the disk, however little it writes.

Callers that come while a transaction is being committed are all taken by the next one. Each has its part of it, with
its own entry in the audit log: what one cannot do leaves nothing, and does not concern the others.
"""

import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from headway.cluster.service.audit import Action
from headway.cluster.service.store import ServiceStore, Transaction
from headway.cluster.service.tables import database_error
from headway.errors import HeadwayError

T = TypeVar("T")
MOST_TOGETHER = 32
"""Callers of one transaction: others must get their turn."""


@dataclass
class _Write:
    """What a caller wants written, and what became of it."""

    act: Callable[[Transaction], Any]
    context: Context = field(default_factory=copy_context)
    """Of the caller: who acts for the audit log."""
    value: Any = None
    error: BaseException | None = None
    over: bool = False


class GroupCommit:
    """Takes writes of many threads to a store."""

    def __init__(self, store: ServiceStore) -> None:
        self._store, self._lock = store, threading.Lock()
        self._waiting: list[_Write] = []

    def run(self, act: Callable[[Transaction], T]) -> T:
        """Do something in a transaction, and return its value once that is committed."""
        write = _Write(act)
        with self._lock:
            self._waiting.append(write)
        with self._store.lock:  # whoever gets it commits for those who wait for it
            while not write.over:
                with self._lock:
                    writes, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
                Context().run(self._commit, writes)  # each part has its own action, and the whole none
        if write.error is not None:
            raise write.error
        value: T = write.value
        return value

    def _commit(self, writes: list[_Write]) -> None:
        """Commit writes together; all are over then, done or not."""
        actions = list[Action]()
        try:
            with self._store.write() as transaction:
                for write in writes:
                    try:
                        with transaction.part():
                            actions += write.context.run(_act, write, transaction)
                    except (HeadwayError, SQLAlchemyError) as error:
                        if transaction.lost:
                            raise
                        write.error = database_error(error) if isinstance(error, SQLAlchemyError) else error
            for action in actions:
                action.recorded = True
        except BaseException as error:  # for each caller to raise, also for those of other threads
            for write in writes:
                write.error = write.error or error
        for write in writes:
            write.over = True


def _act(write: _Write, transaction: Transaction) -> list[Action]:
    write.value = write.act(transaction)
    action = transaction.note_action()
    return [] if action is None else [action]
