"""The memory of a run's nodes: buffers that their workers save into, and replicas on second nodes."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.agent.fd_store import FdStore
from headway.agent.nodes.members import Member, RemoteBuffer, unreachable_member
from headway.agent.nodes.membership import Membership
from headway.agent.saving.buffers import (
    BufferHost,
    RecoveredState,
    SavedPart,
    SnapshotBuffer,
    StateFiles,
    plan_from,
)
from headway.agent.saving.replication import SnapshotReplicator
from headway.agent.saving.restore_points import newest_on_disk
from headway.errors import StateError
from headway.state import BufferPlan, ShardEntry, open_checkpoint, shard_name
from headway.state.peer_read import PeerFile, PeerReader
from headway.state.receive import receive_shard
from headway.state.save_buffer import FilePlan

REJOIN_S = 10.0
"""How long nodes may take to call again after their leader was lost."""


class NodeMemory(BufferHost):
    """Buffers of workers on other nodes."""

    def __init__(self, nodes: Membership, fd_store: FdStore, succeeds: str) -> None:
        """`succeeds` is the machine that led before this agent, if one did."""
        self._nodes, self._fd_store, self._succeeds = nodes, fd_store, succeeds
        self.placement: dict[int, Member] = {}
        """The node of each rank."""
        self._buffers: dict[tuple[int, int], RemoteBuffer] = {}
        self._replicator = SnapshotReplicator(nodes, self.placement)

    def place(self, placement: Mapping[int, Member]) -> None:
        """Ranks are on these nodes from now on."""
        self.placement.clear()
        self.placement.update(placement)

    def homes(self) -> list[Member]:
        """The nodes that have ranks."""
        return list({id(member): member for member in self.placement.values()}.values())

    # -- as a BufferHost

    def make_buffer(self, rank: int, number: int, plan: BufferPlan) -> RemoteBuffer:
        """A buffer that the worker's node makes when the worker is told of it."""
        self._buffers[rank, number] = RemoteBuffer(self, rank, plan, self.placement[rank])
        return self._buffers[rank, number]

    def has_moved(self, buffer: SnapshotBuffer) -> bool:
        """Whether its worker is on another node now."""
        assert isinstance(buffer, RemoteBuffer), "made here"
        return buffer.home is not self.placement[buffer.rank]

    def available_bytes(self, in_use: int) -> int:
        """What the nodes could give together, if each gives as much as the one with the least."""
        return min((member.free_bytes for member in self.homes()), default=0) * len(self.homes())

    def drop(self) -> None:
        """Have all nodes give their memory back."""
        self._buffers = {}
        if not self._nodes.abdicated:
            self._nodes.broadcast("drop")

    def commit_refusal(self) -> str | None:
        """Why this agent may not commit, unless it still holds the leader lease."""
        return self._nodes.lease.refusal()

    def upload_refusal(self) -> str | None:
        """The same for the leader lease in the store too."""
        return self._nodes.lease.store_refusal()

    def replicate(self, snapshot: SavedPart, plans: Mapping[int, BufferPlan]) -> None:
        """Have every file of a state on a second node too."""
        self._replicator.replicate(snapshot.step, plans)

    def replicated_step(self) -> int | None:
        """The step of a state that was replicated since the last call."""
        return self._replicator.replicated_step()

    def store_buffers(self, pieces: Mapping[int, dict[str, Any]], descriptors: Sequence[int]) -> None:
        """Share what workers hold with the nodes that could lead."""
        self._fd_store.put("pieces", told={str(rank): fields for rank, fields in pieces.items()})

    def store_snapshot(self, name: str, snapshot: SavedPart, notes: Mapping[int, dict[str, Any]], each: int) -> None:
        """Share where a state is with the nodes that could lead."""
        self._fd_store.put(
            name,
            step=snapshot.step,
            buffers={str(rank): number for rank, number in snapshot.buffers.items()},
            notes={str(rank): note for rank, note in notes.items()},
            homes={str(rank): self.placement[rank].name for rank in snapshot.buffers},
            count=each,
        )

    def recover(self, attempt: int, workers: int) -> RecoveredState | None:
        """The newest state on the nodes that have called again since the leader before this one was lost."""
        roster, stored = self._fd_store.get("roster"), self._fd_store.get("pieces")
        expected = {name for name in roster.fields["nodes"] if name != self._succeeds} if roster else set[str]()
        self._nodes.wait_until(lambda: expected <= {member.name for member in self._nodes.able()}, REJOIN_S)
        if stored is None:
            return None
        pieces = {int(rank): fields for rank, fields in stored.fields["told"].items()}
        plans = {rank: plan_from(fields) for rank, fields in pieces.items()}
        names = [shard_name(rank, part.frozen) for rank, plan in plans.items() for part in plan.parts]
        known = [entry.fields for name in ("newest", "copied") if (entry := self._fd_store.get(name)) is not None]
        available = [fields for fields in known if self._have(names, fields["step"])]
        if not available or workers != len(plans):
            return RecoveredState(pieces, {})
        state = max(available, key=lambda fields: int(fields["step"]))
        members = self._nodes.members
        self.place({int(rank): members.get(name) or unreachable_member(name) for rank, name in state["homes"].items()})
        buffers: dict[int, list[SnapshotBuffer]] = {
            rank: [self.make_buffer(rank, number, plan) for number in range(state["count"])]
            for rank, plan in plans.items()
        }
        recovered, step = RecoveredState(pieces, buffers), state["step"]
        for rank, number in state["buffers"].items():
            buffer = self._buffers[int(rank), number]
            buffer.note = state["notes"][rank]
            if all(step in buffer.home.files.get(buffer.file_name(part), ()) for part in buffer.plan.parts):
                buffer.step = step  # else a replica is there
            recovered.filled.append((int(rank), number, step))
        return recovered

    def _have(self, files: Iterable[str], step: int) -> bool:
        """Whether each of these files of a step was on some node when it joined."""
        members = self._nodes.members.values()
        return all(any(step in member.files.get(name, ()) for member in members) for name in files)

    # -- as workers report

    def filled(self, rank: int, fields: dict[str, Any]) -> None:
        """A worker has filled one of its buffers."""
        buffer = self._buffers[rank, fields["buffer"]]
        buffer.step, buffer.note = fields["step"], fields.pop("note")

    def freed(self, rank: int, number: int) -> None:
        """A buffer may be filled again: its content cannot be counted on."""
        if (rank, number) in self._buffers:
            self._buffers[rank, number].step = None

    # -- reading

    def holder(self, buffer: RemoteBuffer, part: FilePlan, step: int) -> Member | None:
        """A node that holds a file of a step's state: the worker's own, or one with a replica."""
        members = self._nodes.members
        if buffer.step == step and members.get(buffer.home.name) is buffer.home:
            return buffer.home
        name = buffer.file_name(part)
        return next((member for member in members.values() if step in member.copies.get(name, ())), None)

    def table(self, state: StateFiles) -> list[list[Any]]:
        """Each file of a state: name, size, host and port of a node that serves it."""
        parts = [(buffer, part) for buffer in self._buffers.values() for part in buffer.plan.parts]
        rows = list[list[Any]]()
        for name, _, _, size in state.files:
            named = [(buffer, part) for buffer, part in parts if buffer.file_name(part) == name]
            holders = (self.holder(buffer, part, state.step) for buffer, part in named)
            member = next(member for member in holders if member is not None)
            rows.append([name, size, member.host, member.port])
        return rows

    def write(self, partial: Path, buffer: RemoteBuffer, part: FilePlan, step: int) -> ShardEntry:
        """Have a buffer's node write one of its files; fetch it from a node that does not see the run folder."""
        home, name = buffer.home, buffer.file_name(part)
        if not home.apart:
            answer = self._nodes.request(home, "write", name=name, step=step, folder=str(partial))
            return ShardEntry.model_validate(answer["shard"])
        shard = ShardEntry.model_validate(self._nodes.request(home, "describe", name=name, step=step)["shard"])
        if shard.name != name:
            raise StateError(f"node {home.name} described {shard.name} when asked for {name}")
        newest = newest_on_disk(partial.parent)[0] if part.frozen else None  # what never changes may be linked
        file = PeerFile(home.host, home.port, name, step, part.layout.bytes)
        with contextlib.closing(PeerReader(self._nodes.key)) as reader:
            before = None if newest is None else open_checkpoint(Path(newest.address))
            receive_shard(partial, shard, part, lambda begin, out: reader.read(file, begin, out), before)
        return shard
