"""The workers of one node: started, signalled and ended as the leader says; what they report is relayed to it."""

import base64
import contextlib
import os
import signal
import time
from typing import Any

from headway.agent.nodes.snapshot_server import SnapshotServer
from headway.agent.remote.join import RemoteRun
from headway.agent.saving.buffers import plan_from
from headway.agent.workers.worker_group import WorkerGroup
from headway.errors import HeadwayError
from headway.recipe import Assignment
from headway.state import BufferPlan, Channel, ChannelClosed, Message, SaveBuffer
from headway.track.heartbeat import HeartbeatPages
from headway.track.process_state import process_state

HEARTBEATS_S = 0.3
"""Between two reports of the workers' heartbeats, which also show that this node lives."""
RECORDS_S = 1.0
"""How long the report of a saved state, or of a worker's end, waits for the records of what came before it."""


class NodeWorkers:
    """Relays between the leader and the workers of this node."""

    def __init__(self, group: WorkerGroup, server: SnapshotServer, key: str, remote: RemoteRun | None) -> None:
        self._group, self._server, self._key, self._remote = group, server, key, remote
        self._plans: dict[int, BufferPlan] = {}
        self._channels: dict[int, Channel] = {}
        self._known_pids: dict[int, int] = {}
        self._assigned: list[Assignment] = []
        """Workers to start here."""
        self._state: dict[str, Any] = {}
        """The state to resume from."""
        self._heartbeats = HeartbeatPages(1)
        self._reported = 0.0

    def filenos(self) -> list[int]:
        """Descriptors to select on."""
        return [*self._group.filenos(), *(channel.fileno() for channel in self._channels.values())]

    def dismiss(self) -> None:
        """End all workers; what they saved stays."""
        self._group.dismiss()
        self._channels, self._known_pids, self._assigned = {}, {}, []

    # -- from the leader

    def obey(self, message: Message) -> None:
        """Do what the leader says."""
        fields = message.fields
        match message.kind:
            case "assign":
                self._assigned.append(Assignment.model_validate(fields["assignment"]))
            case "state":
                self._state = fields
            case "to":
                self._relay_to_worker(fields["rank"], fields["said"], fields["fields"])
            case "signal":
                self._group.signal(signal.Signals(fields["number"]), fields["ranks"])
            case "spares":
                self._group.fork(fields["count"])
            case "dismiss":
                self.dismiss()
            case "drop":
                self._server.drop()

    def start_assigned(self, leader_host: str) -> None:
        """Start the workers that were assigned, once the run folder here is up to date."""
        if not self._assigned or (self._remote is not None and not self._remote.is_fresh(self._assigned[0].attempt)):
            return
        for assignment in self._assigned:
            if self._heartbeats.workers != assignment.workers:
                self._heartbeats.close()
                self._heartbeats = HeartbeatPages(assignment.workers)
            if leader_host != self._server.host:  # another machine's clock means nothing here
                assignment = assignment.model_copy(update={"asked_ns": time.monotonic_ns()})
            self._start(assignment)
        self._assigned = []

    def _start(self, assignment: Assignment) -> None:
        if self._remote is not None:
            assignment = self._remote.localize(assignment)
        page = self._heartbeats.page(assignment.rank)
        page[:] = bytes(len(page))
        descriptors, files, remote_files = list[int](), list[tuple[str, int, int]](), list[tuple[Any, ...]]()
        if assignment.from_memory:
            descriptors, files, remote_files = self._state_files()
        fields = {"files": files, "far": remote_files, "key": self._key, "disk": self._state.get("disk", False)}
        if assignment.draw:
            fields = {}
        channel = self._group.assign(assignment, [self._heartbeats.descriptor, *descriptors], **fields)
        for descriptor in descriptors[:1]:
            os.close(descriptor)  # the manifest's: the worker has one of its own
        self._channels[assignment.rank] = channel

    def _state_files(self) -> tuple[list[int], list[tuple[str, int, int]], list[tuple[Any, ...]]]:
        """The state to resume from: files in this node's memory as descriptors, the others by address."""
        content, step = self._state["manifest"].encode(), self._state["step"]
        manifest = os.memfd_create("headway-manifest", os.MFD_CLOEXEC)
        os.pwrite(manifest, content, 0)
        descriptors, files, remote_files = [manifest], [("manifest.json", 0, len(content))], list[tuple[Any, ...]]()
        if self._state.get("disk"):
            assert self._remote is not None, "others see the run folder"
            address = self._remote.address
            return descriptors, files, [(*address, name, step, size) for name, size in self._state["files"]]
        for name, size, host, port in self._state["files"]:
            local = self._server.find(name, step)
            if local is not None:
                descriptors.append(local[0])
                files.append((name, local[1], size))
            else:
                remote_files.append((host, port, name, step, size))
        return descriptors, files, remote_files

    def _relay_to_worker(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """Relay a message to a worker; its buffers are allocated here."""
        channel = self._channels.get(rank)
        if channel is None:
            return
        descriptors = list[int]()
        if kind == "buffers":
            plan, count = self._plans[rank], fields.pop("count")
            buffers = self._server.buffers.get(rank, [])
            if not buffers or buffers[0].plan != plan or len(buffers) != count:
                try:
                    self._server.buffers[rank] = buffers = [SaveBuffer.make(plan) for _ in range(count)]
                except HeadwayError as error:
                    kind, fields, buffers = "refused", {"message": error.message, "hint": error.hint}, []
            descriptors = [buffer.descriptor for buffer in buffers]
        with contextlib.suppress(ChannelClosed):
            channel.send(kind, descriptors, **fields)

    # -- to the leader

    def report_exits(self, leader: Channel) -> None:
        """Report workers that have started or ended."""
        exits = self._group.poll()
        if exits:
            self._flush_records()  # the leader reads there why they ended
        for exited in exits:
            leader.send("exit", rank=exited.rank, pid=exited.pid, code=exited.code)
        for rank, pid in self._group.pids().items():
            if self._known_pids.get(rank) != pid:
                self._known_pids[rank] = pid
                leader.send("worker", rank=rank, pid=pid)

    def relay_messages(self, leader: Channel) -> None:
        """Relay what workers send, with their notes on a state that they saved."""
        messages = list[tuple[int, Message]]()
        for rank, channel in list(self._channels.items()):
            try:
                messages += [(rank, message) for message in channel.receive()]
            except ChannelClosed:
                del self._channels[rank]
                messages.append((rank, Message("gone", {})))
        if any(message.kind == "filled" for _, message in messages):
            self._flush_records()  # a state must not outlive the record of its steps
        for rank, message in messages:
            if message.kind == "gone":
                leader.send("gone", rank=rank)
                continue
            fields = message.fields
            if message.kind == "pieces":
                self._plans[rank] = plan_from(fields)
            if message.kind == "filled":
                fields = fields | {"note": self._server.buffers[rank][fields["buffer"]].read_note()}
            leader.send("from", rank=rank, said=message.kind, fields=fields)

    def _flush_records(self) -> None:
        if self._remote is not None and not self._remote.flush(RECORDS_S):
            print("records were not sent in time; they follow", flush=True)

    def report_heartbeats(self, leader: Channel) -> None:
        """Report the workers' heartbeats every HEARTBEATS_S."""
        if time.monotonic() - self._reported < HEARTBEATS_S:
            return
        self._reported = time.monotonic()
        self._server.pids = pids = self._group.pids()
        pages = {rank: base64.b64encode(self._heartbeats.page(rank)).decode() for rank in pids}
        leader.send("pulses", pages=pages, states={rank: process_state(pid) for rank, pid in pids.items()})
