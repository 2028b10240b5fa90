"""The channel between a worker and its agent: JSON lines over a socket pair, with file descriptors attached.

Both ends use this class. Reads do not block unless asked to, so that a step can poll. Another process can take over an
end: a message that was cut in half by that is skipped.
"""

import contextlib
import json
import os
import re
import select
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from headway.state.signed_stream import SignedStream

_MOST_DESCRIPTORS = 250  # the kernel passes at most 253 with one message
_READ_BYTES = 1 << 16


class ChannelClosed(Exception):
    """The other end closed the channel or died."""


@dataclass(frozen=True)
class Message:
    """A received message; the receiver owns its descriptors."""

    kind: str
    fields: dict[str, Any]
    descriptors: list[int] = field(default_factory=list)


class MessageChannel(ABC):
    """A channel to a worker on this machine or another."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor to select on."""

    @abstractmethod
    def send(self, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Send a message; raise ChannelClosed if the other end is gone."""

    @abstractmethod
    def receive(self, timeout_s: float | None = 0.0) -> list[Message]:
        """Return the messages that arrive within `timeout_s`; raise ChannelClosed if the other end is gone."""

    @abstractmethod
    def close(self) -> None:
        """Close this end."""


@final
class Channel(MessageChannel):
    """One end of a channel."""

    def __init__(self, end: socket.socket | SignedStream) -> None:
        """`end` is of a socket pair, or of a connection to another machine, which carries no descriptors."""
        self._socket = end
        self._unread = b""
        self._descriptors = deque[int]()

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        """Return two connected ends."""
        first, second = socket.socketpair()
        return cls(first), cls(second)

    def local_host(self) -> str:
        """The address of this end, for a channel over TCP."""
        return str(self._socket.getsockname()[0])

    def fileno(self) -> int:
        """The descriptor, for select and for passing the end to a child."""
        return self._socket.fileno()

    def send(self, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Send a message; raise ChannelClosed if the other end is gone."""
        line = json.dumps({"kind": kind, "descriptors": len(descriptors), **fields}).encode() + b"\n"
        assert len(descriptors) <= _MOST_DESCRIPTORS, "more descriptors than one message can carry"
        try:
            if descriptors:
                assert isinstance(self._socket, socket.socket), "descriptors stay on their machine"
                sent = socket.send_fds(self._socket, [line], list(descriptors))
                line = line[sent:]
            self._socket.sendall(line)
        except (ConnectionError, TimeoutError) as error:
            raise ChannelClosed from error

    def receive(self, timeout_s: float | None = 0.0) -> list[Message]:
        """Return the messages that arrive within `timeout_s`; None waits for the next one."""
        messages = list[Message]()
        while select.select([self._socket], [], [], 0.0 if messages else timeout_s)[0]:
            try:
                received = self._read()
            except (ConnectionError, TimeoutError):
                received = None
            if received is None:
                if messages:
                    return messages  # the next call raises
                raise ChannelClosed
            *lines, self._unread = (self._unread + received).split(b"\n")
            messages += [message for line in lines if (message := self._message(line)) is not None]
        return messages

    def _read(self) -> bytes | None:
        """Read what is there; None if the other end closed the channel."""
        if isinstance(self._socket, SignedStream):
            return self._socket.receive_available()
        received, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _MOST_DESCRIPTORS)
        self._descriptors.extend(descriptors)
        return received or None

    def take_over(self) -> None:
        """Start a new line after another process had this end: it may have died in the middle of a message."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next send raises
            self._socket.sendall(b"\n")

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _message(self, line: bytes) -> Message | None:
        """Parse a message; None for half of one, whose other half a dead process sent or read."""
        try:
            fields = json.loads(line)
        except ValueError:
            match = re.search(rb'^{"kind": "[^"]*", "descriptors": (\d+)', line)
            for _ in range(int(match[1]) if match else 0):
                os.close(self._descriptors.popleft())
            return None
        descriptors = [self._descriptors.popleft() for _ in range(fields.pop("descriptors"))]
        return Message(fields.pop("kind"), fields, descriptors)
