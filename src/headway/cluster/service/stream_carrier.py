"""Carries bytes over a stream of the service, the same at both ends: a TCP connection, or one direction of it."""

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

from headway.cluster.service.connection import ServiceConnection
from headway.cluster.service.job_streams import PART_BYTES
from headway.cluster.service.rate_limit import RateLimiter
from headway.errors import HeadwayError

REQUESTS_PER_S = 200.0
"""Of a user's streams: less than the service admits of a token, so that other verbs get answers, too."""
Pace = Callable[[], None]
"""Called before each request."""


def pace_requests() -> Pace:
    """A pace for all streams of a user's process."""
    limiter = RateLimiter(REQUESTS_PER_S, REQUESTS_PER_S / 4, time.monotonic)

    def pace() -> None:
        while wait_s := limiter.admit("requests"):
            time.sleep(wait_s)

    return pace


def send(
    parts: Iterable[bytes], connection: ServiceConnection, path: str, go_on: Callable[[], bool], pace: Pace
) -> None:
    """Send parts to a stream, and its end after them. An empty part says that more may come."""
    offset = 0
    for part, ended in _with_end(parts):
        end = offset + len(part)
        while go_on():
            pace()
            body = {"offset": offset, "data": base64.b64encode(part).decode(), "ended": ended}
            offset = connection.put(path, body)["next"]
            part = part[len(part) - (end - offset) :]
            if not part:
                break


def receive(connection: ServiceConnection, path: str, go_on: Callable[[], bool], pace: Pace) -> Iterator[bytes]:
    """Yield the parts of a stream, some of them empty, up to its end."""
    offset, ended = 0, False
    while not ended and go_on():
        pace()
        answer = connection.get(path, offset=offset)
        part, ended = base64.b64decode(answer["data"]), answer["ended"]
        yield part
        offset += len(part)


def carry(
    channel: socket.socket, connection: ServiceConnection, path: str, pace: Pace = lambda: None
) -> OSError | HeadwayError | None:
    """Carry a connection until both directions have ended; return what broke it, if something did."""
    carrier = _Carrier(channel, connection, path, pace)
    sender = threading.Thread(target=carrier.run, args=(carrier.send,), daemon=True)
    sender.start()
    carrier.run(carrier.receive)
    sender.join()
    channel.close()
    return carrier.error


class _Carrier:
    """Two threads, one per direction; each ends when the other breaks."""

    def __init__(self, channel: socket.socket, connection: ServiceConnection, path: str, pace: Pace) -> None:
        self._channel, self._connection, self._path, self._pace = channel, connection, path, pace
        self.error: OSError | HeadwayError | None = None

    def run(self, direction: Callable[[ServiceConnection], None]) -> None:
        """Carry one direction."""
        with closing(self._connection.another()) as connection:
            try:
                direction(connection)
            except (OSError, HeadwayError) as error:
                self.error = self.error or error
                with contextlib.suppress(OSError):  # wakes a sender that waits for bytes
                    self._channel.shutdown(socket.SHUT_RDWR)

    def _goes_on(self) -> bool:
        return self.error is None

    def send(self, connection: ServiceConnection) -> None:
        """From the channel to the stream."""
        parts = iter(lambda: self._channel.recv(PART_BYTES), b"")
        send(parts, connection, self._path, self._goes_on, self._pace)

    def receive(self, connection: ServiceConnection) -> None:
        """From the stream to the channel."""
        for part in receive(connection, self._path, self._goes_on, self._pace):
            self._channel.sendall(part)
        with contextlib.suppress(OSError):  # it may be closed by now
            self._channel.shutdown(socket.SHUT_WR)


def _with_end(parts: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield each part, and whether it is the end."""
    for part in parts:
        yield part, False
    yield b"", True
