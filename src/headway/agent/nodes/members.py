"""A node as the agent that leads knows it, and what its workers have: lines and memory, as if they were here."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.state import BufferPlan, Channel, ChannelClosed, Message, ShardEntry, shard_name
from headway.state.save_buffer import FilePlan

if TYPE_CHECKING:
    from headway.agent.nodes.node_group import NodeGroup

__all__ = ["Member", "RemoteBuffer", "RemoteChannel", "unreachable_member"]


@dataclass
class Member:
    """A node."""

    name: str
    line: Channel
    host: str
    port: int
    """Where its memory is served."""
    slots: int
    machine: str
    domain: str
    pid: int
    free_bytes: int
    apart: bool = False
    """Whether it does not see the run's folder."""
    ready: bool = False
    files: dict[str, list[int]] = field(default_factory=dict)
    """What its memory held when it called, and of which steps."""
    heard: float = field(default_factory=time.monotonic)
    joined: float = field(default_factory=time.monotonic)
    copies: dict[str, list[int]] = field(default_factory=dict)
    """Files of other nodes that it has copies of, and of which steps."""


class RemoteChannel:
    """The line to a worker on another node, as if it were here."""

    def __init__(self, team: "NodeGroup", rank: int, member: Member) -> None:
        self._team, self._rank, self._member = team, rank, member
        self.messages = deque[Message]()
        self.gone = False

    def fileno(self) -> int:
        """For select."""
        return self._member.line.fileno()

    def send(self, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Say something; memory is made by the node, so that only how much of it is said."""
        more = {"count": len(descriptors)} if kind == "buffers" else {}
        if kind == "free":
            self._team.freed(self._rank, fields["buffer"])
        self._team.send(self._member, "to", rank=self._rank, said=kind, fields=fields | more)

    def receive(self) -> list[Message]:
        """What it has said; nothing waits here."""
        if self.gone and not self.messages:
            raise ChannelClosed
        found = list(self.messages)
        self.messages.clear()
        return found

    def close(self) -> None:
        """There is nothing to hang up here."""


@dataclass
class RemoteBuffer:
    """A worker's memory on the node that it is on, as far as it is known here."""

    team: "NodeGroup"
    rank: int
    plan: BufferPlan
    home: Member
    descriptor: int = -1
    step: int | None = None
    note: dict[str, Any] = field(default_factory=dict)

    def holds(self, step: int) -> bool:
        """Whether the whole state of this step can be had, from there or from a copy."""
        return all(self.team.holder(self, part, step) is not None for part in self.plan.parts)

    def read_note(self) -> dict[str, Any]:
        """What the worker said of it."""
        return self.note

    def write(self, partial: Path, part: FilePlan, step: int) -> ShardEntry:
        """Have its node write one of its files; one that does not see the folder sends it here."""
        if self.home.apart:
            return self.team.fetch(partial, self, part, step)
        told = self.team.ask(self.home, "write", name=self.name(part), step=step, folder=str(partial))
        return ShardEntry.model_validate(told["shard"])

    def name(self, part: FilePlan) -> str:
        """What one of its files is called."""
        return shard_name(self.rank, part.still)

    def close(self) -> None:
        """It is given back by its node."""


def unreachable_member(name: str) -> Member:
    """A node that is known by its name alone."""
    line, other = Channel.pair()
    line.close()
    other.close()
    return Member(name, line, "", 0, 0, name, "", 0, 0)
