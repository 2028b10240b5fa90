"""Runs one command, and sees to it that nothing of it is left. Standard input: an order, then wishes, a line each.

    {"words": [...], "folder": ..., "log": ..., "environment": {...}}     what to run
    "signal 10"                                                            for the command itself
    "kill"                                                                 for all that it has started

It exits with the command's status, 128 and the number for one that a signal ended. When its standard input ends,
whoever watched the command is gone and has perhaps had it started elsewhere: it is ended at once. Needs the standard
library only, and is started by its path, so that it costs a command milliseconds.
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

__all__ = ["descendants", "main"]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_FOUND, NOT_STARTED = 127, 126
"""What shells exit with where there is no such program, and where it cannot be started."""


def main() -> int:
    """Run what the first line says to its end; the status."""
    order, unread = _order()
    with contextlib.suppress(OSError):
        os.setpriority(
            os.PRIO_PROCESS, 0, 0
        )  # Ray's workers are nicer (15) than a command should be; few may change it
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the command leaves behind becomes ours, to be ended with it
    with contextlib.ExitStack() as open_files:
        woken = _woken_by_children()
        try:
            # No Path here: to import it takes a third of all that this needs to start.
            log = open_files.enter_context(open(order["log"], "ab", buffering=0))  # noqa: PTH123
        except OSError as error:
            print(f"{order['log']}: {error.strerror}", flush=True)
            return NOT_STARTED
        try:
            command = _start(order, log)
        except OSError as error:
            log.write(f"{error.filename or order['words'][0]}: {error.strerror}\n".encode())
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
        _obey(command, woken, unread)
    _end_all()
    status = command.wait()
    return status if status >= 0 else 128 - status


def _order() -> tuple[dict[str, Any], bytes]:
    """The first line, and what came with it: wishes may follow at once, and a reader with a buffer would keep them."""
    heard = b""
    while b"\n" not in heard:
        more = os.read(0, 65536)
        if not more:
            break
        heard += more
    line, _, rest = heard.partition(b"\n")
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
        preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # one thread only, so nothing can be locked
    )


def _obey(command: "subprocess.Popen[bytes]", woken: int, unread: bytes) -> None:
    """Do what is wished until the command has ended, or nobody is there to wish anything."""
    while command.poll() is None:
        *lines, unread = unread.split(b"\n")
        for line in lines:
            _do(command, json.loads(line))
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if 0 not in ready:
            continue
        heard = os.read(0, 65536)
        if not heard:
            return
        unread += heard


def _do(command: "subprocess.Popen[bytes]", wish: str) -> None:
    if wish == "kill":
        _end_all()
    else:
        command.send_signal(int(wish.removeprefix("signal ")))


def _end_all() -> None:
    """End everything that we have started, and what that has; until nothing is found any more."""
    for _ in range(100):
        if not _has_children():
            return  # what they leave behind would have become ours
        there = [pid for pid in descendants(os.getpid()) if _state(pid) != "Z"]
        if not there:
            return
        for pid in there:
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
    """All processes that a process has started, and those that they have, as far as `/proc` tells."""
    children = dict[int, list[int]]()
    for entry in os.listdir("/proc"):  # noqa: PTH208 (a thousand Path objects take longer than all the rest)
        if entry.isdecimal() and (fields := _fields(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = children.get(pid, [])
    while found:
        yield from found
        found = [child for parent in found for child in children.get(parent, [])]


def _state(pid: int) -> str:
    fields = _fields(pid)
    return fields[0] if fields else "Z"


def _fields(pid: int) -> list[str]:
    """State, parent and what follows of a line in `/proc/PID/stat`, after the name, which may hold anything."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _woken_by_children() -> int:
    """A descriptor that becomes readable when a child ends."""
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
