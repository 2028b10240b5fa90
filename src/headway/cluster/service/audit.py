"""The audit log: who changed what, written in the transaction of the change.

Whoever acts for a request says so once; the first transaction that commits for it carries its entry. So there is no
change of a user without an entry, and no entry of a change that did not happen. Refused requests have entries, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from headway.cluster.service.tables import audit

LONGEST_TARGET = 400


@dataclass
class Action:
    """What a user does by one request."""

    user: str
    token: str
    tenant: str | None
    action: str
    """Method and route."""
    target: str
    """Path of the request."""
    at: float
    detail: str = ""
    recorded: bool = False
    """Whether its entry has been committed."""

    def entry(self, outcome: str = "done") -> dict[str, Any]:
        """The row of the audit log."""
        return {
            "at": self.at,
            "user": self.user,
            "token": self.token,
            "tenant": self.tenant,
            "action": self.action,
            "target": self.target[:LONGEST_TARGET],
            "detail": self.detail if outcome == "done" else self.detail[:LONGEST_TARGET],
            "outcome": outcome,
        }


_CURRENT: ContextVar[Action | None] = ContextVar("action", default=None)


@contextmanager
def acting(action: Action) -> Iterator[None]:
    """What is written in this context is written for this action."""
    token = _CURRENT.set(action)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def describe(detail: str) -> None:
    """Say what the current action changes; never a secret."""
    action = _CURRENT.get()
    if action is not None:
        action.detail = detail


def unrecorded_action() -> Action | None:
    """The current action, if no transaction has committed its entry yet."""
    action = _CURRENT.get()
    return None if action is None or action.recorded else action


def current_action() -> Action | None:
    """What the request that is being answered does; None for one that only reads."""
    return _CURRENT.get()


def list_audit(
    connection: Connection, tenants: frozenset[str] | None, after: int | None, limit: int
) -> list[dict[str, Any]]:
    """Entries of the users of some tenants (None: all), oldest first: those after a number, else the newest."""
    query = select(audit) if tenants is None else select(audit).where(audit.c.tenant.in_(tenants))
    if after is None:
        rows = connection.execute(query.order_by(audit.c.seq.desc()).limit(limit)).all()[::-1]
    else:
        rows = connection.execute(query.where(audit.c.seq > after).order_by(audit.c.seq).limit(limit)).all()
    return [dict(row._mapping) for row in rows]
