"""Where each document of a dataset came from: a source file, a line or row of it, and a byte offset.

`origins.bin` is beside the shards and not part of the version: datasets that were built before it have none. It has
three little-endian 64-bit integers per document: the number of the file in `sources.json`, its line or row from 1 (0
for a file that is one document), and where that begins in the file's plain text, in bytes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.data.writer import HashedFile

ORIGINS = "origins.bin"
SOURCES = "sources.json"
_BUFFERED = 1 << 16


class Origin(NamedTuple):
    """The source of one document."""

    file: str
    record: int
    """Line or row, from 1; 0 for a file that is one document."""
    offset: int
    """Bytes before it in the file's plain text."""

    def __str__(self) -> str:
        return f"{self.file}:{self.record}" if self.record else self.file


class OriginWriter:
    """Writes the origin of each document of a build, in order."""

    def __init__(self, folder: Path) -> None:
        self._file = HashedFile(folder / ORIGINS)
        self._rows: list[tuple[int, int, int]] = []

    def add(self, file: int, record: int, offset: int) -> None:
        """Add the next document."""
        self._rows.append((file, record, offset))
        if len(self._rows) >= _BUFFERED:
            self._flush()

    def close(self) -> None:
        """Finish the file."""
        self._flush()
        self._file.close()

    def abandon(self) -> None:
        """Close it without finishing."""
        self._file.abandon()

    def _flush(self) -> None:
        if self._rows:
            self._file.write(np.array(self._rows, "<u8").data)
        self._rows = []


@dataclass(frozen=True)
class Origins:
    """The origins of a dataset's documents."""

    files: tuple[str, ...]
    rows: npt.NDArray[np.uint64]

    def __getitem__(self, document: int) -> Origin:
        file, record, offset = (int(value) for value in self.rows[document])
        return Origin(self.files[file], record, offset)

    def find(self, file: str, record: int | None = None) -> npt.NDArray[np.int64]:
        """Return the documents of a file, by its path or the end of it; those of one line or row, if given."""
        numbers = [number for number, path in enumerate(self.files) if _ends_with(path, file)]
        chosen = np.isin(self.rows[:, 0], np.array(numbers, np.uint64))
        if record is not None:
            chosen &= self.rows[:, 1] == record
        return np.flatnonzero(chosen).astype(np.int64)

    def matching(self, file: str) -> list[str]:
        """Return the source files that a path, or the end of one, means."""
        return [path for path in self.files if _ends_with(path, file)]


def read_origins(folder: Path, documents: int) -> Origins | None:
    """Return the origins in a dataset's folder; None if it has none, or none that can be of so many documents."""
    try:
        files = tuple(str(file["path"]) for file in json.loads((folder / SOURCES).read_bytes())["files"])
        if (folder / ORIGINS).stat().st_size != documents * 24:
            return None
        rows = np.memmap(folder / ORIGINS, "<u8", mode="r").view(np.ndarray).reshape(-1, 3)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Origins(files, rows) if not len(rows) or int(rows[:, 0].max()) < len(files) else None


def recorded_sources(folder: Path) -> dict[str, Any]:
    """Return `sources.json` of a dataset, or nothing if it is missing or damaged."""
    try:
        recorded = json.loads((folder / SOURCES).read_bytes())
    except (OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def _ends_with(path: str, end: str) -> bool:
    parts, wanted = Path(path).parts, Path(end).parts
    return bool(wanted) and parts[-len(wanted) :] == wanted
