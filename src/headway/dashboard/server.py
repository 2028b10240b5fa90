"""Listens, answers, and ends in order: what `headway ui` runs in its own process."""

import asyncio
import logging
import secrets
import socket
import sys
from collections.abc import Callable
from threading import Event as StopEvent
from typing import Any

import uvicorn
from fastapi import FastAPI

from headway.frozen_heap import frozen_heap
from headway.http_server import Server

DRAIN_S = 3
"""How long answers under way may take once the server is to end."""
FULL_EVERY = 1000
"""Collections of younger objects between two full ones. Beside 2,000 nodes one takes 250 ms; every 5 s is too often."""
SWITCH_S = 0.001
"""How long a thread that computes may hold up the loop that answers; Python's own 5 ms add up for each request."""


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


def serve(app: FastAPI, listener: socket.socket, listening: Callable[[], None], **settings: Any) -> None:
    """Answer until SIGTERM or Ctrl-C; `settings` are further ones of uvicorn, such as a certificate."""
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", timeout_graceful_shutdown=DRAIN_S, server_header=False, **settings
    )
    server = _Server(config, app.state.stopping, listening)
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with frozen_heap(FULL_EVERY):
            asyncio.run(server.serve(sockets=[listener]))
    finally:
        sys.setswitchinterval(switch_s)


class _Server(Server):
    """Ends its streams as soon as it is to end."""

    def __init__(self, config: uvicorn.Config, stopping: StopEvent, listening: Callable[[], None]) -> None:
        super().__init__(config, self._stop)
        self._stopping, self._listening = stopping, listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, then say so."""
        await super().startup(sockets)
        self._listening()

    def _stop(self) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # answers that are cut off are no errors
        self._stopping.set()
