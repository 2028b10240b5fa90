"""Copies of what lies in nodes' memory: every file of a state on a second node too, beside training."""

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from headway.agent.nodes.members import Member
from headway.errors import StateError
from headway.state import BufferPlan, shard_name

if TYPE_CHECKING:
    from headway.agent.nodes.node_group import NodeGroup

__all__ = ["SnapshotReplicator"]


@dataclass(frozen=True)
class _Copy:
    """A file that a second node shall have."""

    step: int
    name: str
    size: int
    home: Member
    second: Member


class SnapshotReplicator:
    """A thread that has nodes copy from each other, one file after the other."""

    def __init__(self, team: "NodeGroup") -> None:
        self._team = team
        self._to_copy: SimpleQueue[list[_Copy]] = SimpleQueue()
        self._copied: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._copy_all, name="copier", daemon=True).start()

    def replicate(self, step: int, plans: Mapping[int, BufferPlan]) -> None:
        """Have every file of a state lie on a second node too, soon."""
        copies = list[_Copy]()
        for rank, plan in plans.items():
            home = self._team.place(rank)
            second = self._second(home)
            if second is None:
                return
            copies += [_Copy(step, shard_name(rank, part.still), part.image.bytes, home, second) for part in plan.parts]
        self._to_copy.put(copies)

    def replicated_step(self) -> int | None:
        """The step of a state that has its copies now; told once."""
        step = None
        while not self._copied.empty():
            step = self._copied.get()
        return step

    def _second(self, home: Member) -> Member | None:
        """The node that keeps another's copies: the next by name, one that does not fail with it where there is one."""
        members = sorted(self._team.members.values(), key=lambda one: one.name)
        others = [member for member in members if member is not home]
        others = [one for one in others if not home.domain or one.domain != home.domain] or others
        after = [member for member in others if member.name > home.name]
        return next(iter([*after, *others]), None)

    def _copy_all(self) -> None:
        """In a thread: one file after the other, and of states that wait only the newest."""
        ask = self._team.ask
        while True:
            copies = self._to_copy.get()
            while not self._to_copy.empty():
                copies = self._to_copy.get()
            with contextlib.suppress(StateError):  # a node is gone, which is heard of elsewhere; or it went on
                for one in copies:
                    where = {"host": one.home.host, "port": one.home.port}
                    ask(one.second, "copy", name=one.name, step=one.step, size=one.size, **where)
                for one in copies:
                    one.second.copies[one.name] = [one.step]
                for second in {one.second.name: one.second for one in copies}.values():
                    ask(second, "trim", step=copies[0].step)
                self._copied.put(copies[0].step)
