"""Client of the zygote: a process that has imported torch and forks workers on request.

`headway.train.zygote` is the other end of the channel (state/channel.py). When the agent's end closes for any reason,
the zygote kills its workers and exits. If the launcher holds that end too, they outlive the agent.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from headway.agent.fd_store import FdStore
from headway.errors import WorkerError
from headway.state import Channel, ChannelClosed, Message

CLOSE_S = 10.0


class ZygoteDied(WorkerError):
    """The zygote exited after it had started; its workers died with it, and a new one may work."""


class ZygoteClient:
    """Connection to the zygote process; another agent may take it over."""

    def __init__(self, channel: Channel, pid: int, log: Path, ready: bool = False) -> None:
        self._channel, self.pid, self._log, self._ready = channel, pid, log, ready

    @classmethod
    def start(cls, log: Path, environment: Mapping[str, str]) -> "ZygoteClient":
        """Start a zygote in its own session: Ctrl-C in the terminal reaches only the agent, which stops the workers."""
        agent_end, zygote_end = Channel.pair()
        with contextlib.closing(zygote_end), log.open("ab") as output, _blocked({signal.SIGTERM, signal.SIGUSR1}):
            process = subprocess.Popen(
                [sys.executable, "-m", "headway.train.zygote", str(zygote_end.fileno())],
                pass_fds=[zygote_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        process.returncode = 0  # whichever agent holds it then waits for its pid
        return cls(agent_end, process.pid, log)

    @classmethod
    def take_over(cls, descriptor: int, pid: int, log: str) -> "ZygoteClient":
        """Connect to the zygote of an agent that died."""
        channel = Channel(socket.socket(fileno=descriptor))
        channel.take_over()
        return cls(channel, pid, Path(log), ready=True)

    def keep(self, fd_store: FdStore) -> None:
        """Have the launcher hold the channel too."""
        fd_store.put("zygote", [self._channel.fileno()], pid=self.pid, log=str(self._log))

    def fileno(self) -> int:
        """For select."""
        return self._channel.fileno()

    def ready(self, timeout_s: float) -> bool:
        """Whether it has imported everything, waiting up to `timeout_s`."""
        if not self._ready:
            self._ready = any(message.kind == "ready" for message in self.messages(timeout_s))
        return self._ready

    def fork(self, number: int, channel: Channel) -> None:
        """Fork a worker with this channel; a `forked` message with this id and its pid answers."""
        self._channel.send("fork", [channel.fileno()], id=number)

    def ask(self) -> None:
        """Request another report of live and exited workers."""
        self._channel.send("list")

    def messages(self, timeout_s: float) -> list[Message]:
        """Messages received within `timeout_s`: `ready`, `forked` (id, pid), `exit` (pid, code), `listed` (living)."""
        try:
            return self._channel.receive(timeout_s)
        except ChannelClosed:
            code = _wait_for(self.pid, None)
            kind = ZygoteDied if self._ready else WorkerError
            raise kind(
                f"the zygote, which starts workers, exited with status {code}: {log_tail(self._log, 3)}",
                hint=f"its log is {self._log}",
            ) from None

    def kill(self) -> None:
        """Kill it at once, even during its imports; its workers die with it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the zygote and its remaining workers, even during its imports."""
        self._channel.close()
        if not self._ready:
            self.kill()
        if _wait_for(self.pid, CLOSE_S) is None:
            self.kill()
            _wait_for(self.pid, None)


@contextlib.contextmanager
def _blocked(signals: set[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread, and in a process that is started meanwhile until it unblocks them.

    Batch systems signal all processes of a job: a zygote must not die of that while it imports, nor at any other time.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for(pid: int, timeout_s: float | None) -> int | None:
    """The exit status of a process: a child of this agent, or of one that died (then 0); None after `timeout_s`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            if not Path(f"/proc/{pid}").exists():
                return 0
        if deadline is not None and time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def log_tail(log: Path, count: int) -> str:
    """The last `count` lines of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join([line for line in lines if line.strip()][-count:]) or "(empty log)"
