"""What `headway ui`, `serve` and `up` share: a socket, names in Host headers, a key, a server that ends in order."""

import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from headway.errors import UsageError


def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Return a socket that listens; raise UsageError if the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with its protocol named: only then asyncio turns Nagle's algorithm off, which holds answers back for 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --port; 0 takes any free one"
        ) from None
    listener.listen(backlog)
    return listener


def read_key(file: Path, least: int) -> str:
    """Return the key in a file; raise UsageError if it has fewer than `least` characters."""
    try:
        key = file.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    if len(key) < least:
        raise UsageError(
            f"{file} has a key of {len(key)} characters",
            hint=f"use at least {least}, for example openssl rand -hex 16",
        )
    return key


class Server(uvicorn.Server):
    """Finishes what is under way at the first SIGTERM or Ctrl-C, and ends at once at the second.

    uvicorn's own handler raises the signal again at the end. `ending` is called at each signal.
    """

    def __init__(self, config: uvicorn.Config, ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._ending = ending

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle both signals while the server runs."""
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
        self._ending()


def own_names(host: str) -> set[str]:
    """Return the names that a Host header may have, beside addresses."""
    return {"localhost", host.lower(), socket.gethostname().lower()}


def is_own_name(header: str, names: set[str]) -> bool:
    """Whether a Host header is one of these names, or an address: to rebind a name, an attacker needs a name."""
    host = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    host = host.lower()
    if host in names:
        return True
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
