"""Where the bytes of a checkpoint come from: the interface, and its implementation for folders.

A CheckpointSource knows nothing of tensors: it has a manifest and files, and reads ranges of them into memory of the
caller. It raises DamagedState for what it cannot read, so that the caller can fall back to an older checkpoint.
"""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from headway.errors import DamagedState, StateError

MANIFEST = "manifest.json"
_MAX_MANIFEST = 1 << 30
_HINT = "headway checkpoint ls RUN lists all checkpoints; headway checkpoint verify RUN finds the newest intact one"


class CheckpointSource(ABC):
    """The files of one checkpoint. Several threads may read at once."""

    location: str
    """Its name in messages."""
    checked: ClassVar[bool] = True
    """Whether its bytes must have checksums: those that never left a machine's memory have none."""
    request_bytes: int = 4 << 20
    """How much to read per request; more if each request has a high latency."""

    @abstractmethod
    def manifest(self) -> bytes:
        """Return the bytes of its manifest.json."""

    @abstractmethod
    def size(self, file: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def read(self, file: str, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `begin` on."""

    def name(self, file: str) -> str:
        """The name of a file in messages."""
        return f"{self.location}/{file}"


class FolderCheckpoint(CheckpointSource):
    """A checkpoint in a folder."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._path = path
        self._descriptors: dict[str, int] = {}

    def manifest(self) -> bytes:
        """See CheckpointSource."""
        path = self._path / MANIFEST
        try:
            if path.stat().st_size > _MAX_MANIFEST:
                raise DamagedState(f"{path} is damaged: it is too large", hint=_HINT)
            return path.read_bytes()
        except FileNotFoundError as error:
            raise StateError(f"{path} cannot be read: {error.strerror}", hint=_HINT) from error
        except OSError as error:
            raise self._unreadable(MANIFEST, error) from error

    def size(self, file: str) -> int:
        """See CheckpointSource."""
        try:
            return (self._path / file).stat().st_size
        except OSError as error:
            raise self._unreadable(file, error) from error

    def read(self, file: str, begin: int, out: memoryview) -> None:
        """See CheckpointSource."""
        try:
            descriptor = self._open(file)
            while out:
                count = os.preadv(descriptor, [out], begin)
                if count == 0:
                    raise DamagedState(f"{self.name(file)} is damaged: it ends at byte {begin}", hint=_HINT)
                out, begin = out[count:], begin + count
        except OSError as error:
            raise self._unreadable(file, error) from error

    def _unreadable(self, file: str, error: OSError) -> DamagedState:
        return DamagedState(f"{self.name(file)} cannot be read: {error.strerror or error}", hint=_HINT)

    def _open(self, file: str) -> int:
        if file not in self._descriptors:
            descriptor = os.open(self._path / file, os.O_RDONLY | os.O_CLOEXEC)
            # The largest read-ahead: cold files are read at the speed of the disk, not of small requests.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            if self._descriptors.setdefault(file, descriptor) != descriptor:
                os.close(descriptor)  # another thread was first
        return self._descriptors[file]

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
