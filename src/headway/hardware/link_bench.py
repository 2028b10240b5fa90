"""How fast bytes go to another machine over TCP: one side listens, the other asks, and both directions are measured.

Who asks proves that it knows the token that the listener was started with, by an HMAC of a number drawn each time: the
token itself never travels. Without a token only loopback is listened on. Nothing is stored, and nothing but numbers is
read from the other side.
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

__all__ = ["LinkRates", "listen", "measure"]

CHUNK = 1 << 20
PINGS = 200
TALK_S = 10.0
LONGEST_S = 30.0


@dataclass(frozen=True)
class LinkRates:
    """What was measured."""

    there_bytes_s: float
    back_bytes_s: float
    round_trip_s: float
    """The median."""


def listen(
    address: str,
    token: str | None,
    *,
    ready: Callable[[str], None] = lambda _address: None,
    report: Callable[[str], None] = lambda _sentence: None,
    times: int | None = None,
) -> None:
    """Serve measurements at HOST:PORT, one after the other; for ever, or so many times."""
    host, port = _parse(address)
    if token is None and not _is_loopback(host):
        raise UsageError(
            f"{address} can be reached from elsewhere: whoever measures must know a token",
            hint="--token-env NAME names a variable that holds it, on both sides",
        )
    try:
        server = socket.create_server((host, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {address}: {error.strerror or error}", hint="another port, or host"
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
    """One measurement; how it went."""
    try:
        nonce = secrets.token_hex(32)
        _send(connection, {"number": nonce})
        request = _receive(connection)
        if not hmac.compare_digest(_proof(token, nonce), str(request.get("proof", ""))):
            _send(connection, {"error": "the token is another one, or missing"})
            return "refused: it does not know the token"
        seconds = min(LONGEST_S, max(0.1, float(request.get("seconds", 1.0))))
        _send(connection, {"seconds": seconds})
        for _ in range(PINGS):
            connection.sendall(_exactly(connection, 1))
        _send(connection, {"bytes": _drain(connection)})
        _flood(connection, seconds)
    except (OSError, ValueError) as error:
        return f"broken off: {error}"
    return "measured"


def measure(address: str, token: str | None, seconds: float = 2.0) -> LinkRates:
    """Ask the listener at HOST:PORT; each direction for so long."""
    host, port = _parse(address)
    try:
        with socket.create_connection((host, port), timeout=TALK_S) as connection:
            return _ask(connection, token, seconds)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"nothing could be measured with {address}: {error}",
            hint=f"there: headway doctor --network --listen {address}",
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


# Bytes go in chunks; the last one is followed by nothing but its mark, which no other has.
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
                raise ConnectionError("the other side is gone")
            received, left = received + count, left[count:]
    return received


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON; no longer than one of ours would be."""
    line = b""
    while not line.endswith(b"\n"):
        line += _exactly(connection, 1)
        if len(line) > 4096:
            raise ValueError("the other side does not speak as headway does")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("the other side does not speak as headway does")
    return message


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = connection.recv(count)
    if not data:
        raise ConnectionError("the other side is gone")
    return data


def _proof(token: str | None, nonce: str) -> str:
    return hmac.new((token or "").encode(), nonce.encode(), "sha256").hexdigest()


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise UsageError(f"{address!r} is no HOST:PORT", hint="127.0.0.1:20500, for instance")
    return host.strip("[]") or "127.0.0.1", int(port)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
