"""The agent's end of the zygote: a process that has imported torch and forks workers on request.

The other end is `headway.train.zygote`. They speak JSON lines over a socket pair; when this end closes, for
whatever reason, the zygote kills its workers and goes.
"""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import WorkerError
from headway.recipe import Assignment

__all__ = ["Zygote"]


class Zygote:
    """Starts the zygote process and talks to it."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
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
        self._socket = ours
        self._unread = b""
        self._ready = False

    def ready(self, timeout_s: float) -> bool:
        """Whether it has imported everything, waiting that long at most."""
        if not self._ready:
            self._ready = any(message["kind"] == "ready" for message in self.messages(timeout_s))
        return self._ready

    def fork(self, assignment: Assignment) -> None:
        """Ask for one worker; a `forked` message with its rank and pid answers."""
        self._socket.sendall(assignment.model_dump_json().encode() + b"\n")

    def messages(self, timeout_s: float) -> list[dict[str, Any]]:
        """What the zygote has to say by then: `ready`, `forked` (rank, pid), `exit` (rank, pid, code)."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return []
        received = self._socket.recv(65536)
        if not received:
            code = self._process.wait()
            raise WorkerError(
                f"the process that starts workers ended with status {code}: {last_lines(self._log, 3)}",
                hint=f"its log is {self._log}",
            )
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        """End it at once, in the middle of an import if need be; workers die with it."""
        self._process.kill()

    def close(self) -> None:
        """End the zygote and whatever workers it still has."""
        self._socket.close()
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
