"""The parent's end of a process that scores or is an environment: JSON lines to and from it, without ever blocking."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from headway.errors import WorkerError
from headway.track.process_state import process_state

MOST_LINE_BYTES = 1 << 20
"""Of what a process sends; it never needs so much."""
READ_BYTES = 1 << 16


class ScorerPipe:
    """A scorer process, and what is on its way to and from it."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        """`start` tells the process what to import."""
        try:
            self._process = subprocess.Popen(
                # -P: a json.py in the current folder is not imported by accident; the parent's path is sent instead.
                [sys.executable, "-P", "-m", "headway.rl.scorer_process", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent; what rewards have started is killed with them
            )
        except OSError as error:
            raise WorkerError(f"cannot start a scorer process: {error.strerror or error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        os.set_blocking(self._output.fileno(), False)
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.end: str | None = None
        """How the process ended, or why it is of no more use; None while it works."""
        self.killed = False
        """Whether a signal ended it that rewards do not die of by themselves: somebody, or the kernel, killed it."""
        self.send({"path": sys.path, **start})

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message, and write as much as the pipe takes."""
        # Rows of Parquet may hold dates and decimals, for which JSON has no type: rewards see them as text.
        self._outgoing += json.dumps(message, default=str).encode() + b"\n"
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """Write and read as much as the pipes allow; return the messages that are complete."""
        self._flush()
        ended = self._has_exited()  # asked first: what it wrote before it ended is read below
        ended |= self._read()
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        messages = []
        for line in lines:
            try:
                messages.append(json.loads(line))
            except ValueError:
                self.end = "wrote to the descriptor of its scores"
                return messages
        if len(self._incoming) > MOST_LINE_BYTES:
            self.end = "wrote to the descriptor of its scores"
        elif ended:
            status = self._kill_group()
            self.killed = -status in (signal.SIGKILL, signal.SIGTERM)
            self.end = (
                f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
            )
        return messages

    def kill(self) -> None:
        """Kill the process and what it has started, and close the pipes."""
        self._kill_group()
        self._output.close()
        with suppress(OSError):
            self._input.close()

    @property
    def reads(self) -> int:
        """The descriptor to read from."""
        return self._output.fileno()

    @property
    def writes(self) -> int | None:
        """The descriptor to write to; None while there is nothing to write."""
        return self._input.fileno() if self._outgoing else None

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def stopped(self) -> bool:
        """Whether somebody has stopped the process, so that its silence is not the reward's."""
        return process_state(self._process.pid) == "T"

    def _flush(self) -> None:
        while self._outgoing:
            try:
                written = os.write(self._input.fileno(), self._outgoing)
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._outgoing.clear()  # it has ended, which the other pipe will say
                return
            del self._outgoing[:written]

    def _read(self) -> bool:
        """Read what is there; return whether the other end is closed."""
        while True:
            try:
                chunk = os.read(self._output.fileno(), READ_BYTES)
            except BlockingIOError:
                return False
            if not chunk:
                return True
            self._incoming += chunk

    def _has_exited(self) -> bool:
        """Whether it has ended; a process that it has forked may hold its pipes open."""
        # WNOWAIT: its number must stay taken until its group is killed.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill_group(self) -> int:
        """Kill the process and what it has started; return its status."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def wait_for_pipes(pipes: Sequence[ScorerPipe], timeout_s: float) -> None:
    """Wait until one of the pipes can be read or written to, or for so long."""
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe.reads, selectors.EVENT_READ)
            if (writes := pipe.writes) is not None:
                selector.register(writes, selectors.EVENT_WRITE)
        selector.select(timeout_s)
