"""Starts commands in a sandbox, and says whether this machine can build one."""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar

import psutil

from headway.errors import EngineError
from headway.rl.sandbox.syscall_filter import DENIED, filter_bytes
from headway.track.process_state import process_state

T = TypeVar("T")

LAUNCH = Path(__file__).with_name("launch.py")
NOT_BUILT, TIMED_OUT = 125, 124
LOOK_S = 0.25
"""Between looks at a sandbox that has neither ended nor written."""
END_S = 30.0
"""How long the process outside may take to end what is inside; it is killed then, and the kernel does the rest."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What code in a sandbox may use."""

    seconds: float = 5.0
    """From its start."""
    memory_bytes: int = 512 << 20
    """Address space of each process; with cgroup version 2 twice as much is the limit of all together."""
    processes: int = 16
    """Processes and threads at a time."""
    scratch_bytes: int = 32 << 20
    """Of /tmp, all that can be written to."""
    descriptors: int = 64
    """Open files of a process."""


class SandboxLost(EngineError):
    """A sandbox was killed or stopped from outside, which says nothing of the code in it."""


class SandboxProcess:
    """A sandbox with a command in it, from its start to its end; a context manager."""

    def __init__(
        self,
        script: str,
        files: Mapping[str, str],
        limits: SandboxLimits,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        verdict: int | None = None,
    ) -> None:
        """Start Python on one of the files. A `verdict` is a descriptor to pass on, as 3."""
        config = {
            "parent": os.getpid(),
            "command": [_python(), "-E", "-s", "-S", "-B", script],
            "files": dict(files),
            "binds": _binds(),
            "links": _links(),
            "verdict": verdict,
            "filter": filter_bytes(platform.machine()).hex(),
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_bytes,
            "total_bytes": 2 * limits.memory_bytes,
            "processes": limits.processes,
            "scratch_bytes": limits.scratch_bytes,
            "descriptors": limits.descriptors,
        }
        descriptor = os.memfd_create("sandbox")
        try:
            with os.fdopen(os.dup(descriptor), "w") as file:
                json.dump(config, file)
            os.lseek(descriptor, 0, os.SEEK_SET)
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [_python(), "-I", "-S", str(LAUNCH), str(descriptor)],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.PIPE,
                pass_fds=[descriptor, *([verdict] if verdict is not None else [])],
                env={},
            )
        finally:
            os.close(descriptor)

    @property
    def stdin(self) -> IO[bytes] | None:
        """What the command reads, if it was asked for as a pipe."""
        return self.process.stdin

    @property
    def stdout(self) -> IO[bytes] | None:
        """What the command writes, if it was asked for as a pipe."""
        return self.process.stdout

    def end(self) -> int:
        """Wait for the command's end, within its limit of time; return its status, 0, 1 or 124."""
        while True:
            self.check()
            with suppress(subprocess.TimeoutExpired):
                # what is on stderr is a sentence: it fits into the pipe
                self.process.wait(LOOK_S)
                break
        self.check()
        return self.process.returncode

    def check(self) -> None:
        """Raise EngineError if the sandbox could not be built, SandboxLost if it was killed or stopped from outside.

        Call it while waiting: a process outside that is stopped keeps no time.
        """
        status = self.process.poll()
        if status is None and self._stopped:
            raise SandboxLost("a sandbox was stopped by a signal")
        if status is not None and status < 0:
            raise SandboxLost(f"a sandbox was killed by {signal.Signals(-status).name}")
        if status == NOT_BUILT:
            assert self.process.stderr is not None
            problem = self.process.stderr.read()
            raise EngineError(f"code cannot be run in a sandbox here: {problem.decode(errors='replace')}", hint=_HINT)

    @property
    def _stopped(self) -> bool:
        return process_state(self.process.pid) == "T"

    def stop(self) -> None:
        """End the command now, if it still runs, and all that is left of the sandbox."""
        if self._stopped:
            self.process.kill()
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


_HINT = "headway doctor --sandbox says what is missing; docs/guides/rewards.md lists what it needs"


@cache
def why_no_sandbox() -> str | None:
    """Return why this machine can build no sandbox, in a sentence; None if it can. One is built to find out."""
    if sys.platform != "linux":
        return f"it needs Linux's namespaces, and this is {platform.system()}"
    if platform.machine() not in DENIED:
        return f"there is no list of system calls for {platform.machine()}, only for {' and '.join(DENIED)}"
    with SandboxProcess("/box/main.py", {"/box/main.py": "raise SystemExit(0)"}, SandboxLimits(seconds=60)) as sandbox:
        assert sandbox.process.stderr is not None
        problem = sandbox.process.stderr.read().decode(errors="replace").strip()
        status = sandbox.process.wait()
    if status == 0:
        return None
    return problem.splitlines()[-1] if problem else f"a program that does nothing ended with status {status}"


def check_sandbox() -> None:
    """Raise EngineError with one sentence unless code can be run in a sandbox here."""
    if (why := why_no_sandbox()) is not None:
        raise EngineError(f"code cannot be run in a sandbox here: {why}", hint=_HINT)


def sandboxes_of(parents: Sequence[int]) -> list[int]:
    """Return the processes outside of the sandboxes that some processes have started, by pid."""
    pids = list[int]()
    for parent in parents:
        with suppress(psutil.Error):
            children = psutil.Process(parent).children()
            pids += [child.pid for child in children if str(LAUNCH) in child.cmdline()]
    return pids


def once_more_if_lost(run: Callable[[], T]) -> T:
    """Return what a run in sandboxes returns; if one is killed or stopped from outside, that of a second run."""
    try:
        return run()
    except SandboxLost:
        return run()


@cache
def _python() -> str:
    """The interpreter itself: not a link of a virtual environment, which would lead into it."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def _binds() -> list[str]:
    """Return the paths that the interpreter needs: itself, the standard library and shared libraries."""
    candidates = [
        _python(),
        str(Path(os.__file__).parent),
        f"{sys.base_prefix}/lib",
        *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    ]
    real = [path for path in dict.fromkeys(candidates) if Path(path).exists() and not Path(path).is_symlink()]
    folders = [path for path in real if Path(path).is_dir()]
    return [path for path in real if not any(path != folder and path.startswith(f"{folder}/") for folder in folders)]


@cache
def _links() -> Mapping[str, str]:
    """Return the links among the system's folders, such as /lib to usr/lib."""
    paths: Sequence[str] = ("/lib", "/lib64", "/usr/lib64", "/bin")
    return {path: str(Path(path).readlink()) for path in paths if Path(path).is_symlink()}
