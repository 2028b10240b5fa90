"""The key of stored secrets: from a variable, else from a private file; it can be replaced at any time.

<service>/secrets.key        the key
<service>/secrets.key.next   while it is replaced: written before the database, which then says which of the two counts

The database has the id of the key that its values are sealed with, never the key. A start that finds both files seals
everything with the one that counts, and only then removes the other: whichever write was the last before a crash, each
value can be opened.
"""

import base64
import binascii
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, insert, select, update

from headway.cluster.engines.scripts import replace_file
from headway.cluster.service.audit import describe
from headway.cluster.service.faults import WritePoints
from headway.cluster.service.secret_store import KEY_BYTES, Resealed, SecretStore
from headway.cluster.service.store import ServiceStore, Transaction
from headway.cluster.service.tables import facts
from headway.errors import UsageError
from headway.track.files import make_durable

KEY_FILE, NEXT_FILE = "secrets.key", "secrets.key.next"
VARIABLE, OLD_VARIABLE = "HEADWAY_SECRETS_KEY", "HEADWAY_SECRETS_OLD_KEY"
_FACT = "secrets key"


class SecretKeys:
    """The key of a service, and the secrets that are sealed with it."""

    def __init__(
        self,
        folder: Path,
        store: ServiceStore,
        points: WritePoints | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Read the key, or make one. Variables are not inherited by this process's children. `note` is told if stored
        secrets were sealed with another key."""
        self._file, self._next, self._store = folder / KEY_FILE, folder / NEXT_FILE, store
        self._points = points or WritePoints()
        stated, old = os.environ.pop(VARIABLE, None), os.environ.pop(OLD_VARIABLE, None)
        self._stated = stated is not None
        if stated is not None:
            key = _decode(stated, f"${VARIABLE}")
            self.secrets = SecretStore(key)
            if old is not None:
                self._seal_all(key, _decode(old, f"${OLD_VARIABLE}"))
        else:
            if not self._file.exists() and not self._next.exists():
                _write(self._file, secrets.token_bytes(KEY_BYTES))
            key = self._counting()
            self.secrets = SecretStore(key)
            self._settle()
        with store.read() as connection:
            recorded = _recorded(connection)
        if recorded not in (None, key_id(key)):
            note("stored secrets are sealed with another key: jobs that need them cannot start")

    def rekey(self) -> Resealed:
        """Seal everything with a new key."""
        if self._stated:
            raise UsageError(
                f"the key of secrets is in ${VARIABLE}",
                hint=f"restart headway up with a new one there, and this one in ${OLD_VARIABLE}",
            )
        with self._store.lock:  # nothing is sealed between the two
            self._settle()  # the last change may have been broken off
            key = secrets.token_bytes(KEY_BYTES)
            _write(self._next, key)
            self._points.reach("key written")
            self.secrets.accept(key)
            counts = self._seal_all(key)
            self._points.reach("sealed with the key")
            self._next.replace(self._file)
            make_durable(self._file.parent)
            self._points.reach("key replaced")
        return counts

    def _counting(self) -> bytes:
        """Return the key that the database names, if there are two."""
        keys = self._in_files()
        with self._store.read() as connection:
            recorded = _recorded(connection)
        return next((key for key in keys if key_id(key) == recorded), keys[0])

    def _settle(self) -> None:
        """Seal everything with the key that counts, and remove the other one, if there are two."""
        if not self._next.exists():
            return
        key, keys = self._counting(), self._in_files()
        self._seal_all(key, *keys)
        self._next.replace(self._file) if key == keys[-1] else self._next.unlink()

    def _in_files(self) -> list[bytes]:
        """Return the keys of both files, of those that are there."""
        return [_decode(file.read_text(), str(file)) for file in (self._file, self._next) if file.exists()]

    def _seal_all(self, key: bytes, *former: bytes) -> Resealed:
        for other in former:
            self.secrets.accept(other)
        with self._store.write() as transaction:
            counts = self.secrets.reseal(transaction, key)
            _record(transaction, key_id(key))
            describe(f"key of {counts.tenants} secrets of tenants and those of {counts.jobs} jobs")
        self.secrets.use(key)
        return counts


def key_id(key: bytes) -> str:
    """What tells keys apart, and nothing about them."""
    return hashlib.sha256(b"headway secrets key:" + key).hexdigest()[:32]


def _decode(text: str, where: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{where} is no key", hint="32 bytes in Base64, for example openssl rand -base64 32")
    return key


def _write(file: Path, key: bytes) -> None:
    """Write a key so that it outlives a power failure: values are sealed with it right after."""
    replace_file(file, base64.b64encode(key).decode() + "\n", private=True)
    make_durable(file)
    make_durable(file.parent)


def _recorded(connection: Connection) -> str | None:
    known: str | None = connection.execute(select(facts.c.value).where(facts.c.name == _FACT)).scalar()
    return known


def _record(transaction: Transaction, name: str) -> None:
    if not transaction.execute(update(facts).where(facts.c.name == _FACT).values(value=name)).rowcount:
        transaction.execute(insert(facts).values(name=_FACT, value=name))
