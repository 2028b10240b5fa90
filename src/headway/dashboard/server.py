"""Listens, answers, and ends in order: what `headway ui` runs in its own process."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from threading import Event as StopEvent
from typing import Any

import uvicorn
from fastapi import FastAPI

from headway.http_server import Server

DRAIN_S = 3
"""How long answers under way may take once the server is to end."""


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


def serve(app: FastAPI, listener: socket.socket, listening: Callable[[], None], **settings: Any) -> None:
    """Answer until SIGTERM or Ctrl-C; `settings` are further ones of uvicorn, such as a certificate."""
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", timeout_graceful_shutdown=DRAIN_S, server_header=False, **settings
    )
    server = _Server(config, app.state.stopping, listening)
    asyncio.run(server.serve(sockets=[listener]))


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
