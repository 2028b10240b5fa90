"""The agent's end of the zygote: a process that has imported torch and forks workers on request.

The other end is `headway.train.zygote`. They speak over a line (state/channel.py); when this end closes, for whatever
reason, the zygote kills its workers and goes. A keeper that holds this end too has them outlive an agent.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from headway.agent.fd_store import FdStore
from headway.errors import WorkerError
from headway.state import Channel, ChannelClosed, Message

__all__ = ["ZygoteClient", "ZygoteDied", "log_tail"]

CLOSE_S = 10.0


class ZygoteDied(WorkerError):
    """It had started well, and is gone now: another may do better. Its workers are gone with it."""


class ZygoteClient:
    """Talks to the zygote process; `start` starts one, another agent may take it over."""

    def __init__(self, line: Channel, pid: int, log: Path, ready: bool = False) -> None:
        self._line, self.pid, self._log, self._ready = line, pid, log, ready

    @classmethod
    def start(cls, log: Path, environment: Mapping[str, str]) -> "ZygoteClient":
        """A new one, in a session of its own: Ctrl-C on the terminal reaches the agent alone, which stops workers."""
        ours, theirs = Channel.pair()
        with contextlib.closing(theirs), log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "headway.train.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        process.returncode = 0  # it is waited for by its id, by whichever agent has it then
        return cls(ours, process.pid, log)

    @classmethod
    def take_over(cls, descriptor: int, pid: int, log: str) -> "ZygoteClient":
        """That of an agent that died."""
        line = Channel(socket.socket(fileno=descriptor))
        line.take_over()
        return cls(line, pid, Path(log), ready=True)

    def keep(self, kept: FdStore) -> None:
        """Have the keeper hold it too."""
        kept.put("zygote", [self._line.fileno()], pid=self.pid, log=str(self._log))

    def fileno(self) -> int:
        """For select."""
        return self._line.fileno()

    def ready(self, timeout_s: float) -> bool:
        """Whether it has imported everything, waiting that long at most."""
        if not self._ready:
            self._ready = any(message.kind == "ready" for message in self.messages(timeout_s))
        return self._ready

    def fork(self, number: int, line: Channel) -> None:
        """Ask for one worker, which gets the line; a `forked` message with this id and its pid answers."""
        self._line.send("fork", [line.fileno()], id=number)

    def ask(self) -> None:
        """Have it tell again who lives and who has ended."""
        self._line.send("list")

    def messages(self, timeout_s: float) -> list[Message]:
        """What the zygote has to say by then: `ready`, `forked` (id, pid), `exit` (pid, code), `listed` (living)."""
        try:
            return self._line.receive(timeout_s)
        except ChannelClosed:
            code = _wait_for(self.pid, None)
            kind = ZygoteDied if self._ready else WorkerError
            raise kind(
                f"the process that starts workers ended with status {code}: {log_tail(self._log, 3)}",
                hint=f"its log is {self._log}",
            ) from None

    def kill(self) -> None:
        """End it at once, in the middle of an import if need be; workers die with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the zygote and whatever workers it still has, in the middle of its imports if need be."""
        self._line.close()
        if not self._ready:
            self.kill()
        if _wait_for(self.pid, CLOSE_S) is None:
            self.kill()
            _wait_for(self.pid, None)


def _wait_for(pid: int, timeout_s: float | None) -> int | None:
    """The status a process ended with, whether it is this one's child or that of an agent that died (then 0)."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            if not Path(f"/proc/{pid}").exists():
                return 0
        if deadline is not None and time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def log_tail(log: Path, count: int) -> str:
    """The end of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join([line for line in lines if line.strip()][-count:]) or "(empty log)"
