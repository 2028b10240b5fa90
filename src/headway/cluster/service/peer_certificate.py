"""Tells the application which certificate a client has shown: uvicorn keeps it to itself.

A handshake with a certificate that the authority has not signed fails; without any, nothing is told, and the service
then asks for a token. Who the certificate belongs to is looked up by its fingerprint.
"""

import asyncio
import hashlib
from typing import TYPE_CHECKING

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from headway.cluster.service.slow_clients import HEADERS_S, HeadersDeadline

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PEER = "headway.peer_certificate"
"""Key of an ASGI scope: the SHA-256 of the client's certificate."""


class PeerCertificateProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """HTTP over connections whose clients may have shown a certificate, and may not dawdle."""

    headers_s = HEADERS_S

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the certificate of a new connection."""
        super().connection_made(transport)
        self._deadline = HeadersDeadline(transport, self.headers_s)
        self._deadline.update(in_request=False)
        channel = transport.get_extra_info("ssl_object")
        certificate = None if channel is None else channel.getpeercert(binary_form=True)
        if certificate is not None:
            app: ASGIApp = self.app  # type: ignore[has-type]
            self.app = _with_peer(app, hashlib.sha256(certificate).hexdigest())

    def data_received(self, data: bytes) -> None:
        """Note whether a request has begun: from then on the application limits what it takes."""
        super().data_received(data)
        self._deadline.update(in_request=self.cycle is not None and not self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is expected of a connection that is gone."""
        self._deadline.cancel()
        super().connection_lost(exc)


def _with_peer(app: "ASGIApp", fingerprint: str) -> "ASGIApp":
    async def call(scope: "Scope", receive: "Receive", send: "Send") -> None:
        await app({**scope, PEER: fingerprint}, receive, send)

    return call
