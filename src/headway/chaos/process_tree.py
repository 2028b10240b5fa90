"""Every process that comes of this one, however deep and whoever of those between has died (Linux).

While it is open, this process is the parent of all orphans below it, so that nothing a killed keeper or agent leaves
can hide; what is there at the end is ended, by its id.
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

__all__ = ["SHARED_MEMORY", "HeldResources", "ProcessTree", "belongings", "track_descendants"]

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
POLL_S = 0.02
GONE_S = 10.0
"""How long what was killed may take to go."""
ZOMBIE = ""
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class ProcessTree:
    """Descendants that were not there when it was made."""

    _before: frozenset[int]
    _own: set[int] = field(default_factory=set)

    def own(self, pid: int) -> None:
        """A process that somebody here waits for: its end is not taken from them."""
        self._own.add(pid)

    def living(self) -> dict[int, str]:
        """Who lives: process ids and commands."""
        found = dict[int, str]()
        for pid, command in _descendants().items():
            if command != ZOMBIE and pid not in self._before:
                found[pid] = command
            elif pid not in self._before | self._own:
                with contextlib.suppress(ChildProcessError):  # its parent is not yet dead, and waits for it
                    os.waitpid(pid, os.WNOHANG)
        return found

    def wait(self, seconds: float) -> dict[int, str]:
        """Wait until nobody lives, that long at most; who still does."""
        deadline = time.monotonic() + seconds
        while (found := self.living()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return found

    def end(self) -> None:
        """End everybody, also who is born meanwhile."""
        deadline = time.monotonic() + GONE_S
        while (found := self.living()) and time.monotonic() < deadline:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)


@contextlib.contextmanager
def track_descendants() -> Iterator[ProcessTree]:
    """Know all processes that come of this one from here on; end what is left of them on the way out."""
    if sys.platform != "linux":
        raise UsageError("faults are injected on Linux only", hint="what is left behind could not be found elsewhere")
    kernel, was = ctypes.CDLL(None), ctypes.c_int()
    kernel.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    kernel.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    family = ProcessTree(frozenset(_descendants()))
    try:
        yield family
    finally:
        family.end()
        kernel.prctl(PR_SET_CHILD_SUBREAPER, was.value, 0, 0, 0)


def _descendants() -> dict[int, str]:
    """Children, their children and so on: process ids and commands."""
    found = dict[int, str]()
    for process in psutil.Process().children(recursive=True):
        found[process.pid] = ZOMBIE
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie, which has no command
            found[process.pid] = f"{process.name()}: {' '.join(process.cmdline())}"
    return found


@dataclass(frozen=True)
class HeldResources:
    """What this process and this machine hold that a run could leave behind."""

    descriptors: int
    """Open in this process."""
    shared: frozenset[str]
    """Named segments of memory of this user."""


def belongings(shared_memory: Path = SHARED_MEMORY) -> HeldResources:
    """What there is now."""
    shared = set[str]()
    for path in shared_memory.iterdir() if shared_memory.is_dir() else ():
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                shared.add(path.name)
    return HeldResources(len(list(Path("/proc/self/fd").iterdir())), frozenset(shared))
