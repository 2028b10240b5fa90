"""Mutual authentication of two ends of a connection by a shared key: challenge and response, the key is never sent.

    listener  -> a random challenge
    caller    -> its own challenge, and an HMAC of both
    listener  -> another HMAC of both

A caller without the key sees one challenge and is disconnected. What follows is signed frame by frame
(signed_stream.py), and not encrypted: a cluster's network carries gradients in the clear too.
"""

import contextlib
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter

from headway.errors import UsageError
from headway.state.signed_stream import SignedStream

KEY_VARIABLE = "HEADWAY_KEY"
"""Holds the key where machines share no folder; everybody on the machine could see it in arguments."""

CHALLENGE_BYTES = 32
TIMEOUT_S = 5.0
SHORTEST_KEY = 16


MOST_PENDING = 64
"""Connections per address that may be unauthenticated at a time. A handshake takes milliseconds."""
RETRY_S = 0.1
"""Before a refused caller tries again."""
REFUSAL = b"headway: too many connections..."
"""Sent in place of a challenge, which is as long."""
assert len(REFUSAL) == CHALLENGE_BYTES


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


class ConnectionRefused(HandshakeFailed):
    """Too many connections of this address are unauthenticated."""


class PendingHandshakes:
    """Counts the unauthenticated connections of each address, so that strangers cannot use up threads and descriptors.

    Connections of other addresses, and those that have authenticated, are unaffected.
    """

    def __init__(self, most: int = MOST_PENDING) -> None:
        self._most, self._counts, self._lock = most, Counter[str](), threading.Lock()
        self._refused = set[str]()

    def admit(self, end: socket.socket, address: str) -> bool:
        """Whether a connection may start its handshake; one that may not is told so and closed."""
        with self._lock:
            if self._counts[address] < self._most:
                self._counts[address] += 1
                return True
            new, self._refused = address not in self._refused, self._refused | {address}
        if new:
            print(
                f"refusing connections of {address}: {self._most} of them are unauthenticated",
                file=sys.stderr,
                flush=True,
            )
        with contextlib.suppress(OSError):
            end.setblocking(False)
            end.send(REFUSAL)
        end.close()
        return False

    def finish(self, address: str) -> None:
        """A handshake has succeeded or failed."""
        with self._lock:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]
                self._refused.discard(address)


def connect(
    address: tuple[str, int], key: str, timeout_s: float = TIMEOUT_S, answer_s: float = TIMEOUT_S
) -> SignedStream:
    """Connect and authenticate both ends; raise OSError or HandshakeFailed if that fails."""
    deadline = time.monotonic() + answer_s
    while True:
        end = socket.create_connection(address, timeout_s)
        try:
            return client_handshake(end, key, answer_s)
        except ConnectionRefused:
            end.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
        except BaseException:
            end.close()
            raise


def client_handshake(end: socket.socket, key: str, answer_s: float = TIMEOUT_S) -> SignedStream:
    """Authenticate as the caller; return the stream for what follows."""
    deadline = time.monotonic() + answer_s
    listener, caller = _read(end, CHALLENGE_BYTES, deadline), secrets.token_bytes(CHALLENGE_BYTES)
    if listener == REFUSAL:
        raise ConnectionRefused("refused: too many unauthenticated connections from this address")
    end.sendall(caller + _response(key, b"calls", listener, caller))
    _check(_read(end, CHALLENGE_BYTES, deadline), _response(key, b"listens", listener, caller))
    _configure(end)
    to_caller, to_listener = (_response(key, role, listener, caller) for role in (b"to caller", b"to listener"))
    return SignedStream(end, send_key=to_listener, receive_key=to_caller)


def server_handshake(end: socket.socket, key: str) -> SignedStream:
    """Authenticate as the listener; return the stream for what follows. On HandshakeFailed, close the connection."""
    deadline = time.monotonic() + TIMEOUT_S
    end.settimeout(TIMEOUT_S)
    listener = secrets.token_bytes(CHALLENGE_BYTES)
    end.sendall(listener)
    caller = _read(end, CHALLENGE_BYTES, deadline)
    _check(_read(end, CHALLENGE_BYTES, deadline), _response(key, b"calls", listener, caller))
    end.sendall(_response(key, b"listens", listener, caller))
    _configure(end)
    to_caller, to_listener = (_response(key, role, listener, caller) for role in (b"to caller", b"to listener"))
    return SignedStream(end, send_key=to_caller, receive_key=to_listener)


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


def _read(end: socket.socket, count: int, deadline: float) -> bytes:
    content = b""
    while len(content) < count:
        end.settimeout(
            max(0.001, deadline - time.monotonic())
        )  # of all parts together: a byte now and then is no answer
        part = end.recv(count - len(content))
        if not part:
            raise HandshakeFailed("the other end closed the connection")
        content += part
    return content
