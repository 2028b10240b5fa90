"""The API of users, tokens and the audit log."""

from dataclasses import asdict
from typing import Annotated

from fastapi import Depends, FastAPI, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from headway.cluster.service.accounts import Accounts
from headway.cluster.service.audit import list_audit
from headway.cluster.service.live_service import LiveService
from headway.cluster.service.roles import SCOPES, Principal, Role, Scope, at_least, check_user_change, visible_tenants
from headway.cluster.service.tokens import LIFETIME_S, LONGEST_S, Token
from headway.errors import Forbidden, UsageError

SHORTEST_S = 60.0
"""Of a token's life."""


async def _caller(request: Request) -> Principal:  # async, or it would take a thread of its own
    principal: Principal = request.state.principal
    return principal


Caller = Annotated[Principal, Depends(_caller)]
"""The user behind a request."""
Name = Annotated[str, Path(min_length=1, max_length=200)]


class UserAnswer(BaseModel):
    """A user."""

    name: str
    role: Role
    tenant: str | None
    created: float


class UserChange(BaseModel):
    """What a user is to be."""

    model_config = ConfigDict(extra="forbid")
    role: Role
    tenant: str | None = Field(default=None, max_length=128)
    """None for admins only."""


class WhoAmI(BaseModel):
    """The caller, as its token has it."""

    user: str
    role: Role
    tenant: str | None
    tenants: list[str]
    """Whose jobs it sees."""
    scopes: list[Scope]
    token: str
    """Id of the token."""
    expires: float | None


class TokenAnswer(BaseModel):
    """What is known of a token."""

    id: str
    user: str
    label: str
    scopes: list[Scope]
    created: float
    expires: float | None
    revoked: float | None


class TokenRequest(BaseModel):
    """A token to make."""

    model_config = ConfigDict(extra="forbid")
    user: str | None = Field(default=None, max_length=64)
    """The caller, if it is not given."""
    scopes: list[Scope] = Field(default=list(SCOPES), min_length=1, max_length=len(SCOPES))
    label: str = Field(default="", max_length=100)
    lifetime_s: float = Field(default=LIFETIME_S, ge=SHORTEST_S, le=LONGEST_S)


class NewToken(TokenAnswer):
    """A token that was made; its text is told this once."""

    token: str


class AuditEntry(BaseModel):
    """Who changed what, or was refused."""

    seq: int
    at: float
    user: str
    token: str
    tenant: str | None
    action: str
    target: str
    detail: str
    outcome: str


def add_access_routes(app: FastAPI, service: LiveService, accounts: Accounts) -> None:
    """Add the routes of users, tokens and the audit log to an application."""

    def seen_by(caller: Principal) -> frozenset[str] | None:
        return visible_tenants(caller, service.plane.cluster.values["tenants"])

    @app.get("/api/v1/whoami")
    def whoami(caller: Caller) -> WhoAmI:
        seen = seen_by(caller)
        known = [tenant["name"] for tenant in service.plane.cluster.values["tenants"]]
        return WhoAmI(
            user=caller.user,
            role=caller.role,
            tenant=caller.tenant,
            tenants=[name for name in known if seen is None or name in seen],
            scopes=[scope for scope in SCOPES if scope in caller.scopes],
            token=caller.token,
            expires=caller.expires,
        )

    @app.get("/api/v1/audit")
    def audit(
        caller: Caller,
        after: Annotated[
            int | None, Query(ge=0, lt=2**31, description="Entries after this one; else the newest.")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    ) -> list[AuditEntry]:
        with service.store.read() as connection:
            return [AuditEntry(**entry) for entry in list_audit(connection, seen_by(caller), after, limit)]

    @app.get("/api/v1/users")
    def users(caller: Caller) -> list[UserAnswer]:
        return [UserAnswer(**asdict(user)) for user in accounts.users(seen_by(caller))]

    @app.put("/api/v1/users/{user}")
    def set_user(user: Name, body: UserChange, caller: Caller) -> UserAnswer:
        seen = seen_by(caller)
        check_user_change(caller, body.role, body.tenant, seen)
        if body.tenant is not None and body.tenant not in service.plane.cluster.tenants:
            raise UsageError(f"unknown tenant '{body.tenant}'", hint="headway tenants lists them")
        if accounts.known(user):
            accounts.user(user, seen)  # a name that somebody elsewhere has is not the caller's to change
        return UserAnswer(**asdict(accounts.set_user(user, body.role, body.tenant)))

    @app.delete("/api/v1/users/{user}")
    def remove_user(user: Name, caller: Caller) -> UserAnswer:
        removed = accounts.user(user, seen_by(caller))
        accounts.remove_user(user)
        return UserAnswer(**asdict(removed))

    _add_token_routes(app, service, accounts)


def _add_token_routes(app: FastAPI, service: LiveService, accounts: Accounts) -> None:
    def owners(caller: Principal) -> list[str]:
        """The users whose tokens a caller may see and revoke."""
        if not at_least(caller.role, "tenant-admin"):
            return [caller.user]
        seen = visible_tenants(caller, service.plane.cluster.values["tenants"])
        return [user.name for user in accounts.users(seen)]

    @app.get("/api/v1/tokens")
    def tokens(caller: Caller) -> list[TokenAnswer]:
        return [_answer(token) for token in accounts.tokens(owners(caller))]

    @app.post("/api/v1/tokens")
    def issue(body: TokenRequest, caller: Caller) -> NewToken:
        user = body.user or caller.user
        if user not in owners(caller):
            raise Forbidden(f"no user '{user}'", hint="headway users lists those whose tokens you may make")
        beyond = [scope for scope in body.scopes if scope not in caller.scopes]
        if beyond:
            raise Forbidden(f"your token lacks the scope {beyond[0]}", hint="a token cannot make one that may do more")
        scopes = tuple(scope for scope in SCOPES if scope in body.scopes)
        token, text = accounts.issue(user, scopes, body.label, body.lifetime_s)
        return NewToken(**_answer(token).model_dump(), token=text)

    @app.delete("/api/v1/tokens/{token}")
    def revoke(token: Name, caller: Caller) -> TokenAnswer:
        mine = owners(caller)
        if token not in {known.id for known in accounts.tokens(mine)}:
            raise Forbidden(f"no token '{token}'", hint="headway tokens lists them")
        accounts.revoke(token)
        return next(_answer(known) for known in accounts.tokens(mine) if known.id == token)


def _answer(token: Token) -> TokenAnswer:
    return TokenAnswer(**asdict(token))
