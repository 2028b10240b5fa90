"""What the workers of a run are doing at this moment: taken when one hangs, and when somebody asks.

`collect` asks all of them at once and puts together what there is (train/stack_responder.py is the workers' side):

    /proc         state, what the kernel waits for, CPU time, threads: needs no help from the worker
    the worker    a byte into its pipe has a thread of it write every Python stack and PyTorch's flight recorder
    its handler   a worker that leaves the byte unanswered gets SIGUSR2, which shows the main thread's Python stack
    py-spy        where installed and allowed: Python and native stacks, also of a process that is stopped

Nothing here raises because a worker dies meanwhile, or needs more time than it is given. What could not be had is a
sentence in `Seen.missing`. Everything is kept for people in stacks/NNNN-N.txt.
"""

import contextlib
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

__all__ = ["Frame", "StackDump", "WorkerStack", "collect", "its_collective", "its_line", "shortened", "state_in_words"]

LOOK_S = 2.0
"""How long py-spy may take: of a process with torch in it a native dump took 0.5 s, 2.4 s with cold files."""
POLL_S = 0.01
KEPT_COLLECTIVES = 32
"""Last entries of a flight recorder that are handed on; the worker's file has all (2,000)."""
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait",
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "ended",
    "gone": "gone",
}

_LISTENS = re.compile(r"^process (\d+) answers; descriptor (\d+) asks$", re.MULTILINE)
_BLOCK = re.compile(
    r"^(?:Stack|(?:Current thread|Thread) (?P<thread>0x[0-9a-f]+)[^\n]*?) \(most recent call first\):\n"
    r"(?P<frames>(?:  [^\n]*\n)*)",
    re.MULTILINE,
)
_FRAME = re.compile(r'^  File "(?P<file>[^\n]*)", line (?P<line>\d+|\?\?\?) in (?P<function>[^\n]*)$', re.MULTILINE)
_SPIED = re.compile(r'^Thread [^\n]*"MainThread"\n(?P<frames>(?:    [^\n]*\n)*)', re.MULTILINE)
_SPIED_FRAME = re.compile(r"^    (?P<function>[^\n]+?) \((?P<file>[^\n]+):(?P<line>\d+)\)$", re.MULTILINE)
_PACKAGES = r".*/(?:site|dist)-packages/"
_STANDARD = r".*/lib(?:64)?/python3[.\d]*t?/"
_FOLDER = re.compile(rf"{_PACKAGES}|{_STANDARD}|.*/src/")
_PYTHONS = re.compile(rf"<frozen |(?!{_PACKAGES}){_STANDARD}")
_TORCHS = re.compile(rf"<eval_with_key>|{_PACKAGES}torch/|.*/torchinductor_")


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    function: str
    file: str
    line: int
    """0 where it is not known."""


@dataclass(frozen=True)
class WorkerStack:
    """What one worker was doing."""

    rank: int
    pid: int
    state: str
    """The letter of /proc/PID/stat for its main thread; `gone` if there is no such process."""
    waits: str = ""
    """What the kernel waits for on behalf of its main thread, where one may know."""
    cpu_s: float = 0.0
    """CPU time of all its threads since it began."""
    threads: int = 0
    frames: tuple[Frame, ...] = ()
    """Of the main thread, the innermost first."""
    native: str = ""
    """What py-spy shows: native stacks where it could get them, Python's else."""
    collectives: dict[str, Any] | None = None
    """By flight recorder (`fr`: gloo's, `nccl`): what PyTorch tells of it, with the last entries only."""
    missing: tuple[str, ...] = ()
    """A sentence for everything that could not be had."""


@dataclass(frozen=True)
class StackDump:
    """What all workers were doing."""

    path: Path | None
    """Where it is written down; None if it could not be."""
    seen: list[WorkerStack]


def collect(
    workers: Mapping[int, int], folder: Path, attempt: int, wait_s: float = 1.0, *, native: bool = True
) -> StackDump:
    """See what an attempt's workers (process by rank) do, within `wait_s`, and twice LOOK_S where there is py-spy.

    A native look holds each process for up to a second: right for one that hangs, wrong for one that works.
    """
    # 1 look from outside, before asking changes anything
    doors = [_Door(_process(rank, pid), folder / f"{attempt:04d}-rank-{rank}") for rank, pid in sorted(workers.items())]
    with ThreadPoolExecutor(max(1, len(doors))) as pool:
        looking = [pool.submit(_look, door.seen) for door in doors]
        # 2 ask all at once
        _ask(doors, wait_s)
        looks = [look.result() for look in looking]
        # 3 look at native stacks last: a process that is held cannot answer
        if native:
            looks = list(pool.map(_look_deeper, (door.seen for door in doors), looks))
    # 4 put it together
    seen = [_put_together(door, look, wait_s) for door, look in zip(doors, looks, strict=True)]
    return StackDump(_write(folder, attempt, [_page(*pair) for pair in zip(seen, doors, strict=True)]), seen)


def its_line(seen: WorkerStack) -> str:
    """Where a worker is, in words: its innermost frame outside Python and torch, and what that one is in."""
    if not seen.frames:
        return ""
    inner = seen.frames[0]
    own = next((frame for frame in seen.frames if not (_PYTHONS.match(frame.file) or _TORCHS.match(frame.file))), None)
    if own is inner:
        return f"{_place(inner)} in {inner.function}"
    caller = "" if own is None else f", called from {_place(own)} in {own.function}"
    return f"in {inner.function}, {_place(inner)}{caller}"


def its_collective(seen: WorkerStack) -> str:
    """The collective that holds a worker up, the oldest that has not ended, else its last; "" if none is known."""
    recorders = (seen.collectives or {}).values()
    told = [(entry, _has_ended(entry, recorder)) for recorder in recorders for entry in recorder["entries"]]
    if not told:
        return ""
    told.sort(key=lambda pair: pair[0].get("time_created_ns", 0))
    entry, ended = next((pair for pair in told if not pair[1]), told[-1])
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    group = " ".join(str(part) for part in entry.get("process_group", ()))
    name = entry.get("profiling_name", "a collective")
    return f"{name}, number {number} of group {group}, {'ended' if ended else 'not ended'}"


def blocking_rank(seen: Sequence[WorkerStack]) -> int | None:
    """The one worker that the others wait for, by its collectives or its stack; None where these do not tell.

    Workers number the collectives of a group alike: whoever has begun fewer than another is awaited. Where all have
    begun as many, those that stand in PyTorch's exchanges wait, and one that does not is what they wait for.
    """
    begun = {one.rank: _begun(one) for one in seen}
    behind = {
        rank
        for rank, groups in begun.items()
        for others in begun.values()
        if any(others.get(group, 0) > number for group, number in groups.items())
    }
    if not behind:
        behind = {one.rank for one in seen if one.frames and not _exchanges(one)}
    return behind.pop() if len(behind) == 1 else None


def _begun(seen: WorkerStack) -> dict[str, int]:
    """The last collective that a worker has begun, by group."""
    found: dict[str, int] = {}
    for recorder in (seen.collectives or {}).values():
        for entry in recorder["entries"]:
            if not entry.get("is_p2p"):
                group = str((entry.get("process_group") or [""])[0])
                found[group] = max(found.get(group, 0), int(entry.get("collective_seq_id", 0)))
    return found


def _exchanges(seen: WorkerStack) -> bool:
    """Whether a worker's main thread stands in an exchange, or in a backward pass, where other threads make them."""
    inner = seen.frames[:4]
    return any("torch/distributed" in frame.file or "torch/autograd" in frame.file for frame in inner)


def state_in_words(seen: WorkerStack) -> str:
    """What a process's state means."""
    return STATES.get(seen.state, f"in state {seen.state}")


def shortened(file: str) -> str:
    """A file's path from its package on."""
    return _FOLDER.sub("", file, count=1)


def _place(frame: Frame) -> str:
    return f"{shortened(frame.file)}:{frame.line}"


# -- from outside


def _process(rank: int, pid: int) -> WorkerStack:
    """What /proc tells of a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return WorkerStack(rank, pid, "gone")
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    waits = _read(Path(f"/proc/{pid}/wchan")).strip()
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return WorkerStack(rank, pid, fields[0], "" if waits == "0" else waits, cpu_s, int(fields[17]))


def _is_over(seen: WorkerStack) -> bool:
    return seen.state in ("gone", "Z", "X")


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# -- asking the workers


class _Door:
    """Where a worker is asked and where it answers; what lay there before it was asked does not count."""

    def __init__(self, seen: WorkerStack, stem: Path) -> None:
        self.seen = seen
        self.signalled = False
        self._shown, self._threads, self._collectives = (
            stem.with_name(stem.name + ending) for ending in (".txt", "-threads.txt", "-collectives.json")
        )
        text = _read(self._shown)
        listens = [match for match in _LISTENS.finditer(text) if int(match[1]) == seen.pid]
        began = list(_BLOCK.finditer(text, listens[-1].end()))[:1] if listens else []
        self.descriptor = int(listens[-1][2]) if listens else None
        self._outermost = _outermost(began)
        self._before = len(text), _identity(self._threads), _identity(self._collectives)

    def wake(self) -> None:
        """Have the worker's own thread answer; where that is not allowed, the signal is left."""
        with contextlib.suppress(OSError):
            pipe = os.open(f"/proc/{self.seen.pid}/fd/{self.descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(pipe, "wb", buffering=0) as file:
                file.write(b"?")

    def signal(self) -> None:
        """Have faulthandler's handler answer."""
        if _catches(self.seen.pid, signal.SIGUSR2):
            with contextlib.suppress(OSError):
                os.kill(self.seen.pid, signal.SIGUSR2)
                self.signalled = True

    def open(self) -> bool:
        """Whether an answer can come."""
        now = _process(self.seen.rank, self.seen.pid)
        return self.descriptor is not None and now.state != "T" and not _is_over(now)

    def heard(self) -> bool:
        """Whether the worker's own thread has answered."""
        return _identity(self._threads) != self._before[1]

    def done(self) -> bool:
        """Whether nothing more will come."""
        if self.heard():
            return _identity(self._collectives) != self._before[2]
        ended = _outermost(list(_BLOCK.finditer(self.shown()))) if self.signalled else ""
        return ended != "" and ended in (self._outermost, "  ...")

    def shown(self) -> str:
        """What the handler has written."""
        return _read(self._shown)[self._before[0] :]

    def stacks(self) -> str:
        """Every thread's stack, or that of the main thread where the worker could not be asked."""
        return _read(self._threads) if self.heard() else self.shown()

    def collectives(self) -> dict[str, Any] | None:
        """What the flight recorders told; None if they did not."""
        if _identity(self._collectives) == self._before[2]:
            return None
        try:
            told = from_json(self._collectives.read_bytes())
        except (OSError, ValueError) as error:
            return {"error": str(error)}
        return told if isinstance(told, dict) else {"error": "no JSON object"}


def _outermost(blocks: Sequence[re.Match[str]]) -> str:
    """The last line of the last stack without the line number, which moves on; "" where it is not written yet."""
    frames = blocks[-1]["frames"] if blocks else ""
    return re.sub(r", line \d+ in ", " in ", frames.splitlines()[-1]) if frames else ""


def _identity(file: Path) -> tuple[int, int] | None:
    """Changes when a file is replaced."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _ask(doors: Sequence[_Door], wait_s: float) -> None:
    """Wake all workers, signal those who have not answered by half the time, and wait for the rest of it."""
    began = time.monotonic()
    for door in doors:
        if door.open():
            door.wake()
    _wait(doors, _Door.heard, began + wait_s / 2)
    for door in doors:
        if door.open() and not door.heard():
            door.signal()
    _wait(doors, _Door.done, began + wait_s)


def _wait(doors: Sequence[_Door], is_enough: Callable[[_Door], bool], deadline: float) -> None:
    while time.monotonic() < deadline and not all(is_enough(door) or not door.open() for door in doors):
        time.sleep(POLL_S)


def _frames(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, from what faulthandler wrote of it alone or of all threads."""
    main = re.match(r"main thread (0x[0-9a-f]+)", text)
    blocks = [block for block in _BLOCK.finditer(text) if main is None or block["thread"] == main[1]]
    return _parsed(_FRAME, blocks[-1]["frames"]) if blocks else ()


def _parsed(pattern: re.Pattern[str], text: str) -> tuple[Frame, ...]:
    found = pattern.finditer(text)
    return tuple(Frame(at["function"], at["file"], int(at["line"]) if at["line"].isdigit() else 0) for at in found)


# -- py-spy


@dataclass(frozen=True)
class _Look:
    """What py-spy showed of a process."""

    python: str = ""
    native: str = ""
    missing: str = ""


def _look(seen: WorkerStack) -> _Look:
    """Python stacks, without holding the process."""
    if _is_over(seen):
        return _Look()
    text, why = _spy(seen.pid, "--nonblocking", "--full-filenames")
    return _Look(python=text, missing=f"no native stack: {why}" if why else "")


def _look_deeper(seen: WorkerStack, look: _Look) -> _Look:
    """Native stacks beside Python's, where it can see any and the process is not stopped."""
    if not look.python:
        return look
    if seen.state == "T":
        return replace(look, missing="no native stack: py-spy gets none of a stopped process")
    text, why = _spy(seen.pid, "--native")
    return replace(look, native=text, missing=f"no native stack: {why}" if why else "")


def _spy(pid: int, *options: str) -> tuple[str, str]:
    """What `py-spy dump` prints, or why it prints nothing."""
    places = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"
    program = shutil.which("py-spy", path=places)
    if program is None:
        return "", "py-spy is not installed (pip install py-spy)"
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid), *options],
            capture_output=True,
            timeout=LOOK_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy did not finish within {LOOK_S:g} s"
    except OSError as error:
        return "", f"py-spy cannot be started: {error.strerror}"
    if done.returncode == 0:
        return done.stdout.decode(errors="replace"), ""
    return "", _why_not(done.stderr.decode(errors="replace"))


def _why_not(said: str) -> str:
    """Why py-spy failed, from what it said."""
    if "permission denied" in said.lower():
        scope = _read(Path("/proc/sys/kernel/yama/ptrace_scope")).strip()
        way = f"ptrace_scope is {scope} (sysctl kernel.yama.ptrace_scope=0 lets it)" if scope not in ("", "0") else ""
        return f"py-spy may not look: {way or 'it needs the right to trace (CAP_SYS_PTRACE)'}"
    told = [line.strip().removeprefix("Error: ") for line in said.partition("Stack backtrace")[0].splitlines()]
    return f"py-spy says: {'; '.join(line for line in told if line and line != 'Caused by:') or 'nothing'}"


# -- putting it together


def _put_together(door: _Door, look: _Look, wait_s: float) -> WorkerStack:
    """All that is known of a worker, and a sentence for what is not."""
    now = _process(door.seen.rank, door.seen.pid)
    seen = replace(door.seen, state=now.state) if _is_over(now) else door.seen
    frames = _frames(door.stacks())
    if not frames and (spied := _SPIED.search(look.python)):
        frames = _parsed(_SPIED_FRAME, spied["frames"])
    silent = _why_silent(door, seen, wait_s)
    missing = [] if frames else [f"no Python stack: {'its main thread has no frame' if door.stacks() else silent}"]
    collectives, nothing = _last_ones(door.collectives())
    if collectives is None:
        held = "something holds the worker's interpreter, through which it is asked" if door.signalled else silent
        missing.append(f"no collectives: {nothing or held}")
    if look.missing:
        missing.append(look.missing)
    native = look.native or look.python
    return replace(seen, frames=frames, native=native, collectives=collectives, missing=tuple(missing))


def _why_silent(door: _Door, seen: WorkerStack, wait_s: float) -> str:
    """Why a worker did not answer."""
    if _is_over(seen):
        return "the process has ended"
    if door.descriptor is None:
        return "the process does not listen yet"
    if seen.state == "T":
        return "the process is stopped and takes no signal"
    if seen.state == "D":
        return f"the kernel holds the process ({seen.waits or 'state D'}), which takes no signal"
    try:
        os.kill(seen.pid, 0)
    except PermissionError:
        return "the process is another user's"
    except ProcessLookupError:
        return "the process has ended"
    return f"the process did not answer within {wait_s:g} s"


def _last_ones(told: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """The flight recorders that have something, cut to their last entries; why none has, else."""
    if told is None:
        return None, ""
    if "error" in told:
        return None, f"the flight recorder has nothing: {told['error']}"
    kept = {
        name: recorder | {"entries": _kept(recorder)}
        for name, recorder in told.items()
        if isinstance(recorder, dict) and recorder.get("entries")
    }
    errors = [
        str(recorder["error"]) for recorder in told.values() if isinstance(recorder, dict) and "error" in recorder
    ]
    why = "; ".join(errors) or "no collective was recorded (none yet, or TORCH_FR_BUFFER_SIZE is 0)"
    return (kept, "") if kept else (None, f"the flight recorder has nothing: {why}")


def _kept(recorder: dict[str, Any]) -> list[dict[str, Any]]:
    """The last entries of a recorder, and the oldest that has not ended: queues of a GPU are longer."""
    entries: list[dict[str, Any]] = recorder["entries"]
    waiting = [entry for entry in entries[:-KEPT_COLLECTIVES] if not _has_ended(entry, recorder)]
    return waiting[:1] + entries[-KEPT_COLLECTIVES:]


def _has_ended(entry: dict[str, Any], recorder: dict[str, Any]) -> bool:
    """Whether a collective is over: by its own entry, or by what its group has completed.

    Gloo's entries stay "scheduled" for ever, and a few of the first are never marked as retired.
    """
    if entry.get("retired") or entry.get("state") == "completed":
        return True
    group = str((entry.get("process_group") or [""])[0])
    completed = recorder.get("pg_status", {}).get(group, {}).get("last_completed_collective", -1)
    return not entry.get("is_p2p") and int(completed) >= int(entry.get("collective_seq_id", 0))


def _page(seen: WorkerStack, door: _Door) -> str:
    """All there is of a worker, for people."""
    waits = f" in {seen.waits}" if seen.waits else ""
    parts = [
        f"== rank {seen.rank}, process {seen.pid}: {state_in_words(seen)}{waits}, {seen.cpu_s:.1f} s of CPU,"
        f" {seen.threads} thread{'s' * (seen.threads != 1)}",
        its_line(seen),
        *seen.missing,
        f"collective: {its_collective(seen)}" if its_collective(seen) else "",
    ]
    text = "\n".join(part for part in parts if part)
    for title, content in (("Python", door.stacks()), ("py-spy", seen.native)):
        text += f"\n\n-- {title}\n{content.strip()}" if content.strip() else ""
    return text + "\n"


def _write(folder: Path, attempt: int, pages: Sequence[str]) -> Path | None:
    """Keep the pages under the next free number; None where there is no room for them."""
    text = f"attempt {attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n\n" + "\n\n".join(pages)
    number = 1
    while True:
        path = folder / f"{attempt:04d}-{number}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except FileExistsError:
            number += 1
        except OSError:
            return None
        else:
            return path
