"""The record of a run: an append-only JSON Lines file per process and attempt.

    events/0001-agent.jsonl     the agent of attempt 1
    events/0001-rank-0.jsonl    its worker of rank 0

The first line relates the process's clock to wall time and to the other processes:

    {"kind":"open","format":1,"attempt":1,"process":"rank-0","wall":...,"mono":...,"boot":"...","host":"...","pid":1}

Every other line is an event, with the nanoseconds since that moment as `t`:

    agent   attempt (workers, device, from_step), worker (rank, pid), exit (rank, code), end (outcome, reason)
            memory (bytes, buffers), kept (step, seconds), checkpoint and upload (step, digest, bytes, seconds),
            skipped (step), unsaved (step, tier, message, hint), retry (message), rhythm (seconds, cost)
            hang (rank, step, phase, seconds, limit, line, stacks, ends), node (node, state), waiting, woken, adopted,
            straggler, each with a `text`; a failed end has its `failure`, and `recovery` if the run continues
    ranks   step (step, data, compute; rank 0 adds loss, grad_norm, lr, tokens, cursor, chain ...)
            doubt (step, value): the value in a replay of an element in which replicas differed
    rank 0  resumed (step), eval (step, loss), facts (...), replicas (step, digest)
    any     begin (name) and end-span (name), error (type, message, hint), log (message)

A step ended at `t`: `data` ns of waiting for data, then `compute` ns of compute, of which `checkpoint` ns may be a wait
for a save's copy. Spans (startup, context, restore, buffers, compile, checkpoint, evaluation, compare, shutdown) nest;
the innermost one counts.
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

FORMAT = 1
"""The format written; older formats are upgraded when read, newer ones refused."""

Event: TypeAlias = dict[str, Any]

_BATCH = 512  # most events per write, so that the first of a burst reach the file early


@dataclass(frozen=True)
class Header:
    """Which process wrote a record, and how its clock relates to others."""

    attempt: int
    process: str
    wall: float = 0.0
    """Unix seconds when the file was opened."""
    mono: int = 0
    """The same moment on the machine's monotonic clock, in nanoseconds."""
    boot: str = ""
    """Boot id of the kernel: processes that share it share the monotonic clock. Empty: unknown."""
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
    """Complete lines that were not events and were skipped."""


def record_path(folder: Path, attempt: int, process: str) -> Path:
    """Return the record file of a process and attempt in a run's events folder."""
    return folder / f"{attempt:04d}-{process}.jsonl"


# -- writing


@final
class Recorder:
    """Writes the events of one process; the caller only enqueues a tuple and never waits for the disk.

    A daemon thread writes each event immediately, so that a killed process loses almost nothing. What cannot be written
    (disk full) is dropped and counted while training continues; `failed` and `close` report it. Create it after
    forking. An existing file is continued on its own clock.
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
        """The first write error, as a sentence."""
        self._clock = clock
        self._reported = 0
        self._closed = False
        self._queue: SimpleQueue[tuple[int, str, Event] | threading.Event | None] = SimpleQueue()
        now = Header(attempt, process, wall(), clock(), _boot_id(), socket.gethostname(), os.getpid())
        try:
            self._zero, self._pending = _continue_from(path, now)
            path.parent.mkdir(exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(
                f"cannot write the run's record {path}: {error.strerror}",
                hint="check that the runs folder exists and is writable",
            ) from error
        self._write(b"")
        self._thread = threading.Thread(target=self._drain, name=f"record {process}", daemon=True)
        self._thread.start()

    def event(self, kind: str, /, *, at: int | None = None, **fields: Any) -> None:
        """Record an event now, or as of `at` (monotonic ns); its fields must not change afterwards."""
        assert "kind" not in fields, "an event has one kind"
        assert "t" not in fields, "an event's time is given as at="
        self._queue.put(((self._clock() if at is None else at) - self._zero, kind, fields))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record a span around the body."""
        self.event("begin", name=name)
        try:
            yield
        finally:
            self.event("end-span", name=name)

    def flush(self, timeout_s: float) -> bool:
        """Wait for all events so far to be written; return False on timeout."""
        written = threading.Event()
        self._queue.put(written)
        return written.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> str | None:
        """Write pending events and close the file; return the first error, if any."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():  # a hung file system: leave the descriptor to the process's end
                self.failed = self.failed or f"{self.path} accepted no more events within {timeout_s:g} s"
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
        """Write events in batches until the closing None."""
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
        """Append complete lines; on failure, store the reason, count lost events and mark a torn line."""
        data, sent = self._pending + self._lost_notice() + lines, 0
        try:
            while sent < len(data):
                sent += os.write(self._file, data[sent:] if sent else data)
        except OSError as error:
            self.failed = self.failed or f"cannot write {self.path}: {error.strerror}"
            first = max(sent - len(data) + len(lines), 0)
            # A line that lacks only its newline will get it, and is not lost.
            self.dropped += lines.count(b"\n", first) - (lines[first : first + 1] == b"\n")
            # A newline turns the torn rest into one unreadable line; an unwritten header is still pending.
            self._pending = (b"\n" if sent else b"") + (self._pending if sent < len(self._pending) else b"")
        else:
            self._pending, self._reported = b"", self.dropped

    def _lost_notice(self) -> bytes:
        if self.dropped == self._reported:
            return b""
        message = f"{self.dropped - self._reported} events were lost: {self.failed}"
        return _encode(self._clock() - self._zero, "log", {"message": message})


def _encode(t: int, kind: str, fields: Event) -> bytes:
    """Return an event as a JSON line; an event that JSON cannot hold becomes a `log` event that says so."""
    try:
        return to_json({"kind": kind, "t": t, **fields}, inf_nan_mode="null", fallback=_plain) + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        note = f"an event of kind {kind!r} could not be written: {error}"
        return to_json({"kind": "log", "t": t, "message": ascii(note)}) + b"\n"


def _plain(value: Any) -> int | float | str:
    """Return NumPy and torch scalars as numbers, anything else as its repr."""
    for convert in (operator.index, float):
        try:
            return convert(value)
        except Exception:  # whatever a foreign type raises must not stop the record
            continue
    return repr(value)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _continue_from(path: Path, now: Header) -> tuple[int, bytes]:
    """Return the zero of the record's clock, and the bytes to write before the first event."""
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
    """Read a record; a torn last line is ignored, invalid lines are skipped and counted."""
    return _record(path, *_parse(path.read_bytes()))


def read_run(folder: str | os.PathLike[str], process: str = "*") -> list[Record]:
    """Read the records of a run (of one process, if named), ordered by attempt."""
    records = [read_record(path) for path in sorted(Path(folder, "events").glob(f"*-{process}.jsonl"))]
    return sorted(records, key=lambda record: record.header.attempt)


def read_ends(path: Path, size: int = 1 << 16) -> Record:
    """Read only the first and last `size` bytes of a record: its start and current state."""
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
    """Read a record, leaving the lines of one kind unparsed: faster for a kind that makes up most of a long file."""
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")
    beginning = b'{"kind":"%s",' % kind.encode()
    raw = [line for line in lines if line.startswith(beginning)]
    rest = b"\n".join(line for line in lines if not line.startswith(beginning))
    return _record(path, *_parse(rest)), raw


def upgrade(header: Event, events: list[Event]) -> tuple[Event, list[Event]]:
    """Upgrade a record from an older format; all knowledge of older formats belongs here."""
    written = header.get("format", FORMAT)
    if isinstance(written, int) and written > FORMAT:
        raise RunError(
            f"the run was recorded in format {written}; this version of Headway reads formats up to {FORMAT}",
            hint="upgrade Headway to read this run",
        )
    return header, events


def _parse(data: bytes) -> tuple[list[Event], int]:
    """Return the events of the complete lines, and the number of invalid lines."""
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
        # Only keys repeat: caching values too slows 100,000 steps from 0.31 s to 0.49 s.
        event = from_json(line, cache_strings="keys")
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None


def _record(path: Path, lines: list[Event], skipped: int) -> Record:
    opening = next((line for line in lines if line["kind"] == "open"), {})
    opening, events = upgrade(opening, [line for line in lines if line["kind"] != "open"])
    return Record(_header(path, opening), events, skipped)


def _header(path: Path, opening: Event) -> Header:
    """Return a record's header; damaged fields come from the file name or stay empty."""
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
    """Follows a record while it is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def poll(self) -> list[Event]:
        """Return the events (and the opening line) completed since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet, or its file system is not there now
            return []
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        return _parse(data[:complete])[0]


# -- across records


def clock_offset(header: Header, reference: Header) -> int:
    """Return the nanoseconds to add to a record's times to get the clock of another."""
    if header.boot and header.boot == reference.boot:
        return header.mono - reference.mono
    return round((header.wall - reference.wall) * 1e9)


def kept_until(records: Sequence[Record]) -> dict[int, int]:
    """Return, for each attempt that was rolled back, the last of its steps that still counts."""
    resumed: dict[int, int] = {}
    for record in records:
        if record.header.rank == 0:
            for event in record.events:
                if event["kind"] == "resumed" and type(step := event.get("step")) is int:
                    resumed[record.header.attempt] = step
    attempts = {record.header.attempt for record in records}
    later = {number: [resumed[other] for other in resumed if other > number] for number in attempts}
    return {number: min(steps) for number, steps in later.items() if steps}
