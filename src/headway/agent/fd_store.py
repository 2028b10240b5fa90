"""The fd store: file descriptors and small facts that outlive an agent, because its launcher holds copies of them.

The agent stores entries as they change. If it dies, the launcher starts another agent and hands over everything: the
memory that states are saved into, and the channels to the zygote and the workers, who never notice. Without a launcher
(in tests, in a program that supervises a run itself) the store is a plain dictionary.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.state import Channel, ChannelClosed, Message

KEEP_ALIVE_S = 0.5
MAX_DESCRIPTORS = 200
"""Descriptors per message; the kernel passes at most 253."""


@dataclass(frozen=True)
class FdEntry:
    """A stored entry: its fields and its descriptors."""

    fields: dict[str, Any]
    descriptors: tuple[int, ...] = ()


class FdStore:
    """Entries by name, the same in the agent and in its launcher."""

    def __init__(self, channel: Channel | None = None, entries: Mapping[str, FdEntry] | None = None) -> None:
        self._channel, self._had_launcher, self._sent_at = channel, channel is not None, 0.0
        self.entries = dict(entries or {})
        """Descriptors that arrived over the channel belong to this process."""
        self.on_put: Callable[[str, dict[str, Any]], None] = lambda _name, _fields: None
        """Called with the name and fields of every entry that is stored."""

    def put(self, name: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Store an entry, replacing the one of the same name."""
        self.entries[name] = FdEntry(fields, tuple(descriptors))
        self._send("keep", descriptors, name=name, fields=fields)
        self.on_put(name, fields)

    def drop(self, name: str) -> None:
        """Remove an entry."""
        if self.entries.pop(name, None) is not None:
            self._send("drop", name=name)

    def get(self, name: str) -> FdEntry | None:
        """Return the entry of a name."""
        return self.entries.get(name)

    def keep_alive(self) -> bool:
        """Tell the launcher now and then that this agent is alive; return False once the launcher is gone."""
        if self._channel is None:
            return not self._had_launcher
        if time.monotonic() - self._sent_at > KEEP_ALIVE_S:
            self._sent_at = time.monotonic()
            self._send("alive")
        return True

    def tell_storage(self, trouble: str | None, step: int) -> None:
        """Tell the launcher what is wrong with the run's folder, where the live view reads, and the step reached."""
        self._send("storage", trouble=trouble, step=step)

    def _send(self, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        if self._channel is None:
            return
        try:
            send_chunked(self._channel, kind, descriptors, **fields)
        except ChannelClosed:
            self._channel = None  # the launcher is gone; keep_alive reports it, and the agent saves


def send_chunked(channel: Channel, kind: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
    """Send a message with more descriptors than one can carry: the first ones go ahead in messages of their own."""
    ahead = max(0, (len(descriptors) - 1) // MAX_DESCRIPTORS * MAX_DESCRIPTORS)
    for first in range(0, ahead, MAX_DESCRIPTORS):
        channel.send("descriptors", descriptors[first : first + MAX_DESCRIPTORS])
    channel.send(kind, descriptors[ahead:], **fields)


class FdReassembler:
    """Reassembles messages whose descriptors were sent in chunks."""

    def __init__(self) -> None:
        self._ahead: list[int] = []

    def join(self, message: Message) -> Message | None:
        """Return a message with all of its descriptors; None until it is complete."""
        if message.kind == "descriptors":
            self._ahead += message.descriptors
            return None
        complete = Message(message.kind, message.fields, [*self._ahead, *message.descriptors])
        self._ahead = []
        return complete
