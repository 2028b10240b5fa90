"""The processes of a run on this machine: forked ahead, given a place in an attempt, heard of when they end.

A process that has no place yet is a spare: forked by the zygote, waiting on its line. Spares make a restart shorter,
and take a device only when they get a place.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.agent.fd_store import FdStore
from headway.agent.supervise.hang_detector import process_state
from headway.agent.supervise.stack_dumps import StackDump, collect
from headway.agent.workers.zygote import ZygoteClient
from headway.errors import WorkerError
from headway.recipe import Assignment
from headway.state import Channel, ChannelClosed

__all__ = ["WorkerExit", "WorkerGroup"]

LEAVE_S = 2.0
TRIES = 20
"""Spares that may be found dead before one is not."""


@dataclass
class _Process:
    number: int
    line: Channel
    pid: int | None = None
    """None until the zygote has told."""
    rank: int | None = None
    """Its place; None is a spare."""


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended."""

    rank: int
    pid: int
    code: int


@dataclass
class WorkerGroup:
    """Workers and spares."""

    zygote: ZygoteClient
    kept: FdStore
    _processes: dict[int, _Process] = field(default_factory=dict)
    _lines_of_the_dead: list[Channel] = field(default_factory=list)
    _next: int = field(default_factory=lambda: int.from_bytes(os.urandom(4)))

    def fork(self, count: int) -> None:
        """Have so many spares."""
        for _ in range(count - sum(process.rank is None for process in self._processes.values())):
            ours, theirs = Channel.pair()
            with contextlib.closing(theirs):
                self.zygote.fork(self._next, theirs)
            self._processes[self._next] = _Process(self._next, ours)
            self._next += 1

    def ready(self, timeout_s: float) -> bool:
        """Whether workers can be forked, waiting that long at most."""
        if not self.zygote.ready(timeout_s):
            return False
        self.zygote.keep(self.kept)
        return True

    def attend(self) -> None:
        """What the zygote says waits until it is asked."""

    def filenos(self) -> list[int]:
        """For select."""
        return [self.zygote.fileno()]

    def assign(self, assignment: Assignment, descriptors: Sequence[int], **fields: object) -> Channel:
        """Give a place to a spare; returns the line to it."""
        told = assignment.model_dump(mode="json")
        for _ in range(TRIES):
            self.fork(1)
            process = next(process for process in self._processes.values() if process.rank is None)
            try:
                process.line.send("assign", descriptors, assignment=told, **fields)
            except ChannelClosed:  # killed while it waited; the zygote tells of it
                self._forget(process)
                continue
            process.rank = assignment.rank
            return process.line
        raise WorkerError("no process could be started for a worker", hint="something ends them as they start")

    def hear(self) -> list[WorkerExit]:
        """Learn who is there; returns the workers that have ended."""
        ended = list[WorkerExit]()
        for message in self.zygote.messages(0.0):
            pid = message.fields.get("pid", 0)
            if message.kind == "forked":
                self._born(message.fields["id"], pid)
            elif message.kind == "exit" and (process := self._of(pid)) is not None:
                if process.rank is not None:
                    ended.append(WorkerExit(process.rank, pid, message.fields["code"]))
                self._forget(process)
        return ended

    def close(self) -> None:
        """End everybody, and see that nobody is left; a zygote that is gone has taken them along."""
        for process in list(self._processes.values()):
            self._end(process)
        self.dismiss()
        with contextlib.suppress(WorkerError, ChannelClosed):
            if self.zygote.ready(0.0):
                self._see_them_off(time.monotonic() + LEAVE_S)

    def _see_them_off(self, deadline: float) -> None:
        """Ask who is left until nobody is; one question at a time, or both ends would wait for the other to read."""
        self.zygote.ask()
        while time.monotonic() < deadline:
            for message in self.zygote.messages(0.05):
                if message.kind == "forked":
                    self._born(message.fields["id"], message.fields["pid"])
                elif message.kind == "listed" and message.fields["living"] == 0:
                    return
                elif message.kind == "listed":
                    time.sleep(0.005)
                    self.zygote.ask()

    def pids(self) -> dict[int, int]:
        """Workers that live, by rank."""
        return {
            process.rank: process.pid
            for process in self._processes.values()
            if process.rank is not None and process.pid is not None
        }

    def state(self, rank: int) -> str:
        """The kernel's letter for what a worker does."""
        return process_state(self.pids()[rank])

    def stacks(self, folder: Path, attempt: int, native: bool = True) -> StackDump:
        """What all workers do."""
        return collect(self.pids(), folder, attempt, native=native)

    def lines(self) -> dict[int, Channel]:
        """The lines to workers, by rank."""
        return {process.rank: process.line for process in self._processes.values() if process.rank is not None}

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to workers, all or some."""
        for rank, pid in self.pids().items():
            if ranks is None or rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def dismiss(self) -> None:
        """End all workers at once; spares stay."""
        for process in [process for process in self._processes.values() if process.rank is not None]:
            self._end(process)
        for line in self._lines_of_the_dead:
            line.close()
        self._lines_of_the_dead = []

    def forget_all(self) -> None:
        """The zygote is gone, and everybody with it."""
        for process in list(self._processes.values()):
            self._forget(process)
        self.dismiss()

    def _end(self, process: _Process) -> None:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._forget(process)

    def _born(self, number: int, pid: int) -> None:
        """A process is there; one that nobody here asked for was another agent's, and is ended."""
        process = self._processes.get(number)
        if process is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        else:
            process.pid = pid

    def _of(self, pid: int) -> _Process | None:
        return next((process for process in self._processes.values() if process.pid == pid), None)

    def _forget(self, process: _Process) -> None:
        """It has ended; what it said last may still have to be heard."""
        self._processes.pop(process.number, None)
        self._lines_of_the_dead.append(process.line)

    # -- over the death of an agent

    def keep(self) -> None:
        """Have the keeper hold what another agent needs to go on with these workers."""
        workers = [process for process in self._processes.values() if process.rank is not None]
        told = [[process.number, process.pid, process.rank] for process in workers]
        self.kept.put("crew", [process.line.fileno() for process in workers], workers=told, next=self._next)

    def take_over(self) -> None:
        """Go on with the workers of an agent that died; whoever is not known is ended when the zygote tells of it."""
        self.zygote.ask()
        thing = self.kept.get("crew")
        if thing is None:
            return
        for (number, pid, rank), descriptor in zip(thing.fields["workers"], thing.descriptors, strict=True):
            line = Channel(socket.socket(fileno=descriptor))
            line.take_over()
            self._processes[number] = _Process(number, line, pid, rank)

    @property
    def empty(self) -> bool:
        """Whether there is no worker."""
        return all(process.rank is None for process in self._processes.values())
