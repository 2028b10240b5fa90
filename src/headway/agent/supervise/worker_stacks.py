"""What workers were doing, as far as their stacks and collectives say: where each is, and whom the others wait for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


# -- collectives


def last_collectives(dumps: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
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
