"""Stack dumps of a run's workers, taken when one hangs and by `headway stacks`.

`collect` queries all workers at once (train/stack_responder.py is their side) and merges four sources:

    /proc           state, wait channel, CPU time, threads: needs no help from the worker
    responder       a byte into the worker's pipe: a thread dumps all Python stacks and PyTorch's flight recorder
    faulthandler    a worker that leaves the byte unanswered gets SIGUSR2: the main thread's Python stack
    py-spy          where installed and allowed: Python and native stacks, also of a stopped process

A worker that dies or is too slow raises nothing: `WorkerStack.missing` says what is absent and why. The full text
goes to stacks/NNNN-N.txt.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json

PY_SPY_TIMEOUT_S = 2.0
"""A native dump of a process with torch took 0.5 s, 2.4 s with a cold file cache."""
POLL_S = 0.01
MAX_COLLECTIVES = 32
"""Last entries of a flight recorder to return; the worker's file has all (2,000)."""
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "exited",
    "gone": "gone",
}

_RESPONDER = re.compile(r"^process (\d+) answers; descriptor (\d+) asks$", re.MULTILINE)
_BLOCK = re.compile(
    r"^(?:Stack|(?:Current thread|Thread) (?P<thread>0x[0-9a-f]+)[^\n]*?) \(most recent call first\):\n"
    r"(?P<frames>(?:  [^\n]*\n)*)",
    re.MULTILINE,
)
_FRAME = re.compile(r'^  File "(?P<file>[^\n]*)", line (?P<line>\d+|\?\?\?) in (?P<function>[^\n]*)$', re.MULTILINE)
_PY_SPY_MAIN = re.compile(r'^Thread [^\n]*"MainThread"\n(?P<frames>(?:    [^\n]*\n)*)', re.MULTILINE)
_PY_SPY_FRAME = re.compile(r"^    (?P<function>[^\n]+?) \((?P<file>[^\n]+):(?P<line>\d+)\)$", re.MULTILINE)
_PACKAGES = r".*/(?:site|dist)-packages/"
_STDLIB = r".*/lib(?:64)?/python3[.\d]*t?/"
_PATH_PREFIX = re.compile(rf"{_PACKAGES}|{_STDLIB}|.*/src/")
_STDLIB_FILE = re.compile(rf"<frozen |(?!{_PACKAGES}){_STDLIB}")
_TORCH_FILE = re.compile(rf"<eval_with_key>|{_PACKAGES}torch/|.*/torchinductor_")


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    function: str
    file: str
    line: int
    """0 if unknown."""


@dataclass(frozen=True)
class WorkerStack:
    """What one worker was doing."""

    rank: int
    pid: int
    state: str
    """State letter from /proc/PID/stat of its main thread; `gone` if there is no such process."""
    waits: str = ""
    """Kernel function its main thread waits in (wchan), where readable."""
    cpu_s: float = 0.0
    """CPU time of all its threads since it started."""
    threads: int = 0
    frames: tuple[Frame, ...] = ()
    """Of the main thread, innermost first."""
    native: str = ""
    """Output of py-spy: native stacks where possible, else Python's."""
    collectives: dict[str, Any] | None = None
    """Dump per flight recorder (`fr`: gloo's, `nccl`), with the last entries only."""
    missing: tuple[str, ...] = ()
    """One sentence per source that gave nothing, with the reason."""


@dataclass(frozen=True)
class StackDump:
    """What all workers were doing."""

    path: Path | None
    """The text file; None if it could not be written."""
    workers: list[WorkerStack]


def collect(
    workers: Mapping[int, int], folder: Path, attempt: int, wait_s: float = 1.0, *, native: bool = True
) -> StackDump:
    """Dump the stacks of an attempt's workers (pid by rank) within `wait_s`, plus twice PY_SPY_TIMEOUT_S with py-spy.

    A native dump pauses each process for up to a second: fine for one that hangs, not for one that works.
    """
    # 1 read /proc, before a query changes anything
    queries = [
        _Query(_read_proc(rank, pid), folder / f"{attempt:04d}-rank-{rank}") for rank, pid in sorted(workers.items())
    ]
    with ThreadPoolExecutor(max(1, len(queries))) as pool:
        python_dumps = [pool.submit(_dump_python, query.stack) for query in queries]
        # 2 query all workers at once
        _run_queries(queries, wait_s)
        spied = [dump.result() for dump in python_dumps]
        # 3 native stacks last: a paused process cannot answer
        if native:
            spied = list(pool.map(_dump_native, (query.stack for query in queries), spied))
    # 4 merge
    stacks = [_merge(query, dump, wait_s) for query, dump in zip(queries, spied, strict=True)]
    return StackDump(_write(folder, attempt, [_render(*pair) for pair in zip(stacks, queries, strict=True)]), stacks)


def describe_location(stack: WorkerStack) -> str:
    """Where a worker is: its innermost frame, and the innermost outside Python and torch that called it."""
    if not stack.frames:
        return ""
    inner = stack.frames[0]
    own = next((f for f in stack.frames if not (_STDLIB_FILE.match(f.file) or _TORCH_FILE.match(f.file))), None)
    if own is inner:
        return f"{_file_line(inner)} in {inner.function}"
    caller = "" if own is None else f", called from {_file_line(own)} in {own.function}"
    return f"in {inner.function}, {_file_line(inner)}{caller}"


def describe_collective(stack: WorkerStack) -> str:
    """The oldest collective of a worker that has not ended, else its last; "" if none is known."""
    recorders = (stack.collectives or {}).values()
    collectives = [(entry, _has_ended(entry, recorder)) for recorder in recorders for entry in recorder["entries"]]
    if not collectives:
        return ""
    collectives.sort(key=lambda pair: pair[0].get("time_created_ns", 0))
    entry, ended = next((pair for pair in collectives if not pair[1]), collectives[-1])
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    group = " ".join(str(part) for part in entry.get("process_group", ()))
    name = entry.get("profiling_name", "a collective")
    return f"{name}, number {number} of group {group}, {'ended' if ended else 'not ended'}"


def blocking_rank(stacks: Sequence[WorkerStack]) -> int | None:
    """The one rank that the others wait for, by collectives or stacks; None if these do not show it.

    All ranks number the collectives of a group alike, so a rank that started fewer than another is awaited. If all
    started as many, the ranks inside PyTorch's communication wait for the one that is not.
    """
    started = {stack.rank: _started_collectives(stack) for stack in stacks}
    behind = {
        rank
        for rank, groups in started.items()
        for others in started.values()
        if any(others.get(group, 0) > number for group, number in groups.items())
    }
    if not behind:
        behind = {stack.rank for stack in stacks if stack.frames and not _is_communicating(stack)}
    return behind.pop() if len(behind) == 1 else None


def _started_collectives(stack: WorkerStack) -> dict[str, int]:
    """Number of the last collective that a worker started, by group."""
    numbers: dict[str, int] = {}
    for recorder in (stack.collectives or {}).values():
        for entry in recorder["entries"]:
            if not entry.get("is_p2p"):
                group = _group_of(entry)
                numbers[group] = max(numbers.get(group, 0), int(entry.get("collective_seq_id", 0)))
    return numbers


def _group_of(entry: dict[str, Any]) -> str:
    return str((entry.get("process_group") or [""])[0])


def _is_communicating(stack: WorkerStack) -> bool:
    """Whether the main thread is in a collective, or in a backward pass, whose collectives run in other threads."""
    return any("torch/distributed" in frame.file or "torch/autograd" in frame.file for frame in stack.frames[:4])


def describe_state(stack: WorkerStack) -> str:
    """The process state in words."""
    return STATES.get(stack.state, f"in state {stack.state}")


def short_path(file: str) -> str:
    """A file's path, starting at its package."""
    return _PATH_PREFIX.sub("", file, count=1)


def _file_line(frame: Frame) -> str:
    return f"{short_path(frame.file)}:{frame.line}"


# -- /proc


def _read_proc(rank: int, pid: int) -> WorkerStack:
    """What /proc shows of a process."""
    stat = _read(Path(f"/proc/{pid}/stat"))
    if not stat:
        return WorkerStack(rank, pid, "gone")
    fields = stat.rpartition(")")[2].split()  # the command name before it may hold anything
    waits = _read(Path(f"/proc/{pid}/wchan")).strip()
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return WorkerStack(rank, pid, fields[0], "" if waits == "0" else waits, cpu_s, int(fields[17]))


def _has_exited(stack: WorkerStack) -> bool:
    return stack.state in ("gone", "Z", "X")


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal that would otherwise end it."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# -- querying the workers


class _Query:
    """A query to one worker and its answer files; what they held before the query does not count."""

    def __init__(self, stack: WorkerStack, stem: Path) -> None:
        self.stack = stack
        self.signalled = False
        self._handler_file, self._threads, self._collectives = (
            stem.with_name(stem.name + ending) for ending in (".txt", "-threads.txt", "-collectives.json")
        )
        text = _read(self._handler_file)
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
        now = _read_proc(self.stack.rank, self.stack.pid)
        return self.descriptor is not None and now.state != "T" and not _has_exited(now)

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
        return _read(self._handler_file)[self._before[0] :]

    def stacks(self) -> str:
        """Stacks of all threads, or of the main thread if only the signal handler answered."""
        return _read(self._threads) if self.has_answered() else self._handler_output()

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


def _run_queries(queries: Sequence[_Query], wait_s: float) -> None:
    """Wake all responders, signal the workers silent at half time, and wait for the rest of it."""
    started = time.monotonic()
    for query in queries:
        if query.can_answer():
            query.wake_responder()
    _wait(queries, _Query.has_answered, started + wait_s / 2)
    for query in queries:
        if query.can_answer() and not query.has_answered():
            query.send_signal()
    _wait(queries, _Query.is_complete, started + wait_s)


def _wait(queries: Sequence[_Query], is_done: Callable[[_Query], bool], deadline: float) -> None:
    while time.monotonic() < deadline and not all(is_done(query) or not query.can_answer() for query in queries):
        time.sleep(POLL_S)


def _main_frames(text: str) -> tuple[Frame, ...]:
    """The main thread's frames in a faulthandler dump of that thread alone or of all threads."""
    main = re.match(r"main thread (0x[0-9a-f]+)", text)
    blocks = [block for block in _BLOCK.finditer(text) if main is None or block["thread"] == main[1]]
    return _parse_frames(_FRAME, blocks[-1]["frames"]) if blocks else ()


def _parse_frames(pattern: re.Pattern[str], text: str) -> tuple[Frame, ...]:
    matches = pattern.finditer(text)
    return tuple(Frame(m["function"], m["file"], int(m["line"]) if m["line"].isdigit() else 0) for m in matches)


# -- py-spy


@dataclass(frozen=True)
class _PySpyDump:
    """What py-spy printed of a process."""

    python: str = ""
    native: str = ""
    missing: str = ""


def _dump_python(stack: WorkerStack) -> _PySpyDump:
    """Python stacks, without pausing the process."""
    if _has_exited(stack):
        return _PySpyDump()
    text, why = _py_spy(stack.pid, "--nonblocking", "--full-filenames")
    return _PySpyDump(python=text, missing=f"no native stack: {why}" if why else "")


def _dump_native(stack: WorkerStack, dump: _PySpyDump) -> _PySpyDump:
    """Add native stacks, if py-spy got Python's and the process is not stopped."""
    if not dump.python:
        return dump
    if stack.state == "T":
        return replace(dump, missing="no native stack: py-spy cannot unwind a stopped process")
    text, why = _py_spy(stack.pid, "--native")
    return replace(dump, native=text, missing=f"no native stack: {why}" if why else "")


def _py_spy(pid: int, *options: str) -> tuple[str, str]:
    """The output of `py-spy dump`, or why there is none."""
    path = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    program = shutil.which("py-spy", path=path)
    if program is None:
        return "", "py-spy is not installed (pip install py-spy)"
    command = [program, "dump", "--pid", str(pid), *options]
    try:
        process = subprocess.run(
            command, capture_output=True, timeout=PY_SPY_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy did not finish within {PY_SPY_TIMEOUT_S:g} s"
    except OSError as error:
        return "", f"cannot start py-spy: {error.strerror}"
    if process.returncode == 0:
        return process.stdout.decode(errors="replace"), ""
    return "", _explain_py_spy_error(process.stderr.decode(errors="replace"))


def _explain_py_spy_error(stderr: str) -> str:
    if "permission denied" in stderr.lower():
        scope = _read(Path("/proc/sys/kernel/yama/ptrace_scope")).strip()
        fix = f"ptrace_scope is {scope}, run sysctl kernel.yama.ptrace_scope=0" if scope not in ("", "0") else ""
        return f"py-spy has no permission: {fix or 'it needs CAP_SYS_PTRACE'}"
    lines = [line.strip().removeprefix("Error: ") for line in stderr.partition("Stack backtrace")[0].splitlines()]
    return f"py-spy failed: {'; '.join(line for line in lines if line and line != 'Caused by:') or 'no message'}"


# -- merging


def _merge(query: _Query, dump: _PySpyDump, wait_s: float) -> WorkerStack:
    """Everything known of a worker, and a sentence for what is not."""
    now = _read_proc(query.stack.rank, query.stack.pid)
    stack = replace(query.stack, state=now.state) if _has_exited(now) else query.stack
    frames = _main_frames(query.stacks())
    if not frames and (main := _PY_SPY_MAIN.search(dump.python)):
        frames = _parse_frames(_PY_SPY_FRAME, main["frames"])
    silent = _why_silent(query, stack, wait_s)
    missing = [] if frames else [f"no Python stack: {'its main thread has no frame' if query.stacks() else silent}"]
    collectives, why = _last_collectives(query.collectives())
    if collectives is None:
        blocked = "native code holds the worker's GIL" if query.signalled else silent
        missing.append(f"no collectives: {why or blocked}")
    if dump.missing:
        missing.append(dump.missing)
    native = dump.native or dump.python
    return replace(stack, frames=frames, native=native, collectives=collectives, missing=tuple(missing))


def _why_silent(query: _Query, stack: WorkerStack, wait_s: float) -> str:
    """Why a worker did not answer."""
    if _has_exited(stack):
        return "the process has exited"
    if query.descriptor is None:
        return "the process has not started its responder yet"
    if stack.state == "T":
        return "the process is stopped and handles no signal"
    if stack.state == "D":
        return f"the process is in uninterruptible sleep ({stack.waits or 'state D'}) and handles no signal"
    try:
        os.kill(stack.pid, 0)
    except PermissionError:
        return "the process belongs to another user"
    except ProcessLookupError:
        return "the process has exited"
    return f"the process did not answer within {wait_s:g} s"


def _last_collectives(dumps: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """The last entries of each flight recorder that has any; else None and the reason."""
    if dumps is None:
        return None, ""
    if "error" in dumps:
        return None, f"the flight recorder is empty: {dumps['error']}"
    recorders = {name: recorder for name, recorder in dumps.items() if isinstance(recorder, dict)}
    recorded = {
        name: recorder | {"entries": _last_entries(recorder)}
        for name, recorder in recorders.items()
        if recorder.get("entries")
    }
    if recorded:
        return recorded, ""
    errors = [str(recorder["error"]) for recorder in recorders.values() if "error" in recorder]
    why = "; ".join(errors) or "no collective was recorded (none yet, or TORCH_FR_BUFFER_SIZE is 0)"
    return None, f"the flight recorder is empty: {why}"


def _last_entries(recorder: dict[str, Any]) -> list[dict[str, Any]]:
    """The last entries of a recorder, and the oldest that has not ended: GPU queues can be longer."""
    entries: list[dict[str, Any]] = recorder["entries"]
    pending = [entry for entry in entries[:-MAX_COLLECTIVES] if not _has_ended(entry, recorder)]
    return pending[:1] + entries[-MAX_COLLECTIVES:]


def _has_ended(entry: dict[str, Any], recorder: dict[str, Any]) -> bool:
    """Whether a collective has ended, by its own entry or by what its group has completed.

    Gloo's entries stay "scheduled" forever, and a few of the first are never marked as retired.
    """
    if entry.get("retired") or entry.get("state") == "completed":
        return True
    completed = recorder.get("pg_status", {}).get(_group_of(entry), {}).get("last_completed_collective", -1)
    return not entry.get("is_p2p") and int(completed) >= int(entry.get("collective_seq_id", 0))


def _render(stack: WorkerStack, query: _Query) -> str:
    """A worker's section of the text file."""
    waits = f" in {stack.waits}" if stack.waits else ""
    collective = describe_collective(stack)
    parts = [
        f"== rank {stack.rank}, process {stack.pid}: {describe_state(stack)}{waits}, {stack.cpu_s:.1f} s of CPU,"
        f" {stack.threads} thread{'s' * (stack.threads != 1)}",
        describe_location(stack),
        *stack.missing,
        f"collective: {collective}" if collective else "",
    ]
    text = "\n".join(part for part in parts if part)
    for title, content in (("Python", query.stacks()), ("py-spy", stack.native)):
        text += f"\n\n-- {title}\n{content.strip()}" if content.strip() else ""
    return text + "\n"


def _write(folder: Path, attempt: int, sections: Sequence[str]) -> Path | None:
    """Write the sections to the next free number; None if the folder cannot be written."""
    text = f"attempt {attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n\n" + "\n\n".join(sections)
    for number in itertools.count(1):
        path = folder / f"{attempt:04d}-{number}.txt"
        try:
            folder.mkdir(exist_ok=True)
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError:
            return None
        return path
    return None
