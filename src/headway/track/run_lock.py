"""The lock of a run: held by the process that runs it, unlocked by the kernel when that dies."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pydantic_core import from_json, to_json

from headway.errors import RunError
from headway.track.run_folder import RunFolder


class RunLock:
    """A run's lock, held by this process."""

    def __init__(self, run: RunFolder, file: int) -> None:
        self._run, self._file = run, file

    def renew(self) -> bool:
        """Take it again after the folder was mounted again; return False if another process has it."""
        try:
            file = os.open(self._run.lock_file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        if not _lock_soon(file):
            os.close(file)
            return False
        with suppress(OSError):
            os.close(self._file)
        self._file = file
        self.sign()
        return True

    def sign(self) -> None:
        """Write who holds it."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, to_json({"pid": os.getpid(), "host": socket.gethostname()}), 0)

    def release(self) -> None:
        """Unlock it; where the folder is gone, the kernel does."""
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            fcntl.flock(self._file, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(self._file)


@contextmanager
def lock_run(run: RunFolder, seize: bool = False) -> Iterator[RunLock]:
    """Lock a run for this process; raise RunError if another one holds it. The kernel unlocks it when the process dies.

    The holder of the leader lease may `seize` it from an unreachable process.
    """
    try:
        file = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunError(
            f"cannot lock run {run.name}: {error.strerror}",
            hint="check that its folder exists and is writable",
        ) from error
    try:
        if not seize:
            _lock(run, file)
        elif not _lock_soon(file):
            os.close(file)
            run.lock_file.unlink(missing_ok=True)
            file = os.open(run.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _lock(run, file)
    except BaseException:
        os.close(file)
        raise
    lock = RunLock(run, file)
    try:
        lock.sign()
        yield lock
    finally:
        lock.release()


def lock_holder(run: RunFolder) -> int | None:
    """Return the pid of the process that holds a run's lock; None if it is free, 0 if the pid is not recorded."""
    try:
        file = os.open(run.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # A short shared lock: it does not block other readers, and `lock_run` retries.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _named_in(file)[0]
    finally:
        os.close(file)


def _lock_soon(file: int) -> bool:
    for pause_s in (0.01, 0.02, 0.05, 0.1, 0.0):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(pause_s)
    return False


def _lock(run: RunFolder, file: int) -> None:
    """Take the lock, with retries: `lock_holder` in another process may hold it for a moment."""
    if _lock_soon(file):
        return
    pid, host = _named_in(file)
    elsewhere = f" on {host}" if host not in ("", socket.gethostname()) else ""
    raise RunError(
        f"run {run.name} is in use by process {pid}{elsewhere}",
        hint=f"wait for it, or stop it with `{run.command('stop')}`",
    )


def _named_in(file: int) -> tuple[int, str]:
    """Return the pid and host written in a lock file."""
    try:
        named = from_json(os.pread(file, 4096, 0))
        return int(named["pid"]), str(named["host"])
    except (ValueError, KeyError, TypeError):
        return 0, ""
