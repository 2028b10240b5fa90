"""A node as the leader knows it, and the channels and buffers of the workers there."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headway.agent.saving.buffers import SnapshotBuffer
from headway.state import BufferPlan, Channel, ChannelClosed, Message, MessageChannel, OpenCheckpoint, ShardEntry
from headway.state.save_buffer import FilePlan


@dataclass
class Member:
    """A node."""

    name: str
    line: Channel
    host: str
    port: int
    """Where its snapshots are served."""
    slots: int
    machine: str
    domain: str
    pid: int
    free_bytes: int
    apart: bool = False
    """Whether it does not see the run folder."""
    ready: bool = False
    files: dict[str, list[int]] = field(default_factory=dict)
    """The files in its memory when it joined, and of which steps."""
    last_seen: float = field(default_factory=time.monotonic)
    leaving: bool = False
    """Whether it was asked to leave, and gets no more workers."""
    silent: bool = False
    """Whether it was reported as silent."""
    joined: float = field(default_factory=time.monotonic)
    copies: dict[str, list[int]] = field(default_factory=dict)
    """Replicas of other nodes' files that it holds, and of which steps."""

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; a node that is gone is noticed when it is polled."""
        with contextlib.suppress(ChannelClosed, OSError):
            self.line.send(kind, **fields)


class RemoteChannel(MessageChannel):
    """The channel to a worker on another node; the node's agent relays it."""

    def __init__(self, rank: int, member: Member, on_free: Callable[[int], None]) -> None:
        """`on_free` is called with the number of a buffer that the worker may fill again."""
        self._rank, self._member, self._on_free = rank, member, on_free
        self.messages = deque[Message]()
        self.gone = False

    def fileno(self) -> int:
        """The descriptor to select on: that of the node's channel."""
        return self._member.line.fileno()

    def send(self, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Send a message; of descriptors only their number, since the node makes the memory."""
        more = {"count": len(descriptors)} if kind == "buffers" else {}
        if kind == "free":
            self._on_free(fields["buffer"])
        self._member.send("to", rank=self._rank, said=kind, fields=fields | more)

    def receive(self, timeout_s: float | None = 0.0) -> list[Message]:
        """The messages that the node has relayed; never waits."""
        if self.gone and not self.messages:
            raise ChannelClosed
        messages = list(self.messages)
        self.messages.clear()
        return messages

    def close(self) -> None:
        """The node's channel stays open."""


class BufferReader(Protocol):
    """Reads buffers of nodes, for those that hold none themselves."""

    def holder(self, buffer: "RemoteBuffer", part: FilePlan, step: int) -> Member | None:
        """A node that holds a file of a step's state."""

    def write(self, partial: Path, buffer: "RemoteBuffer", part: FilePlan, step: int) -> ShardEntry:
        """Have a file of a buffer written into a checkpoint's folder."""


@dataclass
class RemoteBuffer(SnapshotBuffer):
    """A worker's buffer in the memory of its node, as far as the leader knows it."""

    reader: BufferReader
    rank: int
    plan: BufferPlan
    home: Member
    descriptor: int = -1
    writes_at_once: int = 32
    step: int | None = None
    note: dict[str, Any] = field(default_factory=dict)

    def holds(self, step: int) -> bool:
        """Whether the complete state of this step can be read, from its node or from a replica."""
        return all(self.reader.holder(self, part, step) is not None for part in self.plan.parts)

    def read_note(self) -> dict[str, Any]:
        """What its worker reported with the state."""
        return self.note

    def write(
        self,
        partial: Path,
        part: FilePlan,
        step: int,
        before: OpenCheckpoint | None,
        threads: int,
    ) -> ShardEntry:
        """Have its node write one of its files."""
        return self.reader.write(partial, self, part, step)

    def local(self) -> None:
        """Its memory is on another machine."""

    def close(self) -> None:
        """Its node gives the memory back."""


def unreachable_member(name: str) -> Member:
    """A node of which only the name is known."""
    line, other = Channel.pair()
    line.close()
    other.close()
    return Member(name, line, "", 0, 0, name, "", 0, 0)
