"""Replicates snapshots between nodes during training: every file of a state is held by a second node too."""

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from headway.agent.nodes.members import Member
from headway.agent.nodes.membership import Membership
from headway.errors import StateError
from headway.state import BufferPlan, shard_name


@dataclass(frozen=True)
class _Copy:
    """A file to copy to a second node."""

    step: int
    name: str
    size: int
    home: Member
    second: Member


class SnapshotReplicator:
    """A thread that has nodes copy files from each other, one at a time."""

    def __init__(self, nodes: Membership, placement: Mapping[int, Member]) -> None:
        """`placement` is the node of each rank, as it changes."""
        self._nodes, self._placement = nodes, placement
        self._to_copy: SimpleQueue[list[_Copy]] = SimpleQueue()
        self._replicated: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._copy_all, name="replicator", daemon=True).start()

    def replicate(self, step: int, plans: Mapping[int, BufferPlan]) -> None:
        """Queue every file of a state for a copy on a second node."""
        copies = list[_Copy]()
        for rank, plan in plans.items():
            home = self._placement[rank]
            second = self._second(home)
            if second is None:
                return
            copies += [
                _Copy(step, shard_name(rank, part.frozen), part.layout.bytes, home, second) for part in plan.parts
            ]
        self._to_copy.put(copies)

    def replicated_step(self) -> int | None:
        """The newest step replicated since the last call, if any."""
        step = None
        while not self._replicated.empty():
            step = self._replicated.get()
        return step

    def _second(self, home: Member) -> Member | None:
        """The node that holds another's copies: the next by name, in another failure domain if there is one."""
        others = [member for _, member in sorted(self._nodes.members.items()) if member is not home]
        others = [member for member in others if not member.leaving] or others
        others = [member for member in others if not home.domain or member.domain != home.domain] or others
        after = [member for member in others if member.name > home.name]
        return next(iter([*after, *others]), None)

    def _copy_all(self) -> None:
        """In a thread: copy file by file, and of several queued states only the newest."""
        request = self._nodes.request
        while True:
            copies = self._to_copy.get()
            while not self._to_copy.empty():
                copies = self._to_copy.get()
            with contextlib.suppress(StateError):  # a node is lost, which others detect; or it has overwritten the file
                for copy in copies:
                    address = {"host": copy.home.host, "port": copy.home.port}
                    request(copy.second, "copy", name=copy.name, step=copy.step, size=copy.size, **address)
                for copy in copies:
                    copy.second.copies[copy.name] = [copy.step]
                for second in {copy.second.name: copy.second for copy in copies}.values():
                    request(second, "trim", step=copies[0].step)
                self._replicated.put(copies[0].step)
