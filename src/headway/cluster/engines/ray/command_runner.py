"""Runs one command and leaves nothing of it behind. Reads standard input: the order, then messages, one per line.

    {"words": [...], "folder": ..., "log": ..., "environment": {...}}     what to run
    "signal 10"                                                            signal the command itself
    "kill"                                                                 kill all that it has started

It exits with the command's status, or 128 plus the signal that killed the command. The end of standard input means that
the Ray task is dead and the command may have been restarted elsewhere: it is killed at once. Uses the standard library
only and is started by its path, so that it adds milliseconds to a command.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_FOUND, NOT_STARTED = 127, 126
"""As shells exit if a program is not found, and if it cannot be started."""


def main() -> int:
    """Run the command of the first line to its end, and return its status."""
    order, unread = _read_order()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # Ray's workers run at nice 15; not every user may change it
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # adopt what the command leaves behind, to kill it
    with contextlib.suppress(OSError):
        os.umask(~os.stat(order["folder"]).st_mode & 0o777)  # noqa: PTH116 (files as private as the run's folder)
    with contextlib.ExitStack() as open_files:
        wakeup = _child_wakeup()
        try:
            # No Path here: its import is a third of the start-up time.
            log = open_files.enter_context(open(order["log"], "ab", buffering=0))  # noqa: PTH123
        except OSError as error:
            print(f"{order['log']}: {error.strerror}", flush=True)
            return NOT_STARTED
        try:
            command = _start(order, log)
        except OSError as error:
            log.write(f"{error.filename or order['words'][0]}: {error.strerror}\n".encode())
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
        _follow_messages(command, wakeup, unread)
    _kill_all()
    status = command.wait()
    return status if status >= 0 else 128 - status


def _read_order() -> tuple[dict[str, Any], bytes]:
    """The first line, and what came with it: messages may follow at once, and buffered input would swallow them."""
    received = b""
    while b"\n" not in received:
        data = os.read(0, 65536)
        if not data:
            break
        received += data
    line, _, rest = received.partition(b"\n")
    return json.loads(line), rest


def _start(order: dict[str, Any], log: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        order["words"],
        cwd=order["folder"],
        env=order["environment"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # safe: there is only one thread
    )


def _follow_messages(command: "subprocess.Popen[bytes]", wakeup: int, unread: bytes) -> None:
    """Carry out messages until the command exits or standard input ends."""
    while command.poll() is None:
        *lines, unread = unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message == "kill":
                _kill_all()
            else:
                command.send_signal(int(message.removeprefix("signal ")))
        ready, _, _ = select.select([0, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            unread += data


def _kill_all() -> None:
    """Kill all descendants, until none is left."""
    for _ in range(100):
        if not _has_children():
            return  # orphaned descendants would be our children
        alive = [pid for pid in descendants(os.getpid()) if _state(pid) != "Z"]
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        select.select([], [], [], 0.005)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(pid: int) -> Iterator[int]:
    """All descendants of a process, as far as `/proc` shows."""
    children = dict[int, list[int]]()
    for entry in os.listdir("/proc"):  # noqa: PTH208 (a thousand Path objects would dominate the run time)
        if entry.isdecimal() and (fields := _fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    generation = children.get(pid, [])
    while generation:
        yield from generation
        generation = [child for parent in generation for child in children.get(parent, [])]


def _state(pid: int) -> str:
    fields = _fields(pid)
    return fields[0] if fields else "Z"


def _fields(pid: int) -> list[str]:
    """State, parent and the following fields of `/proc/PID/stat`, after the name, which may hold anything."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _child_wakeup() -> int:
    """A descriptor that becomes readable when a child exits."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    return read


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
