"""Carries a TCP connection over a stream of the service: the same at both ends."""

import base64
import contextlib
import socket
import threading
from collections.abc import Callable
from contextlib import closing

from headway.cluster.service.connection import ServiceConnection
from headway.cluster.service.port_streams import PART_BYTES
from headway.errors import HeadwayError


def carry(
    channel: socket.socket,
    connection: ServiceConnection,
    path: str,
    pace: Callable[[], None] = lambda: None,
) -> OSError | HeadwayError | None:
    """Carry a connection until both directions have ended; return what broke it, if something did.

    `pace` is called before each request."""
    carrier = _Carrier(channel, connection, path, pace)
    sender = threading.Thread(target=carrier.run, args=(carrier.send,), daemon=True)
    sender.start()
    carrier.run(carrier.receive)
    sender.join()
    channel.close()
    return carrier.error


class _Carrier:
    """Two threads, one per direction; each ends when the other breaks."""

    def __init__(
        self, channel: socket.socket, connection: ServiceConnection, path: str, pace: Callable[[], None]
    ) -> None:
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

    def send(self, connection: ServiceConnection) -> None:
        """From the channel to the stream."""
        offset, ended = 0, False
        while not ended:
            part = self._channel.recv(PART_BYTES)
            ended, end = not part, offset + len(part)
            while self.error is None:
                self._pace()
                body = {"offset": offset, "data": base64.b64encode(part).decode(), "ended": ended}
                offset = connection.put(self._path, body)["next"]
                part = part[len(part) - (end - offset) :]
                if not part:
                    break

    def receive(self, connection: ServiceConnection) -> None:
        """From the stream to the channel."""
        offset, ended = 0, False
        while not ended and self.error is None:
            self._pace()
            answer = connection.get(self._path, offset=offset)
            part, ended = base64.b64decode(answer["data"]), answer["ended"]
            self._channel.sendall(part)
            offset += len(part)
        with contextlib.suppress(OSError):  # it may be closed by now
            self._channel.shutdown(socket.SHUT_WR)
