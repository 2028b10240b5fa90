"""Snapshots in memory: the buffers that workers save into, which hold a complete state, which may be filled next.

Every worker has the same number of buffers. A state is complete when all workers have filled one with the same step.
With two buffers or more, the newest complete state stays until a newer one is complete: restarts resume from it.
Buffers outlive the workers, and the next workers reuse them if they hold the same pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.agent.saving.buffers import BufferHost, SnapshotBuffer, StateFiles
from headway.errors import StateError
from headway.state import (
    BufferPlan,
    CheckpointFacts,
    CheckpointManifest,
    FileEntry,
    PieceEntry,
    PieceShape,
    TensorEntry,
    dump_manifest,
)
from headway.state.manifest import digest_of, file_entry
from headway.state.tiers import Tier
from headway.track.carried_records import CarriedRecords, dump_records

ENOUGH = 2
"""Buffers per worker: one that is held or written, one that is filled meanwhile."""
MOST = 8
"""Small states get more, so that runs with short steps skip no saves while the disk syncs."""
SMALL_BYTES = 256e6


@dataclass
class StateSnapshot:
    """The state of one step in memory, as far as workers have saved it."""

    step: int
    attempt: int
    workers: int
    tiers: tuple[Tier, ...]
    facts: CheckpointFacts
    """Without the random state, which every worker reports for itself."""
    last: bool = False
    """Whether it is the run's final state, which must not be lost."""
    buffers: dict[int, int] = field(default_factory=dict)
    """The number of the buffer that each rank has filled."""
    rng: dict[str, str] = field(default_factory=dict)
    released: bool = False
    """Whether nothing reads it any more; the newest may stay anyway."""
    stall_s: float = 0.0
    """How long it stalled the slowest worker."""
    run: str = ""
    """The run's id, where there are `records`."""
    records: CarriedRecords = field(default_factory=dict)
    """Records of its steps that could not be written yet."""

    @property
    def is_complete(self) -> bool:
        """Whether all workers have filled a buffer with it."""
        return len(self.buffers) == self.workers

    @property
    def all_facts(self) -> CheckpointFacts:
        """What a checkpoint stores besides tensors."""
        extra = self.facts.extra | dump_records(self.run, self.records)
        return self.facts.model_copy(update={"rng": self.rng, "extra": extra})


def count_buffers(state_bytes: int, free_bytes: int, bound_gb: float | None) -> int:
    """How many buffers each worker gets; all workers' together hold a state of `state_bytes` per buffer."""
    if state_bytes > free_bytes:
        raise StateError(
            f"a saved state takes {state_bytes / 1e9:.3g} GB of memory, and only {free_bytes / 1e9:.3g} GB are free",
            hint="use fewer workers on this machine, a smaller model, or a machine with more memory",
        )
    if bound_gb is None:
        least = ENOUGH if ENOUGH * state_bytes <= free_bytes / 2 else 1
        return max(least, min(MOST, int(min(SMALL_BYTES, free_bytes / 2) // state_bytes)))
    if state_bytes > bound_gb * 1e9:
        raise StateError(
            f"a saved state takes {state_bytes / 1e9:.3g} GB of memory, and checkpoint.memory_gb is {bound_gb:g}",
            hint=f"set checkpoint.memory_gb = {state_bytes / 1e9 * 1.01:.3g} or more",
        )
    return min(MOST, int(min(bound_gb * 1e9, free_bytes) // state_bytes))


class SnapshotBuffers:
    """All buffers of a run, on this machine or on its nodes."""

    def __init__(self, host: BufferHost) -> None:
        self._host = host
        self._buffers: dict[int, list[SnapshotBuffer]] = {}
        self._in_use: dict[tuple[int, int], StateSnapshot] = {}
        self.newest: StateSnapshot | None = None
        """The newest complete state, if there is one."""
        self.replicated: StateSnapshot | None = None
        """The newest state with every file on two nodes; it stays until a newer one is replicated."""
        self.hold_newest = False
        """Whether the newest state stays even where there is one buffer, so that saves are skipped."""

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.plan.bytes for buffers in self._buffers.values() for buffer in buffers)

    @property
    def buffers_each(self) -> int:
        """Number of buffers per worker."""
        return max((len(buffers) for buffers in self._buffers.values()), default=0)

    def make(self, plans: Mapping[int, BufferPlan], count: int) -> None:
        """Allocate `count` buffers per worker for these plans, unless the existing ones fit."""
        if self.plans() == plans:
            for rank, buffers in self._buffers.items():
                if self._host.has_moved(buffers[0]):  # its worker is on another node now
                    self._allocate(rank, buffers[0].plan, len(buffers))
                    self._in_use = {key: snapshot for key, snapshot in self._in_use.items() if key[0] != rank}
            return
        self.drop()
        for rank, plan in plans.items():
            self._allocate(rank, plan, count)

    def _allocate(self, rank: int, plan: BufferPlan, count: int) -> None:
        self._buffers[rank] = [self._host.make_buffer(rank, number, plan) for number in range(count)]

    def plans(self) -> dict[int, BufferPlan]:
        """The plan of each worker's buffers."""
        return {rank: buffers[0].plan for rank, buffers in self._buffers.items()}

    def adopt(self, buffers: Mapping[int, list[SnapshotBuffer]]) -> None:
        """Adopt the buffers that another agent allocated."""
        self._buffers = dict(buffers)

    def all_descriptors(self) -> list[int]:
        """The descriptors of all buffers, rank by rank."""
        return [buffer.descriptor for rank in sorted(self._buffers) for buffer in self._buffers[rank]]

    def note(self, rank: int, number: int) -> dict[str, Any]:
        """What a worker wrote about the state in one of its buffers."""
        return self._buffers[rank][number].read_note()

    def holds(self, rank: int, number: int, step: int) -> bool:
        """Whether a buffer is known to be in use for the state of a step."""
        snapshot = self._in_use.get((rank, number))
        return snapshot is not None and snapshot.step == step

    def drop(self) -> None:
        """Free all memory."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.close()
        if self._buffers:
            self._host.drop()
        self._buffers, self._in_use, self.newest, self.replicated = {}, {}, None, None

    def descriptors(self, rank: int) -> list[int]:
        """The descriptors of a worker's buffers."""
        return [buffer.descriptor for buffer in self._buffers[rank]]

    def take(self, snapshot: StateSnapshot, rank: int, buffer: int) -> None:
        """Note that a worker has filled one of its buffers."""
        snapshot.buffers[rank] = buffer
        self._in_use[rank, buffer] = snapshot

    def complete(self, snapshot: StateSnapshot) -> None:
        """Note that all workers have: restarts resume from this snapshot from now on."""
        self.newest = snapshot

    def release(self, snapshot: StateSnapshot) -> None:
        """Note that nothing reads a snapshot any more; it stays only if it is the newest and there are more buffers."""
        snapshot.released = True

    def retain(self, snapshot: StateSnapshot) -> bool:
        """Keep a released snapshot for another reader; return False if its buffers may be filled again already."""
        if not all(self._in_use.get(key) is snapshot for key in snapshot.buffers.items()):
            return False
        snapshot.released = False
        return True

    def freed(self) -> list[tuple[int, int, StateSnapshot]]:
        """Free the buffers (rank, number, former content) that may be filled again; each is returned once."""
        held = (self.newest, self.replicated) if self.buffers_each >= ENOUGH or self.hold_newest else ()
        free = [
            (*key, snapshot)
            for key, snapshot in self._in_use.items()
            if snapshot.released and not any(snapshot is other for other in held)
        ]
        for rank, number, _ in free:
            del self._in_use[rank, number]
        return free

    def forget_unfinished(self) -> None:
        """Release incomplete snapshots, after their workers have ended."""
        for snapshot in list(self._in_use.values()):
            if not snapshot.is_complete:
                snapshot.released = True
        self.freed()

    def free(self, rank: int) -> list[int]:
        """The numbers of a worker's free buffers."""
        return [number for number in range(self.buffers_each) if (rank, number) not in self._in_use]

    def restorable(self) -> StateSnapshot | None:
        """The newest complete state that no worker has begun to overwrite and that no lost node held alone."""
        for snapshot in (self.newest, self.replicated):
            if snapshot is not None and all(
                self.buffer(snapshot, rank).holds(snapshot.step) for rank in snapshot.buffers
            ):
                return snapshot
        return None

    @property
    def step(self) -> int:
        """Step of the newest restorable state; -1 if there is none."""
        snapshot = self.restorable()
        return -1 if snapshot is None else snapshot.step

    def buffer(self, snapshot: StateSnapshot, rank: int) -> SnapshotBuffer:
        """The buffer with a worker's part of a snapshot."""
        return self._buffers[rank][snapshot.buffers[rank]]

    def files(self, snapshot: StateSnapshot) -> list[tuple[str, int, int, int]]:
        """Each file of a snapshot: its name, the descriptor of its memory, its offset there, its size."""
        files = []
        for rank in sorted(snapshot.buffers):
            buffer = self.buffer(snapshot, rank)
            for part in buffer.plan.parts:
                files.append((buffer.file_name(part), buffer.descriptor, part.begin, part.layout.bytes))
        return files

    def state_files(self) -> StateFiles | None:
        """The newest complete state as the files of a checkpoint."""
        snapshot = self.restorable()
        if snapshot is None:
            return None
        return StateFiles(snapshot.step, self.manifest(snapshot), self.files(snapshot))

    def manifest(self, snapshot: StateSnapshot) -> bytes:
        """The manifest of a snapshot, without checksums."""
        files: dict[str, FileEntry] = {}
        tensor_pieces: dict[str, tuple[PieceShape, list[PieceEntry]]] = {}
        for rank in sorted(snapshot.buffers):
            buffer = self.buffer(snapshot, rank)
            for part in buffer.plan.parts:
                name, layout = buffer.file_name(part), part.layout
                files[name] = file_entry(layout)
                for piece in part.pieces:
                    offset = layout.spans[piece.name].begin
                    entry = PieceEntry(file=name, offset=offset, start=piece.start, shape=piece.local_shape, xxh3=())
                    tensor_pieces.setdefault(piece.name, (piece, []))[1].append(entry)
        tensors = {
            name: TensorEntry(dtype=piece.dtype, shape=piece.shape, digest="0" * 16, pieces=tuple(entries))
            for name, (piece, entries) in sorted(tensor_pieces.items())
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
