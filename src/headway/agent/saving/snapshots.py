"""The memory that workers save into: whose buffers there are, which hold a whole state, which may be filled next.

Every worker has the same number of buffers. A state is whole when all workers have filled one with the same step. The
newest whole state stays where it is until a newer one is whole, if there are two buffers or more: from it a worker that
died goes on. Buffers outlive the workers, and are used again by the next ones when these hold the same pieces.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.agent.nodes.members import RemoteBuffer
from headway.agent.nodes.node_group import NodeGroup
from headway.errors import StateError
from headway.state import (
    BufferPlan,
    CheckpointFacts,
    CheckpointManifest,
    FileEntry,
    PieceEntry,
    PieceShape,
    SaveBuffer,
    TensorEntry,
    dump_manifest,
    plan_buffer,
    shard_name,
)
from headway.state.manifest import digest_of
from headway.state.tiers import Tier

__all__ = ["MOST", "SMALL_BYTES", "SnapshotBuffers", "StateSnapshot", "available_memory", "count_buffers", "plan_from"]

ENOUGH = 2
"""Buffers of each worker: one that is kept or written, one that is filled meanwhile."""
MOST = 8
"""Small states get more, so that a run of short steps need not leave saves out while the disk syncs."""
SMALL_BYTES = 256e6


@dataclass
class StateSnapshot:
    """The state of one step, as the workers have left it in memory so far."""

    step: int
    attempt: int
    workers: int
    tiers: tuple[Tier, ...]
    facts: CheckpointFacts
    """But for the random state, which every worker tells for itself."""
    last: bool = False
    """Whether the run ends with it, so that it must not be lost."""
    buffers: dict[int, int] = field(default_factory=dict)
    """The buffer that each worker has filled, by rank."""
    rng: dict[str, str] = field(default_factory=dict)
    released: bool = False
    """Whether nobody reads it any more; if it is the newest, it may stay all the same."""
    stall_s: float = 0.0
    """How long the slowest worker stood still for it."""

    @property
    def whole(self) -> bool:
        """Whether all workers have filled a buffer with it."""
        return len(self.buffers) == self.workers

    @property
    def all_facts(self) -> CheckpointFacts:
        """What a checkpoint says beside its tensors."""
        return self.facts.model_copy(update={"rng": self.rng})


def plan_from(fields: Mapping[str, Any]) -> BufferPlan:
    """The plan of a worker's buffers, from what it said of its pieces."""
    trained, still = (
        [PieceShape(name, dtype, tuple(shape), tuple(start), tuple(local)) for name, dtype, shape, start, local in told]
        for told in (fields["trained"], fields["still"])
    )
    return plan_buffer(trained, still)


def count_buffers(state_bytes: int, free_bytes: int, bound_gb: float | None) -> int:
    """How many buffers each worker gets, when all of them together hold a state of so many bytes."""
    if state_bytes > free_bytes:
        raise StateError(
            f"a saved state takes {state_bytes / 1e9:.3g} GB of memory, and {free_bytes / 1e9:.3g} GB are free",
            hint="fewer workers on this machine, a smaller model, or a machine with more memory",
        )
    if bound_gb is None:
        two = ENOUGH if ENOUGH * state_bytes <= free_bytes / 2 else 1
        return max(two, min(MOST, int(min(SMALL_BYTES, free_bytes / 2) // state_bytes)))
    if state_bytes > bound_gb * 1e9:
        raise StateError(
            f"a saved state takes {state_bytes / 1e9:.3g} GB of memory, and checkpoint.memory_gb is {bound_gb:g}",
            hint=f"allow checkpoint.memory_gb = {state_bytes / 1e9 * 1.01:.3g} or more",
        )
    return min(MOST, int(min(bound_gb * 1e9, free_bytes) // state_bytes))


def available_memory() -> int:
    """What the machine could still give, in bytes."""
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123  (no file of a user's)
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class SnapshotBuffers:
    """All buffers of a run, on this machine or on the nodes of a team."""

    def __init__(self, team: NodeGroup | None = None) -> None:
        self._team = team
        self._buffers: dict[int, list[SaveBuffer | RemoteBuffer]] = {}
        self._in_use: dict[tuple[int, int], StateSnapshot] = {}
        self.newest: StateSnapshot | None = None
        """The newest whole state, if there is one."""
        self.copied: StateSnapshot | None = None
        """The newest of which every file lies on two nodes; it stays until a newer one does."""

    @property
    def size(self) -> int:
        """What it takes of this machine's memory, in bytes."""
        return sum(buffer.plan.bytes for buffers in self._buffers.values() for buffer in buffers)

    @property
    def buffers_each(self) -> int:
        """How many buffers a worker has."""
        return max((len(buffers) for buffers in self._buffers.values()), default=0)

    def make(self, plans: Mapping[int, BufferPlan], count: int) -> None:
        """Have buffers for workers of these plans: those there are if they fit, else `count` new ones each."""
        if self.plans() == plans:
            self._follow()
            return
        self.drop()
        for rank, plan in plans.items():
            self._buffers[rank] = [self._make(rank, number, plan) for number in range(count)]

    def _follow(self) -> None:
        """Workers that are on another node now have new memory there."""
        for rank, buffers in self._buffers.items():
            if self._team is None or getattr(buffers[0], "home", None) is self._team.place(rank):
                continue
            self._buffers[rank] = [self._make(rank, number, one.plan) for number, one in enumerate(buffers)]
            self._in_use = {place: snapshot for place, snapshot in self._in_use.items() if place[0] != rank}

    def _make(self, rank: int, number: int, plan: BufferPlan) -> SaveBuffer | RemoteBuffer:
        return SaveBuffer.make(plan) if self._team is None else self._team.make_buffer(rank, number, plan)

    def plans(self) -> dict[int, BufferPlan]:
        """The plan of each worker's buffers."""
        return {rank: buffers[0].plan for rank, buffers in self._buffers.items()}

    def take_over(self, plans: Mapping[int, BufferPlan], descriptors: Sequence[int]) -> None:
        """The buffers that another agent had made, all of one worker after all of the one before it."""
        each = len(descriptors) // max(1, len(plans))
        for place, (rank, plan) in enumerate(sorted(plans.items())):
            mine = descriptors[place * each : (place + 1) * each]
            self._buffers[rank] = [SaveBuffer(plan, descriptor) for descriptor in mine]

    def all_descriptors(self) -> list[int]:
        """Of all buffers, rank by rank."""
        return [buffer.descriptor for rank in sorted(self._buffers) for buffer in self._buffers[rank]]

    def note(self, rank: int, number: int) -> dict[str, Any]:
        """What a worker said of the state that it filled one of its buffers with."""
        return self._buffers[rank][number].read_note()

    def holds(self, rank: int, number: int, step: int) -> bool:
        """Whether a buffer is known to be in use for the state of a step."""
        snapshot = self._in_use.get((rank, number))
        return snapshot is not None and snapshot.step == step

    def found(self) -> dict[tuple[int, int], dict[int, int]]:
        """What is in it: the attempt and step of a state, to the buffer of each rank that has all of its part."""
        states: dict[tuple[int, int], dict[int, int]] = {}
        for rank, buffers in self._buffers.items():
            for number, buffer in enumerate(buffers):
                if buffer.step is not None:
                    states.setdefault((buffer.read_note()["attempt"], buffer.step), {})[rank] = number
        return dict(sorted(states.items()))

    def drop(self) -> None:
        """Give all memory back."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.close()
        if self._team is not None and self._buffers:
            self._team.drop()
        self._buffers, self._in_use, self.newest, self.copied = {}, {}, None, None

    def descriptors(self, rank: int) -> list[int]:
        """The descriptors of a worker's buffers."""
        return [buffer.descriptor for buffer in self._buffers[rank]]

    def take(self, snapshot: StateSnapshot, rank: int, buffer: int) -> None:
        """A worker has filled one of its buffers."""
        snapshot.buffers[rank] = buffer
        self._in_use[rank, buffer] = snapshot

    def complete(self, snapshot: StateSnapshot) -> None:
        """All workers have: from now on this is what a restart goes on from."""
        self.newest = snapshot

    def release(self, snapshot: StateSnapshot) -> None:
        """Nobody reads a snapshot any more; it stays only if it is the newest and there is room beside it."""
        snapshot.released = True

    def freed(self) -> list[tuple[int, int, StateSnapshot]]:
        """Buffers (rank, number, what was in it) that may be filled again from now on; each is told once."""
        stays = () if self.buffers_each < ENOUGH else (self.newest, self.copied)
        free = [
            (*place, snapshot)
            for place, snapshot in self._in_use.items()
            if not any(snapshot is one for one in stays) and snapshot.released
        ]
        for rank, number, _ in free:
            del self._in_use[rank, number]
        return free

    def forget_unfinished(self) -> None:
        """The workers are gone: what they had not finished never will be."""
        for snapshot in list(self._in_use.values()):
            if not snapshot.whole:
                snapshot.released = True
        self.freed()

    def free(self, rank: int) -> list[int]:
        """The numbers of a worker's buffers that nothing is in that counts."""
        return [number for number in range(self.buffers_each) if (rank, number) not in self._in_use]

    def restorable(self) -> StateSnapshot | None:
        """The newest whole state, if no worker has begun to write over it since, and no node was lost with it."""
        for snapshot in (self.newest, self.copied):
            if snapshot is not None and all(
                self.buffer(snapshot, rank).holds(snapshot.step) for rank in snapshot.buffers
            ):
                return snapshot
        return None

    @property
    def step(self) -> int:
        """That of the newest whole state; -1 if there is none."""
        snapshot = self.restorable()
        return -1 if snapshot is None else snapshot.step

    def buffer(self, snapshot: StateSnapshot, rank: int) -> SaveBuffer | RemoteBuffer:
        """Where a worker's part of a snapshot lies."""
        return self._buffers[rank][snapshot.buffers[rank]]

    def files(self, snapshot: StateSnapshot) -> list[tuple[str, int, int, int]]:
        """Each file of a snapshot: its name, the descriptor of its memory, where it begins there, its size."""
        found = []
        for rank in sorted(snapshot.buffers):
            buffer = self.buffer(snapshot, rank)
            for part in buffer.plan.parts:
                found.append((shard_name(rank, part.still), buffer.descriptor, part.begin, part.image.bytes))
        return found

    def manifest(self, snapshot: StateSnapshot) -> bytes:
        """What a checkpoint of this snapshot would say, without checksums."""
        files: dict[str, FileEntry] = {}
        parts: dict[str, tuple[PieceShape, list[PieceEntry]]] = {}
        for rank in sorted(snapshot.buffers):
            for part in self.buffer(snapshot, rank).plan.parts:
                name, image = shard_name(rank, part.still), part.image
                files[name] = FileEntry(
                    bytes=image.bytes, header_bytes=len(image.header), header_xxh3=image.header_xxh3
                )
                for piece in part.pieces:
                    offset = image.places[piece.name].begin
                    entry = PieceEntry(file=name, offset=offset, start=piece.start, shape=piece.local_shape, xxh3=())
                    parts.setdefault(piece.name, (piece, []))[1].append(entry)
        tensors = {
            name: TensorEntry(dtype=piece.dtype, shape=piece.shape, digest="0" * 16, pieces=tuple(entries))
            for name, (piece, entries) in sorted(parts.items())
        }
        return dump_manifest(
            CheckpointManifest(
                **snapshot.all_facts.model_dump(),
                step=snapshot.step,
                digest=digest_of(tensors),
                chunk_bytes=0,
                workers=snapshot.workers,
                tensors=tensors,
                files=files,
            )
        )
