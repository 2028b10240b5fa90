"""The agent's end of the zygote: a process that has imported torch and forks workers on request.

The other end is `headway.train.zygote`. They speak over a line (state/line.py); when this end closes, for whatever
reason, the zygote kills its workers and goes.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from headway.errors import WorkerError
from headway.recipe import Assignment
from headway.state import Line, LineClosed, Message

__all__ = ["Zygote"]


class Zygote:
    """Starts the zygote process and talks to it."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        ours, theirs = Line.pair()
        with contextlib.closing(theirs), log.open("ab") as output:
            # A session of its own: Ctrl-C on the terminal reaches the agent alone, which then stops the workers.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headway.train.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        self._log = log
        self._line = ours
        self._ready = False

    def fileno(self) -> int:
        """For select."""
        return self._line.fileno()

    def ready(self, timeout_s: float) -> bool:
        """Whether it has imported everything, waiting that long at most."""
        if not self._ready:
            self._ready = any(message.kind == "ready" for message in self.messages(timeout_s))
        return self._ready

    def fork(self, assignment: Assignment, line: Line | None = None) -> None:
        """Ask for one worker, which gets the line; a `forked` message with its rank and pid answers."""
        self._line.send("fork", [] if line is None else [line.fileno()], assignment=assignment.model_dump(mode="json"))

    def messages(self, timeout_s: float) -> list[Message]:
        """What the zygote has to say by then: `ready`, `forked` (rank, pid), `exit` (rank, pid, code)."""
        try:
            return self._line.receive(timeout_s)
        except LineClosed:
            code = self._process.wait()
            raise WorkerError(
                f"the process that starts workers ended with status {code}: {last_lines(self._log, 3)}",
                hint=f"its log is {self._log}",
            ) from None

    def kill(self) -> None:
        """End it at once, in the middle of an import if need be; workers die with it."""
        self._process.kill()

    def close(self) -> None:
        """End the zygote and whatever workers it still has, in the middle of its imports if need be."""
        self._line.close()
        if not self._ready:
            self.kill()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


def last_lines(log: Path, count: int) -> str:
    """The end of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join([line for line in lines if line.strip()][-count:]) or "(empty log)"
