"""Who may use the service: everything that is checked before a request reaches a route.

1. The Host header must name this machine: a page of another site, whose name was rebound to 127.0.0.1, has its own.
2. A request may not be larger than MOST_BYTES, and must have arrived after BODY_S.
3. The token must be known and valid: that of a user, or that of nodes for what only nodes may do.
4. Requests per token are limited, and so are wrong tokens per address (FAILURES_PER_S).
5. The user's role and the token's scopes must cover what the route needs (roles.py). What a user may see is its
   tenants': routes ask for them with the Principal that is handed on.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.cluster.service.accounts import Accounts
from headway.cluster.service.audit import Action, acting
from headway.cluster.service.peer_certificate import PEER
from headway.cluster.service.rate_limit import RateLimiter
from headway.cluster.service.roles import NODES, OPEN, PERMISSIONS, Need, Permission, Principal, denial
from headway.http_server import is_own_name, own_names

MOST_BYTES = 16 * 2**20
BODY_S = 30.0
"""How long a request may take to arrive."""
REQUESTS_PER_S, REQUESTS_BURST = 300.0, 600.0
"""Of each user token."""
FAILURES_PER_S, FAILURES_BURST = 2.0, 20.0
"""Wrong tokens from each address."""
READS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class GuardSettings:
    """What the guard goes by."""

    node_token: str
    host: str = "127.0.0.1"
    requests_per_s: float = REQUESTS_PER_S
    requests_burst: float = REQUESTS_BURST
    body_s: float = BODY_S
    clock: Callable[[], float] = time.monotonic
    """Seconds that never go back, for rates."""
    wall_clock: Callable[[], float] = time.time
    """Unix seconds, for the audit log."""


class AccessGuard:
    """Refuses foreign, unauthenticated and excess requests, and those that their user may not make."""

    def __init__(self, app: ASGIApp, accounts: Accounts, settings: GuardSettings) -> None:
        self._app, self._accounts, self._settings = app, accounts, settings
        self._names = own_names(settings.host)
        self._requests = RateLimiter(settings.requests_per_s, settings.requests_burst, settings.clock)
        self._failures = RateLimiter(FAILURES_PER_S, FAILURES_BURST, settings.clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        route = _route(scope)
        need = None if route is None else PERMISSIONS.get(f"{scope['method']} {route}")
        checked = self._check(scope, headers, need)
        if isinstance(checked, Response):
            await checked(scope, receive, send)
            return
        limited = _LimitedBody(receive, self._settings.body_s)
        if checked is None:  # open to all, or a node
            await self._app(scope, limited.receive, send)
            return
        if route is not None and (not isinstance(need, Permission) or not checked.allows(need)):
            refusal = await self._refuse(checked, scope, route, need)
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = checked
        if scope["method"] in READS:
            await self._app(scope, limited.receive, send)
            return
        with acting(self._action(checked, scope, route)):
            await self._app(scope, limited.receive, send)

    def _check(self, scope: Scope, headers: dict[str, str], need: Need | None) -> Principal | Response | None:
        """The caller, None if there need not be one, or a refusal."""
        if not is_own_name(headers.get("host", ""), self._names):
            return _error(403, "this server does not answer to that Host")
        if need == OPEN:
            return None
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return _error(413, f"a request may have {MOST_BYTES // 2**20} MiB")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        if need == NODES and PEER in scope:  # which node it is, the route looks up
            return None
        if need == NODES:
            if secrets.compare_digest(token.encode(), self._settings.node_token.encode()):
                return None
            return self._wrong_token(scope)
        principal = self._accounts.authenticate(token)
        if principal is None:
            return self._wrong_token(scope)
        wait_s = self._requests.admit(principal.token)
        return _too_many(wait_s, "this token asks too often") if wait_s else principal

    def _wrong_token(self, scope: Scope) -> Response:
        """The same for tokens that are unknown, expired and revoked."""
        wait_s = self._failures.admit((scope.get("client") or ("",))[0])
        if wait_s:
            return _too_many(wait_s, "too many requests with wrong tokens")
        return _error(401, "wrong or missing token", **{"www-authenticate": "Bearer"})

    async def _refuse(self, principal: Principal, scope: Scope, route: str, need: Need | None) -> Response:
        await run_in_threadpool(self._accounts.note_refusal, self._action(principal, scope, route))
        return _error(403, denial(principal, scope["method"], route, need))

    def _action(self, principal: Principal, scope: Scope, route: str | None) -> Action:
        return Action(
            principal.user,
            principal.token,
            principal.tenant,
            f"{scope['method']} {route}",
            scope["path"],
            self._settings.wall_clock(),
        )


class _LimitedBody:
    """The body of a request, up to a size and a time; what exceeds them is cut off."""

    def __init__(self, receive: Receive, body_s: float) -> None:
        self._receive, self._left, self._complete = receive, MOST_BYTES, False
        self._due = asyncio.get_running_loop().time() + body_s

    async def receive(self) -> Message:
        """The next part."""
        if self._complete:  # whoever asks waits for the client to go
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._due):
                message = await self._receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        self._left -= len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        return {"type": "http.disconnect"} if self._left < 0 else message


def _route(scope: Scope) -> str | None:
    """The path, with the names of its parameters, of the route that will answer; None if none will."""
    routes: list[BaseRoute] = scope["app"].router.routes
    for route in routes:
        if route.matches(scope)[0] is Match.FULL:
            return str(getattr(route, "path", ""))
    return None


def _too_many(wait_s: float, message: str) -> JSONResponse:
    return _error(429, message, **{"retry-after": str(int(wait_s) + 1)})


def _error(status: int, message: str, **headers: str) -> JSONResponse:
    return JSONResponse({"error": message, "hint": None, "kind": "access"}, status_code=status, headers=headers)
