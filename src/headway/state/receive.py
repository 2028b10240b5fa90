"""Writing a file of a checkpoint whose bytes lie on another machine: read a chunk at a time, each held against the
checksum that was taken where it lies."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from headway.errors import StateError
from headway.state.manifest import CHUNK_BYTES
from headway.state.read_checkpoint import OpenCheckpoint
from headway.state.save_buffer import FilePlan
from headway.state.write_checkpoint import ShardEntry, explain_write_errors, link_unchanged

__all__ = ["receive_shard"]


def receive_shard(
    partial: Path,
    shard: ShardEntry,
    part: FilePlan,
    read: Callable[[int, memoryview], None],
    before: OpenCheckpoint | None = None,
) -> None:
    """Write one file and make it durable; `shard` is what the other machine says of it, and must be as planned.

    `read(begin, out)` fills `out` from there. A file that has not changed since the checkpoint `before` gets a second
    name. When the disk refuses, or a checksum is wrong, nothing is left.
    """
    _check_plan(shard, part)
    path = partial / shard.name
    with explain_write_errors(f"{shard.name} could not be written in {partial}", removes=(path,)):
        if before is not None and link_unchanged(before, path, shard):
            return
        buffer = memoryview(bytearray(min(CHUNK_BYTES, shard.file.bytes)))
        with path.open("xb") as file:
            for begin, size, checksum in _chunks(shard, part):
                chunk = buffer[:size] if size <= len(buffer) else memoryview(bytearray(size))
                read(begin, chunk)
                if xxhash.xxh3_64_hexdigest(chunk) != checksum:
                    raise StateError(f"{shard.name} was changed on its way, or written over meanwhile, at byte {begin}")
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())


def _check_plan(shard: ShardEntry, part: FilePlan) -> None:
    """See that what is told of a file is what its worker said it would hold."""
    planned = {piece.name: (piece.dtype, piece.shape, piece.start, piece.local_shape) for piece in part.pieces}
    told = {
        name: (tensor.dtype, tensor.shape, piece.start, piece.shape)
        for name, tensor in shard.tensors.items()
        for piece in tensor.pieces
    }
    layout, file = part.layout, shard.file
    sizes = (file.bytes, file.header_bytes, file.header_xxh3) == (layout.bytes, len(layout.header), layout.header_xxh3)
    placed = all(
        [(piece.file, piece.offset) for piece in tensor.pieces] == [(shard.name, layout.spans[name].begin)]
        for name, tensor in shard.tensors.items()
        if name in layout.spans
    )
    if told != planned or not sizes or not placed:
        raise StateError(f"{shard.name} is not what its worker said that it saves")


def _chunks(shard: ShardEntry, part: FilePlan) -> Iterator[tuple[int, int, str]]:
    """Each stretch of a file in its order: where it begins, its size, its checksum."""
    yield 0, shard.file.header_bytes, shard.file.header_xxh3
    for name, place in sorted(part.layout.spans.items(), key=lambda one: one[1].begin):
        (piece,) = shard.tensors[name].pieces
        size = place.end - place.begin
        counts = range(0, size, CHUNK_BYTES)
        if len(piece.xxh3) != len(counts):
            raise StateError(f"{shard.name} has too few or many checksums")
        for begin, checksum in zip(counts, piece.xxh3, strict=True):
            yield place.begin + begin, min(CHUNK_BYTES, size - begin), checksum
