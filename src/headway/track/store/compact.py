"""Compaction: finished ranges of a run's record become Parquet beside it, once; what is newer is read as JSON.

    0001-rank-0.jsonl                       |--- 16 MiB ---|--- 16 MiB ---|-- newest lines --|
    0001-rank-0.0-16777301.parquet          |--------------|
    0001-rank-0.16777301-33554610.parquet                  |--------------|

The record stays the truth. A Parquet file that is missing, damaged, of another format or of another record is made
again from it; two processes that do so at once write the same bytes. Where a folder cannot be written, what was read is
used as it is. The newest lines become Parquet too when their attempt is over.
"""

import itertools
import os
import re
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from pydantic_core import from_json

from headway.track.access import umask_of
from headway.track.events import Event, read_ends, record_path
from headway.track.run_folder import RunFolder
from headway.track.run_lock import lock_holder
from headway.track.store.compaction_pool import CompactionPool
from headway.track.store.parquet import (
    SegmentFacts,
    open_database,
    probe_of,
    read_facts,
    segment_path,
    write_segment,
)
from headway.track.store.segments import (
    SEGMENT_BYTES,
    KeyRange,
    SegmentData,
    append_segment,
    parse_segment,
    range_of,
)

if TYPE_CHECKING:
    import duckdb

SMALLEST_BYTES = 64 << 10
"""The end of a finished record becomes Parquet from this size on: less is parsed as fast."""
BEHIND_BYTES = 2 << 20
"""More than this takes a noticeable time to parse: about 0.05 s."""
WORTH_HELP = 4
"""Runs that wait for compaction from which other processes help: they take half a second to start."""
_PROBE_BYTES, _OPENING_BYTES = 4096, 1 << 16
_RECORD = re.compile(r"(\d+)-rank-0\.jsonl", re.ASCII)
_SEGMENT = re.compile(r"(\d+-rank-0)\.(\d+)-(\d+)\.parquet", re.ASCII)
_LEFTOVER = re.compile(r"\.\d+-rank-0\.\d+-\d+(\.levels)?\.parquet\.[0-9a-f]+\.partial", re.ASCII)
_LEFTOVER_S = 3600.0


@dataclass(frozen=True)
class SegmentPart:
    """A range of a record as it is known: in a file, or in memory."""

    attempt: int
    start: int
    end: int
    keys: Mapping[str, KeyRange]
    resumed: int | None
    """The step that the attempt went on from, if this range says so."""
    facts: Mapping[str, float | None]
    """FLOPs per token and the device's peak, if this range has them."""
    path: Path | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    """The column of each key in the file."""
    levels_path: Path | None = None
    data: SegmentData | None = None
    """What is in it, where there is no file."""


class _Stamp(NamedTuple):
    """Whether a file is the one that was read."""

    inode: int
    size: int
    mtime_ns: int


class _Tail(NamedTuple):
    start: int
    end: int
    inode: int
    probe: str
    data: SegmentData


class _Files(NamedTuple):
    """What is in a run's events folder."""

    records: dict[str, _Stamp]
    """By name without suffix."""
    segments: dict[str, dict[int, list[int]]]
    """Ends by start, by record."""
    leftovers: list[Path]


@final
class MetricStore:
    """Finds the parts of records, compacts what is finished, and remembers what it has read; not for several threads.

    Whoever asks again and again keeps one: of a live run only new lines are parsed then.
    """

    def __init__(self, *, segment_bytes: int = SEGMENT_BYTES, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self._segment_bytes, self._smallest_bytes = segment_bytes, smallest_bytes
        self._database: duckdb.DuckDBPyConnection | None = None
        self._known: dict[Path, SegmentFacts] = {}
        self._checked: dict[Path, tuple[_Stamp, list[Path]]] = {}
        self._tails: dict[Path, _Tail] = {}
        self._damaged: set[Path] = set()
        self._attempted: dict[Path, _Stamp] = {}
        self._pool = CompactionPool()
        weakref.finalize(self, self._pool.close)

    @property
    def database(self) -> "duckdb.DuckDBPyConnection":
        """A database in memory."""
        if self._database is None:
            self._database = open_database()
        return self._database

    def parts(self, runs: Sequence[RunFolder], *, from_records: bool = False) -> list[list[SegmentPart]]:
        """Return the parts of each run's records, by attempt and position; nothing for a folder that is gone.

        `from_records` parses all lines, and neither reads nor writes other files.
        """
        listed = [_list_files(run) for run in runs]
        if from_records:
            return [_read_records(run, files) for run, files in zip(runs, listed, strict=True)]
        chains = {
            run.events / record: self._usable(_chain(run, record, stamp, files.segments.get(record, {})))
            for run, files in zip(runs, listed, strict=True)
            for record, stamp in files.records.items()
        }
        unknown = [path for chain in chains.values() for path in chain if path not in self._known]
        if unknown:
            self._known |= read_facts(self.database, unknown)
        return [self._parts_of(run, files, chains) for run, files in zip(runs, listed, strict=True)]

    def forget(self, paths: Iterable[Path]) -> None:
        """Remove files that turned out to be damaged; they are made again."""
        for path in paths:
            self._known.pop(path, None)
            self._damaged.add(path)
            with suppress(OSError):
                path.unlink()

    def compact(self, run: RunFolder) -> int:
        """Compact what is finished of a run; return how many files its metrics are in."""
        return sum(part.path is not None for part in self.parts([run])[0])

    def compact_some(self, runs: Sequence[RunFolder], seconds: float) -> list[RunFolder]:
        """Compact runs of which much is not yet Parquet, until so much time has passed; return those that are left.

        Whoever cannot wait for all reads the other runs now, and asks again. At least one run is compacted per call; if
        that fails, it counts as done. Where they are many, other processes help; they finish what they have begun.
        """
        end = time.monotonic() + seconds
        behind = {run.path: run for run in runs if self._is_behind(run)}
        waiting = deque(run for path, run in behind.items() if path not in self._pool.busy)
        while waiting or self._pool.busy & behind.keys():
            while len(waiting) >= WORTH_HELP and self._pool.assign(waiting[-1].path):
                waiting.pop()
            if waiting:
                run = waiting.popleft()
                self.parts([run])
                self._has_attempted(run)
            finished = self._pool.finished(0.0 if waiting else end - time.monotonic())
            for path in finished:
                self._has_attempted(RunFolder(path))
            if time.monotonic() > end:
                break
        left = [run for path, run in behind.items() if run in waiting or path in self._pool.busy]
        if not left:
            self._pool.close()
        return left

    def _has_attempted(self, run: RunFolder) -> None:
        """Remember that a run was compacted as it is now, or could not be."""
        self._attempted |= {run.events / record: stamp for record, stamp in _list_files(run).records.items()}

    def _is_behind(self, run: RunFolder) -> bool:
        """Whether reading a run would first parse much: by the names of its files."""
        files = _list_files(run)
        for record, stamp in files.records.items():
            chain = _chain(run, record, stamp, files.segments.get(record, {}))
            tail = self._tails.get(run.events / record)
            at = max(int(chain[-1].stem.rpartition("-")[2]) if chain else 0, 0 if tail is None else tail.end)
            if stamp.size - at > BEHIND_BYTES and self._attempted.get(run.events / record) != stamp:
                return True
        return False

    def _parts_of(self, run: RunFolder, files: _Files, chains: dict[Path, list[Path]]) -> list[SegmentPart]:
        parts = list[SegmentPart]()
        attempts = {record: int(record.partition("-")[0]) for record in files.records}
        for record in sorted(files.records, key=lambda name: attempts[name]):
            with suppress(OSError):  # gone or unreadable meanwhile: the rest can be shown
                is_last = attempts[record] == max(attempts.values())
                chain = chains[run.events / record]
                parts += self._parts_of_record(run, record, attempts[record], files.records[record], chain, is_last)
        _remove_leftovers(files.leftovers)
        return parts

    def _parts_of_record(
        self, run: RunFolder, record: str, attempt: int, stamp: _Stamp, chain: list[Path], is_last: bool
    ) -> list[SegmentPart]:
        path = run.events / f"{record}.jsonl"
        parts = [_stored(attempt, file, self._known[file]) for file in self._valid(path, stamp, chain)]
        at = parts[-1].end if parts else 0
        if at >= stamp.size:
            return parts
        with path.open("rb") as file:
            opening = _opening(file.read(_OPENING_BYTES))
            while stamp.size - at >= self._segment_bytes:
                data = _read_lines(file.fileno(), at, self._segment_bytes)
                if not data:  # no line ends in there
                    break
                parts.append(self._compacted(run, record, attempt, at, data, opening))
                at += len(data)
            if stamp.size - at >= self._smallest_bytes and (not is_last or _is_over(run, attempt)):
                if data := _complete(os.pread(file.fileno(), stamp.size - at, at)):
                    parts.append(self._compacted(run, record, attempt, at, data, opening))
                    at += len(data)
                self._tails.pop(path, None)
            tail = self._tail(path, file.fileno(), at, stamp, opening)
        return [*parts, _in_memory(attempt, tail.start, tail.end, tail.data)] if tail.end > at else parts

    def _usable(self, chain: list[Path]) -> list[Path]:
        """Return the files of a chain up to the first one that is damaged and could not be removed."""
        return list(itertools.takewhile(lambda path: path not in self._damaged, chain))

    def _valid(self, record: Path, stamp: _Stamp, chain: list[Path]) -> list[Path]:
        """Return the files of a chain, from the first one on, that say what is in the record."""
        checked = self._checked.get(record)
        if checked is not None and checked == (stamp, chain):
            return chain
        valid = list[Path]()
        with record.open("rb") as file:
            for path in chain:
                facts = self._known.get(path)
                if facts is None or facts.probe != _probe(file.fileno(), facts.start, facts.end):
                    self.forget(chain[len(valid) :])
                    break
                valid.append(path)
        self._checked[record] = (stamp, valid)
        return valid

    def _compacted(
        self, run: RunFolder, record: str, attempt: int, start: int, data: bytes, opening: Event
    ) -> SegmentPart:
        """Write a range as Parquet; where that fails, keep it in memory."""
        import duckdb

        end, parsed, probe = start + len(data), parse_segment(data, opening), probe_of(data[-_PROBE_BYTES:])
        path = segment_path(run.events, record, start, end)
        levels = segment_path(run.events, record, start, end, levels=True)
        try:
            with umask_of(run.path):
                facts = write_segment(self.database, path, levels, parsed, range(start, end), probe)
        except (OSError, duckdb.Error):
            return _in_memory(attempt, start, end, parsed)
        self._known[path] = facts
        self._damaged.discard(path)
        return _stored(attempt, path, facts)

    def _tail(self, path: Path, file: int, start: int, stamp: _Stamp, opening: Event) -> _Tail:
        """Return what the lines after the last segment say; lines that were parsed before are not parsed again."""
        tail = self._tails.get(path)
        if (
            tail is None
            or tail.start != start
            or tail.inode != stamp.inode
            or tail.end > stamp.size
            or tail.probe != _probe(file, tail.start, tail.end)
        ):
            tail = _Tail(start, start, stamp.inode, "", SegmentData())
        data = _complete(os.pread(file, stamp.size - tail.end, tail.end))
        if data:
            end = tail.end + len(data)
            parsed = append_segment(tail.data, parse_segment(data, opening))
            tail = _Tail(start, end, stamp.inode, _probe(file, start, end), parsed)
        self._tails[path] = tail
        return tail


def _read_records(run: RunFolder, files: _Files) -> list[SegmentPart]:
    parts = list[SegmentPart]()
    for record in sorted(files.records, key=lambda name: int(name.partition("-")[0])):
        with suppress(OSError):
            data = _complete((run.events / f"{record}.jsonl").read_bytes())
            parsed = parse_segment(data, _opening(data[:_OPENING_BYTES]))
            parts.append(_in_memory(int(record.partition("-")[0]), 0, len(data), parsed))
    return parts


def _list_files(run: RunFolder) -> _Files:
    files = _Files({}, {}, [])
    try:
        entries = list(os.scandir(run.events))
    except OSError:
        return files
    for entry in entries:
        if (match := _SEGMENT.fullmatch(entry.name)) is not None:
            files.segments.setdefault(match[1], {}).setdefault(int(match[2]), []).append(int(match[3]))
        elif _RECORD.fullmatch(entry.name):
            with suppress(OSError):
                status = entry.stat()
                stamp = _Stamp(status.st_ino, status.st_size, status.st_mtime_ns)
                files.records[entry.name.removesuffix(".jsonl")] = stamp
        elif _LEFTOVER.fullmatch(entry.name):
            files.leftovers.append(Path(entry.path))
    return files


def _chain(run: RunFolder, record: str, stamp: _Stamp, segments: dict[int, list[int]]) -> list[Path]:
    """Return the files that cover a record from its beginning without a gap, as far as there are any."""
    chain, at = list[Path](), 0
    while ends := [end for end in segments.get(at, []) if at < end <= stamp.size]:
        chain.append(segment_path(run.events, record, at, max(ends)))
        at = max(ends)
    return chain


def _remove_leftovers(paths: list[Path]) -> None:
    """Remove files that a process that died was writing; by the clock of the file system, which has both times."""
    for path in paths:
        with suppress(OSError):
            if path.parent.stat().st_mtime - path.stat().st_mtime > _LEFTOVER_S:
                path.unlink()


def _is_over(run: RunFolder, attempt: int) -> bool:
    """Whether nothing is written any more by the last attempt of a run."""
    if lock_holder(run) is not None:
        return False
    try:
        events = read_ends(record_path(run.events, attempt, "agent")).events
    except OSError:
        return False
    return any(event["kind"] == "end" for event in events)


def _stored(attempt: int, path: Path, facts: SegmentFacts) -> SegmentPart:
    levels = segment_path(path.parent, path.name.split(".")[0], facts.start, facts.end, levels=True)
    return SegmentPart(
        attempt,
        facts.start,
        facts.end,
        facts.keys,
        facts.resumed,
        facts.facts,
        path,
        facts.columns,
        levels if facts.levels else None,
    )


def _in_memory(attempt: int, start: int, end: int, data: SegmentData) -> SegmentPart:
    keys = {key: range_of(*series) for key, series in data.series.items()}
    return SegmentPart(attempt, start, end, keys, data.resumed, data.facts, data=data)


def _opening(data: bytes) -> Event:
    """Return a record's first line, which has its format; empty if it is damaged."""
    try:
        event = from_json(data.partition(b"\n")[0])
    except ValueError:
        return {}
    return event if isinstance(event, dict) and event.get("kind") == "open" else {}


def _read_lines(file: int, at: int, size: int) -> bytes:
    """Return at least so many bytes from there on, up to the end of a line."""
    data, more = os.pread(file, size, at), b""
    while not data.endswith(b"\n") and (more := os.pread(file, 1 << 16, at + len(data))):
        end = more.find(b"\n") + 1
        data += more[:end] if end else more
    return data if data.endswith(b"\n") else _complete(data)


def _complete(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _probe(file: int, start: int, end: int) -> str:
    size = min(_PROBE_BYTES, end - start)
    return probe_of(os.pread(file, size, end - size))
