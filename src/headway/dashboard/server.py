"""Listens, answers, and ends in order: what `headway ui` runs in its own process."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from threading import Event as StopEvent
from typing import Any

import uvicorn
from fastapi import FastAPI

from headway.errors import UsageError

DRAIN_S = 3
"""How long answers under way may take once the server is to end."""


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise UsageError if the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --port; 0 takes any free one"
        ) from None
    listener.listen(128)
    return listener


def serve(app: FastAPI, listener: socket.socket, listening: Callable[[], None]) -> None:
    """Answer until SIGTERM or Ctrl-C."""
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", timeout_graceful_shutdown=DRAIN_S, server_header=False
    )
    server = _Server(config, app.state.stopping, listening)
    asyncio.run(server.serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """Ends its streams as soon as it is to end."""

    def __init__(self, config: uvicorn.Config, stopping: StopEvent, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopping, self._listening = stopping, listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, then say so."""
        await super().startup(sockets)
        self._listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End in order at the first signal, at once at the second."""
        handled = (signal.SIGTERM, signal.SIGINT)
        before = {which: signal.signal(which, self._end) for which in handled}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    def _end(self, *_: Any) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # answers that are cut off are no errors
        self._stopping.set()
