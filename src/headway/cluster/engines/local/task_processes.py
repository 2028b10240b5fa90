"""The processes of a job's start on this machine: found, signalled and killed by the files that its scripts write.

start.sh holds a lock for as long as it lives, and the task writes `pid` first: process group and session. So whoever
comes after a `kill -9`, and is not their parent, knows whether they run, and never signals a reused pid.
"""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

LOCK_FD = 9
"""The descriptor that start.sh holds open."""


def reserve_lock_fd() -> None:
    """Take the number of the lock's descriptor, so that nothing else in this process has it."""
    os.dup2(0, LOCK_FD, inheritable=False)


@contextlib.contextmanager
def start_lock(path: Path) -> Iterator[None]:
    """A lock for a child to hold, on the descriptor that start.sh knows."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.dup2(file, LOCK_FD, inheritable=True)
        yield
    finally:
        os.dup2(0, LOCK_FD, inheritable=False)
        os.close(file)


def kill_task(own: Path, boot: str, number: int, *, our_child: bool) -> bool:
    """Send a signal to the task of a start, SIGKILL to its whole process group; False if it has no process (yet).

    `own` is the folder of its files, `boot` the boot id of the machine when it was started."""
    if boot != boot_id():
        return False
    try:
        pid, session = map(int, (own / "pid").read_text().split())
        if not _is_task(pid, session, our_child):
            return False
        os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)
    except (OSError, ValueError):
        return False
    return True


def _is_task(pid: int, session: int, our_child: bool) -> bool:
    """Whether a pid still belongs to the task, or at least to its group."""
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return our_child  # its group may outlive it; otherwise the pid may have been reused


def boot_id() -> str:
    """An id that changes with every boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
