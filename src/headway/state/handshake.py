"""Mutual authentication of two ends of a connection by a shared key: challenge and response, the key is never sent.

    listener  -> a random challenge
    caller    -> its own challenge, and an HMAC of both
    listener  -> another HMAC of both

A caller without the key sees one challenge and is disconnected. What follows is neither encrypted nor signed: a
cluster's network carries gradients in the clear too.
"""

import hmac
import os
import secrets
import socket

from headway.errors import UsageError

KEY_VARIABLE = "HEADWAY_KEY"
"""Holds the key where machines share no folder; everybody on the machine could see it in arguments."""

CHALLENGE_BYTES = 32
TIMEOUT_S = 5.0
SHORTEST_KEY = 16


class HandshakeFailed(Exception):
    """The other end has a different key, or none."""


def new_key() -> str:
    """Make a key for a run."""
    return secrets.token_hex(CHALLENGE_BYTES)


def key_from_env() -> str | None:
    """Return the key in the environment, or None if it is not set."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key and len(key) < SHORTEST_KEY:
        raise UsageError(
            f"the key in {KEY_VARIABLE} is too short: {len(key)} characters, needs {SHORTEST_KEY}",
            hint="set the same key on all machines, for example the output of `openssl rand -hex 32`",
        )
    return key or None


def connect(
    address: tuple[str, int], key: str, timeout_s: float = TIMEOUT_S, answer_s: float = TIMEOUT_S
) -> socket.socket:
    """Connect and authenticate both ends; raise OSError or HandshakeFailed if that fails."""
    end = socket.create_connection(address, timeout_s)
    try:
        client_handshake(end, key, answer_s)
    except BaseException:
        end.close()
        raise
    return end


def client_handshake(end: socket.socket, key: str, answer_s: float = TIMEOUT_S) -> None:
    """Authenticate as the caller."""
    end.settimeout(answer_s)
    listener, caller = _read(end, CHALLENGE_BYTES), secrets.token_bytes(CHALLENGE_BYTES)
    end.sendall(caller + _response(key, b"calls", listener, caller))
    _check(_read(end, CHALLENGE_BYTES), _response(key, b"listens", listener, caller))
    _configure(end)


def server_handshake(end: socket.socket, key: str) -> None:
    """Authenticate as the listener; on HandshakeFailed, close the connection."""
    end.settimeout(TIMEOUT_S)
    listener = secrets.token_bytes(CHALLENGE_BYTES)
    end.sendall(listener)
    caller = _read(end, CHALLENGE_BYTES)
    _check(_read(end, CHALLENGE_BYTES), _response(key, b"calls", listener, caller))
    end.sendall(_response(key, b"listens", listener, caller))
    _configure(end)


def _configure(end: socket.socket) -> None:
    """Block, send small messages at once, and notice an end that vanished."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _response(key: str, role: bytes, listener: bytes, caller: bytes) -> bytes:
    return hmac.digest(key.encode(), role + listener + caller, "sha256")


def _check(response: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(response, expected):
        raise HandshakeFailed("the other end has a different key")


def _read(end: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = end.recv(count - len(content))
        if not part:
            raise HandshakeFailed("the other end closed the connection")
        content += part
    return content
