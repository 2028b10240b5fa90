"""Users and their tokens, in the database, and in memory for the look-up that each request makes.

One service writes to a database at a time, so what it remembers is what is there.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import delete, insert, select, update

from headway.cluster.service.audit import Action, describe
from headway.cluster.service.roles import SCOPES, Principal, Role, Scope
from headway.cluster.service.store import ServiceStore
from headway.cluster.service.tables import audit, tokens, users
from headway.cluster.service.tokens import Token, digest, new_token
from headway.errors import Forbidden, UsageError

FIRST = "admin"
"""The user of the token that `headway up` makes."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class User:
    """Somebody who may use the service."""

    name: str
    role: Role
    tenant: str | None
    created: float


class Accounts:
    """Who may use a service."""

    def __init__(self, store: ServiceStore, clock: Callable[[], float]) -> None:
        """`clock` returns Unix seconds."""
        self._store, self._clock = store, clock
        self._users: dict[str, User] = {}
        self._tokens: dict[str, Token] = {}
        """By digest."""
        self._load()

    def _load(self) -> None:
        with (
            self._store.lock,
            self._store.read() as connection,
        ):  # no older rows from a concurrent load
            self._users = {
                row.name: User(row.name, row.role, row.tenant, row.created) for row in connection.execute(select(users))
            }
            self._tokens = {
                row.digest: Token(
                    row.id, row.user, row.label, tuple(json.loads(row.scopes)), row.created, row.expires, row.revoked
                )
                for row in connection.execute(select(tokens))
            }

    def authenticate(self, token: str) -> Principal | None:
        """The user behind a token; None if it is unknown, expired or revoked."""
        known = self._tokens.get(digest(token))
        user = None if known is None else self._users.get(known.user)
        if known is None or user is None or not known.valid(self._clock()):
            return None
        return Principal(user.name, user.role, user.tenant, frozenset(known.scopes), known.id, known.expires)

    def admit_first(self, token: str) -> bool:
        """Let the token of the service's own folder act for the first admin; False if it was revoked."""
        known = self._tokens.get(digest(token))
        if known is not None:
            return known.revoked is None
        now = self._clock()
        with self._store.write() as transaction:
            if FIRST not in self._users:
                transaction.execute(insert(users).values(name=FIRST, role="admin", tenant=None, created=now))
            first = Token(secrets.token_hex(4), FIRST, "headway up", SCOPES, now, None)
            transaction.execute(insert(tokens).values(_row(first, token)))
        self._load()
        return True

    def note_refusal(self, action: Action) -> None:
        """Write that a request was refused to the audit log."""
        with self._store.write() as transaction:
            transaction.execute(insert(audit).values(action.entry("refused")))

    # -- users

    def users(self, visible: frozenset[str] | None) -> list[User]:
        """The users of some tenants (None: all)."""
        return sorted(
            (user for user in self._users.values() if visible is None or user.tenant in visible),
            key=lambda user: user.name,
        )

    def user(self, name: str, visible: frozenset[str] | None) -> User:
        """A user of some tenants; UsageError if there is none."""
        user = self._users.get(name)
        if user is None or (visible is not None and user.tenant not in visible):
            unknown = UsageError if visible is None else Forbidden  # it may be another tenant's
            raise unknown(f"no user '{name}'", hint="headway users lists them")
        return user

    def known(self, name: str) -> bool:
        """Whether somebody has this name, in whatever tenant."""
        return name in self._users

    def set_user(self, name: str, role: Role, tenant: str | None) -> User:
        """Add a user, or change its role and tenant, which its tokens follow at once."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"invalid user name {name!r}", hint="at most 64 letters, digits, dots, dashes, underscores"
            )
        self._check_admin_remains(name, role)
        describe(f"{role} of {tenant}" if tenant else role)
        values = {"role": role, "tenant": tenant}
        with self._store.write() as transaction:
            if not transaction.execute(update(users).where(users.c.name == name).values(values)).rowcount:
                transaction.execute(insert(users).values(name=name, created=self._clock(), **values))
        self._load()
        return self._users[name]

    def remove_user(self, name: str) -> None:
        """Remove a user and its tokens; its jobs go on."""
        self._check_admin_remains(name, None)
        with self._store.write() as transaction:
            transaction.execute(delete(tokens).where(tokens.c.user == name))
            transaction.execute(delete(users).where(users.c.name == name))
        self._load()

    def _check_admin_remains(self, name: str, role: Role | None) -> None:
        others = [user for user in self._users.values() if user.role == "admin" and user.name != name]
        if role != "admin" and name in self._users and self._users[name].role == "admin" and not others:
            raise UsageError(f"'{name}' is the only admin", hint="make another user admin first")

    # -- tokens

    def tokens(self, owners: Iterable[str]) -> list[Token]:
        """The tokens of users, newest first; those that cannot be used any more, too."""
        names = set(owners)
        mine = [token for token in self._tokens.values() if token.user in names]
        return sorted(mine, key=lambda token: (-token.created, token.id))

    def issue(self, user: str, scopes: tuple[Scope, ...], label: str, lifetime_s: float) -> tuple[Token, str]:
        """Make a token for a user. The token itself is returned once, and kept nowhere."""
        text, now = new_token(), self._clock()
        token = Token(secrets.token_hex(4), user, label, scopes, now, now + lifetime_s)
        describe(f"token {token.id} of {user}, scopes {', '.join(scopes)}")
        with self._store.write() as transaction:
            transaction.execute(insert(tokens).values(_row(token, text)))
        self._load()
        return token, text

    def revoke(self, token: str) -> None:
        """End a token: the next request with it is refused."""
        with self._store.write() as transaction:
            mine = (tokens.c.id == token) & tokens.c.revoked.is_(None)
            transaction.execute(update(tokens).where(mine).values(revoked=self._clock()))
        self._load()


def _row(token: Token, text: str) -> dict[str, Any]:
    return asdict(token) | {"scopes": json.dumps(token.scopes), "digest": digest(text)}
