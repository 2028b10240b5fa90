"""The record of a run: one append-only file of JSON lines for each process of each attempt.

    events/0001-agent.jsonl     the agent of attempt 1
    events/0001-rank-0.jsonl    its worker of rank 0

The first line opens the file and ties the process's own clock to the wall and to its neighbours:

    {"kind":"open","format":1,"attempt":1,"process":"rank-0","wall":...,"mono":...,"boot":"...","host":"...","pid":1}

Every other line is an event, stamped with the nanoseconds since that moment:

    agent   attempt (workers, device, from_step), worker (rank, pid), exit (rank, code), end (outcome, reason)
            memory (bytes, buffers), kept (step, seconds), checkpoint and upload (step, digest, bytes, seconds),
            skipped (step), unsaved (step, tier, message, hint), retry (message), rhythm (seconds, cost)
            hang (rank, step, phase, seconds, limit, line, stacks, ends), woken, adopted, straggler, each with a `text`;
            an end that failed has its `failure`, and `recovery` where the run goes on
    ranks   step (step, data, compute; rank 0 adds loss, grad_norm, lr, tokens, cursor, chain ...)
            doubt (step, value): what a replay found where replicas differed before
    rank 0  resumed (step), eval (step, loss), facts (...), replicas (step, digest)
    any     begin (name) and end-span (name), error (type, message, hint), log (message)

A step ended at `t`; its compute took the `compute` ns before that, and its wait for data the `data` ns before
those; of its compute it may have waited `checkpoint` ns for a save's copy. Spans (startup, context, restore, buffers,
compile, checkpoint, evaluation, compare, shutdown) nest; the innermost one counts.
"""

import operator
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeAlias, final

from pydantic_core import from_json, to_json

from headway.errors import RunError

__all__ = [
    "FORMAT",
    "Event",
    "Header",
    "Record",
    "Recorder",
    "Tail",
    "clock_offset",
    "kept_until",
    "read_ends",
    "read_record",
    "read_run",
    "read_with_raw_lines",
    "record_path",
    "upgrade",
]

FORMAT = 1
"""The format written; older ones are translated when read, newer ones refused."""

Event: TypeAlias = dict[str, Any]

_BATCH = 512  # events in one write: a burst is cut up, so that the first ones reach the file early


@dataclass(frozen=True)
class Header:
    """Who wrote a record, and how its clock lies to others."""

    attempt: int
    process: str
    wall: float = 0.0
    """Unix seconds when the file was opened."""
    mono: int = 0
    """The same moment on the machine's monotonic clock, in nanoseconds."""
    boot: str = ""
    """Identity of the running kernel: processes that share it share the monotonic clock. Empty: unknown."""
    host: str = ""
    pid: int = 0

    @property
    def rank(self) -> int | None:
        """The worker's rank, or None for the agent."""
        kind, _, number = self.process.partition("-")
        return int(number) if kind == "rank" and number.isascii() and number.isdigit() else None


@dataclass(frozen=True)
class Record:
    """What one process of one attempt wrote."""

    header: Header
    events: list[Event]
    skipped: int = 0
    """Complete lines that were no event and were left out."""


def record_path(folder: Path, attempt: int, process: str) -> Path:
    """Return where a process of an attempt writes, inside a run's events folder."""
    return folder / f"{attempt:04d}-{process}.jsonl"


# -- writing


@final
class Recorder:
    """Writes the events of one process; the caller pays for a tuple in a queue and never waits for the disk.

    A daemon thread writes each event as soon as it comes, so that a killed process loses next to nothing.
    What cannot be written (a full disk) is dropped and counted: training goes on, and `failed` and `close`
    tell. Make it after forking. A file that exists already is continued on its own clock.
    """

    def __init__(
        self,
        path: Path,
        *,
        attempt: int,
        process: str,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.dropped = 0
        """Events that could not be written."""
        self.failed: str | None = None
        """The first thing that went wrong while writing, as a sentence."""
        self._clock = clock
        self._told = 0
        self._closed = False
        self._queue: SimpleQueue[tuple[int, str, Event] | threading.Event | None] = SimpleQueue()
        now = Header(attempt, process, wall(), clock(), _boot_id(), socket.gethostname(), os.getpid())
        try:
            self._zero, self._owed = _continue_from(path, now)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(
                f"cannot write the run's record {path}: {error.strerror}",
                hint="check that the runs folder exists and is yours to write",
            ) from error
        self._write(b"")
        self._thread = threading.Thread(target=self._drain, name=f"record {process}", daemon=True)
        self._thread.start()

    def event(self, kind: str, /, *, at: int | None = None, **fields: Any) -> None:
        """Record an event now, or as of `at` (monotonic clock, ns); its fields must not change afterwards."""
        assert "kind" not in fields, "an event has one kind"
        assert "t" not in fields, "an event's time is given as at="
        self._queue.put(((self._clock() if at is None else at) - self._zero, kind, fields))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record that everything inside belongs to the phase `name`."""
        self.event("begin", name=name)
        try:
            yield
        finally:
            self.event("end-span", name=name)

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was recorded so far is written, that long at most; False if it is not."""
        written = threading.Event()
        self._queue.put(written)
        return written.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> str | None:
        """Write what is left and close the file; return what went wrong on the way, if anything did."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():  # a hung file system: leave the descriptor to the process's end
                self.failed = self.failed or f"{self.path} took no more events within {timeout_s:g} s"
            else:
                os.close(self._file)
        return self.failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self) -> None:
        """Write events until the closing None: wait for one, take what else is there, write once."""
        while True:
            batch = [self._queue.get()]
            while batch[-1] is not None and len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            self._write(b"".join(_encode(*item) for item in batch if isinstance(item, tuple)))
            for item in batch:
                if isinstance(item, threading.Event):
                    item.set()
            if batch[-1] is None:
                return

    def _write(self, lines: bytes) -> None:
        """Append whole lines; on failure remember why, count what is lost and mark where the file is torn."""
        data, sent = self._owed + self._lost_notice() + lines, 0
        try:
            while sent < len(data):
                sent += os.write(self._file, data[sent:] if sent else data)
        except OSError as error:
            self.failed = self.failed or f"cannot write {self.path}: {error.strerror}"
            first = max(sent - len(data) + len(lines), 0)
            # One that lacks its newline alone will have it, and is not lost.
            self.dropped += lines.count(b"\n", first) - (lines[first : first + 1] == b"\n")
            # A newline makes one unreadable line of what is torn; an unwritten header is still owed.
            self._owed = (b"\n" if sent else b"") + (self._owed if sent < len(self._owed) else b"")
        else:
            self._owed, self._told = b"", self.dropped

    def _lost_notice(self) -> bytes:
        if self.dropped == self._told:
            return b""
        message = f"{self.dropped - self._told} events were lost: {self.failed}"
        return _encode(self._clock() - self._zero, "log", {"message": message})


def _encode(t: int, kind: str, fields: Event) -> bytes:
    """Return an event's line; one that cannot be JSON leaves a note in its place, and the rest is written."""
    try:
        return to_json({"kind": kind, "t": t, **fields}, inf_nan_mode="null", fallback=_plain) + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        note = f"an event of kind {kind!r} could not be written: {error}"
        return to_json({"kind": "log", "t": t, "message": ascii(note)}) + b"\n"


def _plain(value: Any) -> int | float | str:
    """Return a number for what is one (NumPy and torch scalars), else its text."""
    for convert in (operator.index, float):
        try:
            return convert(value)
        except Exception:  # whatever a foreign type raises: the record must not stop for it
            continue
    return repr(value)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _continue_from(path: Path, now: Header) -> tuple[int, bytes]:
    """Return the zero of the record's clock, and what must be written before the first event."""
    try:
        record, torn = read_ends(path), _is_torn(path)
    except FileNotFoundError:
        record, torn = None, False
    if record is None or record.header.wall == 0.0:  # no file yet, or one without a readable header
        line = {"kind": "open", "format": FORMAT, "attempt": now.attempt, "process": now.process}
        line |= {"wall": now.wall, "mono": now.mono, "boot": now.boot, "host": now.host, "pid": now.pid}
        return now.mono, (b"\n" if torn else b"") + to_json(line) + b"\n"
    return now.mono - clock_offset(now, record.header), b"\n" if torn else b""


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        return file.read(1) not in (b"", b"\n")


# -- reading


def read_record(path: Path) -> Record:
    """Read one process's record: a torn last line is ignored, garbage in the middle skipped and counted."""
    return _record(path, *_parse(path.read_bytes()))


def read_run(folder: str | os.PathLike[str], process: str = "*") -> list[Record]:
    """Read the records of a run (of one process, if named), attempt by attempt."""
    records = [read_record(path) for path in sorted(Path(folder, "events").glob(f"*-{process}.jsonl"))]
    return sorted(records, key=lambda record: record.header.attempt)


def read_ends(path: Path, size: int = 1 << 16) -> Record:
    """Read only the first and last `size` bytes of a record: how it began and where it stands."""
    with path.open("rb") as file:
        head = file.read(size)
        length = file.seek(0, os.SEEK_END)
        if length <= 2 * size:
            file.seek(len(head))
            return _record(path, *_parse(head + file.read()))
        file.seek(length - size)
        tail = file.read()
    head_events, head_skipped = _parse(head)
    tail_events, tail_skipped = _parse(tail.partition(b"\n")[2])
    return _record(path, head_events + tail_events, head_skipped + tail_skipped)


def read_with_raw_lines(path: Path, kind: str) -> tuple[Record, list[bytes]]:
    """Read a record with the lines of one kind left as they are, for a kind that makes up most of a long file."""
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")
    beginning = b'{"kind":"%s",' % kind.encode()
    apart = [line for line in lines if line.startswith(beginning)]
    rest = b"\n".join(line for line in lines if not line.startswith(beginning))
    return _record(path, *_parse(rest)), apart


def upgrade(header: Event, events: list[Event]) -> tuple[Event, list[Event]]:
    """Translate a record of an older format to today's: the one place that knows them."""
    written = header.get("format", FORMAT)
    if isinstance(written, int) and written > FORMAT:
        raise RunError(
            f"the run was recorded in format {written}; this version of Headway reads up to {FORMAT}",
            hint="upgrade Headway to read this run",
        )
    return header, events


def _parse(data: bytes) -> tuple[list[Event], int]:
    """Return the events of the complete lines, and how many lines were none."""
    events: list[Event] = []
    skipped = 0
    for line in data[: data.rfind(b"\n") + 1].split(b"\n"):
        if not line:
            continue
        event = _decode(line)
        if event is None:
            skipped += 1
        else:
            events.append(event)
    return events, skipped


def _decode(line: bytes) -> Event | None:
    try:
        # Only keys repeat: with the values' strings cached too, 100,000 steps took 0.49 s instead of 0.31 s.
        event = from_json(line, cache_strings="keys")
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def _record(path: Path, lines: list[Event], skipped: int) -> Record:
    opening = next((line for line in lines if line["kind"] == "open"), {})
    opening, events = upgrade(opening, [line for line in lines if line["kind"] != "open"])
    return Record(_header(path, opening), events, skipped)


def _header(path: Path, opening: Event) -> Header:
    """Return the record's header; what is damaged in it comes from the file's name or stays empty."""
    attempt, _, process = path.stem.partition("-")
    named = int(attempt) if attempt.isascii() and attempt.isdigit() else 0
    wall = opening.get("wall")
    return Header(
        attempt=_integer(opening.get("attempt"), named),
        process=str(opening.get("process", process)),
        wall=float(wall) if isinstance(wall, int | float) and abs(wall) < 1e12 else 0.0,
        mono=_integer(opening.get("mono"), 0),
        boot=str(opening.get("boot", "")),
        host=str(opening.get("host", "")),
        pid=_integer(opening.get("pid"), 0),
    )


def _integer(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


@final
class Tail:
    """Follows a record that is still being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def poll(self) -> list[Event]:
        """Return the events (and the opening line) that were completed since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return _parse(data[:whole])[0]


# -- between records


def clock_offset(header: Header, reference: Header) -> int:
    """Return what to add to a time of one record to place it on the clock of another, in nanoseconds."""
    if header.boot and header.boot == reference.boot:
        return header.mono - reference.mono
    return round((header.wall - reference.wall) * 1e9)


def kept_until(records: Sequence[Record]) -> dict[int, int]:
    """Return, for each attempt that a later one rolled back, the last of its steps that still counts."""
    resumed: dict[int, int] = {}
    for record in records:
        if record.header.rank == 0:
            for event in record.events:
                if event["kind"] == "resumed" and type(step := event.get("step")) is int:
                    resumed[record.header.attempt] = step
    attempts = {record.header.attempt for record in records}
    later = {number: [resumed[other] for other in resumed if other > number] for number in attempts}
    return {number: min(steps) for number, steps in later.items() if steps}
