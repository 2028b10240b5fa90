"""The record of a run: an append-only JSON Lines file per process and attempt.

    events/0001-agent.jsonl     the agent of attempt 1
    events/0001-rank-0.jsonl    its worker of rank 0

The first line relates the process's clock to wall time and to the other processes:

    {"kind":"open","format":1,"attempt":1,"process":"rank-0","wall":...,"mono":...,"boot":"...","host":"...","pid":1}

Every other line is an event, with the nanoseconds since that moment as `t`:

    agent   attempt (workers, device, from_step), worker (rank, pid), exit (rank, code), end (outcome, reason)
            memory (bytes, buffers), kept (step, seconds), checkpoint and upload (step, digest, bytes, seconds),
            skipped (step), unsaved (step, tier, message, hint), retry (message, limit_s), rhythm (seconds, cost)
            hang (rank, step, phase, seconds, limit, line, stacks, ends), node (node, state), waiting, woken, adopted,
            straggler, tracker, each with a `text`; storage (text, works): the run's storage failed, or works again;
            a failed end has its `failure`, and `recovery` if the run continues
    ranks   step (step, data, compute; rank 0 adds loss, grad_norm, lr, tokens, cursor, chain ...)
            doubt (step, value): the value in a replay of an element in which replicas differed
    rank 0  resumed (step), eval (step, and loss or reward), facts (...), replicas (step, digest)
            reference (of, done, total): rows that the reference or the teacher has scored, before the first step
    any     begin (name) and end-span (name), error (type, message, hint), log (message)
            lost (events, since): so many events since then could not be written and are missing

A step ended at `t`: `data` ns of waiting for data, then `compute` ns of compute, of which `checkpoint` ns may be a wait
for a save's copy. Spans (startup, context, restore, buffers, compile, checkpoint, evaluation, compare, generate, score,
sync, idle, shutdown) nest; the innermost one counts.
"""

import errno
import operator
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeAlias, final

from pydantic_core import from_json, to_json

from headway.errors import RunError, plural

FORMAT = 1
"""The format written; older formats are upgraded when read, newer ones refused."""

Event: TypeAlias = dict[str, Any]

BACKLOG_BYTES = 4 << 20
"""Events that wait to be written, per process: about 20,000 steps of rank 0."""
_BATCH = 512  # most events per write, so that the first of a burst reach the file early
_RETRY_S = 1.0


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


@dataclass(frozen=True)
class UnwrittenLines:
    """The end of a record that is not in its file yet."""

    offset: int
    """Where it begins in the file, in bytes."""
    lines: bytes


class _Flush:
    """A request to say whether all events before it are in the file."""

    def __init__(self) -> None:
        self.answered, self.written = threading.Event(), False


_Queued: TypeAlias = tuple[int, str, Event] | _Flush | None
"""An event, a flush, or the end."""


@final
class Recorder:
    """Writes the events of one process; the caller only enqueues a tuple and never waits for the disk.

    A daemon thread writes each event immediately, so that a killed process loses almost nothing. What cannot be written
    (disk full, file system gone) waits in memory, up to `backlog_bytes`, and is retried with every event and every
    second: the file is always a prefix of what was recorded. Events beyond that are counted and dropped until the rest
    is written; a `lost` event then says how many and since when. Create it after forking. An existing file is continued
    on its own clock.
    """

    def __init__(
        self,
        path: Path,
        *,
        attempt: int,
        process: str,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], float] = time.time,
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        self.path = path
        self.dropped = 0
        """Events that were lost."""
        self.trouble: str | None = None
        """Why the last events are not in the file yet, as a sentence."""
        self.on_trouble: Callable[[int, int], None] = lambda _nanoseconds, _errno: None
        """Called in its thread with how long events could not be written, at least every second, and why; with zeros
        once they are."""
        self._trouble_since: int | None = None
        self._clock, self._backlog_bytes = clock, backlog_bytes
        self._lost, self._lost_since = 0, 0
        self._closed = False
        self._queue: SimpleQueue[_Queued] = SimpleQueue()
        now = Header(attempt, process, wall(), clock(), _boot_id(), socket.gethostname(), os.getpid())
        try:
            self._zero, first = _continue_from(path, now)
            path.parent.mkdir(exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(
                f"cannot write the run's record {path}: {error.strerror}",
                hint="check that the runs folder exists and is writable",
            ) from error
        status = os.fstat(self._file)
        self._inode, self._unwritten = status.st_ino, UnwrittenLines(status.st_size, first)
        self._write()
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
        """Wait until all events so far are written or cannot be; return whether they are, False on timeout too."""
        request = _Flush()
        self._queue.put(request)
        return request.answered.wait(timeout_s) and request.written

    def unwritten(self) -> UnwrittenLines | None:
        """What waits in memory, without what `flush` would wait for; None for nothing. Never waits for the disk."""
        unwritten = self._unwritten
        return unwritten if unwritten.lines else None

    def trouble_s(self) -> float:
        """How long ago the first of the events that wait could not be written; 0 if none waits."""
        since = self._trouble_since
        return 0.0 if since is None else (self._clock() - since) / 1e9

    def close(self, timeout_s: float = 10.0) -> str | None:
        """Write pending events and close the file; return why some are not written, if so."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():  # a hung file system: leave the descriptor to the process's end
                self.trouble = self.trouble or f"{self.path} accepted no more events within {timeout_s:g} s"
            else:
                os.close(self._file)
        return self.trouble

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self) -> None:
        """Write events in batches until the closing None."""
        batch = list[_Queued]()
        while batch[-1:] != [None]:
            batch = self._next_batch()
            for item in batch:
                if isinstance(item, tuple):
                    self._append(item)
            self._write()
            for item in batch:
                if isinstance(item, _Flush):
                    item.written = not self._unwritten.lines
                    item.answered.set()

    def _next_batch(self) -> list[_Queued]:
        """Wait for the next events; for a second at most while others wait to be written, which are then retried."""
        try:
            batch = [self._queue.get(timeout=_RETRY_S if self._unwritten.lines else None)]
        except Empty:
            return []
        while batch[-1] is not None and len(batch) < _BATCH and not self._queue.empty():
            batch.append(self._queue.get())
        return batch

    def _append(self, item: tuple[int, str, Event]) -> None:
        """Add an event to what is to be written; drop and count it where too much waits already."""
        line, unwritten = _encode(*item), self._unwritten
        if self._lost or (self.trouble and len(unwritten.lines) + len(line) > self._backlog_bytes):
            self._lost_since = self._lost_since if self._lost else item[0]
            self._lost += 1
            self.dropped += 1
        else:
            self._unwritten = UnwrittenLines(unwritten.offset, unwritten.lines + line)

    def _write(self) -> None:
        """Append what waits to the file; on failure keep the rest and say why."""
        data, sent = self._unwritten.lines, 0
        try:
            while sent < len(data):
                sent += os.write(self._file, data[sent:] if sent else data)
                self.trouble = None
            if self._trouble_since is not None:
                self._trouble_since = None
                self.on_trouble(0, 0)
        except OSError as error:
            self.trouble = f"cannot write {self.path}: {error.strerror}"
            now = self._clock()
            self._trouble_since = now if self._trouble_since is None else self._trouble_since
            self.on_trouble(max(1, now - self._trouble_since), error.errno or 0)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._reopen()
        if sent:
            self._unwritten = UnwrittenLines(self._unwritten.offset + sent, data[sent:])
        if self._lost and not self._unwritten.lines:
            now, lost = self._clock() - self._zero, self._lost
            text = (
                f"{plural(lost, 'event')} {'was' if lost == 1 else 'were'} lost: they could not be written for too long"
            )
            self._lost = 0
            self._append((now, "lost", {"events": lost, "since": self._lost_since, "text": text}))
            self._write()

    def _reopen(self) -> None:
        """Open the same file again for the next try: its file system may have been mounted again."""
        with suppress(OSError):
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            same = os.fstat(file).st_ino == self._inode
            os.close(self._file if same else file)
            self._file = file if same else self._file


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
