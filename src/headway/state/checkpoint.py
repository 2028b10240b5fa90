"""Checkpoints on disk: begun beside, written by every rank, committed by one rename.

    partial = begin(checkpoints, step, bytes)        one rank
    write_shard(partial, rank, pieces)               every rank, its own file
    commit(checkpoints, step, facts, workers)        one rank, when all have written

Ranks meet in the folder: nothing is sent between them and nothing here waits; the caller holds the run's lock
and puts barriers between the three. A folder whose name begins with a dot is not a checkpoint, with one
exception: the old one of a step that is being replaced counts until the new one has its name.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import StateError
from headway.state.box import Box, tiling_fault
from headway.state.digest import MASK, digest_box
from headway.state.manifest import (
    Facts,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    digest_of,
    dump_manifest,
)
from headway.state.safetensors_file import Block, write_file

__all__ = [
    "Entry",
    "Piece",
    "abandon",
    "begin",
    "commit",
    "find_checkpoint",
    "list_checkpoints",
    "partial_folder",
    "prune",
    "write_shard",
]

_NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
_HINTS = {
    errno.ENOSPC: "free some space, or keep fewer (checkpoint.keep_last); older checkpoints are untouched",
    errno.EDQUOT: "free some quota, or keep fewer (checkpoint.keep_last); older checkpoints are untouched",
    errno.EROFS: "make the folder writable, or put the runs elsewhere with --runs",
    errno.EACCES: "make the folder writable, or put the runs elsewhere with --runs",
    errno.ENOENT: "another worker gave this save up, or the run's folder was removed",
}
_DISK_HINT = "check the disk (dmesg); older checkpoints are untouched"


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
class Entry:
    """A checkpoint that is there."""

    step: int
    path: Path


def begin(checkpoints: Path, step: int, needs_bytes: int = 0) -> Path:
    """Make the folder that a checkpoint is written into; clear away what earlier saves left behind."""
    with _writing(f"checkpoint of step {step} could not be begun in {checkpoints}"):
        checkpoints.mkdir(parents=True, exist_ok=True)
        _clear(checkpoints)
        free = shutil.disk_usage(checkpoints).free
        if needs_bytes > free:
            raise StateError(
                f"checkpoint of step {step} needs {_size(needs_bytes)}, {_size(free)} free in {checkpoints}",
                hint=_HINTS[errno.ENOSPC],
            )
        partial = partial_folder(checkpoints, step)
        partial.mkdir()
    return partial


def partial_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step is written until it is committed."""
    return checkpoints / f".step-{step:08d}.partial"


def write_shard(partial: Path, rank: int, pieces: Sequence[Piece], threads: int = 1) -> None:
    """Write one rank's pieces and make them durable; digests are taken meanwhile, by so many threads.

    When the disk refuses, this rank's part is removed; the caller abandons the save once all ranks know.
    """
    name = f"rank-{rank:05d}"
    blocks = [Block(piece.name, piece.dtype, piece.local_shape, piece.data) for piece in pieces]
    own = (partial / f"{name}.safetensors", partial / f"{name}.json")
    pool = ThreadPoolExecutor(threads, thread_name_prefix="digest")
    with _writing(f"{name}.safetensors could not be written in {partial}", removes=own):
        try:
            digests = [pool.submit(digest_box, piece.data, piece.shape, piece.box) for piece in pieces]
            written = write_file(own[0], blocks)
            tensors = {
                piece.name: _part(piece, digest.result(), f"{name}.safetensors", written.xxh3[piece.name])
                for piece, digest in zip(pieces, digests, strict=True)
            }
        finally:
            pool.shutdown(cancel_futures=True)  # they matter no longer once the disk has refused
        file = {"bytes": written.bytes, "header_xxh3": written.header_xxh3}
        _write_durably(own[1], json.dumps({"file": file, "tensors": tensors}).encode())


def commit(
    checkpoints: Path,
    step: int,
    facts: Facts,
    workers: int,
    *,
    keep_last: int | None = None,
    keep_every_steps: int = 0,
) -> Path:
    """Turn what the ranks wrote into a checkpoint, at one instant; then prune if told what to keep."""
    partial = partial_folder(checkpoints, step)
    with _writing(f"checkpoint of step {step} could not be committed in {checkpoints}", removes=(partial,)):
        manifest = _merge(partial, step, facts, workers)
        _write_durably(partial / "manifest.json", dump_manifest(manifest))
        for rank in range(workers):
            (partial / f"rank-{rank:05d}.json").unlink()
        _sync_folder(partial)
        path = _rename(checkpoints, partial, step)
    if keep_last is not None:
        prune(checkpoints, keep_last, keep_every_steps, always=step)
    return path


def abandon(partial: Path) -> None:
    """Give a save up: remove what has been written of it."""
    _remove(partial)


def list_checkpoints(checkpoints: Path) -> list[Entry]:
    """Every complete checkpoint, oldest step first."""
    try:
        # A dot sorts first: a step's own folder overrides the replaced one.
        names = sorted(path.name for path in checkpoints.iterdir())
    except FileNotFoundError:
        return []
    found: dict[int, Path] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match and (checkpoints / name).is_dir():
            found[int(match[1] or match[2])] = checkpoints / name
    return sorted(Entry(step, path) for step, path in found.items())


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
    entries = list_checkpoints(checkpoints)
    removed = []
    for entry in entries[:-keep_last]:
        if entry.step == always or (keep_every_steps and entry.step % keep_every_steps == 0):
            continue
        # Renamed first: a checkpoint that is half removed must not be seen as one.
        doomed = checkpoints / f".step-{entry.step:08d}.removed"
        with _writing(f"{entry.path} could not be removed"):
            entry.path.rename(doomed)
            shutil.rmtree(doomed)
        removed.append(entry.step)
    return removed


def _part(piece: Piece, digest: int, file: str, xxh3: str) -> dict[str, Any]:
    """What a rank says of one tensor in the small file beside its shard."""
    return {
        "dtype": piece.dtype,
        "shape": piece.shape,
        "digest": f"{digest:016x}",
        "piece": {"file": file, "start": piece.start, "shape": piece.local_shape, "xxh3": xxh3},
    }


def _merge(partial: Path, step: int, facts: Facts, workers: int) -> Manifest:
    """One manifest from what every rank left beside its file."""
    files: dict[str, FileEntry] = {}
    parts: dict[str, list[dict[str, Any]]] = {}
    for rank in range(workers):
        shard = _read_sidecar(partial / f"rank-{rank:05d}.json", rank)
        files[f"rank-{rank:05d}.safetensors"] = FileEntry(**shard["file"])
        for name, part in shard["tensors"].items():
            parts.setdefault(name, []).append(part)
    tensors = {name: _merge_tensor(name, parts[name]) for name in sorted(parts)}
    return Manifest(
        **facts.model_dump(),
        step=step,
        digest=digest_of(tensors),
        workers=workers,
        tensors=tensors,
        files=files,
    )


def _merge_tensor(name: str, parts: list[dict[str, Any]]) -> TensorEntry:
    digest = sum(int(part["digest"], 16) for part in parts) & MASK
    tensor = TensorEntry(
        dtype=parts[0]["dtype"],
        shape=parts[0]["shape"],
        digest=f"{digest:016x}",
        pieces=tuple(PieceEntry(**part["piece"]) for part in parts),
    )
    if any((part["dtype"], part["shape"]) != (parts[0]["dtype"], parts[0]["shape"]) for part in parts):
        raise StateError(f"workers disagree on the dtype or shape of tensor {name}; nothing was saved")
    if fault := tiling_fault(tensor.shape, (piece.box for piece in tensor.pieces)):
        raise StateError(f"tensor {name} would not be saved whole: {fault}; nothing was saved")
    return tensor


def _read_sidecar(path: Path, rank: int) -> dict[str, Any]:
    try:
        shard: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StateError(
            f"worker {rank} has not written its part of {path.parent.name}; nothing was saved",
            hint="its log says why (headway logs RUN --rank)",
        ) from error
    return shard


def _rename(checkpoints: Path, partial: Path, step: int) -> Path:
    """Give the finished folder its name; one that has it already steps aside and counts until then."""
    path = checkpoints / f"step-{step:08d}"
    old = checkpoints / f".step-{step:08d}.replaced"
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    partial.rename(path)
    _sync_folder(checkpoints)
    shutil.rmtree(old, ignore_errors=True)
    return path


def _clear(checkpoints: Path) -> None:
    """Remove what killed saves and prunings left behind; an only copy of a step gets its name back."""
    for path in checkpoints.glob(".step-*"):
        match = _NAME.fullmatch(path.name)
        own = checkpoints / f"step-{match[2]}" if match else None
        if own and not own.exists():
            path.rename(own)
        else:
            shutil.rmtree(path)


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


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(failed: str, removes: Sequence[Path] = ()) -> Iterator[None]:
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
