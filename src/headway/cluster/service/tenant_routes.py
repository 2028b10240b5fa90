"""The API of tenants and their secrets."""

import re
from dataclasses import asdict
from typing import Annotated

from fastapi import FastAPI, Path
from pydantic import BaseModel, ConfigDict, Field

from headway.cluster.service.access_routes import Caller
from headway.cluster.service.accounts import Accounts
from headway.cluster.service.audit import describe
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.roles import Principal, lineage_of, visible_tenants
from headway.cluster.service.secret_keys import SecretKeys
from headway.cluster.service.secret_store import MOST_BYTES, list_inherited, list_secrets
from headway.cluster.service.tenant_changes import with_tenant, without_tenant
from headway.errors import EngineError, Forbidden, UsageError

Gpus = Annotated[int, Field(ge=0, le=2**31)]
TenantName = Annotated[str, Path(min_length=1, max_length=128)]
SecretName = Annotated[str, Path(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class TenantAnswer(BaseModel):
    """A tenant, its limits, and what it uses."""

    name: str
    parent: str | None
    guarantee: int
    borrow: int | None
    """GPUs above its guarantee, at most; None: no limit."""
    lend: int | None
    budget_gpu_h: float | None
    """Per calendar month (UTC)."""
    gpus: int
    """Held now, with its children's."""
    wanted_gpus: int
    """Waited for."""
    spent_gpu_h: float
    """This month."""
    month: str


class TenantChange(BaseModel):
    """What is to change of a tenant: what is not given stays, null removes a limit."""

    model_config = ConfigDict(extra="forbid")
    parent: str | None = Field(default=None, max_length=128)
    guarantee: Gpus | None = None
    borrow: Gpus | None = None
    lend: Gpus | None = None
    budget_gpu_h: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None = None


class SecretAnswer(BaseModel):
    """A secret: everything but its value, which is never answered."""

    tenant: str
    name: str
    changed: float
    user: str
    """Who set it last."""
    inherited: bool = False
    """Whether it is of a tenant above, which is not said."""


class RekeyAnswer(BaseModel):
    """Secrets that are sealed with the new key, and those that no known key opens."""

    tenants: int
    jobs: int
    unreadable: int


class SecretValue(BaseModel):
    """A secret's value."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
    value: str = Field(min_length=1, max_length=MOST_BYTES)


def add_tenant_routes(app: FastAPI, service: LiveService, accounts: Accounts, keys: SecretKeys | None = None) -> None:
    """Add the routes of tenants and secrets to an application."""
    plane = service.plane

    def answers(caller: Principal) -> list[TenantAnswer]:
        tenants = plane.cluster.values["tenants"]
        seen, now = visible_tenants(caller, tenants), service.tenant_usage()
        rows = list[TenantAnswer]()
        for tenant in tenants:
            if tenant["name"] in now["usage"] and (seen is None or tenant["name"] in seen):
                limits = {key: tenant.get(key) for key in ("parent", "borrow", "lend", "budget_gpu_h")}
                if seen is not None and limits["parent"] not in seen:
                    limits["parent"] = None
                usage = now["usage"][tenant["name"]] | {"month": now["month"]}
                rows.append(TenantAnswer(name=tenant["name"], guarantee=tenant.get("guarantee", 0), **limits, **usage))
        return rows

    def check_below(name: str, caller: Principal) -> None:
        """Raise Forbidden unless a tenant is below the caller's, or new; an admin's is everything."""
        tenants = plane.cluster.values["tenants"]
        seen = visible_tenants(caller, tenants)
        if seen is not None and name == caller.tenant:
            raise Forbidden(f"'{caller.user}' cannot change tenant {name} itself", hint="its limits are set from above")
        if seen is not None and name not in seen and any(tenant["name"] == name for tenant in tenants):
            raise Forbidden(f"unknown tenant '{name}'", hint="headway tenants lists yours")

    @app.get("/api/v1/tenants")
    def tenants(caller: Caller) -> list[TenantAnswer]:
        return answers(caller)

    @app.put("/api/v1/tenants/{tenant}")
    def set_tenant(tenant: TenantName, body: TenantChange, caller: Caller) -> TenantAnswer:
        if not _NAME.fullmatch(tenant):
            raise UsageError(f"invalid tenant name {tenant!r}", hint="letters, digits, dots, dashes, underscores")
        check_below(tenant, caller)
        change = body.model_dump(exclude_unset=True)
        known = tenant in plane.cluster.tenants
        if caller.tenant is not None and ("parent" in change or not known):
            change["parent"] = change.get("parent") or caller.tenant
            if change["parent"] not in (visible_tenants(caller, plane.cluster.values["tenants"]) or ()):
                raise Forbidden(f"unknown tenant '{change['parent']}'", hint="headway tenants lists yours")
        describe(", ".join(f"{key}={value}" for key, value in change.items()))
        plane.change_tenants(lambda tenants: with_tenant(tenants, tenant, change))
        return next(answer for answer in answers(caller) if answer.name == tenant)

    @app.delete("/api/v1/tenants/{tenant}")
    def remove_tenant(tenant: TenantName, caller: Caller) -> TenantAnswer:
        check_below(tenant, caller)
        removed = next((answer for answer in answers(caller) if answer.name == tenant), None)
        if removed is None:
            raise UsageError(f"unknown tenant '{tenant}'", hint="headway tenants lists yours")
        users = [user.name for user in accounts.users(frozenset([tenant]))]
        if users:
            raise UsageError(f"tenant {tenant} has users: {', '.join(users[:5])}", hint="move or remove them first")
        plane.change_tenants(lambda tenants: without_tenant(tenants, tenant))
        return removed

    _add_secret_routes(app, service, keys)


def _add_secret_routes(app: FastAPI, service: LiveService, keys: SecretKeys | None) -> None:
    plane, store = service.plane, service.store

    def check_own(tenant: str, caller: Principal) -> None:
        tenants = plane.cluster.values["tenants"]
        seen = visible_tenants(caller, tenants)
        known = {known["name"] for known in tenants} if seen is None else seen
        if tenant not in known:
            unknown = UsageError if seen is None else Forbidden  # it may be another's
            raise unknown(f"unknown tenant '{tenant}'", hint="headway tenants lists yours")

    @app.get("/api/v1/secrets")
    def secrets(caller: Caller) -> list[SecretAnswer]:
        with store.read() as connection:
            seen = visible_tenants(caller, plane.cluster.values["tenants"])
            rows = list_secrets(connection, seen)
            if caller.tenant is not None:
                rows += list_inherited(connection, lineage_of(plane.cluster.values["tenants"], caller.tenant))
            return [SecretAnswer(**row) for row in rows]

    @app.post("/api/v1/secrets:rekey")
    def rekey() -> RekeyAnswer:
        if keys is None:
            raise EngineError("this service keeps the key of its secrets in memory only", hint="headway up does not")
        return RekeyAnswer(**asdict(keys.rekey()))

    @app.put("/api/v1/secrets/{tenant}/{secret}")
    def set_secret(tenant: TenantName, secret: SecretName, body: SecretValue, caller: Caller) -> SecretAnswer:
        check_own(tenant, caller)
        now = plane.wall_s
        with store.write() as transaction:
            plane.secrets.set(transaction, tenant, secret, body.value, user=caller.user, now=now)
        return SecretAnswer(tenant=tenant, name=secret, changed=now, user=caller.user)

    @app.delete("/api/v1/secrets/{tenant}/{secret}")
    def remove_secret(tenant: TenantName, secret: SecretName, caller: Caller) -> dict[str, str]:
        check_own(tenant, caller)
        with store.write() as transaction:
            if not plane.secrets.remove(transaction, tenant, secret):
                raise UsageError(f"tenant {tenant} has no secret '{secret}'", hint="headway secrets ls lists them")
        return {"tenant": tenant, "removed": secret}
