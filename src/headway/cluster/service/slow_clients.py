"""Closes connections whose clients do not get their request across: each would otherwise hold one for ever."""

import asyncio
from typing import Any

HEADERS_S = 10.0
"""How long the head of a request may take, from its first byte or the beginning of the connection."""
MOST_CONNECTIONS = 10_000
"""At a time; further ones are answered with status 503."""


class HeadersDeadline:
    """The deadline of one connection; whoever receives its data says when to look."""

    def __init__(self, transport: Any, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self._timer: asyncio.TimerHandle | None = None

    def update(self, *, in_request: bool) -> None:
        """Data has come, or the connection: `in_request` once the head of a request is complete."""
        if in_request:
            self.cancel()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._transport.abort)

    def cancel(self) -> None:
        """Nothing is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
