"""Write checkpoints to disk: into a partial folder, shard by shard, committed by one rename.

    save = begin_checkpoint(checkpoints, step, bytes)  creates the partial folder
    shard = write_shard(save.partial, file, pieces)    per file: hashed and written at the same time, durable
    commit(save, facts, shards, workers)               writes the manifest and renames the folder

Nothing here waits for another process. If several processes write one checkpoint, each leaves its shard's entry beside
its file (`leave_shard_entry`), and the one that commits reads them (`collect_shard_entries`) once all are written. A
folder whose name starts with a dot is not a checkpoint, with one exception: while a step is being replaced, the old
checkpoint counts until the new one has its name.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from headway.errors import StateError
from headway.state.box import Box, tiling_fault
from headway.state.digest import MASK, digest_box
from headway.state.durable import locked_folder, new_file
from headway.state.manifest import (
    CheckpointFacts,
    CheckpointManifest,
    FileEntry,
    FileName,
    PieceEntry,
    TensorEntry,
    chunk_checksums,
    digest_of,
    dump_manifest,
    file_entry,
)
from headway.state.read_checkpoint import OpenCheckpoint
from headway.state.safetensors_file import SafetensorsLayout, plan_file, write_file, write_memory
from headway.state.source import MANIFEST
from headway.track import make_durable
from headway.track.registry import NAMED

_NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
_HINTS = {
    errno.ENOSPC: "free some space, or keep fewer (checkpoint.keep_last); older checkpoints are untouched",
    errno.EDQUOT: "free some quota, or keep fewer (checkpoint.keep_last); older checkpoints are untouched",
    errno.EROFS: "make the folder writable, or put the runs elsewhere with --runs",
    errno.EACCES: "make the folder writable, or put the runs elsewhere with --runs",
    errno.ENOENT: "another process cancelled this save, or the run's folder was removed",
}
_DISK_HINT = "check the disk (dmesg); older checkpoints are untouched"


@dataclass(frozen=True)
class PieceShape:
    """A box of a tensor, without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    local_shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The region of the tensor that it is."""
        return Box(self.start, self.local_shape)

    def filled(self, data: NDArray[np.unsignedinteger]) -> "Piece":
        """Return the piece with these bytes."""
        return Piece(self.name, self.dtype, self.shape, self.start, self.local_shape, data)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor in memory: its elements in row-major order, as unsigned integers of the dtype's size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    local_shape: tuple[int, ...]
    data: NDArray[np.unsignedinteger]

    @property
    def box(self) -> Box:
        """The region of the tensor that it holds."""
        return Box(self.start, self.local_shape)


@dataclass(frozen=True, order=True)
class CheckpointEntry:
    """A complete checkpoint."""

    step: int
    path: Path


class ShardEntry(BaseModel):
    """One written file of a checkpoint, as the manifest will describe it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: FileName
    file: FileEntry
    tensors: dict[str, TensorEntry]
    """Each with the one piece in this file, and what that adds to the digest."""


@dataclass(frozen=True)
class PartialCheckpoint:
    """A checkpoint that is being written."""

    checkpoints: Path
    step: int
    partial: Path
    """The folder of its files until it is committed."""
    lock: int
    """Descriptor of a lock that keeps other processes from removing the partial folder as a leftover."""


def begin_checkpoint(checkpoints: Path, step: int, needs_bytes: int = 0, writer: str = "") -> PartialCheckpoint:
    """Create the partial folder of a checkpoint; remove what dead writers left behind.

    Writers that might save the same step at the same time need distinct names. The folder above `checkpoints` must
    exist: where it is gone, nothing is created in its place.
    """
    with explain_write_errors(f"checkpoint of step {step} could not be started in {checkpoints}"):
        checkpoints.mkdir(exist_ok=True)
        free = shutil.disk_usage(checkpoints).free
        if needs_bytes > free:
            raise StateError(
                f"checkpoint of step {step} needs {_size(needs_bytes)}, {_size(free)} free in {checkpoints}",
                hint=_HINTS[errno.ENOSPC],
            )
        partial = partial_folder(checkpoints, step, writer)
        with locked_folder(checkpoints):
            _remove_leftovers(checkpoints)
            partial.mkdir()
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
    return PartialCheckpoint(checkpoints, step, partial, lock)


def partial_folder(checkpoints: Path, step: int, writer: str = "") -> Path:
    """Return the folder that a step's checkpoint is written into until it is committed."""
    return checkpoints / f".step-{step:08d}{writer and '.'}{writer}.partial"


def shard_name(rank: int, frozen: bool = False) -> str:
    """Return the name of a worker's file of trained or frozen tensors."""
    return f"rank-{rank:05d}{'-still' if frozen else ''}.safetensors"


def shard_layout(pieces: Sequence[Piece] | Sequence[PieceShape]) -> SafetensorsLayout:
    """Return the layout of a file of these pieces."""
    return plan_file((piece.name, piece.dtype, piece.local_shape) for piece in pieces)


def write_shard(
    partial: Path,
    name: str,
    pieces: Sequence[Piece],
    *,
    memory: memoryview | None = None,
    before: OpenCheckpoint | None = None,
    threads: int = 1,
) -> ShardEntry:
    """Write one file durably, while `threads` threads compute checksums and digests from memory.

    `memory` is the whole file, if the pieces already have its layout. A file that has not changed since the checkpoint
    `before` is hard-linked instead of written again. If the disk fails, nothing is left behind.
    """
    layout = shard_layout(pieces)
    path = partial / name
    pool = ThreadPoolExecutor(threads, thread_name_prefix="digest")
    with explain_write_errors(f"{name} could not be written in {partial}", removes=(path,)):
        try:
            described = {piece.name: pool.submit(_describe, piece, name, layout) for piece in pieces}
            if before is None or not link_unchanged(before, path, _shard(name, layout, described)):
                if memory is None:
                    views = {piece.name: _bytes(piece) for piece in pieces}
                    write_file(path, layout.header, (views[tensor] for tensor in layout.spans))
                else:
                    write_memory(path, memory, layout.bytes)
            return _shard(name, layout, described)
        finally:
            pool.shutdown(cancel_futures=True)  # not needed once the disk has failed


def describe_shard(name: str, pieces: Sequence[Piece], threads: int = 1) -> ShardEntry:
    """Return the entry of a file that is not written here."""
    layout = shard_layout(pieces)
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        return _shard(name, layout, {piece.name: pool.submit(_describe, piece, name, layout) for piece in pieces})


def leave_shard_entry(partial: Path, shard: ShardEntry) -> None:
    """Store a file's entry beside it, for the process that commits."""
    path = partial / f"{shard.name}.json"
    failed = f"{path.name} could not be written in {partial}"
    with explain_write_errors(failed, removes=(path,)), new_file(path) as file:
        file.write(shard.model_dump_json().encode())


def collect_shard_entries(partial: Path, workers: int) -> list[ShardEntry]:
    """Read and remove the entries that the workers left beside their files."""
    shards = []
    for rank in range(workers):
        path = partial / f"{shard_name(rank)}.json"
        try:
            shards.append(ShardEntry.model_validate_json(path.read_bytes()))
            path.unlink()
        except (OSError, ValidationError) as error:
            raise StateError(
                f"worker {rank} has not written its shard of {partial.name}; nothing was saved",
                hint="its log says why: headway logs RUN --rank",
            ) from error
    return shards


def commit(
    save: PartialCheckpoint,
    facts: CheckpointFacts,
    shards: Sequence[ShardEntry],
    workers: int,
    refusal: Callable[[], str | None] = lambda: None,
) -> Path:
    """Turn what was written into a checkpoint atomically, unless `refusal` then says why not."""
    checkpoints, step, partial = save.checkpoints, save.step, save.partial
    failed = f"checkpoint of step {step} could not be committed in {checkpoints}"
    try:
        with explain_write_errors(failed, removes=(partial,)):
            with new_file(partial / MANIFEST) as file:
                file.write(dump_manifest(merge(step, facts, shards, workers)))
            make_durable(partial)
            with locked_folder(checkpoints):
                if (refused := refusal()) is not None:
                    raise StateError(f"{failed}: {refused}", hint="nothing was changed")
                path = _rename(checkpoints, partial, step)
    finally:
        os.close(save.lock)
    return path


def fence(checkpoints: Path) -> None:
    """Remove whatever other processes are writing there, so that they can no longer commit it."""
    for path in checkpoints.glob(".step-*.partial"):
        with contextlib.suppress(OSError):  # another process did it
            fenced = path.rename(path.with_name(f"{path.name}.fenced"))
            shutil.rmtree(fenced, ignore_errors=True)


def abandon(save: PartialCheckpoint) -> None:
    """Cancel a save and remove what has been written of it."""
    _remove(save.partial)
    os.close(save.lock)


def list_checkpoints(checkpoints: Path) -> list[CheckpointEntry]:
    """Return all complete checkpoints, oldest step first."""
    try:
        # A dot sorts first: a step's own folder overrides the replaced one.
        names = sorted(path.name for path in checkpoints.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths: dict[int, Path] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match and (checkpoints / name).is_dir():
            paths[int(match[1] or match[2])] = checkpoints / name
    return sorted(CheckpointEntry(step, path) for step, path in paths.items())


def find_checkpoint(checkpoints: Path, step: int | None = None) -> Path:
    """Return the checkpoint of a step, or the newest one; raise StateError listing those that exist."""
    entries = list_checkpoints(checkpoints)
    if not entries:
        raise StateError(
            f"{checkpoints} has no checkpoint",
            hint="the run may have stopped before its first save (checkpoint.every_steps)",
            usage=True,
        )
    for entry in reversed(entries):
        if step is None or entry.step == step:
            return entry.path
    steps = ", ".join(str(entry.step) for entry in entries[-10:])
    raise StateError(
        f"{checkpoints} has no checkpoint of step {step}",
        hint=f"there {'are' if len(entries) > 1 else 'is'} {'..., ' if len(entries) > 10 else ''}{steps}",
        usage=True,
    )


def prune(checkpoints: Path, keep_last: int, keep_every_steps: int = 0, always: int | None = None) -> list[int]:
    """Remove all but the newest, multiples of `keep_every_steps`, named ones and `always`; return the removed steps."""
    assert keep_last >= 1, "pruning would leave nothing"
    removed = []
    with explain_write_errors(f"old checkpoints could not be removed from {checkpoints}"), locked_folder(checkpoints):
        for entry in list_checkpoints(checkpoints)[:-keep_last]:
            named = (entry.path / NAMED).exists()
            if named or entry.step == always or (keep_every_steps and entry.step % keep_every_steps == 0):
                continue
            # Renamed first: a half-removed checkpoint must not be listed.
            doomed = checkpoints / f".step-{entry.step:08d}.removed"
            entry.path.rename(doomed)
            shutil.rmtree(doomed)
            removed.append(entry.step)
    return removed


def merge(step: int, facts: CheckpointFacts, shards: Sequence[ShardEntry], workers: int) -> CheckpointManifest:
    """Merge the entries of all files into a manifest; raise StateError if they are not a complete state."""
    parts: dict[str, list[TensorEntry]] = {}
    for shard in shards:
        for name, part in shard.tensors.items():
            parts.setdefault(name, []).append(part)
    tensors = {name: _merge_tensor(name, parts[name]) for name in sorted(parts)}
    return CheckpointManifest(
        **facts.model_dump(),
        step=step,
        digest=digest_of(tensors),
        workers=workers,
        tensors=tensors,
        files={shard.name: shard.file for shard in shards},
    )


def _merge_tensor(name: str, parts: list[TensorEntry]) -> TensorEntry:
    first = parts[0]
    if any((part.dtype, part.shape) != (first.dtype, first.shape) for part in parts):
        raise StateError(f"workers disagree on the dtype or shape of tensor {name}; nothing was saved")
    pieces = tuple(piece for part in parts for piece in part.pieces)
    if fault := tiling_fault(first.shape, (piece.box for piece in pieces)):
        raise StateError(f"tensor {name} would be incomplete: {fault}; nothing was saved")
    digest = sum(int(part.digest, 16) for part in parts) & MASK
    return first.model_copy(update={"digest": f"{digest:016x}", "pieces": pieces})


def _describe(piece: Piece, file: str, layout: SafetensorsLayout) -> TensorEntry:
    """Return the manifest entry of one piece: its offset, and its checksums and digest computed from memory."""
    offset, checksums = layout.spans[piece.name].begin, chunk_checksums(_bytes(piece))
    digest = digest_box(piece.data, piece.shape, piece.box)
    entry = PieceEntry(file=file, offset=offset, start=piece.start, shape=piece.local_shape, xxh3=checksums)
    return TensorEntry(dtype=piece.dtype, shape=piece.shape, digest=f"{digest:016x}", pieces=(entry,))


def _bytes(piece: Piece) -> memoryview:
    return np.ascontiguousarray(piece.data).reshape(-1).view(np.uint8).data


def _shard(name: str, layout: SafetensorsLayout, described: Mapping[str, Future[TensorEntry]]) -> ShardEntry:
    """Return a file's entry, once all of its pieces are described."""
    tensors = {tensor: described[tensor].result() for tensor in layout.spans}
    return ShardEntry(name=name, file=file_entry(layout), tensors=tensors)


def link_unchanged(before: OpenCheckpoint, path: Path, shard: ShardEntry) -> bool:
    """Hard-link an unchanged file of an earlier checkpoint; return False if it changed or cannot be linked."""
    old = before.manifest
    pieces = {
        name: piece for name, tensor in old.tensors.items() for piece in tensor.pieces if piece.file == shard.name
    }
    if old.files.get(shard.name) != shard.file or pieces != {n: t.pieces[0] for n, t in shard.tensors.items()}:
        return False
    try:
        os.link(before.source.name(shard.name), path)
    except OSError:  # a file system without links, or a file that was removed
        return False
    return True


def _rename(checkpoints: Path, partial: Path, step: int) -> Path:
    """Give the finished folder its name; a checkpoint that has it is renamed, and counts until then."""
    path = checkpoints / f"step-{step:08d}"
    old = checkpoints / f".step-{step:08d}.replaced"
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    partial.rename(path)
    make_durable(checkpoints)
    shutil.rmtree(old, ignore_errors=True)
    return path


def _remove_leftovers(checkpoints: Path) -> None:
    """Remove what killed saves and prunings left behind; the only copy of a step gets its name back."""
    for path in checkpoints.glob(".step-*"):
        match = _NAME.fullmatch(path.name)
        final = checkpoints / f"step-{match[2]}" if match else None
        if final and not final.exists():
            path.rename(final)
        elif not _in_use(path):
            shutil.rmtree(path)


def _in_use(path: Path) -> bool:
    """Whether another process is writing this partial folder."""
    try:
        with locked_folder(path, wait=False):
            return False
    except BlockingIOError:
        return True


def _remove(path: Path) -> None:
    """Remove a file or folder if it exists; what fails is left to the next save."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def explain_write_errors(failed: str, removes: Sequence[Path] = ()) -> Iterator[None]:
    """Turn an OSError into a StateError with a hint, and remove what could not be finished."""
    try:
        yield
    except (OSError, StateError) as error:
        for path in removes:
            _remove(path)
        if isinstance(error, StateError):
            raise
        hint = _HINTS.get(error.errno or 0, _DISK_HINT)
        raise StateError(f"{failed}: {error.strerror or error}", hint=hint) from error


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
