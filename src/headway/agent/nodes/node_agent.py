"""The agent of one node among several: has the workers there, and does what the agent that leads says.

    the agent that leads (agent/supervise/supervisor.py, node_group.py)
      <- hello, ready, worker, exit, from (what a worker says), pulses, had      -> welcome, state, assign, to, signal,
                                                                                     dismiss, drop, stacks, bye
    this node: a zygote, workers, the memory that they save into (snapshot_server.py), the marks that they make

A node decides nothing. It passes on what its workers say, keeps what they save, and serves it to other nodes. When
the line to the agent that leads is cut, its workers are ended and what they saved stays: it calls again, for a while,
so that another agent finds everything as it was. Where nobody leads any more, a node that may starts an agent that
does, with what the one before had all nodes know (lease.py says whose turn it is).
"""

import argparse
import base64
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.agent.fd_store import FdStore
from headway.agent.nodes.lease import newest_lease, take_lease, takeover_delay_s
from headway.agent.nodes.lease_record import LeaseRecord
from headway.agent.nodes.snapshot_server import SnapshotServer
from headway.agent.remote.join import RemoteRun
from headway.agent.saving.buffers import available_memory, plan_from
from headway.agent.supervise.hang_detector import process_state
from headway.agent.supervise.outcome import AttemptOutcome, recorded_exit_status
from headway.agent.supervise.stop_signals import StopSignals
from headway.agent.workers.env import network_variables, without_key
from headway.agent.workers.worker_group import WorkerGroup
from headway.agent.workers.zygote import ZygoteClient
from headway.errors import HeadwayError
from headway.recipe import Assignment
from headway.state import BufferPlan, Channel, ChannelClosed, Message, SaveBuffer, fence
from headway.state.handshake import HandshakeFailed, connect
from headway.state.peer_read import peer_request
from headway.track import RunFolder
from headway.track.heartbeat import HeartbeatPages

__all__ = ["NodeAgent", "main"]

POLL_S = 0.1
TELL_S = 0.3
"""Between two looks at the workers' marks that are passed on; also the sign that this node lives."""
CALL_S = 60.0
"""How long a node looks for an agent that leads, before it gives up."""
SAY_SO_S = 3.0
TAKEN = 2.4
"""How long a node waits for another of its name to be gone, of the time after which it is missed."""
SILENT = 1.6
"""After how much of that an agent that says nothing does not lead any more; it has something to say every second."""
SAY_S = 4.0
"""Whoever does not take in what it is told for so long does not hear it."""
CONNECT_S = 1.0
ASK_S = 0.5
"""Between two times that the others are asked whether they hear the agent that leads."""
RECORDS_S = 1.0
"""How long word of a saved state, or of a worker's end, waits for the record of what came before it."""
Things = dict[str, dict[str, Any]]


class _Taken(Exception):
    """Another process is this node."""


@dataclass
class NodeAgent:
    """A node of a run."""

    name: str
    run: RunFolder
    slots: int
    """Workers that fit here."""
    machine: str = ""
    """What the engine calls the machine; its own name where there is none."""
    domain: str = ""
    """What fails together with this node: a rack, a power supply."""
    visit: RemoteRun | None = None
    """Of a run whose folder this machine does not see: whom to call, and the folder that stands in for it."""
    start_lead: Callable[[Things, LeaseRecord, int], "subprocess.Popen[bytes]"] | None = None
    """Starts an agent that leads, from what the one before had kept, its lease, and the descriptor of a door; None
    where this node never does."""
    leading: "subprocess.Popen[bytes] | None" = None
    """The process that leads, where it is this node's."""
    _key: str = ""
    _warned: bool = False
    _asked_to_go: StopSignals = field(default_factory=StopSignals)
    _lease: int = 0
    """The lease under which the agent led that this node heard last."""
    _silent_s: float = 5.0
    """`train.silent_node_s`, as the agent that leads says."""
    _called: LeaseRecord | None = None
    _things: Things = field(default_factory=dict)
    _plans: dict[int, BufferPlan] = field(default_factory=dict)
    _workers: dict[int, Channel] = field(default_factory=dict)
    _state: dict[str, Any] = field(default_factory=dict)
    _told: float = 0.0
    _heard: float = 0.0
    _known: dict[int, int] = field(default_factory=dict)
    _assigned: list[Assignment] = field(default_factory=list)
    """Workers that are to start here."""

    def serve(self) -> int:
        """Until the run has ended, or nobody leads it any more."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._warn)
        with contextlib.ExitStack() as stack:
            shelf = zygote = None
            refused = 0.0
            while True:
                line = self._call(shelf)
                if line is None:
                    return self._why_nobody()
                if shelf is None:
                    host = line.local_host()
                    shelf = SnapshotServer(
                        host, self._key, self.run.checkpoints, self.run.stacks if self.visit else None
                    )
                    stack.callback(shelf.close)
                try:
                    self._greet(line, shelf)
                    if zygote is None:
                        zygote = self._start(line)
                        stack.callback(zygote.close)
                        crew = stack.enter_context(contextlib.closing(WorkerGroup(zygote, FdStore())))
                    status = self._serve(line, shelf, zygote, crew)
                    if self.leading is not None:  # engines end what a command leaves behind; it has a last word
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            self.leading.wait(CALL_S)
                    return status
                except _Taken as taken:
                    wait_s = TAKEN * self._silent_s
                    if not refused:
                        refused = time.monotonic()
                        self._print(
                            f"this rank is taken, by {taken}; waiting {wait_s:.0f} s, for it may be about to go"
                        )
                    elif time.monotonic() - refused > wait_s:
                        self._print(f"this node is in the run already: {taken}")
                        return 1
                    time.sleep(1.0)
                except ChannelClosed:
                    shelf.leader_heard_at = 0.0
                    self._print("the agent that leads is not heard any more")
                    if zygote is not None:
                        crew.dismiss()
                    self._workers, self._known = {}, {}
                finally:
                    line.close()

    def _greet(self, line: Channel, shelf: SnapshotServer) -> None:
        line.send(
            "hello", name=self.name, machine=self.machine or self.name, domain=self.domain, slots=self.slots,
            host=shelf.host, port=shelf.port, pid=os.getpid(), free_bytes=available_memory(), files=shelf.steps(),
            apart=self.visit is not None,
        )  # fmt: skip

    def _warn(self, number: int, _frame: object) -> None:
        """A batch system says that it will take this machine away: the run is to save and stop. Who is asked twice to
        go, and not only warned, goes."""
        self._warned = True
        if number != signal.SIGUSR1:
            self._asked_to_go.receive(number, time.monotonic())
        if self._asked_to_go.asked > 1:
            if self.leading is not None:
                self.leading.kill()
            sys.exit(1)

    def _call(self, shelf: SnapshotServer | None) -> Channel | None:
        """The line to the agent that leads, wherever the run's newest lease says that it listens; None if nobody does
        for long."""
        lost = asked = time.monotonic()
        said = False
        while time.monotonic() < lost + CALL_S:
            if not said and time.monotonic() - lost > SAY_SO_S:
                said = True
                self._print(f"waiting for an agent to lead run {self.run.name}")
            with contextlib.suppress(OSError, HandshakeFailed, ValueError):
                lease = self._whom()
                if lease is not None and lease.port:
                    end = connect((lease.host, lease.port), self._key, CONNECT_S)
                    end.settimeout(SAY_S)
                    self._called = lease
                    return Channel(end)
            if self.visit is not None and self._warned:
                return None  # whoever started this wants it to end, and there is nobody to save with
            if self.leading is not None and self.leading.poll() is not None and not self._things:
                return None  # it ended before it led anybody, and has said why
            if shelf is not None and self._things and time.monotonic() - asked > ASK_S:
                if recorded_exit_status(self.run) is not None:
                    return None  # who led has gone because it was done
                try:
                    self._perhaps_lead(shelf, time.monotonic() - lost)
                except (HeadwayError, OSError) as error:
                    self._print(f"could not lead: {error}")
                asked = time.monotonic()
            time.sleep(0.05)
        return None

    def _whom(self) -> LeaseRecord | None:
        """Who leads the run: as its newest lease says, or the one that this machine was told to join."""
        if self.visit is not None:
            self._key = self.visit.key
            host, port = self.visit.leader_address()
            return LeaseRecord(0, f"{host}:{port}", host, port)
        lease = newest_lease(self.run.leases)
        if lease is not None and lease.port:
            self._key = self.run.key_file.read_text().strip()
        return lease

    def _why_nobody(self) -> int:
        """Nobody leads: the status that this leaves to exit with, and a word of it."""
        if self.visit is not None:
            self._print(f"run {self.run.name} lost its leader; restart it where its folder is")
            return AttemptOutcome.STOPPED_CODE
        ended = recorded_exit_status(self.run) if self._things else None
        if ended is not None:
            self._print(f"run {self.run.name} is over")
            return ended
        if self.leading is not None:
            status = self.leading.wait()
            return AttemptOutcome.STOPPED_CODE if status < 0 and self.start_lead is None else status or 1
        self._print(f"nobody leads run {self.run.name}")
        return 1

    def _perhaps_lead(self, shelf: SnapshotServer, waited_s: float) -> None:
        """Lead this run, if nobody does and it is this node's turn."""
        lease = newest_lease(self.run.leases)
        if "attempt" not in self._things or lease is None or lease.number != self._lease or self.start_lead is None:
            return  # it never led us, or another does already
        nodes = self._things.get("roster", {}).get("nodes", {})
        with ThreadPoolExecutor(len(nodes) or 1) as pool:
            answers = dict(zip(nodes, pool.map(self._hears, nodes.values()), strict=True))
        turn = takeover_delay_s(self.name, answers | {self.name: False} if self.name in nodes else answers)
        if turn is None or waited_s < turn:
            return
        with socket.create_server((shelf.host, 0), backlog=64) as door:
            mine = LeaseRecord(lease.number + 1, self.name, *door.getsockname()[:2])
            if take_lease(self.run.leases, mine):
                self._print(f"nobody hears {lease.lead}: leading")
                fence(self.run.checkpoints)
                self.leading = self.start_lead(self._things | {"after": {"lead": lease.lead}}, mine, door.fileno())

    def _print(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.name}: {text}", file=sys.stderr, flush=True)

    def _hears(self, where: tuple[str, int]) -> bool | None:
        """Whether another node hears the agent that leads; None where it cannot be asked."""
        try:
            with contextlib.closing(connect((where[0], where[1]), self._key, CONNECT_S, CONNECT_S)) as end:
                end.settimeout(CONNECT_S)
                return bool(peer_request(end, "lead")["hears"])
        except (OSError, HandshakeFailed, ValueError, KeyError):
            return None

    def _start(self, line: Channel) -> ZygoteClient:
        """A zygote with the environment that the agent that leads has for workers."""
        while True:
            messages = line.receive(CALL_S)
            for message in messages:
                self._note(message)
            for message in messages:
                if message.kind == "welcome":
                    log = self.run.logs / f"{message.fields['attempt']:04d}-{self.name}-zygote.log"
                    told = message.fields["environment"] | network_variables(self.name, line.local_host())
                    if self.visit is not None:
                        self.visit.start_forwarding()
                    return ZygoteClient.start(log, without_key(os.environ) | told)

    def _serve(self, line: Channel, shelf: SnapshotServer, zygote: ZygoteClient, crew: WorkerGroup) -> int:
        pulses, ready, self._heard = HeartbeatPages(1), False, time.monotonic()
        self._assigned = []
        while True:
            # 1 what everybody has to say
            ends = [line.fileno(), zygote.fileno(), *(one.fileno() for one in self._workers.values())]
            select.select(ends, [], [], POLL_S)
            for message in line.receive():
                self._heard = shelf.leader_heard_at = time.monotonic()
                self._note(message)
                if message.kind == "bye":
                    self._print(f"run {self.run.name} is over")
                    return int(message.fields["status"])
                if message.kind == "assign":
                    self._assigned.append(Assignment.model_validate(message.fields["assignment"]))
                else:
                    self._obey(message, shelf, crew)
            pulses = self._assign_all(shelf, crew, pulses)
            # 2 pass it on
            if self._warned:
                self._warned = False
                line.send("warned")
            if not ready and zygote.ready(0.0):
                ready = True
                line.send("ready")
            if ready:
                self._exits(line, crew)
            self._words(line, shelf)
            # 3 show how the workers are
            self._tell(line, crew, shelf, pulses)
            if time.monotonic() - self._heard > SILENT * self._silent_s:
                raise ChannelClosed

    def _note(self, message: Message) -> None:
        """What another agent would need to lead."""
        if message.kind == "taken":
            self._silent_s = message.fields["silent_s"]
            raise _Taken(f"process {message.fields['pid']} on {message.fields.get('machine', 'its machine')}")
        if message.kind == "keep":
            self._things[message.fields["name"]] = message.fields["fields"]
        elif message.kind == "lease":
            self._lease = message.fields["number"]
        elif message.kind == "welcome":
            self._lease, self._silent_s = message.fields["lease"], message.fields["silent_s"]
            assert self._called is not None, "there is a line to it"
            lease = f"under lease {self._called.number} of {self._called.lead}, " if self._called.number else ""
            self._print(f"joined, {lease}at {self._called.host}:{self._called.port}")

    def _obey(self, message: Message, shelf: SnapshotServer, crew: WorkerGroup) -> None:
        fields = message.fields
        match message.kind:
            case "state":
                self._state = fields
            case "to":
                self._say(shelf, fields)
            case "signal":
                crew.signal(signal.Signals(fields["number"]), fields["ranks"])
            case "spares":
                crew.fork(fields["count"])
            case "dismiss":
                crew.dismiss()
                self._workers, self._known, self._assigned = {}, {}, []
            case "drop":
                shelf.drop()

    def _assign_all(self, shelf: SnapshotServer, crew: WorkerGroup, pulses: HeartbeatPages) -> HeartbeatPages:
        """Start workers that were asked for, once the folder here is as it should be; the marks they make."""
        if not self._assigned or (self.visit is not None and not self.visit.is_fresh(self._assigned[0].attempt)):
            return pulses
        for assignment in self._assigned:
            if pulses.workers != assignment.workers:
                pulses.close()
                pulses = HeartbeatPages(assignment.workers)
            self._assign(assignment, shelf, crew, pulses)
        self._assigned = []
        return pulses

    def _assign(self, assignment: Assignment, shelf: SnapshotServer, crew: WorkerGroup, pulses: HeartbeatPages) -> None:
        if self.visit is not None:
            assignment = self.visit.localize(assignment)
        if self._called is not None and self._called.host != shelf.host:  # another machine's clock says nothing here
            assignment = assignment.model_copy(update={"asked_ns": time.monotonic_ns()})
        page = pulses.page(assignment.rank)
        page[:] = bytes(len(page))
        descriptors, files, far = list[int](), list[tuple[str, int, int]](), list[tuple[Any, ...]]()
        if assignment.from_memory:
            descriptors, files, far = self._files(shelf)
        fields = {"files": files, "far": far, "key": self._key, "disk": self._state.get("disk", False)}
        if assignment.draw:
            fields = {}
        line = crew.assign(assignment, [pulses.descriptor, *descriptors], **fields)
        for descriptor in descriptors[:1]:
            os.close(descriptor)  # the manifest's: the worker has one of its own
        self._workers[assignment.rank] = line

    def _files(self, shelf: SnapshotServer) -> tuple[list[int], list[tuple[str, int, int]], list[tuple[Any, ...]]]:
        """The state to go on from: what lies here as descriptors, the rest by where it lies."""
        content, step = self._state["manifest"].encode(), self._state["step"]
        manifest = os.memfd_create("headway-manifest", os.MFD_CLOEXEC)
        os.pwrite(manifest, content, 0)
        descriptors, files, far = [manifest], [("manifest.json", 0, len(content))], list[tuple[Any, ...]]()
        if self._state.get("disk"):
            assert self.visit is not None, "others see the folder that it lies in"
            return descriptors, files, [(*self.visit.address, name, step, size) for name, size in self._state["files"]]
        for name, size, host, port in self._state["files"]:
            found = shelf.find(name, step)
            if found is not None:
                descriptors.append(found[0])
                files.append((name, found[1], size))
            else:
                far.append((host, port, name, step, size))
        return descriptors, files, far

    def _say(self, shelf: SnapshotServer, fields: dict[str, Any]) -> None:
        """Pass a word on to a worker; memory for its saves is made here."""
        rank, kind, said = fields["rank"], fields["said"], fields["fields"]
        line = self._workers.get(rank)
        if line is None:
            return
        descriptors = list[int]()
        if kind == "buffers":
            plan, count = self._plans[rank], said.pop("count")
            there = shelf.buffers.get(rank, [])
            if not there or there[0].plan != plan or len(there) != count:
                try:
                    shelf.buffers[rank] = there = [SaveBuffer.make(plan) for _ in range(count)]
                except HeadwayError as error:
                    kind, said, there = "refused", {"message": error.message, "hint": error.hint}, []
            descriptors = [buffer.descriptor for buffer in there]
        with contextlib.suppress(ChannelClosed):
            line.send(kind, descriptors, **said)

    def _exits(self, line: Channel, crew: WorkerGroup) -> None:
        exits = crew.poll()
        if exits:
            self._pass_records_on()  # whoever leads reads there why they ended
        for one in exits:
            line.send("exit", rank=one.rank, pid=one.pid, code=one.code)
        for rank, pid in crew.pids().items():
            if self._known.get(rank) != pid:
                self._known[rank] = pid
                line.send("worker", rank=rank, pid=pid)

    def _pass_records_on(self) -> None:
        if self.visit is not None and not self.visit.flush(RECORDS_S):
            self._print("records could not be passed on in time; they follow")

    def _words(self, line: Channel, shelf: SnapshotServer) -> None:
        """What workers say goes to the agent that leads, with what they noted of a state that they saved."""
        said = list[tuple[int, Message]]()
        for rank, worker in list(self._workers.items()):
            try:
                said += [(rank, message) for message in worker.receive()]
            except ChannelClosed:
                del self._workers[rank]
                said.append((rank, Message("gone", {})))
        if any(message.kind == "filled" for _, message in said):
            self._pass_records_on()  # a state must not outlive the record of its steps
        for rank, message in said:
            if message.kind == "gone":
                line.send("gone", rank=rank)
            else:
                fields = message.fields
                if message.kind == "pieces":
                    self._plans[rank] = plan_from(fields)
                if message.kind == "filled":
                    fields = fields | {"note": shelf.buffers[rank][fields["buffer"]].read_note()}
                line.send("from", rank=rank, said=message.kind, fields=fields)

    def _tell(self, line: Channel, crew: WorkerGroup, shelf: SnapshotServer, pulses: HeartbeatPages) -> None:
        if time.monotonic() - self._told < TELL_S:
            return
        self._told = time.monotonic()
        shelf.pids = pids = crew.pids()
        pages = {rank: base64.b64encode(pulses.page(rank)).decode() for rank in pids}
        line.send("pulses", pages=pages, states={rank: process_state(pid) for rank, pid in pids.items()})


def main(words: list[str] | None = None) -> int:
    """`python -m headway.agent.nodes.node_agent --run RUN --name NAME --slots N [--domain D]`."""
    parser = argparse.ArgumentParser(prog="python -m headway.agent.nodes.node_agent")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--domain", default="")
    told = parser.parse_args(words)
    return NodeAgent(told.name, RunFolder(told.run), told.slots, domain=told.domain).serve()


if __name__ == "__main__":
    sys.exit(main())
