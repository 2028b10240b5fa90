"""Benchmarks a folder's storage: write, read, durable small writes, metadata; and what it is suitable for.

Measures in a temporary subfolder. Writes end with fsync; reads bypass the page cache with O_DIRECT if the file system
supports it, else follow a request to drop it, which not all file systems honour.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.errors import UsageError

BLOCK = 4 << 20
MOST_BYTES = 8 << 30
SHARE_OF_FREE = 0.1
SMALL = 4096
STAGES = {"write": 0.35, "read": 0.3, "append": 0.1, "metadata": 0.25}
"""Share of the time per stage."""
MEMORY = ("tmpfs", "ramfs")
CHECKPOINT_BYTES_S, DATA_BYTES_S, FLUSHES_S, FILES_S = 200e6, 50e6, 20.0, 100.0
BYTES_OF_7B = 7e9 * 14
"""Checkpoint of a 7B model: weights in two bytes, AdamW's three copies in four."""


@dataclass(frozen=True)
class StorageRates:
    """Measured rates of a folder."""

    path: str
    file_system: str
    free_bytes: int
    write_bytes_s: float
    """Including fsync."""
    read_bytes_s: float
    cold: bool
    """Whether reads certainly bypassed the page cache."""
    flushes_s: float
    """Small appends, each with fsync."""
    creates_s: float
    stats_s: float
    renames_s: float
    unlinks_s: float
    locks: bool
    """Whether flock excludes a second process."""


@dataclass(frozen=True)
class StorageUse:
    """Whether storage is suitable for a purpose, and why."""

    what: str
    good: bool
    why: str


def measure_storage(
    path: str | Path, seconds: float = 5.0, progress: Callable[[str, float], None] = lambda _stage, _share: None
) -> StorageRates:
    """Measure a folder for about `seconds`; `progress` receives the stage and the share done."""
    folder_path = Path(path)
    if not folder_path.is_dir():
        raise UsageError(f"{path} is not a folder", hint="pass a folder on the disk to measure")
    free = shutil.disk_usage(folder_path).free
    limit = int(min(MOST_BYTES, free * SHARE_OF_FREE)) // BLOCK * BLOCK
    if limit < 4 * BLOCK:
        raise UsageError(
            f"{path} has {free / 1e6:.0f} MB free, too little to measure", hint="free some, or pass another folder"
        )
    with _folder_in(folder_path) as folder:

        def stage(name: str) -> tuple[float, Callable[[float], None]]:
            """Seconds of a stage, and its progress as a share of the total."""
            names = list(STAGES)
            before = sum(STAGES[earlier] for earlier in names[: names.index(name)])
            return seconds * STAGES[name], lambda share: progress(name, before + STAGES[name] * min(1.0, share))

        written, write_bytes_s = _write(folder / "large", limit, *stage("write"))
        read_bytes_s, cold = _read(folder / "large", written, *stage("read"))
        flushes_s = _append(folder / "small", *stage("append"))
        rates = _metadata(folder / "many", *stage("metadata"))
        locks = _locks(folder / "lock")
        progress("metadata", 1.0)
    return StorageRates(
        str(folder_path), file_system(folder_path), free, write_bytes_s, read_bytes_s, cold, flushes_s, *rates, locks
    )


@contextlib.contextmanager
def _folder_in(folder_path: Path) -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix=".headway-doctor-", dir=folder_path))
    except OSError as error:
        raise UsageError(
            f"{folder_path} is not writable: {error.strerror}", hint="pass a folder you can write to"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, limit: int, seconds: float, report: Callable[[float], None]) -> tuple[int, float]:
    """Write for `seconds` with fsync; return bytes and bytes per second."""
    block, written = os.urandom(BLOCK), 0  # random, so that it does not compress
    with path.open("wb", buffering=0) as file:
        begin = time.perf_counter()
        while written < limit and (spent := time.perf_counter() - begin) < seconds:
            written += file.write(block)
            # Periodic syncs, or the page cache would absorb it all and the last fsync take minutes.
            if written % (64 * BLOCK) == 0:
                os.fdatasync(file.fileno())
            report(max(spent / seconds, written / limit))
        os.fsync(file.fileno())
        return written, written / (time.perf_counter() - begin)


def _read(path: Path, size: int, seconds: float, report: Callable[[float], None]) -> tuple[float, bool]:
    """Read it back; return bytes per second, and whether the cache was bypassed."""
    descriptor, cold = _open_cold(path)
    try:
        with mmap.mmap(-1, BLOCK) as block:  # O_DIRECT needs page-aligned memory
            begin, read = time.perf_counter(), 0
            while (spent := time.perf_counter() - begin) < seconds and read < size:
                read += os.preadv(descriptor, [block], read)
                report(max(spent / seconds, read / size))
            return read / (time.perf_counter() - begin), cold
    finally:
        os.close(descriptor)


def _open_cold(path: Path) -> tuple[int, bool]:
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, BLOCK) as block:
                os.preadv(descriptor, [block], 0)
            if file_system(path) not in MEMORY:
                return descriptor, True
        except OSError:
            pass
        os.close(descriptor)
    descriptor = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return descriptor, False


def _append(path: Path, seconds: float, report: Callable[[float], None]) -> float:
    """Durable small writes per second."""
    begin, count = time.perf_counter(), 0
    with path.open("ab", buffering=0) as file:
        while (spent := time.perf_counter() - begin) < seconds or not count:
            file.write(b"x" * SMALL)
            os.fsync(file.fileno())
            count += 1
            report(spent / seconds)
    return count / (time.perf_counter() - begin)


def _metadata(folder: Path, seconds: float, report: Callable[[float], None]) -> tuple[float, float, float, float]:
    """Files created, statted, renamed and removed per second."""
    folder.mkdir()
    begin, paths = time.perf_counter(), list[str]()
    while (spent := time.perf_counter() - begin) < seconds / 2 or not paths:
        paths.append(f"{folder}/{len(paths)}")
        with open(paths[-1], "wb") as file:  # noqa: PTH123 (a Path takes longer than the file)
            file.write(b"x")
        report(spent / seconds)
    creates = len(paths) / (time.perf_counter() - begin)
    renamed = [f"{path}.new" for path in paths]
    stats = _rate(os.stat, paths)
    renames = _rate(os.rename, paths, renamed)
    unlinks = _rate(os.unlink, renamed)
    return creates, stats, renames, unlinks


def _rate(act: Callable[..., object], *columns: list[str]) -> float:
    begin = time.perf_counter()
    for arguments in zip(*columns, strict=True):
        act(*arguments)
    return len(columns[0]) / max(1e-9, time.perf_counter() - begin)


def _locks(path: Path) -> bool:
    """Whether flock works: some network file systems accept it without effect."""
    with path.open("wb") as first, path.open("rb") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EWOULDBLOCK, errno.EAGAIN)
    return False


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kernel's name for a path's file system; empty if unknown."""
    target, best, kind = str(path.resolve()), "", ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        inside = point == "/" or target == point or target.startswith(f"{point}/")
        if inside and len(point) >= len(best):  # the last mount at a path hides the others
            best, kind = point, after.split()[0]
    return kind


def uses(rates: StorageRates) -> list[StorageUse]:
    """What the storage is suitable for, by its rates."""
    return [_checkpoints(rates), _data(rates), _runs(rates)]


def _checkpoints(rates: StorageRates) -> StorageUse:
    if rates.file_system in MEMORY:
        return StorageUse("checkpoints", False, "it is in memory, and lost with the machine")
    takes = f"one of a 7B model (98 GB) takes {_time(BYTES_OF_7B / rates.write_bytes_s)}"
    takes += f", and {rates.free_bytes / 1e9:,.0f} GB are free"
    slow = rates.write_bytes_s < CHECKPOINT_BYTES_S
    return StorageUse("checkpoints", not slow, takes + (f", below {CHECKPOINT_BYTES_S / 1e6:.0f} MB/s" if slow else ""))


def _data(rates: StorageRates) -> StorageUse:
    tokens = f"{rates.read_bytes_s / 2 / 1e6:,.0f} million tokens/s of two bytes each"
    warm = "" if rates.cold else ", perhaps from the page cache"
    return StorageUse("data", rates.read_bytes_s >= DATA_BYTES_S, tokens + warm)


def _runs(rates: StorageRates) -> StorageUse:
    if not rates.locks:
        return StorageUse("runs, logs", False, "flock does not exclude a second agent")
    if rates.file_system in MEMORY:
        return StorageUse("runs, logs", False, "it is in memory, and lost with the machine")
    slow = rates.flushes_s < FLUSHES_S or rates.creates_s < FILES_S
    why = f"{rates.flushes_s:,.0f} durable lines/s and {rates.creates_s:,.0f} new files/s"
    return StorageUse("runs, logs", not slow, why)


def _time(seconds: float) -> str:
    unit, size = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / size:.0f} {unit}"
