"""Shared memory of the agent that a worker saves into, laid out as the files it will become.

One buffer holds one worker's state at one step:

    file of trained tensors | file of frozen tensors | marks and a note

each starting on a page boundary. Both sides plan it from the same pieces, so that only bytes are shared. The memory is
anonymous: it is freed with the last process that maps it. The marks state which step is being copied and which one is
complete; a worker that dies in the middle leaves them different. The note holds what else belongs to the state of that
step (cursor, chain, random state), so that a run can resume from memory alone.
"""

import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import StateError
from headway.state.peer_read import PeerFile, PeerReader
from headway.state.safetensors_file import SafetensorsLayout, bits_dtype
from headway.state.source import MANIFEST, CheckpointSource
from headway.state.write_checkpoint import Piece, PieceShape, shard_layout

PAGE = 4096
_MARKS = struct.Struct("<QQ")
_LENGTH = struct.Struct("<Q")
NEVER = 2**64 - 1
NOTE_BYTES = 16 * PAGE
"""Room for the marks and the note; the random state of a CPU and a GPU takes a tenth of it."""


@dataclass(frozen=True)
class FilePlan:
    """One file of a buffer, and its offset there."""

    frozen: bool
    begin: int
    layout: SafetensorsLayout
    pieces: tuple[PieceShape, ...]


@dataclass(frozen=True)
class BufferPlan:
    """The layout of a buffer."""

    parts: tuple[FilePlan, ...]

    @property
    def marks(self) -> int:
        """Offset of the marks."""
        return max((part.begin + _pages(part.layout.bytes) for part in self.parts), default=0)

    @property
    def bytes(self) -> int:
        """Size of the buffer."""
        return self.marks + NOTE_BYTES


class SaveBuffer:
    """A plan and its memory, mapped into this process."""

    def __init__(self, plan: BufferPlan, descriptor: int) -> None:
        """Map the memory of an open descriptor, which then belongs to the buffer."""
        self.plan, self.descriptor = plan, descriptor
        # Populated at once: page faults in the first save would stall the step.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.memory = mmap.mmap(descriptor, plan.bytes, flags=flags)

    @classmethod
    def make(cls, plan: BufferPlan) -> "SaveBuffer":
        """Allocate all pages of a new buffer; raise StateError if the machine has too little memory."""
        descriptor = os.memfd_create("headway-state", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, plan.bytes)
            buffer = cls(plan, descriptor)
        except OSError as error:
            os.close(descriptor)
            raise StateError(
                f"cannot allocate {plan.bytes / 1e9:.1f} GB of memory for a saved state: {error.strerror}",
                hint="use more workers, each holds less then, or lower checkpoint.memory_gb",
            ) from error
        buffer.mark(NEVER, NEVER)
        for part in plan.parts:
            buffer.memory[part.begin : part.begin + len(part.layout.header)] = part.layout.header
        return buffer

    def mark(self, begun: int, done: int) -> None:
        """Record which step is being copied, and which one is complete."""
        _MARKS.pack_into(self.memory, self.plan.marks, begun, done)

    def write_note(self, note: Mapping[str, Any]) -> None:
        """Store what else belongs to the state that is being copied."""
        text = json.dumps(note).encode()
        begin = self.plan.marks + _MARKS.size + _LENGTH.size
        assert begin + len(text) <= self.plan.bytes, "the note does not fit"
        _LENGTH.pack_into(self.memory, self.plan.marks + _MARKS.size, len(text))
        self.memory[begin : begin + len(text)] = text

    def read_note(self) -> dict[str, Any]:
        """Return the note of the state in the buffer."""
        begin = self.plan.marks + _MARKS.size + _LENGTH.size
        (length,) = _LENGTH.unpack_from(self.memory, self.plan.marks + _MARKS.size)
        note: dict[str, Any] = json.loads(self.memory[begin : begin + length])
        return note

    @property
    def step(self) -> int | None:
        """The step whose complete state is in the buffer, if any."""
        begun, done = _MARKS.unpack_from(self.memory, self.plan.marks)
        return int(done) if begun == done != NEVER else None

    def holds(self, step: int) -> bool:
        """Whether the complete state of this step is in the buffer."""
        return self.step == step

    def pieces(self, part: FilePlan) -> list[Piece]:
        """The pieces of one file, as views of the memory."""
        return [shape.filled(self.bits(part, shape)) for shape in part.pieces]

    def bits(self, part: FilePlan, shape: PieceShape) -> NDArray[np.unsignedinteger]:
        """The memory of one piece."""
        span = part.layout.spans[shape.name]
        dtype = bits_dtype(shape.dtype)
        count = (span.end - span.begin) // dtype.itemsize
        return np.frombuffer(self.memory, dtype, count, part.begin + span.begin).reshape(shape.local_shape)

    def file(self, part: FilePlan) -> memoryview:
        """The memory of one file, up to the end of its last page."""
        return memoryview(self.memory)[part.begin : part.begin + _pages(part.layout.bytes)]

    def close(self) -> None:
        """Release the memory; it stays mapped while views of it exist."""
        os.close(self.descriptor)


class MemoryCheckpoint(CheckpointSource):
    """A checkpoint whose files are in buffers: what a restarted worker resumes from."""

    checked = False
    location = "the agent's memory"

    def __init__(
        self,
        files: Mapping[str, memoryview],
        peer_files: Mapping[str, PeerFile] | None = None,
        reader: PeerReader | None = None,
    ) -> None:
        """`peer_files` are in the memory of other nodes, and read through `reader`."""
        self._files, self._peer_files, self._reader = files, peer_files or {}, reader

    def manifest(self) -> bytes:
        """See CheckpointSource."""
        return bytes(self._files[MANIFEST])

    def size(self, file: str) -> int:
        """See CheckpointSource."""
        return len(self._files[file]) if file in self._files else self._peer_files[file].size

    def read(self, file: str, begin: int, out: memoryview) -> None:
        """See CheckpointSource."""
        if file not in self._files:
            assert self._reader is not None, "files of peers need a reader"
            self._reader.read(self._peer_files[file], begin, out)
            return
        # NumPy releases the GIL, so that threads copy in parallel: 13 GB/s instead of 4 on an H200 host.
        part = self._files[file][begin : begin + len(out)]
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(part, np.uint8))


def map_files(descriptors: Sequence[int], files: Sequence[tuple[str, int, int]]) -> dict[str, memoryview]:
    """Map files (name, offset, size) in the memory behind descriptors, and close the descriptors."""
    mapped = {}
    for descriptor, (name, begin, size) in zip(descriptors, files, strict=True):
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        mapped[name] = memoryview(memory)[begin : begin + size]
        os.close(descriptor)
    return mapped


def plan_buffer(trained: Sequence[PieceShape], frozen: Sequence[PieceShape]) -> BufferPlan:
    """Plan the buffer for a worker's pieces; a file without pieces is left out."""
    parts: list[FilePlan] = []
    begin = 0
    for is_frozen, pieces in ((False, trained), (True, frozen)):
        if pieces:
            layout = shard_layout(pieces)
            parts.append(FilePlan(is_frozen, begin, layout, tuple(pieces)))
            begin += _pages(layout.bytes)
    return BufferPlan(tuple(parts))


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
