"""Who may use the service: everything that is checked before a request reaches a route.

- The Host header must name this machine: a page of another site, whose name was rebound to 127.0.0.1, has its own name.
- The token must be known: that of users, or that of nodes for what only nodes may do.
- A request may not be larger than MOST_BYTES.
"""

import secrets

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.http_server import is_own_name, own_names

MOST_BYTES = 16 * 2**20
OPEN = "/health"
"""Needs no token, and says nothing."""
FOR_NODES = "/api/v1/sync"


class TokenGuard:
    """Refuses requests from elsewhere, and those without the token."""

    def __init__(self, app: ASGIApp, user_token: str, node_token: str, host: str = "127.0.0.1") -> None:
        self._app, self._user_token, self._node_token = app, user_token, node_token
        self._names = own_names(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        left = MOST_BYTES

        async def receive_limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            return {"type": "http.disconnect"} if left < 0 else message

        await self._app(scope, receive_limited, send)

    def _refusal(self, path: str, headers: dict[str, str]) -> Response | None:
        if not is_own_name(headers.get("host", ""), self._names):
            return _error(403, "this server does not answer to that Host")
        if path == OPEN:
            return None
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return _error(413, f"a request may have {MOST_BYTES // 2**20} MiB")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        token = self._node_token if path == FOR_NODES else self._user_token
        if scheme.lower() != "bearer" or not secrets.compare_digest(key.strip().encode(), token.encode()):
            return _error(401, "wrong or missing token")
        return None


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message, "hint": None}, status_code=status)
