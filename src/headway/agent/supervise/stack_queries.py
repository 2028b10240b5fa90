"""Asks workers for their Python stacks and flight recorders, and reads what /proc shows of them."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from headway.agent.supervise.worker_stacks import Frame, WorkerStack

POLL_S = 0.01

_RESPONDER = re.compile(r"^process (\d+) answers; descriptor (\d+) asks$", re.MULTILINE)
_BLOCK = re.compile(
    r"^(?:Stack|(?:Current thread|Thread) (?P<thread>0x[0-9a-f]+)[^\n]*?) \(most recent call first\):\n"
    r"(?P<frames>(?:  [^\n]*\n)*)",
    re.MULTILINE,
)
_FRAME = re.compile(r'^  File "(?P<file>[^\n]*)", line (?P<line>\d+|\?\?\?) in (?P<function>[^\n]*)$', re.MULTILINE)


# -- /proc


def read_proc(rank: int, pid: int) -> WorkerStack:
    """What /proc shows of a process."""
    stat = read_text(Path(f"/proc/{pid}/stat"))
    if not stat:
        return WorkerStack(rank, pid, "gone")
    fields = stat.rpartition(")")[2].split()  # the command name before it may hold anything
    waits = read_text(Path(f"/proc/{pid}/wchan")).strip()
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return WorkerStack(rank, pid, fields[0], "" if waits == "0" else waits, cpu_s, int(fields[17]))


def has_exited(stack: WorkerStack) -> bool:
    """Whether the process is gone, or only its exit status is left."""
    return stack.state in ("gone", "Z", "X")


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal that would otherwise end it."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", read_text(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def read_text(path: Path) -> str:
    """A file's text; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# -- querying


class StackQuery:
    """A query to one worker and its answer files; what they held before the query does not count."""

    def __init__(self, stack: WorkerStack, stem: Path) -> None:
        self.stack = stack
        self.signalled = False
        self._handler_file, self._threads, self._collectives = (
            stem.with_name(stem.name + ending) for ending in (".txt", "-threads.txt", "-collectives.json")
        )
        text = read_text(self._handler_file)
        responders = [match for match in _RESPONDER.finditer(text) if int(match[1]) == stack.pid]
        first_dump = list(_BLOCK.finditer(text, responders[-1].end()))[:1] if responders else []
        self.descriptor = int(responders[-1][2]) if responders else None
        self._outermost = _outermost(first_dump)
        self._before = len(text), _identity(self._threads), _identity(self._collectives)

    def wake_responder(self) -> None:
        """Ask the worker's responder thread; where that is not permitted, the signal remains."""
        with contextlib.suppress(OSError):
            pipe = os.open(f"/proc/{self.stack.pid}/fd/{self.descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(pipe, "wb", buffering=0) as file:
                file.write(b"?")

    def send_signal(self) -> None:
        """Have faulthandler's handler answer."""
        if _catches(self.stack.pid, signal.SIGUSR2):
            with contextlib.suppress(OSError):
                os.kill(self.stack.pid, signal.SIGUSR2)
                self.signalled = True

    def can_answer(self) -> bool:
        """Whether the worker is able to answer."""
        now = read_proc(self.stack.rank, self.stack.pid)
        return self.descriptor is not None and now.state != "T" and not has_exited(now)

    def has_answered(self) -> bool:
        """Whether the responder thread has written its stacks."""
        return _identity(self._threads) != self._before[1]

    def is_complete(self) -> bool:
        """Whether the whole answer is there."""
        if self.has_answered():
            return _identity(self._collectives) != self._before[2]
        outermost = _outermost(list(_BLOCK.finditer(self._handler_output()))) if self.signalled else ""
        return outermost != "" and outermost in (self._outermost, "  ...")

    def _handler_output(self) -> str:
        return read_text(self._handler_file)[self._before[0] :]

    def stacks(self) -> str:
        """Stacks of all threads, or of the main thread if only the signal handler answered."""
        return read_text(self._threads) if self.has_answered() else self._handler_output()

    def collectives(self) -> dict[str, Any] | None:
        """The flight recorders' dumps; None without an answer."""
        if _identity(self._collectives) == self._before[2]:
            return None
        try:
            content = from_json(self._collectives.read_bytes())
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        return content if isinstance(content, dict) else {"error": "no JSON object"}


def _outermost(blocks: Sequence[re.Match[str]]) -> str:
    """Last line of the last stack, without the line number, which changes; "" if not written yet."""
    frames = blocks[-1]["frames"] if blocks else ""
    return re.sub(r", line \d+ in ", " in ", frames.splitlines()[-1]) if frames else ""


def _identity(file: Path) -> tuple[int, int] | None:
    """A value that changes when a file is replaced."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def run_queries(queries: Sequence[StackQuery], wait_s: float) -> None:
    """Wake all responders, signal the workers silent at half time, and wait for the rest of it."""
    started = time.monotonic()
    for query in queries:
        if query.can_answer():
            query.wake_responder()
    _wait(queries, StackQuery.has_answered, started + wait_s / 2)
    for query in queries:
        if query.can_answer() and not query.has_answered():
            query.send_signal()
    _wait(queries, StackQuery.is_complete, started + wait_s)


def _wait(queries: Sequence[StackQuery], is_done: Callable[[StackQuery], bool], deadline: float) -> None:
    while time.monotonic() < deadline and not all(is_done(query) or not query.can_answer() for query in queries):
        time.sleep(POLL_S)


def main_frames(text: str) -> tuple[Frame, ...]:
    """The main thread's frames in a faulthandler dump of that thread alone or of all threads."""
    main = re.match(r"main thread (0x[0-9a-f]+)", text)
    blocks = [block for block in _BLOCK.finditer(text) if main is None or block["thread"] == main[1]]
    return parse_frames(_FRAME, blocks[-1]["frames"]) if blocks else ()


def parse_frames(pattern: re.Pattern[str], text: str) -> tuple[Frame, ...]:
    """The frames in a text, each a match of the pattern."""
    matches = pattern.finditer(text)
    return tuple(Frame(m["function"], m["file"], int(m["line"]) if m["line"].isdigit() else 0) for m in matches)
