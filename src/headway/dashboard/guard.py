"""Who may read the dashboard: everything that is checked before a request reaches a page.

- The Host header must name this machine: a page of another site, whose name was rebound to 127.0.0.1, has its own name.
- The token must be known. It comes once, in the address that `headway ui` prints, and is then kept in a cookie that
  scripts cannot read and other sites' pages do not send. The cookie is derived from the token, not the token itself.
- Requests that a page of another origin caused are refused: another port of this machine is another user's server.
- Only GET, the one form that takes the token, and labels of runs: those as JSON, which a page of another origin cannot
  send unasked, and only from a page that says it is this server's own.
"""

import hashlib
import hmac
import html
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.http_server import is_own_name, own_names

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""No inline script or style, and nothing from another machine."""
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer, unless it has its own."""
MOST_FORM_BYTES = 4096
MOST_CHANGE_BYTES = 64 << 10
_DATA = ("/api/", "/files", "/sheet")


class Guard:
    """Refuses requests from elsewhere and without the token; adds the headers that restrict a page."""

    def __init__(self, app: ASGIApp, token: str, host: str = "127.0.0.1") -> None:
        self._app, self._token = app, token
        self._names = own_names(host)
        self.cookie = cookie_of(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(raw=message.get("headers", []))
                for name, value in HEADERS.items():
                    own.setdefault(name, value)
                message["headers"] = own.raw
            await send(message)

        answer = await self._refusal(scope, headers, receive)
        await (answer or self._app)(scope, receive, send_guarded)
        return None

    async def _refusal(self, scope: Scope, headers: dict[str, str], receive: Receive) -> Response | None:
        """Return the answer to a request that goes no further; None for one that may pass."""
        if not is_own_name(headers.get("host", ""), self._names):
            return _plain(403, "this server does not answer to that Host")
        logs_in = scope["method"] == "POST" and scope["path"] == "/login"
        labels = scope["method"] == "POST" and scope["path"] == "/api/labels"
        if scope["method"] not in ("GET", "HEAD") and not logs_in and not labels:
            return _plain(405, "the dashboard changes nothing but labels")
        if labels and (refusal := _refused_change(headers)) is not None:
            return refusal
        if logs_in:
            if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                return _plain(403, "requests of other sites are refused")
            form = parse_qs((await _body(receive))[:MOST_FORM_BYTES].decode("latin-1"))
            return self._enter(form.get("token", [""])[0], "/")
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if given and not scope["path"].startswith(_DATA):
            return self._enter(given[0], scope["path"])
        if scope["path"].startswith(_DATA) and headers.get("sec-fetch-site", "none") not in (
            "same-origin",
            "none",
        ):
            return _plain(403, "requests of other sites are refused")
        return None if self._is_known(headers) else self._ask(headers)

    def _is_known(self, headers: dict[str, str]) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return secrets.compare_digest(key.strip().encode(), self._token.encode())
        name, value = self.cookie
        try:
            sent = SimpleCookie(headers.get("cookie", "")).get(name)
        except CookieError:
            return False
        return sent is not None and secrets.compare_digest(sent.value.encode(), value.encode())

    def _enter(self, token: str, path: str) -> Response:
        """Answer a request that carries the token: a cookie, and a page that goes on without the token.

        A redirect would not do: the browser would not send a strict cookie along if a link of another site, such as a
        terminal in a browser, had led here.
        """
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return _page(401, "Headway", "<p class=wrong>That token is wrong.</p>" + _FORM)
        path = "/" + path.lstrip("/\\")
        refresh = f'<meta http-equiv="refresh" content="0;url={html.escape(path)}">'
        answer = _page(200, "Headway", f'<p><a href="{html.escape(path)}">Continue</a></p>', refresh)
        name, value = self.cookie
        answer.set_cookie(name, value, httponly=True, samesite="strict", path="/")
        return answer

    def _ask(self, headers: dict[str, str]) -> Response:
        if "text/html" in headers.get("accept", ""):
            return _page(401, "Headway", "<p>Open the address that <code>headway ui</code> printed.</p>" + _FORM)
        return _plain(401, "token missing: open the address that `headway ui` printed")


_FORM = (
    '<form method="post" action="/login"><label>Token <input name="token" type="password" autocomplete="off" '
    'required></label> <button type="submit">Open</button></form>'
)


def cookie_of(token: str) -> tuple[str, str]:
    """Return the name and value of the cookie that stands for a token.

    Cookies do not tell ports apart: servers of several tokens need several names.
    """
    digest = hmac.new(token.encode(), b"headway ui cookie", hashlib.sha256).hexdigest()
    return f"headway-ui-{digest[:8]}", digest[8:]


def _refused_change(headers: Mapping[str, str]) -> Response | None:
    """Return why a change is refused before it is read; None if it may be."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return _plain(403, "requests of other sites are refused")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return _plain(415, "labels are sent as JSON")
    length = headers.get("content-length", "")
    if not length.isdigit() or int(length) > MOST_CHANGE_BYTES:
        return _plain(413, "too long")
    return None


async def _body(receive: Receive) -> bytes:
    """Return the body of a request, as far as it is needed."""
    data = b""
    while len(data) < MOST_FORM_BYTES:
        message = await receive()
        data += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    return data


def _plain(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status)


def _page(status: int, title: str, body: str, head: str = "") -> HTMLResponse:
    style = '<meta name="color-scheme" content="light dark">'
    page = f'<!doctype html><html lang="en"><head><meta charset="utf-8">{style}{head}<title>{title}</title></head>'
    return HTMLResponse(f"{page}<body><main><h1>{title}</h1>{body}</main></body></html>", status_code=status)
