"""Streams between users and jobs, as the service holds them: connections to ports of a job, and its logs.

Both ends are clients of the service, so it needs to reach neither: what one end puts, the other asks for. A part comes
with the offset of its first byte, so that a request may be repeated; asking for an offset confirms all before it.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from headway.cluster.service.messages import WantedStream
from headway.errors import EngineError, UsageError

End = Literal["user", "node"]
PART_BYTES = 256 * 2**10
"""The most that a request carries."""
WINDOW_BYTES = 2**20
"""The most that is held of one direction of a stream; then its sender waits."""
MOST_STREAMS, MOST_OF_USER = 256, 32
IDLE_S = 60.0
"""A stream of which one end has asked nothing for so long is closed."""
WAIT_S = 2.0
"""How long a request waits for the other end."""
ANSWER_S = 30.0
"""How long a node may take to hear of a stream: it asks for its orders every few seconds."""


class Direction:
    """The bytes that one end has put and the other has not confirmed; for one event loop."""

    def __init__(self) -> None:
        self._begin, self._bytes = 0, bytearray()
        self.ended = False
        """Whether no more will come."""
        self.delivered = False
        """Whether the other end has asked for the last of it."""
        self._changed = asyncio.Event()

    @property
    def next(self) -> int:
        """The offset that is to be put next."""
        return self._begin + len(self._bytes)

    @property
    def full(self) -> bool:
        """Whether nothing more can be put."""
        return len(self._bytes) >= WINDOW_BYTES

    def put(self, offset: int, part: bytes, ended: bool) -> int:
        """Take what is new of a part and fits, and return the offset that is to be put next."""
        if not 0 <= offset <= self.next or (self.ended and offset + len(part) > self.next):
            raise UsageError(f"a part of a stream begins at byte {offset}, and {self.next} is the next")
        fresh = part[self.next - offset :]
        taken = fresh[: max(WINDOW_BYTES - len(self._bytes), 0)]
        self._bytes += taken
        self.ended = self.ended or (ended and len(taken) == len(fresh))
        self.wake()
        return self.next

    def get(self, offset: int) -> tuple[bytes, bool]:
        """Return the bytes from an offset on, and whether they are the last. Those before it are forgotten."""
        if not self._begin <= offset <= self.next:
            raise UsageError(f"byte {offset} of a stream was asked for, and {self._begin} to {self.next} are there")
        del self._bytes[: offset - self._begin]
        self._begin = offset
        part = bytes(self._bytes[:PART_BYTES])
        last = self.ended and len(part) == len(self._bytes)
        self.delivered = self.delivered or last
        self.wake()
        return part, last

    def wake(self) -> None:
        """Have whoever waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, ready: Callable[[], bool]) -> None:
        """Return once something holds, or after WAIT_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while not ready():
                    await self._changed.wait()


@dataclass
class JobStream:
    """A connection to a port of a job, or the log of a start."""

    id: str
    user: str
    node: str
    peer: str | None
    """Fingerprint of the node's certificate; this machine's own nodes have none."""
    wanted: WantedStream
    opened: float
    asked: dict[End, float]
    """When each end asked last."""
    dialled: bool = False
    """Whether the node has heard of it."""
    failure: str | None = None
    """Why the node cannot carry it."""
    sent: dict[End, Direction] = field(default_factory=lambda: {"user": Direction(), "node": Direction()})
    """What each end has sent."""


class JobStreams:
    """The streams that are open; but for `wanted`, for one event loop. `clock` returns seconds that never go back."""

    def __init__(self, clock: Callable[[], float], changed: Callable[[str], None]) -> None:
        """`changed` is told of nodes whose orders have changed."""
        self._clock, self._changed = clock, changed
        self._streams: dict[str, JobStream] = {}

    def open_port(self, user: str, node: str, peer: str | None, start: str, port: int) -> JobStream:
        """Have a node connect to a port of a start."""
        return self._open(user, node, peer, WantedStream(_new_id(), start, port))

    def open_log(self, user: str, node: str, peer: str | None, start: str, *, follow: bool) -> JobStream:
        """Have a node send the log of a start: what it has so far, or all until the start has ended."""
        stream = self._open(user, node, peer, WantedStream(_new_id(), start, follow=follow))
        stream.sent["user"].ended = True  # nothing is sent to a log
        return stream

    def _open(self, user: str, node: str, peer: str | None, wanted: WantedStream) -> JobStream:
        self._close_idle()
        mine = sum(stream.user == user for stream in list(self._streams.values()))
        if mine >= MOST_OF_USER or len(self._streams) >= MOST_STREAMS:
            count, whose = (mine, f"user '{user}'") if mine >= MOST_OF_USER else (len(self._streams), "the service")
            raise EngineError(f"{whose} has {count} open connections to jobs", hint="close some of them")
        now = self._clock()
        stream = JobStream(wanted.id, user, node, peer, wanted, now, {"user": now, "node": now})
        self._streams[wanted.id] = stream
        self._changed(node)
        return stream

    def wanted(self, node: str) -> tuple[WantedStream, ...]:
        """The streams that a node has not heard of."""
        streams = list(self._streams.values())
        return tuple(stream.wanted for stream in streams if stream.node == node and not stream.dialled)

    def of_user(self, name: str, user: str) -> JobStream:
        """A stream, asked for by its user; EngineError if the node cannot carry it, or has not heard of it in time."""
        stream = self._find(name)
        if stream is None or stream.user != user:
            raise _unknown(name)
        now = stream.asked["user"] = self._clock()
        if not stream.dialled and stream.failure is None and now - stream.opened > ANSWER_S:
            self.close(stream, f"node {stream.node} has not answered for {now - stream.opened:.0f} s")
        if stream.failure is not None:
            raise EngineError(stream.failure)
        return stream

    def of_node(self, name: str, peer: str | None) -> JobStream:
        """A stream, asked for by its node."""
        stream = self._find(name)
        if stream is None or stream.peer != peer:
            raise _unknown(name)
        stream.asked["node"] = self._clock()
        if not stream.dialled:
            stream.dialled = True
            self._changed(stream.node)
        return stream

    def close(self, stream: JobStream, failure: str | None = None) -> None:
        """Forget a stream, or keep why its node cannot carry it until its user has heard of it."""
        stream.failure = failure
        if failure is None:
            self._streams.pop(stream.id, None)
        for direction in stream.sent.values():
            direction.ended = True
            direction.wake()
        if not stream.dialled:
            self._changed(stream.node)

    def _find(self, name: str) -> JobStream | None:
        self._close_idle()
        return self._streams.get(name)

    def _close_idle(self) -> None:
        now = self._clock()
        for stream in list(self._streams.values()):
            if now - min(stream.asked.values()) > IDLE_S:
                self.close(stream)


def _new_id() -> str:
    return secrets.token_urlsafe(16)


def _unknown(name: str) -> UsageError:
    return UsageError(f"no stream '{name}'", hint="it was closed, or one of its ends was silent for too long")
