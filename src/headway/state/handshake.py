"""Two ends of a connection that have the same key know each other: challenge and answer, the key never travels.

    who listens    -> a number nobody can guess
    who calls      -> another one, and what the key makes of both
    who listens    -> what the key makes of both the other way round

Whoever has not the key hears one number and is hung up on. What is said afterwards is neither hidden nor sealed: the
network of a cluster carries gradients in the clear too.
"""

import hmac
import os
import secrets
import socket

from headway.errors import UsageError

__all__ = [
    "KEY_VARIABLE",
    "HandshakeFailed",
    "client_handshake",
    "connect",
    "key_from_env",
    "new_key",
    "server_handshake",
]

KEY_VARIABLE = "HEADWAY_KEY"
"""Has the key where machines share no folder; arguments would be seen by everybody on the machine."""

NUMBER_BYTES = 32
PATIENCE_S = 5.0
SHORTEST = 16


class HandshakeFailed(Exception):
    """The other end has another key, or none."""


def new_key() -> str:
    """A key for a run."""
    return secrets.token_hex(NUMBER_BYTES)


def key_from_env() -> str | None:
    """The key that the environment has; None where it has none."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key and len(key) < SHORTEST:
        raise UsageError(
            f"the key in {KEY_VARIABLE} is too short to be one: it has {len(key)} characters",
            hint="for example what `openssl rand -hex 32` prints; the same on all machines",
        )
    return key or None


def connect(
    address: tuple[str, int], key: str, timeout_s: float = PATIENCE_S, answer_s: float = PATIENCE_S
) -> socket.socket:
    """Connect to whoever listens there, and see that it is one of ours; OSError or Stranger where it cannot be."""
    end = socket.create_connection(address, timeout_s)
    try:
        client_handshake(end, key, answer_s)
    except BaseException:
        end.close()
        raise
    return end


def client_handshake(end: socket.socket, key: str, answer_s: float = PATIENCE_S) -> None:
    """The caller's side."""
    end.settimeout(answer_s)
    theirs, ours = _read(end, NUMBER_BYTES), secrets.token_bytes(NUMBER_BYTES)
    end.sendall(ours + _answer(key, b"calls", theirs, ours))
    _compare(_read(end, NUMBER_BYTES), _answer(key, b"listens", theirs, ours))
    _settle(end)


def server_handshake(end: socket.socket, key: str) -> None:
    """The listener's side; Stranger is to be hung up on."""
    end.settimeout(PATIENCE_S)
    ours = secrets.token_bytes(NUMBER_BYTES)
    end.sendall(ours)
    theirs = _read(end, NUMBER_BYTES)
    _compare(_read(end, NUMBER_BYTES), _answer(key, b"calls", ours, theirs))
    end.sendall(_answer(key, b"listens", ours, theirs))
    _settle(end)


def _settle(end: socket.socket) -> None:
    """From here on words go as they come, and an end that vanished is noticed."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _answer(key: str, role: bytes, listener: bytes, caller: bytes) -> bytes:
    return hmac.digest(key.encode(), role + listener + caller, "sha256")


def _compare(said: bytes, right: bytes) -> None:
    if not hmac.compare_digest(said, right):
        raise HandshakeFailed("the other end has another key")


def _read(end: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = end.recv(count - len(found))
        if not part:
            raise HandshakeFailed("the other end has hung up")
        found += part
    return found
