"""Where the bytes of a checkpoint come from: a folder here; memory and object stores have their own files.

A Source knows nothing of tensors: it has a manifest and files, and reads ranges of them into memory that the caller
brings. What it cannot read it tells by DamagedState, so that whoever asked can take an older checkpoint.
"""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from headway.errors import DamagedState, StateError

__all__ = ["CheckpointSource", "FolderCheckpoint"]

MANIFEST = "manifest.json"
_MAX_MANIFEST = 1 << 30
_HINT = "headway checkpoint ls lists what there is; headway checkpoint verify finds the newest that is whole"


class CheckpointSource(ABC):
    """One checkpoint's files. Several threads may read at once."""

    location: str
    """How messages call it."""
    checked: ClassVar[bool] = True
    """Whether its bytes must have checksums: those that never left this machine's memory have none."""
    request_bytes: int = 4 << 20
    """What to read at a time; more where each request takes its time."""

    @abstractmethod
    def manifest(self) -> bytes:
        """The bytes of its manifest.json."""

    @abstractmethod
    def size(self, file: str) -> int:
        """How many bytes a file has."""

    @abstractmethod
    def read(self, file: str, begin: int, out: memoryview) -> None:
        """Fill `out` with a file's bytes from `begin` on."""

    def name(self, file: str) -> str:
        """How messages call a file."""
        return f"{self.location}/{file}"


class FolderCheckpoint(CheckpointSource):
    """A checkpoint in a folder."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._path = path
        self._descriptors: dict[str, int] = {}

    def manifest(self) -> bytes:
        """See Source."""
        path = self._path / MANIFEST
        try:
            if path.stat().st_size > _MAX_MANIFEST:
                raise DamagedState(f"{path} is damaged: it is too large", hint=_HINT)
            return path.read_bytes()
        except FileNotFoundError as error:
            raise StateError(f"{path} cannot be read: {error.strerror}", hint=_HINT) from error
        except OSError as error:
            raise DamagedState(f"{path} cannot be read: {error.strerror or error}", hint=_HINT) from error

    def size(self, file: str) -> int:
        """See Source."""
        try:
            return (self._path / file).stat().st_size
        except OSError as error:
            raise DamagedState(f"{self.name(file)} cannot be read: {error.strerror or error}", hint=_HINT) from error

    def read(self, file: str, begin: int, out: memoryview) -> None:
        """See Source."""
        try:
            descriptor = self._open(file)
            while out:
                count = os.preadv(descriptor, [out], begin)
                if count == 0:
                    raise DamagedState(f"{self.name(file)} is damaged: it ends at byte {begin}", hint=_HINT)
                out, begin = out[count:], begin + count
        except OSError as error:
            raise DamagedState(f"{self.name(file)} cannot be read: {error.strerror or error}", hint=_HINT) from error

    def _open(self, file: str) -> int:
        if file not in self._descriptors:
            descriptor = os.open(self._path / file, os.O_RDONLY | os.O_CLOEXEC)
            # Read-ahead as far as it goes: cold files come at disk speed, not at that of small requests.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            if self._descriptors.setdefault(file, descriptor) != descriptor:
                os.close(descriptor)  # another thread was faster
        return self._descriptors[file]

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
