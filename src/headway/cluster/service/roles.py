"""Who may call what: one table from route to permission, and the rules on whom a caller may act: pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from headway.errors import Forbidden, UsageError

Role = Literal["viewer", "member", "tenant-admin", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each may do what the ones before it may."""
Scope = Literal["read", "jobs", "manage"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""What a token may be limited to: reading, changing jobs, or managing users, tokens, tenants and secrets."""


@dataclass(frozen=True)
class Permission:
    """What a route needs of its caller."""

    role: Role
    scope: Scope


@dataclass(frozen=True)
class Principal:
    """The user behind a request, as the token that came with it allows."""

    user: str
    role: Role
    tenant: str | None
    """None: all tenants, which only an admin has."""
    scopes: frozenset[Scope]
    token: str
    """Id of the token."""
    expires: float | None = None
    """When the token expires, in Unix seconds."""

    def allows(self, permission: Permission) -> bool:
        """Whether the user's role and the token's scopes cover a permission."""
        return at_least(self.role, permission.role) and permission.scope in self.scopes


OPEN: Literal["open"] = "open"
"""Needs no token, and says nothing."""
NODES: Literal["nodes"] = "nodes"
"""For the agents of nodes only."""
Need = Permission | Literal["open", "nodes"]

_READ, _CHANGE = Permission("viewer", "read"), Permission("member", "jobs")
_OWN_TOKENS, _SECRETS = Permission("viewer", "manage"), Permission("member", "manage")
_MANAGE, _ADMIN = Permission("tenant-admin", "manage"), Permission("admin", "manage")

PERMISSIONS: dict[str, Need] = {
    "GET /health": OPEN,
    "POST /api/v1/sync": NODES,
    "GET /openapi.json": _READ,
    "GET /api/v1/whoami": _READ,
    # jobs: those of the caller's tenants; a member changes its own, a tenant-admin all of them
    "POST /api/v1/jobs": _CHANGE,
    "GET /api/v1/jobs": _READ,
    "GET /api/v1/jobs/{job}": _READ,
    "GET /api/v1/jobs/{job}/why": _READ,
    "POST /api/v1/jobs:batch": _CHANGE,
    "POST /api/v1/jobs/{job}/signal": _CHANGE,
    "POST /api/v1/jobs/{job}/priority": _CHANGE,
    "POST /api/v1/jobs/{job}/streams": _CHANGE,
    "GET /api/v1/jobs/{job}/logs": _READ,
    "POST /api/v1/jobs/{job}/logs": _READ,  # changes nothing
    "POST /api/v1/jobs/{job}/{verb}": _CHANGE,
    "PUT /api/v1/streams/{stream}": _CHANGE,  # of the caller only
    "GET /api/v1/streams/{stream}": _READ,  # of the caller only; viewers may open logs
    "DELETE /api/v1/streams/{stream}": _READ,
    "PUT /api/v1/node-streams/{stream}": NODES,
    "GET /api/v1/node-streams/{stream}": NODES,
    "POST /api/v1/node-streams/{stream}/failure": NODES,
    "PUT /api/v1/code/{digest}": _CHANGE,
    "GET /api/v1/code/{digest}": NODES,
    # the cluster
    "GET /api/v1/nodes": _READ,
    "GET /api/v1/events": _READ,
    "GET /api/v1/usage": _READ,
    "POST /api/v1/simulate": _READ,  # changes nothing
    "GET /metrics": Permission("admin", "read"),  # of all tenants
    "POST /api/v1/join": OPEN,  # with a join token, which the route checks
    "POST /api/v1/renew-certificate": NODES,
    "POST /api/v1/join-tokens": _ADMIN,
    "DELETE /api/v1/nodes/{node}": _ADMIN,
    "POST /api/v1/nodes/{node}/{verb}": _ADMIN,
    "PUT /api/v1/nodes/{node}/maintenance": _ADMIN,
    "DELETE /api/v1/nodes/{node}/maintenance": _ADMIN,
    "GET /api/v1/record": Permission("admin", "read"),
    # who may do what
    "GET /api/v1/users": Permission("tenant-admin", "read"),
    "PUT /api/v1/users/{user}": _MANAGE,
    "DELETE /api/v1/users/{user}": _MANAGE,
    "GET /api/v1/tokens": _READ,
    "POST /api/v1/tokens": _OWN_TOKENS,
    "DELETE /api/v1/tokens/{token}": _OWN_TOKENS,
    "GET /api/v1/tenants": _READ,
    "PUT /api/v1/tenants/{tenant}": _MANAGE,
    "DELETE /api/v1/tenants/{tenant}": _MANAGE,
    "GET /api/v1/secrets": Permission("member", "read"),
    "POST /api/v1/secrets:rekey": _ADMIN,
    "PUT /api/v1/secrets/{tenant}/{secret}": _SECRETS,
    "DELETE /api/v1/secrets/{tenant}/{secret}": _SECRETS,
    "GET /api/v1/audit": Permission("tenant-admin", "read"),
}
"""Every route, by method and path. A route that is not listed is refused to everybody."""


def denial(principal: Principal, method: str, path: str, need: Need | None) -> str:
    """Why a caller may not make a request, in words: which role or scope it takes."""
    kind = path.removeprefix("/api/v1/").strip("/").partition("/")[0].partition(":")[0]
    deed = f"{'read' if method == 'GET' else 'change'} {kind}"
    if not isinstance(need, Permission):
        return f"{principal.role} '{principal.user}' may not {deed}: no user may"
    if not at_least(principal.role, need.role):
        least = "" if need.role == ROLES[-1] else " or above"
        return f"{principal.role} '{principal.user}' may not {deed}: that takes the role {need.role}{least}"
    return f"this token of '{principal.user}' may not {deed}: it lacks the scope {need.scope}"


def at_least(role: Role, least: Role) -> bool:
    """Whether a role may do what another may."""
    return ROLES.index(role) >= ROLES.index(least)


def subtree(tenants: Iterable[Mapping[str, Any]], top: str) -> frozenset[str]:
    """The names of a tenant and of everything below it; empty if there is no such tenant. Parents are listed first."""
    names = set[str]()
    for tenant in tenants:
        if tenant["name"] == top or tenant.get("parent") in names:
            names.add(tenant["name"])
    return frozenset(names)


def lineage_of(tenants: Iterable[Mapping[str, Any]], name: str) -> tuple[str, ...]:
    """A tenant and those above it, nearest first."""
    parents, lineage = {tenant["name"]: tenant.get("parent") for tenant in tenants}, [name]
    while (above := parents.get(lineage[-1])) is not None:
        lineage.append(above)
    return tuple(lineage)


def visible_tenants(principal: Principal, tenants: Iterable[Mapping[str, Any]]) -> frozenset[str] | None:
    """The tenants whose jobs, users and secrets a caller may see; None: all."""
    return None if principal.tenant is None else subtree(tenants, principal.tenant)


def check_user_change(principal: Principal, role: Role, tenant: str | None, visible: frozenset[str] | None) -> None:
    """Raise UsageError unless a role fits a tenant, and Forbidden unless the caller may give it."""
    if (role == "admin") != (tenant is None):
        raise UsageError(
            f"a user with role {role} {'has no' if role == 'admin' else 'needs a'} tenant",
            hint="admins see all tenants; all others have one",
        )
    if not at_least(principal.role, role):
        raise Forbidden(f"{principal.role} '{principal.user}' cannot make a user {role}")
    if tenant is not None and visible is not None and tenant not in visible:
        raise Forbidden(f"unknown tenant '{tenant}'", hint=f"yours: {', '.join(sorted(visible))}")


def may_change_job(principal: Principal, owner: str) -> bool:
    """Whether a caller who sees a job may change it, too."""
    return at_least(principal.role, "tenant-admin") or owner == principal.user
