"""Secrets of tenants and jobs: in the database only encrypted, under a key that is kept elsewhere (secret_keys.py).

Each value is sealed with AES-256-GCM for its owner and name, so that whoever can write to the database can neither read
a value nor hand one to another tenant's job. Values leave the service in the orders of the node that starts a job.
A job gets those of its tenant and of the tenants above it; the nearest counts. A lineage is a tenant and those above.
"""

import base64
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import Connection, Row, and_, delete, insert, select, update

from headway.cluster.service.audit import describe
from headway.cluster.service.store import Transaction
from headway.cluster.service.tables import job_secrets, jobs, tenant_secrets
from headway.errors import UsageError

KEY_BYTES, NONCE_BYTES = 32, 12
MOST_BYTES = 64 * 1024
"""Of one value."""
Reader: TypeAlias = Connection | Transaction


@dataclass(frozen=True)
class Resealed:
    """What a change of the key has come to."""

    tenants: int
    """Secrets of tenants that are sealed with the new key."""
    jobs: int
    """The same, of jobs."""
    unreadable: int
    """Those that no known key opens: they stay as they are."""


class SecretStore:
    """Seals values, and opens them for the nodes that need them."""

    def __init__(self, key: bytes, former: Sequence[bytes] = ()) -> None:
        """`former` are keys that open what was sealed before."""
        self._ciphers = tuple(map(AESGCM, (key, *former)))
        """The first seals."""

    # -- keys

    def use(self, key: bytes) -> None:
        """Seal with a key from now on; what others have sealed can still be opened."""
        self._ciphers = (AESGCM(key), *self._ciphers)

    def accept(self, key: bytes) -> None:
        """Open what a key has sealed, too."""
        self._ciphers = (*self._ciphers, AESGCM(key))

    def reseal(self, transaction: Transaction, key: bytes) -> Resealed:
        """Seal everything that is stored with a key."""
        counts = {True: 0, False: 0}
        unreadable, cipher = 0, AESGCM(key)
        for table, columns in ((tenant_secrets, ("tenant", "name")), (job_secrets, ("job",))):
            for row in transaction.execute(select(table)).all():
                owner = _of_tenant(row.tenant, row.name) if table is tenant_secrets else self._owner(transaction, row)
                try:
                    sealed = _seal(cipher, owner, self._open(owner, row.sealed))
                except InvalidTag:
                    unreadable += 1
                    continue
                mine = and_(*(table.c[column] == row._mapping[column] for column in columns))
                transaction.execute(update(table).where(mine).values(sealed=sealed))
                counts[table is tenant_secrets] += 1
        return Resealed(counts[True], counts[False], unreadable)

    @staticmethod
    def _owner(transaction: Transaction, row: Row[Any]) -> str:
        """Whom the values of a job are sealed for."""
        tenant = transaction.execute(select(jobs.c.tenant).where(jobs.c.id == row.job)).scalar()
        return _of_job(row.job, tenant or "")

    # -- of tenants

    def set(self, transaction: Transaction, tenant: str, name: str, value: str, *, user: str, now: float) -> None:
        """Add or replace a tenant's secret."""
        if not value or len(value.encode()) > MOST_BYTES:
            raise UsageError(f"secret {name}: the value is empty or larger than {MOST_BYTES // 1024} KiB")
        describe(f"secret {name} of tenant {tenant}")
        mine = (tenant_secrets.c.tenant == tenant) & (tenant_secrets.c.name == name)
        values = {"sealed": self._seal(_of_tenant(tenant, name), value), "changed": now, "user": user}
        if not transaction.execute(update(tenant_secrets).where(mine).values(values)).rowcount:
            transaction.execute(insert(tenant_secrets).values(tenant=tenant, name=name, **values))

    def remove(self, transaction: Transaction, tenant: str, name: str) -> bool:
        """Remove a tenant's secret; False if there is none."""
        describe(f"secret {name} of tenant {tenant}")
        mine = (tenant_secrets.c.tenant == tenant) & (tenant_secrets.c.name == name)
        return bool(transaction.execute(delete(tenant_secrets).where(mine)).rowcount)

    # -- of jobs

    def keep(self, transaction: Transaction, jobs: Sequence[str], tenant: str, values: Mapping[str, str]) -> None:
        """Keep values that came with a submission, for each of its jobs."""
        if values:
            text = json.dumps(dict(values))
            rows = [{"job": job, "sealed": self._seal(_of_job(job, tenant), text)} for job in jobs]
            transaction.execute(insert(job_secrets), rows)

    def values(
        self, connection: Connection, job: str, lineage: Sequence[str], names: Sequence[str]
    ) -> dict[str, str] | None:
        """The values that a job is to have: those it was submitted with, else those of its lineage; None if one is
        missing or cannot be opened."""
        given = connection.execute(select(job_secrets.c.sealed).where(job_secrets.c.job == job)).scalar()
        try:
            values = {
                row.name: self._open(_of_tenant(row.tenant, row.name), row.sealed)
                for row in _nearest(connection, lineage, names)
            }
            values |= {} if given is None else json.loads(self._open(_of_job(job, lineage[0]), given))
        except InvalidTag:
            return None
        return {name: values[name] for name in names} if set(names) <= set(values) else None

    # -- sealing

    def _seal(self, owner: str, value: str) -> str:
        return _seal(self._ciphers[0], owner, value)

    def _open(self, owner: str, sealed: str) -> str:
        raw = base64.b64decode(sealed)
        for cipher in self._ciphers:
            with suppress(InvalidTag):
                return cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], owner.encode()).decode()
        raise InvalidTag


def _seal(cipher: AESGCM, owner: str, value: str) -> str:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return base64.b64encode(nonce + cipher.encrypt(nonce, value.encode(), owner.encode())).decode()


def drop_job_secrets(transaction: Transaction, job: str) -> None:
    """Forget the values of a job that is over."""
    transaction.execute(delete(job_secrets).where(job_secrets.c.job == job))


def missing_secrets(
    connection: Reader, lineage: Sequence[str], names: Sequence[str], values: Mapping[str, str]
) -> list[str]:
    """The names that neither a submission nor its tenant or one above has a value for."""
    stored = {row.name for row in _nearest(connection, lineage, names)}
    return [name for name in names if name not in values and name not in stored]


def list_secrets(connection: Connection, tenants: Collection[str] | None) -> list[dict[str, Any]]:
    """The names of the secrets of some tenants (None: all), and who set them when; no values."""
    columns = [tenant_secrets.c[key] for key in ("tenant", "name", "changed", "user")]
    query = select(*columns).order_by(tenant_secrets.c.tenant, tenant_secrets.c.name)
    if tenants is not None:
        query = query.where(tenant_secrets.c.tenant.in_(tenants))
    return [dict(row._mapping) for row in connection.execute(query)]


def list_inherited(connection: Connection, lineage: Sequence[str]) -> list[dict[str, Any]]:
    """The secrets that a tenant has from those above it, without a word of whose they are."""
    return [
        {"tenant": lineage[0], "name": row.name, "changed": row.changed, "user": "", "inherited": True}
        for row in _nearest(connection, lineage)
        if row.tenant != lineage[0]
    ]


def _nearest(connection: Reader, lineage: Sequence[str], names: Sequence[str] | None = None) -> list[Row[Any]]:
    """The secrets of a lineage, the nearest of each name (None: all names), by name."""
    query = select(tenant_secrets).where(tenant_secrets.c.tenant.in_(lineage))
    rows = connection.execute(query if names is None else query.where(tenant_secrets.c.name.in_(names))).all()
    rows = sorted(rows, key=lambda row: (row.name, lineage.index(row.tenant)))
    return [next(same) for _, same in groupby(rows, key=lambda row: row.name)]


def _of_tenant(tenant: str, name: str) -> str:
    return json.dumps(["tenant", tenant, name])


def _of_job(job: str, tenant: str) -> str:
    return json.dumps(["job", job, tenant])
