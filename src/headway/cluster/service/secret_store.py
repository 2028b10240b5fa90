"""Secrets of tenants and jobs: in the database only encrypted, under a key that is kept elsewhere.

Each value is sealed with AES-256-GCM for its owner and name, so that whoever can write to the database can neither read
a value nor hand one to another tenant's job. Values leave the service in the orders of the node that starts a job.
"""

import base64
import binascii
import json
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import Connection, delete, insert, select, update

from headway.cluster.engines.scripts import replace_file
from headway.cluster.service.audit import describe
from headway.cluster.service.store import Transaction
from headway.cluster.service.tables import job_secrets, tenant_secrets
from headway.errors import UsageError

KEY_FILE, VARIABLE = "secrets.key", "HEADWAY_SECRETS_KEY"
KEY_BYTES, NONCE_BYTES = 32, 12
MOST_BYTES = 64 * 1024
"""Of one value."""


def secrets_key(folder: Path) -> bytes:
    """The key of a service: from $HEADWAY_SECRETS_KEY, which its children do not inherit, else from a private file."""
    stated, file = os.environ.pop(VARIABLE, None), folder / KEY_FILE
    if stated is not None:
        return _decode(stated, f"${VARIABLE}")
    if not file.exists():
        replace_file(file, base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode() + "\n", private=True)
    return _decode(file.read_text(), str(file))


def _decode(text: str, where: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{where} is no key", hint="32 bytes in Base64, for example openssl rand -base64 32")
    return key


class SecretStore:
    """Seals values, and opens them for the nodes that need them."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

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

    def values(self, connection: Connection, job: str, tenant: str, names: Sequence[str]) -> dict[str, str] | None:
        """The values that a job is to have: those it was submitted with, else its tenant's; None if one is missing or
        cannot be opened."""
        given = connection.execute(select(job_secrets.c.sealed).where(job_secrets.c.job == job)).scalar()
        mine = (tenant_secrets.c.tenant == tenant) & tenant_secrets.c.name.in_(names)
        stored = connection.execute(select(tenant_secrets).where(mine)).all()
        try:
            values = {row.name: self._open(_of_tenant(tenant, row.name), row.sealed) for row in stored}
            values |= {} if given is None else json.loads(self._open(_of_job(job, tenant), given))
        except InvalidTag:
            return None
        return {name: values[name] for name in names} if set(names) <= set(values) else None

    # -- sealing

    def _seal(self, owner: str, value: str) -> str:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return base64.b64encode(nonce + self._cipher.encrypt(nonce, value.encode(), owner.encode())).decode()

    def _open(self, owner: str, sealed: str) -> str:
        raw = base64.b64decode(sealed)
        return self._cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], owner.encode()).decode()


def drop_job_secrets(transaction: Transaction, job: str) -> None:
    """Forget the values of a job that is over."""
    transaction.execute(delete(job_secrets).where(job_secrets.c.job == job))


def missing_secrets(connection: Any, tenant: str, names: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The names that neither a submission nor its tenant has a value for."""
    mine = (tenant_secrets.c.tenant == tenant) & tenant_secrets.c.name.in_(names)
    stored = set(connection.execute(select(tenant_secrets.c.name).where(mine)).scalars())
    return [name for name in names if name not in values and name not in stored]


def list_secrets(connection: Connection, tenants: Collection[str] | None) -> list[dict[str, Any]]:
    """The names of the secrets of some tenants (None: all), and who set them when; no values."""
    columns = [tenant_secrets.c[key] for key in ("tenant", "name", "changed", "user")]
    query = select(*columns).order_by(tenant_secrets.c.tenant, tenant_secrets.c.name)
    if tenants is not None:
        query = query.where(tenant_secrets.c.tenant.in_(tenants))
    return [dict(row._mapping) for row in connection.execute(query)]


def _of_tenant(tenant: str, name: str) -> str:
    return json.dumps(["tenant", tenant, name])


def _of_job(job: str, tenant: str) -> str:
    return json.dumps(["job", job, tenant])
