"""Write a checkpoint file whose bytes are on another machine, verifying each chunk against the checksum taken there."""

from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from headway.errors import StateError
from headway.state.durable import new_file
from headway.state.manifest import CHUNK_BYTES
from headway.state.read_checkpoint import OpenCheckpoint
from headway.state.save_buffer import FilePlan
from headway.state.write_checkpoint import ShardEntry, explain_write_errors, link_unchanged


def receive_shard(
    partial: Path,
    shard: ShardEntry,
    part: FilePlan,
    read: Callable[[int, memoryview], None],
    before: OpenCheckpoint | None = None,
) -> None:
    """Write one file durably; `shard` is the other machine's entry for it, and must match the plan.

    `read(begin, out)` fills `out` from there. A file that has not changed since the checkpoint `before` is hard-linked
    instead. If the disk fails or a checksum is wrong, nothing is left behind.
    """
    _check_plan(shard, part)
    path = partial / shard.name
    with explain_write_errors(f"{shard.name} could not be written in {partial}", removes=(path,)):
        if before is not None and link_unchanged(before, path, shard):
            return
        buffer = memoryview(bytearray(min(CHUNK_BYTES, shard.file.bytes)))
        with new_file(path) as file:
            for begin, size, checksum in _chunks(shard, part):
                chunk = buffer[:size] if size <= len(buffer) else memoryview(bytearray(size))
                read(begin, chunk)
                if xxhash.xxh3_64_hexdigest(chunk) != checksum:
                    raise StateError(f"{shard.name} was corrupted in transit or overwritten meanwhile, at byte {begin}")
                file.write(chunk)


def _check_plan(shard: ShardEntry, part: FilePlan) -> None:
    """Raise StateError if a file's entry does not match what its worker planned to save."""
    planned = {piece.name: (piece.dtype, piece.shape, piece.start, piece.local_shape) for piece in part.pieces}
    received = {
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
    if received != planned or not sizes or not placed:
        raise StateError(f"{shard.name} does not match what its worker planned to save")


def _chunks(shard: ShardEntry, part: FilePlan) -> Iterator[tuple[int, int, str]]:
    """Each range of a file in order: its first byte, size and checksum."""
    yield 0, shard.file.header_bytes, shard.file.header_xxh3
    for name, span in sorted(part.layout.spans.items(), key=lambda item: item[1].begin):
        (piece,) = shard.tensors[name].pieces
        size = span.end - span.begin
        begins = range(0, size, CHUNK_BYTES)
        if len(piece.xxh3) != len(begins):
            raise StateError(f"{shard.name} has {len(piece.xxh3)} checksums, not {len(begins)}")
        for begin, checksum in zip(begins, piece.xxh3, strict=True):
            yield span.begin + begin, min(CHUNK_BYTES, size - begin), checksum
