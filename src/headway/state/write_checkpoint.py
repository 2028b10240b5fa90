"""Checkpoints on disk: begun beside, written shard by shard, committed by one rename.

    save = begin(checkpoints, step, bytes)           makes a folder whose name says that it is no checkpoint yet
    shard = write_shard(save.partial, file, pieces)  once a file: hashed and written at the same time, made durable
    commit(save, facts, shards)                      the manifest, and the rename

Nothing here waits for another process. Where several processes write one checkpoint, each leaves its shard's entry
beside its file (`leave`), and the one that commits picks them up (`collect`) once it knows that all are there. A folder
whose name begins with a dot is not a checkpoint, with one exception: the old one of a step that is being replaced
counts until the new one has its name.
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
)
from headway.state.read_checkpoint import OpenCheckpoint
from headway.state.safetensors_file import SafetensorsLayout, plan_file, write_file, write_memory
from headway.state.source import MANIFEST
from headway.track import make_durable

__all__ = [
    "CheckpointEntry",
    "PartialCheckpoint",
    "Piece",
    "PieceShape",
    "ShardEntry",
    "abandon",
    "begin_checkpoint",
    "collect_shard_entries",
    "commit",
    "describe_shard",
    "explain_write_errors",
    "fence",
    "find_checkpoint",
    "leave_shard_entry",
    "link_unchanged",
    "list_checkpoints",
    "merge",
    "partial_folder",
    "prune",
    "shard_layout",
    "shard_name",
    "write_shard",
]

_NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
_HINTS = {
    errno.ENOSPC: "free some space, or keep fewer (checkpoint.keep_last); older checkpoints are untouched",
    errno.EDQUOT: "free some quota, or keep fewer (checkpoint.keep_last); older checkpoints are untouched",
    errno.EROFS: "make the folder writable, or put the runs elsewhere with --runs",
    errno.EACCES: "make the folder writable, or put the runs elsewhere with --runs",
    errno.ENOENT: "another process gave this save up, or the run's folder was removed",
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
        """The piece that these bytes make."""
        return Piece(self.name, self.dtype, self.shape, self.start, self.local_shape, data)


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, in memory: the bits of its elements in row-major order as unsigned integers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    local_shape: tuple[int, ...]
    data: NDArray[np.unsignedinteger]

    @property
    def box(self) -> Box:
        """The region of the tensor that it has."""
        return Box(self.start, self.local_shape)


@dataclass(frozen=True, order=True)
class CheckpointEntry:
    """A checkpoint that is there."""

    step: int
    path: Path


class ShardEntry(BaseModel):
    """One file of a checkpoint that is written: what the manifest will say of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: FileName
    file: FileEntry
    tensors: dict[str, TensorEntry]
    """Each with the one piece that this file has, and that piece's share of the digest."""


@dataclass(frozen=True)
class PartialCheckpoint:
    """A checkpoint that is being written."""

    checkpoints: Path
    step: int
    partial: Path
    """Where its files go until it is committed."""
    lock: int
    """Keeps others from taking the partial folder for something left behind."""


def begin_checkpoint(checkpoints: Path, step: int, needs_bytes: int = 0, writer: str = "") -> PartialCheckpoint:
    """Make the folder that a checkpoint is written into; clear away what dead writers left behind.

    Writers that might save the same step at the same time bring names of their own.
    """
    with explain_write_errors(f"checkpoint of step {step} could not be begun in {checkpoints}"):
        checkpoints.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(checkpoints).free
        if needs_bytes > free:
            raise StateError(
                f"checkpoint of step {step} needs {_size(needs_bytes)}, {_size(free)} free in {checkpoints}",
                hint=_HINTS[errno.ENOSPC],
            )
        partial = partial_folder(checkpoints, step, writer)
        with _locked(checkpoints):
            _clear(checkpoints)
            partial.mkdir()
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
    return PartialCheckpoint(checkpoints, step, partial, lock)


def partial_folder(checkpoints: Path, step: int, writer: str = "") -> Path:
    """Where the checkpoint of a step is written until it is committed."""
    return checkpoints / f".step-{step:08d}{writer and '.'}{writer}.partial"


def shard_name(rank: int, still: bool = False) -> str:
    """What the file of a worker is called: of what it trains, or of what stays as it is."""
    return f"rank-{rank:05d}{'-still' if still else ''}.safetensors"


def shard_layout(pieces: Sequence[Piece] | Sequence[PieceShape]) -> SafetensorsLayout:
    """How these pieces lie in a file."""
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
    """Write one file and make it durable; so many threads take checksums and digests meanwhile, from memory.

    `memory` is the whole file, where the pieces already lie as in one. A file that has not changed since the
    checkpoint `before` is not written again: it gets a second name. When the disk refuses, nothing is left.
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
            pool.shutdown(cancel_futures=True)  # they matter no longer once the disk has refused


def describe_shard(name: str, pieces: Sequence[Piece], threads: int = 1) -> ShardEntry:
    """What the manifest will say of a file that is not written here."""
    layout = shard_layout(pieces)
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        return _shard(name, layout, {piece.name: pool.submit(_describe, piece, name, layout) for piece in pieces})


def leave_shard_entry(partial: Path, shard: ShardEntry) -> None:
    """Leave what is known of a file beside it, for the process that commits."""
    path = partial / f"{shard.name}.json"
    with explain_write_errors(f"{path.name} could not be written in {partial}", removes=(path,)):
        _write_durably(path, shard.model_dump_json().encode())


def collect_shard_entries(partial: Path, workers: int) -> list[ShardEntry]:
    """What the workers left beside their files."""
    shards = []
    for rank in range(workers):
        path = partial / f"{shard_name(rank)}.json"
        try:
            shards.append(ShardEntry.model_validate_json(path.read_bytes()))
            path.unlink()
        except (OSError, ValidationError) as error:
            raise StateError(
                f"worker {rank} has not written its part of {partial.name}; nothing was saved",
                hint="its log says why (headway logs RUN --rank)",
            ) from error
    return shards


def commit(
    save: PartialCheckpoint,
    facts: CheckpointFacts,
    shards: Sequence[ShardEntry],
    workers: int,
    allowed: Callable[[], bool] = lambda: True,
) -> Path:
    """Turn what was written into a checkpoint, at one instant, if it is still allowed then."""
    checkpoints, step, partial = save.checkpoints, save.step, save.partial
    failed = f"checkpoint of step {step} could not be committed in {checkpoints}"
    try:
        with explain_write_errors(failed, removes=(partial,)):
            _write_durably(partial / MANIFEST, dump_manifest(merge(step, facts, shards, workers)))
            make_durable(partial)
            with _locked(checkpoints):
                if not allowed():
                    raise StateError(f"{failed}: another agent leads the run", hint="nothing was changed")
                path = _rename(checkpoints, partial, step)
    finally:
        os.close(save.lock)
    return path


def fence(checkpoints: Path) -> None:
    """Take away whatever others are writing there, so that they can commit it no more, whether they live or not."""
    for path in checkpoints.glob(".step-*.partial"):
        with contextlib.suppress(OSError):  # somebody else does it
            gone = path.rename(path.with_name(f"{path.name}.fenced"))
            shutil.rmtree(gone, ignore_errors=True)


def abandon(save: PartialCheckpoint) -> None:
    """Give a save up: remove what has been written of it."""
    _remove(save.partial)
    os.close(save.lock)


def list_checkpoints(checkpoints: Path) -> list[CheckpointEntry]:
    """Every complete checkpoint, oldest step first."""
    try:
        # A dot sorts first: a step's own folder overrides the replaced one.
        names = sorted(path.name for path in checkpoints.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found: dict[int, Path] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match and (checkpoints / name).is_dir():
            found[int(match[1] or match[2])] = checkpoints / name
    return sorted(CheckpointEntry(step, path) for step, path in found.items())


def find_checkpoint(checkpoints: Path, step: int | None = None) -> Path:
    """The checkpoint of a step, or the newest one; StateError says which there are."""
    entries = list_checkpoints(checkpoints)
    if not entries:
        raise StateError(
            f"{checkpoints} has no checkpoint",
            hint="the run may have stopped before its first save (checkpoint.every_steps)",
        )
    for entry in reversed(entries):
        if step is None or entry.step == step:
            return entry.path
    steps = ", ".join(str(entry.step) for entry in entries[-10:])
    raise StateError(
        f"{checkpoints} has no checkpoint of step {step}",
        hint=f"there {'are' if len(entries) > 1 else 'is'} {'..., ' if len(entries) > 10 else ''}{steps}",
    )


def prune(checkpoints: Path, keep_last: int, keep_every_steps: int = 0, always: int | None = None) -> list[int]:
    """Remove all but the newest, multiples of `keep_every_steps`, and `always`; say which steps went."""
    assert keep_last >= 1, "pruning would leave nothing"
    removed = []
    with explain_write_errors(f"old checkpoints could not be removed from {checkpoints}"), _locked(checkpoints):
        for entry in list_checkpoints(checkpoints)[:-keep_last]:
            if entry.step == always or (keep_every_steps and entry.step % keep_every_steps == 0):
                continue
            # Renamed first: a checkpoint that is half removed must not be seen as one.
            doomed = checkpoints / f".step-{entry.step:08d}.removed"
            entry.path.rename(doomed)
            shutil.rmtree(doomed)
            removed.append(entry.step)
    return removed


def merge(step: int, facts: CheckpointFacts, shards: Sequence[ShardEntry], workers: int) -> CheckpointManifest:
    """One manifest from what is known of each file; StateError when they do not make a whole state."""
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
        raise StateError(f"tensor {name} would not be saved whole: {fault}; nothing was saved")
    digest = sum(int(part.digest, 16) for part in parts) & MASK
    return first.model_copy(update={"digest": f"{digest:016x}", "pieces": pieces})


def _describe(piece: Piece, file: str, layout: SafetensorsLayout) -> TensorEntry:
    """What the manifest will say of one piece: its place, checksums and digest, taken from memory."""
    offset, checksums = layout.spans[piece.name].begin, chunk_checksums(_bytes(piece))
    digest = digest_box(piece.data, piece.shape, piece.box)
    written = PieceEntry(file=file, offset=offset, start=piece.start, shape=piece.local_shape, xxh3=checksums)
    return TensorEntry(dtype=piece.dtype, shape=piece.shape, digest=f"{digest:016x}", pieces=(written,))


def _bytes(piece: Piece) -> memoryview:
    return np.ascontiguousarray(piece.data).reshape(-1).view(np.uint8).data


def _shard(name: str, layout: SafetensorsLayout, described: Mapping[str, Future[TensorEntry]]) -> ShardEntry:
    """A file's entry, when all of its pieces are described."""
    file = FileEntry(bytes=layout.bytes, header_bytes=len(layout.header), header_xxh3=layout.header_xxh3)
    return ShardEntry(name=name, file=file, tensors={tensor: described[tensor].result() for tensor in layout.spans})


def link_unchanged(before: OpenCheckpoint, path: Path, shard: ShardEntry) -> bool:
    """Give an unchanged file of an earlier checkpoint a second name; False if it changed or cannot have one."""
    old = before.manifest
    pieces = {
        name: piece for name, tensor in old.tensors.items() for piece in tensor.pieces if piece.file == shard.name
    }
    if old.files.get(shard.name) != shard.file or pieces != {n: t.pieces[0] for n, t in shard.tensors.items()}:
        return False
    try:
        os.link(before.source.name(shard.name), path)
    except OSError:  # a file system without links, or a file that is gone by now
        return False
    return True


def _rename(checkpoints: Path, partial: Path, step: int) -> Path:
    """Give the finished folder its name; one that has it already steps aside and counts until then."""
    path = checkpoints / f"step-{step:08d}"
    old = checkpoints / f".step-{step:08d}.replaced"
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    partial.rename(path)
    make_durable(checkpoints)
    shutil.rmtree(old, ignore_errors=True)
    return path


def _clear(checkpoints: Path) -> None:
    """Remove what killed saves and prunings left behind; an only copy of a step gets its name back."""
    for path in checkpoints.glob(".step-*"):
        match = _NAME.fullmatch(path.name)
        own = checkpoints / f"step-{match[2]}" if match else None
        if own and not own.exists():
            path.rename(own)
        elif not _in_use(path):
            shutil.rmtree(path)


def _in_use(path: Path) -> bool:
    """Whether another process is writing this partial folder."""
    with _opened_folder(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove(path: Path) -> None:
    """Remove a file or folder if it is there; what cannot go now is cleared by the next save."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time gives and takes names in a folder."""
    with _opened_folder(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explain_write_errors(failed: str, removes: Sequence[Path] = ()) -> Iterator[None]:
    """Say in one sentence what the disk refused, and leave nothing behind of what could not be finished."""
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
