"""The logs of jobs of the service: from their folders where this machine has them, else from the nodes they ran on."""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.cluster.engines.engine import OVER
from headway.cluster.engines.scripts import list_logs, log_folder, log_path
from headway.cluster.service.connection import ServiceConnection, connect, job_path
from headway.cluster.service.stream_carrier import Pace, pace_requests, receive
from headway.errors import HeadwayError, UsageError

_POLL_S = 0.5
MOST_FOLLOWED = 16
"""Logs of nodes that are followed at a time."""
MOST_LINES = 10_000
"""That are received and not yet printed."""
LogLine = tuple[str, str]
"""Name of a log, and a line of it."""


@dataclass(frozen=True)
class LogChoice:
    """Which logs of a job are wanted."""

    rank: int | None = None
    start: int | None = None

    def covers(self, start: int, rank: int) -> bool:
        """Whether a log is wanted."""
        return self.rank in (None, rank) and self.start in (None, start)


@dataclass
class _NodeLog:
    """A log that is received from its node."""

    job: str
    start: int
    rank: int
    thread: threading.Thread | None = None
    failure: HeadwayError | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it is being followed."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def label(self) -> str:
        """Its name, as that of a local one."""
        return _label(self.job, log_path(Path(), self.start, self.rank))

    def lines(self, connection: ServiceConnection, pace: Pace, *, follow: bool) -> Iterator[LogLine]:
        """Yield its lines; an error is kept, since other logs may be there."""
        body, rest = {"start": self.start, "rank": self.rank, "follow": follow}, b""
        with closing(connection.another()) as own:
            try:
                path = f"/api/v1/streams/{own.post(job_path(self.job, 'logs'), body)['stream']}"
                for part in receive(own, path, lambda: True, pace):
                    *lines, rest = (rest + part).split(b"\n")
                    yield from ((self.label, line.decode(errors="replace")) for line in lines)
                own.delete(path)
            except HeadwayError as error:
                self.failure = error
            if rest:
                yield self.label, rest.decode(errors="replace")


@dataclass
class _Reader:
    """Reads all logs of a job so far, again and again."""

    connection: ServiceConnection
    choice: LogChoice
    follow: bool
    offsets: dict[Path, int] = field(default_factory=dict)
    listed: dict[str, tuple[Any, list[dict[str, int]]]] = field(default_factory=dict)
    """Logs of each job, and its state when the service listed them."""
    remote: dict[str, _NodeLog] = field(default_factory=dict)
    pace: Pace = field(default_factory=pace_requests)
    received: "queue.Queue[LogLine]" = field(default_factory=lambda: queue.Queue(MOST_LINES))

    def new_lines(self, row: Mapping[str, Any], *, over: bool) -> Iterator[LogLine]:
        """Yield what is new in the folder of a job; begin to receive what is not there."""
        folder = log_folder(Path(row["folder"]), row["id"])
        local = {path.name: path for path in list_logs(folder)}
        for path in local.values():
            start, rank = map(int, path.stem.split("-"))
            label = _label(row["id"], path)
            if self.choice.covers(start, rank) and label not in self.remote:
                yield from ((label, line) for line in self._read(path, whole=over or not self.follow))
        for log in self._others(row, local):
            if not self.follow or over or log.start < row["starts"]:
                yield from log.lines(self.connection, self.pace, follow=False)
            elif sum(known.is_alive for known in self.remote.values()) >= MOST_FOLLOWED:
                raise UsageError(
                    f"job {row['id']} has more than {MOST_FOLLOWED} logs that are on its nodes only",
                    hint="--rank N follows the log of one of them",
                )
            else:
                log.thread = threading.Thread(target=self._receive, args=(log,), daemon=True)
                log.thread.start()

    def arrived(self, wait_s: float) -> Iterator[LogLine]:
        """Yield what has come from nodes, for a while."""
        until = time.monotonic() + wait_s
        with suppress(queue.Empty):
            while True:
                yield self.received.get(timeout=max(until - time.monotonic(), 0.0))

    def rest(self) -> Iterator[LogLine]:
        """Yield all that still comes from nodes."""
        while any(log.is_alive for log in self.remote.values()):
            yield from self.arrived(_POLL_S)
        yield from self.arrived(0.0)

    def _others(self, row: Mapping[str, Any], local: Mapping[str, Path]) -> list[_NodeLog]:
        """Return the wanted logs that are not in a job's folder here, of which none has been returned before."""
        newest = [(row["starts"], rank) for rank in range(len(row["placement"]))]
        if row["starts"] == 0 or (
            all(log_path(Path(), *log).name in local for log in newest) and len(local) >= row["starts"]
        ):
            return []
        state = (row["starts"], row["state"])
        if self.listed.get(row["id"], (None,))[0] != state:
            self.listed[row["id"]] = state, self.connection.get(job_path(row["id"], "logs"))
        fresh = []
        for log in self.listed[row["id"]][1]:
            own = _NodeLog(row["id"], log["start"], log["rank"])
            absent = log_path(Path(), own.start, own.rank).name not in local
            if absent and own.label not in self.remote and self.choice.covers(own.start, own.rank):
                self.remote[own.label] = own
                fresh.append(own)
        return fresh

    def _receive(self, log: _NodeLog) -> None:
        for line in log.lines(self.connection, self.pace, follow=True):
            self.received.put(line)

    def _read(self, path: Path, *, whole: bool) -> list[str]:
        """Return the lines that a log has more than before; a last one without its end if `whole`."""
        data = path.read_bytes()[self.offsets.get(path, 0) :]
        end = len(data) if whole else data.rfind(b"\n") + 1
        self.offsets[path] = self.offsets.get(path, 0) + end
        return [line.decode(errors="replace") for line in data[:end].splitlines()]


def log_lines(root: Path, name: str, *, follow: bool, choice: LogChoice | None = None) -> Iterator[LogLine]:
    """Yield file names and lines of the logs of a job; when following, until it is over.

    What a node cannot give is said on stderr, and is an error if there is nothing else."""
    connection = connect(root)
    reader, any_line = _Reader(connection, choice or LogChoice(), follow), False
    for lines in _rounds(reader, lambda: list(connection.get(job_path(name)))):
        for line in lines:
            any_line = True
            yield line
    failures = [log.failure for log in reader.remote.values() if log.failure is not None]
    if failures and not any_line:
        raise failures[0]
    for failure in failures:
        print(f"note: {failure.message}", file=sys.stderr)


def _rounds(reader: _Reader, jobs: Callable[[], list[dict[str, Any]]]) -> Iterator[Iterator[LogLine]]:
    """Yield the new lines of all logs, until the jobs are over."""
    while True:
        rows = jobs()  # before reading, so that the last lines are not missed
        over = all(row["state"] in OVER for row in rows)
        for row in rows:
            yield reader.new_lines(row, over=over)
        if over or not reader.follow:
            yield reader.rest()
            return
        yield reader.arrived(_POLL_S)


def _label(job: str, path: Path) -> str:
    return f"{job}/{path.name}"
