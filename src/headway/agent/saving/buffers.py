"""The buffers that workers save into: an abstract buffer and its host, and both on this machine."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headway.agent.fd_store import FdStore
from headway.state import (
    BufferPlan,
    OpenCheckpoint,
    PieceShape,
    SaveBuffer,
    ShardEntry,
    plan_buffer,
    shard_name,
    write_shard,
)
from headway.state.save_buffer import FilePlan


def plan_from(fields: Mapping[str, Any]) -> BufferPlan:
    """The plan of a worker's buffers, from the pieces that it reported."""
    trained, frozen = (
        [PieceShape(name, dtype, tuple(shape), tuple(start), tuple(local)) for name, dtype, shape, start, local in rows]
        for rows in (fields["trained"], fields["still"])
    )
    return plan_buffer(trained, frozen)


def available_memory() -> int:
    """Bytes that this machine could still give."""
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123  (no file of a user's)
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclass(frozen=True)
class StateFiles:
    """A complete state in memory, as the files of a checkpoint."""

    step: int
    manifest: bytes
    files: list[tuple[str, int, int, int]]
    """Name, descriptor of the memory it is in, offset there, size."""


class SnapshotBuffer(ABC):
    """One buffer of one worker."""

    rank: int
    plan: BufferPlan
    descriptor: int
    """Of its memory, where that is on this machine; else -1."""
    writes_at_once: int
    """How many files of such buffers are written concurrently."""

    @property
    @abstractmethod
    def step(self) -> int | None:
        """The step whose complete state it holds."""

    @abstractmethod
    def holds(self, step: int) -> bool:
        """Whether the complete state of this step can be read, from here or from a replica."""

    @abstractmethod
    def read_note(self) -> dict[str, Any]:
        """What its worker reported with the state."""

    @abstractmethod
    def write(
        self, partial: Path, part: FilePlan, step: int, before: OpenCheckpoint | None, threads: int
    ) -> ShardEntry:
        """Write one of its files; an unchanging one may be linked from the checkpoint `before`."""

    @abstractmethod
    def local(self) -> SaveBuffer | None:
        """Its memory, where that is on this machine."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""

    def file_name(self, part: FilePlan) -> str:
        """The name of one of its files."""
        return shard_name(self.rank, part.frozen)


class SavedPart(Protocol):
    """What a host has to know of a snapshot."""

    step: int
    buffers: dict[int, int]
    """The buffer that each worker has filled, by rank."""


@dataclass(frozen=True)
class RecoveredState:
    """What a new agent found in the memory that the agent before it left."""

    pieces: dict[int, dict[str, Any]]
    """What each worker reported of the pieces it holds."""
    buffers: dict[int, list[SnapshotBuffer]]
    filled: list[tuple[int, int, int]] = field(default_factory=list)
    """Rank, buffer and step of states that are complete, or that workers still complete."""
    stale: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Rank, buffer, step and attempt of states that no worker will complete."""
    newest_step: int = -1
    """Of this attempt's complete states; what workers report up to it is known already."""


class BufferHost(ABC):
    """Makes the buffers of a run's workers, and stores what another agent needs to find them again."""

    @abstractmethod
    def make_buffer(self, rank: int, number: int, plan: BufferPlan) -> SnapshotBuffer:
        """A new buffer; raise StateError where there is no memory for it."""

    @abstractmethod
    def has_moved(self, buffer: SnapshotBuffer) -> bool:
        """Whether its worker is on another machine now, and needs new memory there."""

    @abstractmethod
    def available_bytes(self, in_use: int) -> int:
        """Memory for all buffers together, given what they use now."""

    @abstractmethod
    def drop(self) -> None:
        """All buffers are given back."""

    @abstractmethod
    def commit_refusal(self) -> str | None:
        """Why this agent may not commit a checkpoint to the disk; None if it may."""

    @abstractmethod
    def upload_refusal(self) -> str | None:
        """Why this agent may not write to the run's object store; None if it may."""

    @abstractmethod
    def replicate(self, snapshot: SavedPart, plans: Mapping[int, BufferPlan]) -> None:
        """Copy a complete state to a second machine, in the background, where there is one."""

    @abstractmethod
    def replicated_step(self) -> int | None:
        """The step of a state that was replicated since the last call."""

    @abstractmethod
    def store_buffers(self, pieces: Mapping[int, dict[str, Any]], descriptors: Sequence[int]) -> None:
        """Store what another agent needs to find these buffers."""

    @abstractmethod
    def store_snapshot(self, name: str, snapshot: SavedPart, notes: Mapping[int, dict[str, Any]], each: int) -> None:
        """Store what another agent needs to resume from a state; `each` is the number of buffers per worker."""

    @abstractmethod
    def recover(self, attempt: int, workers: int) -> RecoveredState | None:
        """Find the buffers of the agent before this one; None where there are none."""


class LocalBuffer(SnapshotBuffer):
    """A buffer in this machine's memory."""

    writes_at_once = 1

    def __init__(self, rank: int, buffer: SaveBuffer) -> None:
        self.rank, self.plan, self.descriptor, self._buffer = rank, buffer.plan, buffer.descriptor, buffer

    @property
    def step(self) -> int | None:
        """The step whose complete state it holds."""
        return self._buffer.step

    def holds(self, step: int) -> bool:
        """Whether the complete state of this step is in it."""
        return self._buffer.step == step

    def read_note(self) -> dict[str, Any]:
        """What its worker reported with the state."""
        return self._buffer.read_note()

    def write(
        self,
        partial: Path,
        part: FilePlan,
        step: int,
        before: OpenCheckpoint | None,
        threads: int,
    ) -> ShardEntry:
        """Write one of its files."""
        pieces, memory = self._buffer.pieces(part), self._buffer.file(part)
        before = before if part.frozen else None
        return write_shard(partial, self.file_name(part), pieces, memory=memory, before=before, threads=threads)

    def local(self) -> SaveBuffer:
        """Its memory."""
        return self._buffer

    def close(self) -> None:
        """Give the memory back."""
        self._buffer.close()


class LocalMemory(BufferHost):
    """Buffers of a run on one machine; the launcher holds their descriptors for the next agent."""

    def __init__(self, fd_store: FdStore) -> None:
        self._fd_store = fd_store

    def make_buffer(self, rank: int, number: int, plan: BufferPlan) -> LocalBuffer:
        """A new buffer; raise StateError where there is no memory for it."""
        return LocalBuffer(rank, SaveBuffer.make(plan))

    def has_moved(self, buffer: SnapshotBuffer) -> bool:
        """Workers stay on this machine."""
        return False

    def available_bytes(self, in_use: int) -> int:
        """What the machine could give if the buffers there are were given back."""
        return available_memory() + in_use

    def drop(self) -> None:
        """Closed buffers leave nothing behind."""

    def commit_refusal(self) -> str | None:
        """No other agent can have this run."""
        return None

    def upload_refusal(self) -> str | None:
        """No other agent can have this run."""
        return None

    def replicate(self, snapshot: SavedPart, plans: Mapping[int, BufferPlan]) -> None:
        """There is no second machine."""

    def replicated_step(self) -> int | None:
        """There is no second machine."""
        return None

    def store_buffers(self, pieces: Mapping[int, dict[str, Any]], descriptors: Sequence[int]) -> None:
        """Hand the descriptors to the launcher."""
        self._fd_store.put("buffers", descriptors, pieces=dict(pieces))

    def store_snapshot(self, name: str, snapshot: SavedPart, notes: Mapping[int, dict[str, Any]], each: int) -> None:
        """The buffers themselves tell."""

    def recover(self, attempt: int, workers: int) -> RecoveredState | None:
        """Map the buffers again, and see which states in them are complete or will be."""
        entry = self._fd_store.get("buffers")
        if entry is None:
            return None
        pieces = {int(rank): fields for rank, fields in entry.fields["pieces"].items()}
        each = len(entry.descriptors) // max(1, len(pieces))
        buffers: dict[int, list[SnapshotBuffer]] = {}
        states: dict[tuple[int, int], dict[int, int]] = {}
        for place, rank in enumerate(sorted(pieces)):
            descriptors, plan = entry.descriptors[place * each : (place + 1) * each], plan_from(pieces[rank])
            buffers[rank] = [LocalBuffer(rank, SaveBuffer(plan, descriptor)) for descriptor in descriptors]
            for number, buffer in enumerate(buffers[rank]):
                if buffer.step is not None:
                    states.setdefault((buffer.read_note()["attempt"], buffer.step), {})[rank] = number
        newest = max((key for key, ranks in states.items() if len(ranks) == len(pieces)), default=(0, -1))
        recovered = RecoveredState(pieces, buffers, newest_step=newest[1] if newest[0] == attempt else -1)
        for key, ranks in sorted(states.items()):
            will_complete = key[0] == attempt and key > newest
            for rank, number in ranks.items():
                if len(ranks) == len(pieces) or will_complete:
                    recovered.filled.append((rank, number, key[1]))
                else:
                    recovered.stale.append((rank, number, key[1], key[0]))
        return recovered
