"""The shell scripts and log files of jobs: pure functions of a request, every user-supplied word quoted."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from headway.cluster.engines.engine import LaunchRequest

INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TZ", "USER")
"""Variables that every command inherits from its submitter."""


def inherited_environment() -> dict[str, str]:
    """Those of INHERITED that are set here."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


def task_script(request: LaunchRequest, first: Sequence[str] = (), folder: str | None = None) -> str:
    """The script that runs on each machine of a job: the engine's own `first` lines, the folder (the request's, or this
    shell expression), the variables and the setup lines. `exec` replaces it with the command, so that signals to the
    script reach the command."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(request.environment.items())]
    lines = [
        "#!/bin/bash",
        f"# {request.name}: runs on each machine",
        *first,
        f"cd -- {folder or shlex.quote(str(request.folder))} || exit 1",
        *exports,
        *(["set -e", *request.setup, "set +e"] if request.setup else []),
        f"exec -- {shlex.join(request.command)}",
    ]
    return "\n".join(lines) + "\n"


def command_with_setup(request: LaunchRequest) -> list[str]:
    """The command as an argument vector, under a shell that runs the setup lines first if there are any."""
    if not request.setup:
        return list(request.command)
    shell = "\n".join(["set -e", *request.setup, "set +e", 'exec -- "$@"'])
    return ["bash", "-c", shell, "bash", *request.command]


def start_script(task: Path, log: Path, own: Path, *, first: Sequence[str] = (), run_as: Sequence[str] = ()) -> str:
    """The script of a local job: starts the task and records its exit status, even if the daemon dies.

    `set -m` gives the task its own process group, and the default signal handlers that a background process would lack.
    Descriptor 9 is a lock, held while this script lives and not inherited by the task. The task writes its pid first,
    so that it can be signalled from the beginning. The traps come after the task, which would otherwise inherit them
    until it becomes bash, and lose signals that arrive before that. `first` are lines that the task runs before it
    becomes `run_as` another user.
    """
    entered = "".join(f"{line} || exit 1; " for line in first)
    command = shlex.join([*run_as, "bash", str(task)])
    lines = [
        "#!/bin/bash",
        "set -m",
        f"cd -- {shlex.quote(str(own))} || exit 1",
        f'{{ echo "$BASHPID $$" >pid; {entered}exec {command}; }} >>{shlex.quote(str(log))} 2>&1 </dev/null 9>&- &',
        "task=$!",
        "trap heard=1 HUP INT TERM USR1 USR2",
        "heard=1",
        'while [ "$heard" = 1 ]; do heard=0; wait "$task"; status=$?; done',
        'echo "$status" >exit.partial && mv exit.partial exit',
    ]
    return "\n".join(lines) + "\n"


def log_folder(folder: Path, job: str) -> Path:
    """The folder of a job's logs; an array has a subfolder per task."""
    base, _, index = job.partition("_")
    return folder / "jobs" / base / index


def log_path(folder: Path, start: int, machine: int = 0) -> Path:
    """The log of one machine in one start."""
    return folder / f"{start:04d}-{machine}.log"


def list_logs(folder: Path) -> list[Path]:
    """All logs in a folder, by start and then by machine."""
    return sorted((path for path in folder.glob("*-*.log") if _numbers(path)), key=_numbers)


def _numbers(path: Path) -> tuple[int, ...]:
    parts = path.stem.split("-")
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdecimal() for part in parts) else ()


def replace_file(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file atomically: readers see the old content or the new. Only its owner can read a private one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    if private:
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    partial.write_text(text)
    partial.replace(path)
