"""The shell scripts that engines have started: pure functions of a request, every word of a user's quoted."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from headway.cluster.engines.engine import LaunchRequest

__all__ = ["PASSED_ON", "log_of", "logs_in", "passed_on", "start_script", "task_script"]

PASSED_ON = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TZ", "USER")
"""Variables that a command has from whoever submits it without being asked: where programs and people are."""


def passed_on() -> dict[str, str]:
    """Those of them that there are."""
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


def task_script(request: LaunchRequest, first: Sequence[str] = (), folder: str | None = None) -> str:
    """What runs on each machine of a job: an engine's own lines, the folder (the request's, or one that the shell knows
    by this word), the variables, the set-up lines, and then the command in the script's place, so that what is meant
    for the one is heard by the other."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(request.environment.items())]
    lines = [
        "#!/bin/bash",
        f"# {request.name}: on each of its machines",
        *first,
        f"cd -- {folder or shlex.quote(str(request.folder))} || exit 1",
        *exports,
        *(["set -e", *request.setup, "set +e"] if request.setup else []),
        f"exec -- {shlex.join(request.command)}",
    ]
    return "\n".join(lines) + "\n"


def start_script(task: Path, log: Path, own: Path) -> str:
    """What the local engine starts: the task, and beside it somebody who writes down how it ended, whoever else dies.

    `set -m` gives the task a process group of its own, and the signals that a background process would not have. File
    9 is a lock: held as long as this script lives, and not by what it starts. The task writes down its own number
    first, so that whatever a command has done, it can be told of. The traps come after the task, which would have them
    until it is bash itself, and lose what it heard before.
    """
    quoted = shlex.quote(str(task))
    lines = [
        "#!/bin/bash",
        "set -m",
        f"cd -- {shlex.quote(str(own))} || exit 1",
        f'{{ echo "$BASHPID $$" >pid; exec bash {quoted}; }} >>{shlex.quote(str(log))} 2>&1 </dev/null 9>&- &',
        "task=$!",
        "trap heard=1 HUP INT TERM USR1 USR2",
        "heard=1",
        'while [ "$heard" = 1 ]; do heard=0; wait "$task"; status=$?; done',
        'echo "$status" >exit.partial && mv exit.partial exit',
    ]
    return "\n".join(lines) + "\n"


def log_of(folder: Path, start: int, machine: int = 0) -> Path:
    """What the command of one machine prints in one start."""
    return folder / f"{start:04d}-{machine}.log"


def logs_in(folder: Path) -> list[Path]:
    """All such files there are, the oldest start first; the first machine's first."""
    found = [path for path in folder.glob("*-*.log") if _numbers(path)]
    return sorted(found, key=_numbers)


def _numbers(path: Path) -> tuple[int, ...]:
    parts = path.stem.split("-")
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdecimal() for part in parts) else ()
