"""`hw.log`: numbers, images, audio, tables and artifacts that the user's own code records in its run.

    events/0001-user-rank-0.jsonl    logged (step, values); media (step, key, type, file, bytes, sha256, caption)
    logged/00000012-attention-0001-rank-0-3.png

Every process of a run that runs code of the user's has a log of its own, which is made with its first value. Several
values of a key in one step, from microbatches, workers or rewards, are averaged when they are read. Nothing here waits
for a disk: events go through a Recorder, files through a bounded queue and a thread.
"""

import hashlib
import math
import os
import queue
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from headway.errors import HeadwayError, RunError, UsageError, plural
from headway.track.events import Record, Recorder, read_record, record_path
from headway.track.logged_values import LoggedFile, MediaKind, to_number
from headway.track.run_folder import RunFolder

if TYPE_CHECKING:
    from headway.track.metrics import Series

USER = "user-"
"""Beginning of the process name of such a record."""
WAITING_FILES, WAITING_BYTES = 64, 256 << 20
"""Most files that wait to be written, and most bytes of them; further ones are dropped, counted and reported."""

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./@ -]{0,99}")
_FILE = re.compile(r"[0-9]{8}-[A-Za-z0-9][A-Za-z0-9._-]{0,150}")


class Logged(NamedTuple):
    """One value that is not a number, in its file."""

    step: int
    key: str
    kind: MediaKind
    path: Path
    bytes: int
    sha256: str
    caption: str


@dataclass
class _Waiting:
    files: int = 0
    bytes: int = 0
    dropped: int = 0


@final
class UserLog:
    """What one process of a run logs."""

    def __init__(self, run: Path, attempt: int, process: str) -> None:
        self.step = 0
        """The step that values belong to unless the caller names one."""
        self._folder, self._attempt, self._process = RunFolder(run), attempt, process
        self._recorder: Recorder | None = None
        self._failed = False
        self._queue: queue.SimpleQueue[tuple[int, str, LoggedFile] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting, self._lock, self._number = _Waiting(), threading.Lock(), 0

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record values; raise UsageError for one that cannot be, never for a disk's failure."""
        numbers, media = sorted_values(values)
        step = self.step if step is None else _checked_step(step)
        recorder = self._open()
        if recorder is None:
            return
        if numbers:
            recorder.event("logged", step=step, values=numbers)
        for key, value in media.items():
            self._enqueue(step, key, value)

    def address(self) -> dict[str, Any]:
        """Return the run, attempt and process as JSON."""
        return {"run": str(self._folder.path), "attempt": self._attempt, "process": self._process}

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, within a time."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
        if self._recorder is not None:
            self._recorder.close(timeout_s)

    def _open(self) -> Recorder | None:
        if self._recorder is None and not self._failed:
            name = f"{USER}{self._process}"
            path = record_path(self._folder.events, self._attempt, name)
            try:
                self._recorder = Recorder(path, attempt=self._attempt, process=name)
            except RunError as error:
                self._failed = True
                print(f"warning: nothing is logged: {error.message}", file=sys.stderr)
        return self._recorder

    def _enqueue(self, step: int, key: str, value: LoggedFile) -> None:
        with self._lock:
            full = self._waiting.files >= WAITING_FILES or self._waiting.bytes + value.size > WAITING_BYTES
            if full and self._waiting.files:
                self._waiting.dropped += 1
                return
            self._waiting.files += 1
            self._waiting.bytes += value.size
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_files, name="logged files", daemon=True)
            self._thread.start()
        self._queue.put((step, key, value))

    def _write_files(self) -> None:
        while (item := self._queue.get()) is not None:
            step, key, value = item
            assert self._recorder is not None, "the record is opened before a value is queued"
            try:
                self._recorder.event("media", step=step, key=key, **self._written(step, key, value))
            except Exception as error:  # an encoder or a disk: the run goes on
                self._recorder.event("log", message=f"{key} of step {step} was not logged: {error}")
            with self._lock:
                self._waiting.files -= 1
                self._waiting.bytes -= value.size
                dropped, self._waiting.dropped = self._waiting.dropped, 0
            if dropped:
                text = f"{plural(dropped, 'logged file')} dropped: more than the disk takes"
                self._recorder.event("log", message=text)

    def _written(self, step: int, key: str, value: LoggedFile) -> dict[str, Any]:
        """Write a file that did not exist; return what its event says."""
        suffix, data = value.encode()
        self._number += 1
        slug = re.sub(r"[^A-Za-z0-9]+", "-", key).strip("-")[:40] or "value"
        name = f"{step:08d}-{slug}-{self._attempt:04d}-{self._process}-{self._number}{suffix}"
        self._folder.logged.mkdir(exist_ok=True)
        path = self._folder.logged / name
        partial = path.with_name(f".{name}.partial")
        with suppress(FileNotFoundError):
            partial.unlink()
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(file, "wb") as out:
            out.write(data)
        partial.replace(path)
        digest = hashlib.sha256(data).hexdigest()
        return {"type": value.kind, "file": name, "bytes": len(data), "sha256": digest, "caption": value.caption[:1000]}


# -- the log of this process. User code calls `hw.log` without an argument that could carry it.

_current: UserLog | None = None


def open_log(run: Path, attempt: int, process: str) -> UserLog:
    """Have `hw.log` of this process record into a run."""
    global _current
    _current = UserLog(run, attempt, process)
    return _current


def close_log() -> None:
    """Write what waits; `hw.log` of this process has no run any more."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def set_step(step: int) -> None:
    """Say which step values belong to from now on."""
    if _current is not None:
        _current.step = step


def current_step() -> int:
    """Return the step that values belong to; 0 outside of a run."""
    return 0 if _current is None else _current.step


def shared() -> dict[str, Any] | None:
    """Return what a process started by this one needs to log into the same run, or None outside of one."""
    return None if _current is None else _current.address()


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """Say which step values belong to until the end of a block."""
    log = _current
    if log is None:
        yield
        return
    before, log.step = log.step, step
    try:
        yield
    finally:
        log.step = before


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Record values of the user's own in the run that this code is part of, at the current step.

    Values are numbers, scalars of NumPy and torch, or `hw.Image`, `hw.Audio`, `hw.Table`, `hw.Artifact`. Call it in an
    objective, callback, reward or environment of your own; outside of a run the values are printed.
    """
    if _current is not None:
        _current.log(values, step)
        return
    numbers, media = sorted_values(values)
    shown = [f"{key}={number:.6g}" for key, number in numbers.items()]
    shown += [f"{key}=<{value.kind}>" for key, value in media.items()]
    print(f"hw.log outside of a run: {', '.join(shown)}", file=sys.stderr)


def sorted_values(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, LoggedFile]]:
    """Return numbers and media by key; raise UsageError for a key or a value that cannot be logged."""
    if not isinstance(values, Mapping):
        raise UsageError(f"hw.log takes a dict, not a {type(values).__name__}", hint='hw.log({"my/value": 1.0})')
    numbers, media = dict[str, float](), dict[str, LoggedFile]()
    for key, value in values.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key) or ".." in key:
            raise UsageError(
                f"hw.log: invalid key {key!r}",
                hint="up to 100 letters, digits, spaces and . / _ - @; it starts with a letter or digit",
            )
        if isinstance(value, LoggedFile):
            media[key] = value
        elif (number := to_number(value)) is not None:
            numbers[key] = number
        else:
            raise UsageError(
                f"hw.log: {key} is a {type(value).__name__}",
                hint="a number, a scalar tensor, hw.Image, hw.Audio, hw.Table or hw.Artifact",
            )
    return numbers, media


def _checked_step(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**8:
        raise UsageError(f"hw.log: step is {step!r}", hint="a whole number from 0, or leave it out")
    return step


# -- reading


def user_records(run: RunFolder) -> list[Record]:
    """Return what the processes of a run logged, ordered by attempt; damaged or unreadable files are left out."""
    records = []
    for path in sorted(run.events.glob(f"*-{USER}*.jsonl")):
        with suppress(OSError, HeadwayError):
            records.append(read_record(path))
    return sorted(records, key=lambda record: record.header.attempt)


def logged_series(
    records: Sequence[Record], kept: Mapping[int, int], keys: Sequence[str] | None = None
) -> dict[str, "Series"]:
    """Return logged numbers by key: the mean of a step's values in the latest attempt that logged any.

    `kept` is, for each attempt that was rolled back, its last step that counts.
    """
    import numpy as np

    sums: dict[str, dict[int, tuple[int, float, int]]] = {}
    for record in records:
        attempt = record.header.attempt
        for event in record.events:
            step, values = event.get("step"), event.get("values")
            if event["kind"] != "logged" or type(step) is not int or not isinstance(values, dict):
                continue
            if step > kept.get(attempt, math.inf):
                continue
            for key, value in values.items():
                if keys is not None and key not in keys:
                    continue
                number = math.nan if value is None else value
                if not isinstance(number, int | float):
                    continue
                latest, total, count = sums.setdefault(key, {}).get(step, (attempt, 0.0, 0))
                if attempt != latest:
                    total, count = 0.0, 0
                sums[key][step] = (attempt, total + number, count + 1)
    series = dict[str, "Series"]()
    for key, by_step in sums.items():
        steps = sorted(by_step)
        means = [by_step[step][1] / by_step[step][2] for step in steps]
        series[key] = (np.array(steps, np.int64), np.array(means, np.float64))
    return series


def logged_files(run: RunFolder) -> list[Logged]:
    """Return the files that a run logged and that exist, in order of steps; names that lead elsewhere are left out."""
    files = []
    for record in user_records(run):
        for event in record.events:
            if event["kind"] == "media" and (item := _logged(run, event)) is not None:
                files.append(item)
    return sorted(files, key=lambda item: (item.step, item.key, item.path.name))


def _logged(run: RunFolder, event: Mapping[str, Any]) -> Logged | None:
    step, key, kind, name = (event.get(field) for field in ("step", "key", "type", "file"))
    if type(step) is not int or not isinstance(key, str) or kind not in ("image", "audio", "table", "artifact"):
        return None
    path = logged_path(run, name)
    if path is None:
        return None
    count, digest = event.get("bytes"), event.get("sha256")
    known = count if type(count) is int else 0
    return Logged(step, key, kind, path, known, str(digest or ""), str(event.get("caption", "")))


def logged_path(run: RunFolder, name: Any) -> Path | None:
    """Return the path of a logged file by its name, or None if it is no plain file in the run's `logged` folder."""
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        return None
    path = run.logged / name
    return path if not path.is_symlink() and path.is_file() and not run.logged.is_symlink() else None
