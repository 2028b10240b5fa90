"""All descendants of this process, even if processes between have died (Linux).

While a `ProcessTree` is open, this process adopts all orphans below it, so that nothing a killed launcher or agent
leaves can hide; what is left at the end is killed, by its pid.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headway.errors import UsageError

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
POLL_S = 0.02
KILL_S = 10.0
"""How long killed processes may take to exit."""
ZOMBIE = ""
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class ProcessTree:
    """Descendants that did not exist when it was made."""

    _before: frozenset[int]
    _reaped_elsewhere: set[int] = field(default_factory=set)

    def leave_to_caller(self, pid: int) -> None:
        """Never reap this process: somebody else waits for it."""
        self._reaped_elsewhere.add(pid)

    def alive(self) -> dict[int, str]:
        """Return the live descendants: commands by pid."""
        commands = dict[int, str]()
        for pid, command in _descendants().items():
            if command != ZOMBIE and pid not in self._before:
                commands[pid] = command
            elif pid not in self._before | self._reaped_elsewhere:
                with contextlib.suppress(ChildProcessError):  # its parent is alive and waits for it
                    os.waitpid(pid, os.WNOHANG)
        return commands

    def wait(self, seconds: float) -> dict[int, str]:
        """Wait at most that long until all have exited; return those still alive."""
        deadline = time.monotonic() + seconds
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return alive

    def kill(self) -> None:
        """Kill all, including those started meanwhile."""
        deadline = time.monotonic() + KILL_S
        while (alive := self.alive()) and time.monotonic() < deadline:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)


@contextlib.contextmanager
def track_descendants() -> Iterator[ProcessTree]:
    """Track all descendants of this process from here on; kill what is left of them at the end."""
    if sys.platform != "linux":
        raise UsageError("faults can be injected on Linux only", hint="leftover processes cannot be found elsewhere")
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    tree = ProcessTree(frozenset(_descendants()))
    try:
        yield tree
    finally:
        tree.kill()
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _descendants() -> dict[int, str]:
    """Return all descendants: commands by pid."""
    commands = dict[int, str]()
    for process in psutil.Process().children(recursive=True):
        commands[process.pid] = ZOMBIE
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie, which has no command
            commands[process.pid] = f"{process.name()}: {' '.join(process.cmdline())}"
    return commands


@dataclass(frozen=True)
class HeldResources:
    """Resources of this process and this machine that a run could leave behind."""

    descriptors: int
    """Open in this process."""
    shared: frozenset[str]
    """Named shared memory segments of this user."""


def held_resources(shared_memory: Path = SHARED_MEMORY) -> HeldResources:
    """Return the resources held now."""
    shared = set[str]()
    for path in shared_memory.iterdir() if shared_memory.is_dir() else ():
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                shared.add(path.name)
    return HeldResources(len(list(Path("/proc/self/fd").iterdir())), frozenset(shared))
