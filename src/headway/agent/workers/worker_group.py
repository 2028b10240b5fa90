"""The workers of a run on this machine: forked ahead as spares, assigned a rank, polled until they end.

A spare is a process that the zygote has forked and that waits on its channel for an assignment. Spares shorten a
restart, and take a device only when they are assigned a rank.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.agent.attempt import Attempt, make_assignment
from headway.agent.fd_store import FdStore
from headway.agent.saving.buffers import LocalMemory, StateFiles
from headway.agent.supervise.recover import Failure
from headway.agent.supervise.stack_dumps import collect
from headway.agent.supervise.worker_stacks import StackDump
from headway.agent.workers.workers import WorkerExit, Workers
from headway.agent.workers.zygote import ZygoteClient
from headway.errors import WorkerError
from headway.recipe import Assignment, Recipe
from headway.state import Channel, ChannelClosed, MessageChannel
from headway.track import Recorder
from headway.track.heartbeat import HeartbeatPages
from headway.track.process_state import process_state

POLL_S = 0.15
EXIT_S = 2.0
TRIES = 20
"""Dead spares to pass over before giving up."""


@dataclass
class _Process:
    number: int
    channel: Channel
    pid: int | None = None
    """None until the zygote has reported it."""
    rank: int | None = None
    """None for a spare."""


@final
class WorkerGroup(Workers):
    """Workers and spares of one machine."""

    def __init__(
        self,
        zygote: ZygoteClient,
        fd_store: FdStore,
        new_zygote: Callable[[Attempt], ZygoteClient] | None = None,
    ) -> None:
        """`new_zygote` replaces a zygote that died."""
        self._zygote, self._fd_store, self._new_zygote = zygote, fd_store, new_zygote
        self.memory = LocalMemory(fd_store)
        self.lost_nodes, self.node_events, self.preempted, self.takeover, self.store_lease = [], [], False, "", None
        self._heartbeats: HeartbeatPages | None = None
        self._processes: dict[int, _Process] = {}
        self._channels_of_dead: list[Channel] = []
        self._next = int.from_bytes(os.urandom(4))

    # -- an attempt

    def gather(
        self, attempt: Attempt, heartbeats: HeartbeatPages, recorder: Recorder, tick: Callable[[], None]
    ) -> None:
        """Wait for the zygote to have imported torch."""
        self._heartbeats = heartbeats
        while not self._zygote.ready(POLL_S):
            tick()
        self._zygote.keep(self._fd_store)

    def fork(self, count: int) -> None:
        """Have so many spares."""
        for _ in range(count - sum(process.rank is None for process in self._processes.values())):
            channel, other = Channel.pair()
            with contextlib.closing(other):
                self._zygote.fork(self._next, other)
            self._processes[self._next] = _Process(self._next, channel)
            self._next += 1

    def survey(self) -> None:
        """There are no nodes to poll."""

    def assign_initializer(self, attempt: Attempt) -> None:
        """Start the process that initializes the weights of a custom model, as rank 0."""
        self.assign(make_assignment(attempt, 0, draw=True), [])

    def assign_all(self, attempt: Attempt, state: StateFiles | None) -> Iterator[tuple[int, MessageChannel]]:
        """Give every rank its assignment, the heartbeat pages and the memory of the state to resume from."""
        assert self._heartbeats is not None, "gathered before"
        with _files_in_memory(state) as (descriptors, files):
            for rank in range(attempt.workers):
                passed = [self._heartbeats.descriptor, *descriptors]
                yield rank, self.assign(make_assignment(attempt, rank), passed, files=files)

    def assign(self, assignment: Assignment, descriptors: Sequence[int], **fields: object) -> Channel:
        """Assign a rank to a spare; return the channel to it."""
        message = assignment.model_dump(mode="json")
        for _ in range(TRIES):
            self.fork(1)
            process = next(process for process in self._processes.values() if process.rank is None)
            try:
                process.channel.send("assign", descriptors, assignment=message, **fields)
            except ChannelClosed:  # killed while it waited; the zygote reports it
                self._forget(process)
                continue
            process.rank = assignment.rank
            return process.channel
        raise WorkerError("no process could be started for a worker", hint="something ends them as they start")

    def poll(self) -> list[WorkerExit]:
        """Process what the zygote has reported; return the workers that have ended."""
        exits = list[WorkerExit]()
        for message in self._zygote.messages(0.0):
            pid = message.fields.get("pid", 0)
            if message.kind == "forked":
                self._forked(message.fields["id"], pid)
            elif message.kind == "exit" and (process := self._by_pid(pid)) is not None:
                if process.rank is not None:
                    exits.append(WorkerExit(process.rank, pid, message.fields["code"]))
                self._forget(process)
        return exits

    def attend(self) -> None:
        """There are no nodes to attend to."""

    def filenos(self) -> list[int]:
        """Descriptors to select on."""
        return [self._zygote.fileno()]

    def pids(self) -> dict[int, int]:
        """Process ids of live workers by rank."""
        return {
            process.rank: process.pid
            for process in self._processes.values()
            if process.rank is not None and process.pid is not None
        }

    def state(self, rank: int) -> str:
        """The kernel's letter for a worker's state."""
        return process_state(self.pids()[rank])

    def stacks(self, folder: Path, attempt: int, native: bool = True) -> StackDump:
        """The stacks of all workers."""
        return collect(self.pids(), folder, attempt, native=native)

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to workers, all or some."""
        for rank, pid in self.pids().items():
            if ranks is None or rank in ranks:
                _kill(pid, number)

    def channels(self) -> dict[int, Channel]:
        """The channels to workers, by rank."""
        return {process.rank: process.channel for process in self._processes.values() if process.rank is not None}

    def dismiss(self) -> None:
        """End all workers at once; spares stay."""
        for process in [process for process in self._processes.values() if process.rank is not None]:
            self._end(process)
        for channel in self._channels_of_dead:
            channel.close()
        self._channels_of_dead = []

    def finish(self, exit_status: int) -> None:
        """There are no nodes that need to know."""

    def close(self) -> None:
        """End all processes, and see that none is left; a zygote that is gone has taken them along."""
        for process in list(self._processes.values()):
            self._end(process)
        self.dismiss()
        with contextlib.suppress(WorkerError, ChannelClosed):
            if self._zygote.ready(0.0):
                self._await_exits(time.monotonic() + EXIT_S)

    def _await_exits(self, deadline: float) -> None:
        """Ask for the number of live processes until it is 0; one question at a time, or both ends would block."""
        self._zygote.ask()
        while time.monotonic() < deadline:
            for message in self._zygote.messages(0.05):
                if message.kind == "forked":
                    self._forked(message.fields["id"], message.fields["pid"])
                elif message.kind == "listed" and message.fields["living"] == 0:
                    return
                elif message.kind == "listed":
                    time.sleep(0.005)
                    self._zygote.ask()

    # -- processes

    def _end(self, process: _Process) -> None:
        if process.pid is not None:
            _kill(process.pid, signal.SIGKILL)
        self._forget(process)

    def _forked(self, number: int, pid: int) -> None:
        """A process was forked; one that is unknown here was another agent's, and is ended."""
        process = self._processes.get(number)
        if process is None:
            _kill(pid, signal.SIGKILL)
        else:
            process.pid = pid

    def _by_pid(self, pid: int) -> _Process | None:
        return next((process for process in self._processes.values() if process.pid == pid), None)

    def _forget(self, process: _Process) -> None:
        """It has ended; its last messages may still have to be received."""
        self._processes.pop(process.number, None)
        self._channels_of_dead.append(process.channel)

    # -- when an agent or the zygote dies

    @property
    def has_workers(self) -> bool:
        """Whether there are workers."""
        return any(process.rank is not None for process in self._processes.values())

    def hold(self) -> None:
        """Have the launcher hold what another agent needs to adopt these workers."""
        workers = [process for process in self._processes.values() if process.rank is not None]
        rows = [[process.number, process.pid, process.rank] for process in workers]
        self._fd_store.put("crew", [process.channel.fileno() for process in workers], workers=rows, next=self._next)

    def release(self) -> None:
        """The attempt is over: nothing is left to adopt."""
        self._fd_store.drop("crew")

    def adopt(self) -> Mapping[int, MessageChannel]:
        """Take over the workers of an agent that died; unknown ones are ended when the zygote reports them."""
        self._zygote.ask()
        entry = self._fd_store.get("crew")
        if entry is not None:
            for (number, pid, rank), descriptor in zip(entry.fields["workers"], entry.descriptors, strict=True):
                channel = Channel(socket.socket(fileno=descriptor))
                channel.take_over()
                self._processes[number] = _Process(number, channel, pid, rank)
        return self.channels()

    def restart(self, attempt: Attempt, avoid: str, why: str, zygote_died: bool) -> None:
        """Replace a zygote that died, and every process with it."""
        if zygote_died:
            for process in list(self._processes.values()):
                self._forget(process)
            self.dismiss()
            assert self._new_zygote is not None, "supervised runs can start one"
            self._zygote = self._new_zygote(attempt)

    # -- a single machine never changes

    minority = False

    def heard_at(self) -> float:
        """Always: heartbeats are in memory that is shared with the workers."""
        return float("inf")

    def leaving_with_workers(self) -> tuple[str, ...]:
        """There are no nodes."""
        return ()

    def let_leave(self) -> None:
        """There are no nodes."""

    def slots(self, joined_for_s: float) -> int:
        """No node can join."""
        return 0

    def node_of(self, failure: Failure) -> str:
        """There are no nodes."""
        return ""

    def capacity(self, recipe: Recipe, attempt: Attempt, wanted: int) -> None:
        """It cannot change."""


@contextlib.contextmanager
def _files_in_memory(state: StateFiles | None) -> Iterator[tuple[list[int], list[tuple[str, int, int]]]]:
    """Descriptors of a state's files, manifest first; and name, offset and size of each."""
    if state is None:
        yield [], []
        return
    manifest = os.memfd_create("headway-manifest", os.MFD_CLOEXEC)
    try:
        os.pwrite(manifest, state.manifest, 0)
        files = [("manifest.json", manifest, 0, len(state.manifest)), *state.files]
        yield [file[1] for file in files], [(name, offset, size) for name, _, offset, size in files]
    finally:
        os.close(manifest)


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
