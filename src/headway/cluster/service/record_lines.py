"""The record in memory: a fold of its first lines, and the lines after it, counted from the very first."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Fold:
    """The state that the first lines of a record lead to, so that a start need not read them."""

    seq: int
    """How many lines."""
    at: float
    """Time of the last of them."""
    sum: str
    """Checksum of the last of them, which covers all."""
    cluster: Line
    """Nodes, tenants and policy by then."""
    state: bytes
    """LiveState as JSON, compressed."""

    @property
    def text(self) -> str:
        """LiveState as JSON."""
        return unpacked(self.state)


def packed(state: str) -> bytes:
    """LiveState as JSON, as folds have it."""
    return zlib.compress(state.encode(), 1)


def unpacked(state: bytes) -> str:
    """What `packed` was given."""
    return zlib.decompress(state).decode()


class RecordLines(Sequence[Line]):
    """All lines of a record by their numbers, from 0; those that a fold stands for cannot be read here."""

    def __init__(self, fold: Fold | None = None) -> None:
        self._view = fold, 0 if fold is None else fold.seq, list[Line]()
        """Read and replaced as a whole: other threads fold and read."""

    @property
    def fold(self) -> Fold | None:
        """What stands for the first lines."""
        return self._view[0]

    @property
    def first(self) -> int:
        """Number of the first line that is here."""
        return self._view[1]

    def __len__(self) -> int:
        _, first, lines = self._view
        return first + len(lines)

    @overload
    def __getitem__(self, index: int) -> Line: ...
    @overload
    def __getitem__(self, index: slice) -> list[Line]: ...
    def __getitem__(self, index: int | slice) -> Line | list[Line]:
        _, first, lines = self._view
        if isinstance(index, int):
            number = index + first + len(lines) if index < 0 else index
            if number < first:
                raise IndexError(f"line {number + 1} is folded")
            return lines[number - first]
        begin, end, step = index.indices(first + len(lines))
        if begin < min(first, end):
            raise IndexError(f"line {begin + 1} is folded")
        return lines[max(begin - first, 0) : max(end - first, 0) : step]

    def __iter__(self) -> Iterator[Line]:
        return iter(self[0:])

    def since(self, seen: int, until: int | None = None) -> tuple[Fold | None, list[Line]]:
        """Return the lines after those that were seen; after those that a fold stands for, and the fold, if these were
        not."""
        fold, first, lines = self._view
        end = None if until is None else until - first
        return (None, lines[seen - first : end]) if seen >= first else (fold, lines[:end])

    def extend(self, lines: Sequence[Line]) -> None:
        """Append lines."""
        self._view[2].extend(lines)

    def fold_until(self, fold: Fold) -> None:
        """Let a newer fold stand for lines that are here."""
        _, first, lines = self._view
        self._view = fold, fold.seq, lines[fold.seq - first :]

    @property
    def last_at(self) -> float:
        """Time of the last line; 0 if there is none."""
        fold, _, lines = self._view
        return float(lines[-1]["at"]) if lines else 0.0 if fold is None else fold.at

    @property
    def cluster(self) -> Line | None:
        """Nodes, tenants and policy as they were last recorded."""
        fold, _, lines = self._view
        for line in reversed(lines):
            if "cluster" in line:
                cluster: Line = line["cluster"]
                return cluster
        return None if fold is None else fold.cluster
