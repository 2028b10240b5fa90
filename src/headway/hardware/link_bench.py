"""Measures TCP latency and bandwidth in both directions between two machines, a listener and a client.

The client proves that it knows the listener's token by an HMAC of a random nonce; the token itself is never sent.
Without a token the listener accepts only loopback. Nothing is stored, and only numbers are read from the peer.
"""

import contextlib
import hmac
import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.errors import EngineError, UsageError

CHUNK = 1 << 20
PINGS = 200
TALK_S = 10.0
LONGEST_S = 30.0


@dataclass(frozen=True)
class LinkRates:
    """Measured rates of a link."""

    there_bytes_s: float
    back_bytes_s: float
    round_trip_s: float
    """Median."""


def listen(
    address: str,
    token: str | None,
    *,
    ready: Callable[[str], None] = lambda _address: None,
    report: Callable[[str], None] = lambda _sentence: None,
    times: int | None = None,
) -> None:
    """Serve measurements at HOST:PORT sequentially, forever or `times` times."""
    host, port = _parse(address)
    if token is None and not _is_loopback(host):
        raise UsageError(
            f"{address} is reachable from other machines and needs a token",
            hint="pass --token-env NAME with the variable that holds it, on both sides",
        )
    try:
        server = socket.create_server((host, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {address}: {error.strerror or error}", hint="use another port or host"
        ) from None
    with server:
        ready("{}:{}".format(*server.getsockname()[:2]))
        while times is None or times > 0:
            connection, peer = server.accept()
            with connection:
                connection.settimeout(TALK_S)
                report(f"{peer[0]}: {_serve(connection, token)}")
            times = None if times is None else times - 1


def _serve(connection: socket.socket, token: str | None) -> str:
    """Serve one measurement; return how it went."""
    try:
        nonce = secrets.token_hex(32)
        _send(connection, {"number": nonce})
        request = _receive(connection)
        if not hmac.compare_digest(_proof(token, nonce), str(request.get("proof", ""))):
            _send(connection, {"error": "wrong or missing token"})
            return "refused: wrong token"
        seconds = min(LONGEST_S, max(0.1, float(request.get("seconds", 1.0))))
        _send(connection, {"seconds": seconds})
        for _ in range(PINGS):
            connection.sendall(_exactly(connection, 1))
        _send(connection, {"bytes": _drain(connection)})
        _flood(connection, seconds)
    except (OSError, ValueError) as error:
        return f"aborted: {error}"
    return "measured"


def measure(address: str, token: str | None, seconds: float = 2.0) -> LinkRates:
    """Measure the link to the listener at HOST:PORT, each direction for `seconds`."""
    host, port = _parse(address)
    try:
        with socket.create_connection((host, port), timeout=TALK_S) as connection:
            return _ask(connection, token, seconds)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"cannot measure the link to {address}: {error}",
            hint=f"run there: headway doctor --network --listen {address}",
        ) from None


def _ask(connection: socket.socket, token: str | None, seconds: float) -> LinkRates:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce = str(_receive(connection)["number"])
    _send(connection, {"proof": _proof(token, nonce), "seconds": seconds})
    answer = _receive(connection)
    if "error" in answer:
        raise ValueError(str(answer["error"])[:200])
    times = []
    for _ in range(PINGS):
        begin = time.perf_counter()
        connection.sendall(b"x")
        _exactly(connection, 1)
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    _flood(connection, seconds)
    received = float(_receive(connection)["bytes"])
    there = received / (time.perf_counter() - begin)
    begin = time.perf_counter()
    back = _drain(connection) / (time.perf_counter() - begin)
    return LinkRates(there, back, sorted(times)[len(times) // 2])


# Each chunk is preceded by _MORE; _LAST ends the stream.
_MORE, _LAST = b"\1", b"\0"


def _flood(connection: socket.socket, seconds: float) -> None:
    body = bytes(CHUNK)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        connection.sendall(_MORE + body)
    connection.sendall(_LAST)


def _drain(connection: socket.socket) -> int:
    buffer, received = bytearray(CHUNK), 0
    while _exactly(connection, 1) == _MORE:
        left = memoryview(buffer)
        while left:
            count = connection.recv_into(left)
            if not count:
                raise ConnectionError("the peer closed the connection")
            received, left = received + count, left[count:]
    return received


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Receive one line of JSON, of limited length."""
    line = b""
    while not line.endswith(b"\n"):
        line += _exactly(connection, 1)
        if len(line) > 4096:
            raise ValueError("the peer does not speak this protocol")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("the peer does not speak this protocol")
    return message


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = connection.recv(count)
    if not data:
        raise ConnectionError("the peer closed the connection")
    return data


def _proof(token: str | None, nonce: str) -> str:
    return hmac.new((token or "").encode(), nonce.encode(), "sha256").hexdigest()


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise UsageError(f"expected HOST:PORT, got {address!r}", hint="for example 127.0.0.1:20500")
    return host.strip("[]") or "127.0.0.1", int(port)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
