"""Memory that the agent holds and a worker saves into: laid out as the files it will become.

One buffer takes one worker's state at one step:

    the file of what it trains | the file of what stays as it is | marks and a note

each beginning at a page. Both sides plan it from the same pieces, so that nothing but bytes is shared. The memory has
no name: it is gone when the last process that has it is. The marks say which step is being copied and which one is
whole; a worker that dies in the middle leaves them different. The note is what else belongs to the state of that step
(cursor, chain, random state), so that memory alone is enough to go on from.
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

__all__ = ["BufferPlan", "FilePlan", "MemoryCheckpoint", "SaveBuffer", "map_files", "plan_buffer"]

PAGE = 4096
_MARKS = struct.Struct("<QQ")
_LENGTH = struct.Struct("<Q")
NEVER = 2**64 - 1
NOTE_BYTES = 16 * PAGE
"""For the marks and the note; the random state of a CPU and a GPU takes a tenth of it."""


@dataclass(frozen=True)
class FilePlan:
    """One file of a buffer, and where it begins there."""

    frozen: bool
    begin: int
    layout: SafetensorsLayout
    pieces: tuple[PieceShape, ...]


@dataclass(frozen=True)
class BufferPlan:
    """Where everything lies in a buffer."""

    parts: tuple[FilePlan, ...]

    @property
    def marks(self) -> int:
        """Where the marks begin."""
        return max((part.begin + _pages(part.layout.bytes) for part in self.parts), default=0)

    @property
    def bytes(self) -> int:
        """Size of the buffer."""
        return self.marks + NOTE_BYTES


class SaveBuffer:
    """A plan and the memory behind it, mapped into this process."""

    def __init__(self, plan: BufferPlan, descriptor: int) -> None:
        """Map the memory of an open descriptor, which then belongs to the buffer."""
        self.plan, self.descriptor = plan, descriptor
        # Populated at once: a page that is first touched by a save would stall the step.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.memory = mmap.mmap(descriptor, plan.bytes, flags=flags)

    @classmethod
    def make(cls, plan: BufferPlan) -> "SaveBuffer":
        """New memory, every page of it there; StateError when the machine does not have so much."""
        descriptor = os.memfd_create("headway-state", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, plan.bytes)
            buffer = cls(plan, descriptor)
        except OSError as error:
            os.close(descriptor)
            raise StateError(
                f"no memory for a saved state of {plan.bytes / 1e9:.1f} GB: {error.strerror}",
                hint="more workers hold less each; checkpoint.memory_gb bounds what is kept",
            ) from error
        buffer.mark(NEVER, NEVER)
        for part in plan.parts:
            buffer.memory[part.begin : part.begin + len(part.layout.header)] = part.layout.header
        return buffer

    def mark(self, begun: int, done: int) -> None:
        """Note which step is being copied, and which one is whole."""
        _MARKS.pack_into(self.memory, self.plan.marks, begun, done)

    def write_note(self, note: Mapping[str, Any]) -> None:
        """Say what else belongs to the state that is being copied."""
        text = json.dumps(note).encode()
        begin = self.plan.marks + _MARKS.size + _LENGTH.size
        assert begin + len(text) <= self.plan.bytes, "a note that does not fit"
        _LENGTH.pack_into(self.memory, self.plan.marks + _MARKS.size, len(text))
        self.memory[begin : begin + len(text)] = text

    def read_note(self) -> dict[str, Any]:
        """What was said of the state in it."""
        begin = self.plan.marks + _MARKS.size + _LENGTH.size
        (length,) = _LENGTH.unpack_from(self.memory, self.plan.marks + _MARKS.size)
        note: dict[str, Any] = json.loads(self.memory[begin : begin + length])
        return note

    @property
    def step(self) -> int | None:
        """The step whose whole state is in it."""
        begun, done = _MARKS.unpack_from(self.memory, self.plan.marks)
        return int(done) if begun == done != NEVER else None

    def holds(self, step: int) -> bool:
        """Whether the whole state of this step is in it."""
        return self.step == step

    def pieces(self, part: FilePlan) -> list[Piece]:
        """The pieces of one of its files, as they lie in memory."""
        return [shape.filled(self.bits(part, shape)) for shape in part.pieces]

    def bits(self, part: FilePlan, shape: PieceShape) -> NDArray[np.unsignedinteger]:
        """The memory of one piece."""
        place = part.layout.spans[shape.name]
        dtype = bits_dtype(shape.dtype)
        count = (place.end - place.begin) // dtype.itemsize
        return np.frombuffer(self.memory, dtype, count, part.begin + place.begin).reshape(shape.local_shape)

    def file(self, part: FilePlan) -> memoryview:
        """The memory of one of its files, to the end of its last page."""
        return memoryview(self.memory)[part.begin : part.begin + _pages(part.layout.bytes)]

    def close(self) -> None:
        """Give the memory up; views of it that are still around keep it mapped."""
        os.close(self.descriptor)


class MemoryCheckpoint(CheckpointSource):
    """A checkpoint whose files lie in buffers: what a restarted worker goes on from."""

    checked = False
    location = "the agent's memory"

    def __init__(
        self,
        files: Mapping[str, memoryview],
        elsewhere: Mapping[str, PeerFile] | None = None,
        far: PeerReader | None = None,
    ) -> None:
        """`elsewhere` are files in the memory of other nodes, read through `far`."""
        self._files, self._elsewhere, self._far = files, elsewhere or {}, far

    def manifest(self) -> bytes:
        """See Source."""
        return bytes(self._files[MANIFEST])

    def size(self, file: str) -> int:
        """See Source."""
        return len(self._files[file]) if file in self._files else self._elsewhere[file].size

    def read(self, file: str, begin: int, out: memoryview) -> None:
        """See Source."""
        if file not in self._files:
            assert self._far is not None, "files elsewhere are read from there"
            self._far.read(self._elsewhere[file], begin, out)
            return
        # By NumPy, which lets other threads copy meanwhile: 4 GB/s become 13 on an H200 host.
        part = self._files[file][begin : begin + len(out)]
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(part, np.uint8))


def map_files(descriptors: Sequence[int], files: Sequence[tuple[str, int, int]]) -> dict[str, memoryview]:
    """Files (name, where it begins, size) that lie in the memory behind descriptors, which are then closed."""
    mapped = {}
    for descriptor, (name, begin, size) in zip(descriptors, files, strict=True):
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        mapped[name] = memoryview(memory)[begin : begin + size]
        os.close(descriptor)
    return mapped


def plan_buffer(trained: Sequence[PieceShape], still: Sequence[PieceShape]) -> BufferPlan:
    """Lay a worker's pieces out; what has no pieces has no file."""
    parts: list[FilePlan] = []
    begin = 0
    for is_still, pieces in ((False, trained), (True, still)):
        if pieces:
            layout = shard_layout(pieces)
            parts.append(FilePlan(is_still, begin, layout, tuple(pieces)))
            begin += _pages(layout.bytes)
    return BufferPlan(tuple(parts))


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
