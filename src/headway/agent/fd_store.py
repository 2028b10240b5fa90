"""What outlives an agent: descriptors and a few facts under a name, which its keeper holds as well.

The agent puts things here as they change. If it dies, its keeper starts another one and hands everything over: the
memory that states are saved into, the lines to the zygote and the workers, who never notice. Without a keeper (in
tests, in a program of one's own) they are simply remembered.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.state import Channel, ChannelClosed, Message

__all__ = ["FdEntry", "FdStore"]

SAY_S = 0.5
HOW_MANY_AT_ONCE = 200
"""Descriptors in one message; the kernel passes at most 253."""


@dataclass(frozen=True)
class FdEntry:
    """Something kept: what is known of it, and its descriptors."""

    fields: dict[str, Any]
    descriptors: tuple[int, ...] = ()


class FdStore:
    """Things by name, the same at both ends of the line between agent and keeper."""

    def __init__(self, line: Channel | None = None, things: Mapping[str, FdEntry] | None = None) -> None:
        self._line, self._was_kept, self._said = line, line is not None, 0.0
        self.things = dict(things or {})
        """What there is. Descriptors that came over the line belong to this process."""
        self.on_put: Callable[[str, dict[str, Any]], None] = lambda _name, _fields: None
        """Called with everything that is put here."""

    def put(self, name: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Keep something, in the place of what had that name."""
        self.things[name] = FdEntry(fields, tuple(descriptors))
        self._send("keep", descriptors, name=name, fields=fields)
        self.on_put(name, fields)

    def drop(self, name: str) -> None:
        """Keep it no longer."""
        if self.things.pop(name, None) is not None:
            self._send("drop", name=name)

    def take(self, name: str) -> FdEntry | None:
        """What is kept under a name."""
        return self.things.get(name)

    def alive(self) -> bool:
        """Say that this agent is there, now and then; False when nobody keeps it any more."""
        if self._line is None:
            return not self._was_kept
        if time.monotonic() - self._said > SAY_S:
            self._said = time.monotonic()
            self._send("alive")
        return True

    def _send(self, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        if self._line is None:
            return
        try:
            send_chunked(self._line, kind, descriptors, **fields)
        except ChannelClosed:
            self._line = None  # the keeper is gone; the agent notices elsewhere and saves


def send_chunked(line: Channel, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
    """Say something with more descriptors than one message can carry: they go ahead, a few at a time."""
    head = max(0, (len(descriptors) - 1) // HOW_MANY_AT_ONCE * HOW_MANY_AT_ONCE)
    for first in range(0, head, HOW_MANY_AT_ONCE):
        line.send("descriptors", descriptors[first : first + HOW_MANY_AT_ONCE])
    line.send(kind, descriptors[head:], **fields)


class FdReassembler:
    """Puts messages that came in parts together again."""

    def __init__(self) -> None:
        self._ahead: list[int] = []

    def join(self, message: Message) -> Message | None:
        """A message with all of its descriptors; None as long as it is not complete."""
        if message.kind == "descriptors":
            self._ahead += message.descriptors
            return None
        whole = Message(message.kind, message.fields, [*self._ahead, *message.descriptors])
        self._ahead = []
        return whole
