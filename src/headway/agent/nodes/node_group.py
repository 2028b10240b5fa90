"""The nodes of a run as the agent that leads sees them: who is there, where each worker has its place, who was lost.

A Team stands where a Crew does for a run on one machine: workers are started, heard and ended through it, whatever node
they are on. Nodes call (node_agent.py); whoever has the run's key is let in. A node whose line is cut, or that says nothing
for `train.silent_node_s`, is lost, and its workers with it. What another agent would need to lead in this one's stead
is told to the first few nodes as it changes; whether another does is looked up in the run's leases.
"""

import base64
import contextlib
import json
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from headway.agent.fd_store import FdStore
from headway.agent.nodes.lease import VOTERS, LeaderLease, LeaseSuperseded
from headway.agent.nodes.members import Member, RemoteBuffer, RemoteChannel, unreachable_member
from headway.agent.remote.folder_server import RunFolderServer
from headway.agent.saving.replication import SnapshotReplicator
from headway.agent.saving.restore_points import newest_on_disk
from headway.agent.supervise.stack_dumps import Frame, StackDump, WorkerStack
from headway.agent.workers.worker_group import WorkerExit
from headway.errors import StateError
from headway.recipe import Assignment
from headway.state import BufferPlan, Channel, ChannelClosed, Message, ShardEntry, open_checkpoint
from headway.state.address import is_in_store
from headway.state.handshake import HandshakeFailed, call, server_handshake
from headway.state.peer_read import PeerFile, PeerReader, peer_request, read_line
from headway.state.receive import receive_shard
from headway.state.save_buffer import FilePlan
from headway.track.heartbeat import HeartbeatPages

__all__ = ["NodeGroup"]

SIGN_S = 1.0
"""Between two words to nodes that there is otherwise nothing to say to, and two looks at the leases."""
AGAIN_S = 0.05
TOLD = ("attempt", "pieces", "newest", "copied", "roster")
"""What of all that an agent keeps another one needs."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
KILLED = -int(signal.SIGKILL)


class NodeGroup:
    """All nodes of a run."""

    def __init__(
        self,
        key: str,
        listener: socket.socket,
        environment: Mapping[str, str],
        right: LeaderLease,
        kept: FdStore,
        desk: RunFolderServer,
        silent_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._key, self._listener, self._environment = key, listener, dict(environment)
        self.right, self._kept, self._desk, self._signed = right, kept, desk, 0.0
        kept.on_put = self._tell_heirs
        self._lost_s = silent_s
        """A node tells how its workers are three times a second."""
        self.after = ""
        """Whom this agent follows, if another machine's led before."""
        self.abdicated = False
        """Whether another agent leads, so that nothing may be said to nodes any more."""
        self.members: dict[str, Member] = {}
        self.suspects: dict[str, str] = {}
        """Machines that get no workers any more, and why."""
        self.lost: list[tuple[str, str]] = []
        """Nodes that were lost in this attempt, and how."""
        self.warned = False
        """Whether a node will be taken away."""
        self.processes: list[subprocess.Popen[bytes]] = []
        """The nodes, where all of them are this machine."""
        self.attempt = 0
        self.status = 1
        """What the nodes exit with at the end."""
        self._began_with = frozenset[str]()
        self.pulses: HeartbeatPages | None = None
        """Where the marks of all workers are put, as if they were made here."""
        self.buffers: dict[tuple[int, int], RemoteBuffer] = {}
        self._places: dict[int, Member] = {}
        self._lines: dict[int, RemoteChannel] = {}
        self._pids: dict[int, int] = {}
        self._states: dict[int, str] = {}
        self._exits = deque[WorkerExit]()
        self._new: SimpleQueue[Member] = SimpleQueue()
        self.copies = SnapshotReplicator(self)
        threading.Thread(target=self._let_in, name="door", daemon=True).start()

    # -- who is there

    def _let_in(self) -> None:
        """Whoever calls: each is seen to by a thread, so that one that says nothing keeps no one waiting."""
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._meet, args=(end,), daemon=True).start()

    def _meet(self, end: socket.socket) -> None:
        try:
            server_handshake(end, self._key)
            end.settimeout(self._lost_s)  # who does not take in what it is told for so long is lost
            said = json.loads(read_line(end))
            if said["kind"] != "hello":
                self._desk.serve(end, said)
                return
            fields = {key: value for key, value in said.items() if key not in ("kind", "descriptors")}
            if not NAME.fullmatch(fields["name"]):
                raise ValueError("no node is called so")
            self._new.put(Member(line=Channel(end), **fields))
        except (HandshakeFailed, OSError, ValueError, TypeError, KeyError):
            end.close()

    def attend(self) -> None:
        """Take in what nodes have said; notice who has come and who is gone."""
        while not self._new.empty():
            member = self._new.get()
            if (old := self.members.get(member.name)) is not None:
                if old.pid != member.pid and self._now() - old.heard < self._lost_s:
                    self.send(member, "taken", pid=old.pid, machine=old.machine, silent_s=self._lost_s)
                    member.line.close()
                    continue
                self._lose(old, "called again")
            self.members[member.name] = member
            member.heard = self._now()
            member.copies = {name: list(steps) for name, steps in member.files.items()}
            self.send(
                member,
                "welcome",
                attempt=max(self.attempt, 1),
                environment=self._environment,
                lease=self.right.number,
                silent_s=self._lost_s,
            )
            for name in TOLD:
                if (thing := self._kept.get(name)) is not None:
                    self._tell_heirs(name, thing.fields)
            self._call_the_roll()
        for member in list(self.members.values()):
            try:
                for message in member.line.receive():
                    member.heard = self._now()
                    self._take(member, message)
            except ChannelClosed:
                self._lose(member, "its agent is gone")
                continue
            if self._now() - member.heard > self._lost_s:
                self._lose(member, f"it has said nothing for {self._lost_s:g} s")
        if self._now() - self._signed > SIGN_S:
            self._signed = self._now()
            for member in self.members.values():
                self.send(member, "alive")
            if self.right.lost():
                self.abdicated = True
                raise LeaseSuperseded

    def _call_the_roll(self) -> None:
        """Who is there, for those who may have to do without this agent."""
        self._kept.put("roster", nodes={one.name: [one.host, one.port] for one in self._heirs()})

    def _tell_heirs(self, name: str, fields: dict[str, Any]) -> None:
        if name in TOLD:
            for member in self._heirs():
                self.send(member, "keep", name=name, fields=fields)

    def _heirs(self) -> list[Member]:
        """Those who could lead: they see the run's leases."""
        able = sorted(name for name, member in self.members.items() if not member.apart)
        return [self.members[name] for name in able[:VOTERS]]

    @property
    def minority(self) -> bool:
        """Whether fewer than half of those are left that this attempt began with and that could lead."""
        return 2 * sum(name in self.members for name in self._began_with) < len(self._began_with)

    def claim(self) -> None:
        """Take the lease of another attempt; Superseded where another agent has it."""
        if not self.right.claim():
            self.abdicated = True
            raise LeaseSuperseded
        self._kept.put("lease", number=self.right.number, lead=self.right.lead)
        for member in self.members.values():
            self.send(member, "lease", number=self.right.number)

    def _take(self, member: Member, message: Message) -> None:
        fields, rank = message.fields, message.fields.get("rank", -1)
        if message.kind == "ready":
            member.ready = True
        elif message.kind == "warned":
            self.warned = True
        elif message.kind == "pulses":
            self._show(member, fields)
        elif self._places.get(rank) is not member:
            return  # of an attempt that is over
        elif message.kind == "worker":
            self._pids[rank] = fields["pid"]
        elif message.kind == "exit" and rank in self._lines and not self._over(rank):
            self._exit(rank, fields["pid"], fields["code"])
        elif message.kind == "from":
            if fields["said"] == "filled":
                self._filled(rank, fields["fields"])
            self._lines[rank].messages.append(Message(fields["said"], fields["fields"]))
        elif message.kind == "gone" and rank in self._lines:
            self._lines[rank].gone = True

    def _show(self, member: Member, fields: Mapping[str, Any]) -> None:
        for rank, page in fields["pages"].items():
            if self.pulses is not None and int(rank) < self.pulses.workers and self._places.get(int(rank)) is member:
                self.pulses.page(int(rank))[:] = base64.b64decode(page)
        self._states |= {int(rank): state for rank, state in fields["states"].items()}

    def _lose(self, member: Member, how: str) -> None:
        """A node is gone, and whoever worked there."""
        member.line.close()
        if self.members.get(member.name) is member:
            del self.members[member.name]
            self._call_the_roll()
        mine = [rank for rank, place in self._places.items() if place is member and not self._over(rank)]
        if mine:
            self.lost.append((member.name, how))
        for rank in mine:
            self._exit(rank, self._pids.get(rank, 0), KILLED)

    def _exit(self, rank: int, pid: int, code: int) -> None:
        self._exits.append(WorkerExit(rank, pid, code))
        self._pids.pop(rank, None)
        self._lines[rank].gone = True

    def _over(self, rank: int) -> bool:
        return rank not in self._lines or (self._lines[rank].gone and rank not in self._pids)

    def listen(self, timeout_s: float) -> None:
        """Wait that long at most for news of nodes, and take it in."""
        select.select(self.filenos(), [], [], timeout_s)
        self.attend()

    def all_ended(self) -> bool:
        """Whether nobody can come any more: all nodes are processes of this machine, and have ended."""
        return bool(self.processes) and all(process.poll() is not None for process in self.processes)

    # -- as a Crew

    def able(self) -> list[Member]:
        """Nodes that can have workers, in the order of their names; first those that see the run's folder."""
        there = [member for member in self.members.values() if member.ready and member.machine not in self.suspects]
        return sorted(there, key=lambda member: (member.apart, member.name))

    def lay_out(self, workers: int) -> bool:
        """Give each rank a place, ranks that follow each other on one node; False where there are not enough."""
        slots = [member for member in self.able() for _ in range(member.slots)]
        if len(slots) < workers:
            return False
        self._places = dict(enumerate(slots[:workers]))
        self._lines, self._pids, self._states = {}, {}, {}
        self._exits.clear()
        self.lost = []
        self._began_with = frozenset(name for name, member in self.members.items() if not member.apart)
        return True

    def wait_for(self, names: Iterable[str], wait_s: float) -> None:
        """Have these nodes call again, as far as they do within that time."""
        wanted, deadline = set(names), time.monotonic() + wait_s
        while not wanted <= {one.name for one in self.able()} and time.monotonic() < deadline:
            time.sleep(AGAIN_S)
            self.attend()

    def look_around(self) -> None:
        """Hear from every node, or lose it: where one was lost for its silence, others may be silent too."""
        began = self._now()
        while any(member.heard < began for member in self.members.values()):
            time.sleep(AGAIN_S)
            self.attend()

    def has(self, files: Iterable[str], step: int) -> bool:
        """Whether some node or other said, when it called, that it has each of these files of a step."""
        return all(any(step in one.files.get(name, ()) for one in self.members.values()) for name in files)

    def find_again(self, homes: Mapping[int, str]) -> None:
        """The places that workers had before another agent led; some may be lost."""
        self._places = {rank: self.members.get(name) or unreachable_member(name) for rank, name in homes.items()}

    def place(self, rank: int) -> Member:
        """The node of a rank."""
        return self._places[rank]

    def share(self, step: int, manifest: bytes, files: Sequence[tuple[str, int]]) -> None:
        """Tell all nodes of the state to go on from, and where each of its files lies."""
        table = []
        for name, size in files:
            holder = self._holder_of(name, step)
            assert holder is not None, "asked for only where all are there"
            table.append([name, size, holder.host, holder.port])
        for member in {id(place): place for place in self._places.values()}.values():
            self.send(member, "state", step=step, manifest=manifest.decode(), files=table)

    def offer(self, checkpoint: str | None) -> None:
        """Have nodes that do not see the run's folder read the checkpoint to go on from, where it lies there."""
        apart = [member for member in self._of_places() if member.apart]
        if checkpoint is None or is_in_store(checkpoint) or not apart:
            return
        step, manifest, files = self._desk.publish(Path(checkpoint))
        for member in apart:
            self.send(member, "state", step=step, manifest=manifest.decode(), disk=True, files=files)

    def assign(self, assignment: Assignment) -> RemoteChannel:
        """Give a place to a worker; returns the line to it."""
        rank = assignment.rank
        line = self._lines[rank] = RemoteChannel(self, rank, self._places[rank])
        self.send(self._places[rank], "assign", assignment=assignment.model_dump(mode="json"))
        return line

    def fork(self, _count: int) -> None:
        """Have spares on every node, as many as it has room for."""
        for member in self.able():
            self.send(member, "spares", count=member.slots)

    def hear(self) -> list[WorkerExit]:
        """Learn who is there; returns the workers that have ended."""
        self.attend()
        found = list(self._exits)
        self._exits.clear()
        return found

    def filenos(self) -> list[int]:
        """For select."""
        return [member.line.fileno() for member in self.members.values()]

    def pids(self) -> dict[int, int]:
        """Workers that live, by rank; process ids are those of their nodes."""
        return dict(self._pids)

    def state(self, rank: int) -> str:
        """The kernel's letter for what a worker does."""
        return self._states.get(rank, "")

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to workers, all or some."""
        for member in list(self.members.values()):
            mine = [
                rank for rank, place in self._places.items() if place is member and (ranks is None or rank in ranks)
            ]
            if mine:
                self.send(member, "signal", number=int(number), ranks=mine)

    def stacks(self, folder: Path, attempt: int, native: bool = True) -> StackDump:
        """What all workers do."""
        found = list[WorkerStack]()
        path = None
        for member in self._of_places():
            if self._now() - member.heard > SIGN_S:
                continue  # it may be gone, and nobody should wait to find out
            with contextlib.suppress(StateError):
                told = self.ask(member, "stacks", folder=str(folder), attempt=attempt, native=native)
                path = _pages(folder, attempt, member, told) or path
                found += [_seen(one) for one in told["seen"]]
        known = {one.rank for one in found}
        return StackDump(path, found + [WorkerStack(rank, 0, "") for rank in self._places if rank not in known])

    def dismiss(self) -> None:
        """End all workers at once; spares stay."""
        for member in list(self.members.values()):
            self.send(member, "dismiss")

    def drop(self) -> None:
        """Have all nodes give their memory back."""
        self.buffers = {}
        if self.abdicated:
            return
        for member in list(self.members.values()):
            self.send(member, "drop")

    def close(self) -> None:
        """The run is over: nodes go. Where another agent leads, they call that one."""
        for member in list(self.members.values()):
            if not self.abdicated:
                self.send(member, "bye", status=self.status)
            member.line.close()
        self._listener.close()

    # -- their memory

    def free_memory(self) -> int:
        """What the nodes of this attempt could give together, if it is spread as on the one that has least."""
        members = list(self._of_places())
        return min((member.free_bytes for member in members), default=0) * len(members)

    def make_buffer(self, rank: int, number: int, plan: BufferPlan) -> RemoteBuffer:
        """Memory of a worker, which its node makes when the worker is told of it."""
        self.buffers[rank, number] = RemoteBuffer(self, rank, plan, self._places[rank])
        return self.buffers[rank, number]

    def freed(self, rank: int, number: int) -> None:
        """A buffer may be filled again: what was in it cannot be counted on."""
        if (rank, number) in self.buffers:
            self.buffers[rank, number].step = None

    def _filled(self, rank: int, fields: dict[str, Any]) -> None:
        buffer = self.buffers[rank, fields["buffer"]]
        buffer.step, buffer.note = fields["step"], fields.pop("note")

    def holder(self, buffer: RemoteBuffer, part: FilePlan, step: int) -> Member | None:
        """A node that has a file of a step's state: the worker's own, or one that has a copy."""
        if buffer.step == step and self.members.get(buffer.home.name) is buffer.home:
            return buffer.home
        name = buffer.name(part)
        return next((one for one in self.members.values() if step in one.copies.get(name, ())), None)

    def _holder_of(self, name: str, step: int) -> Member | None:
        named = [(one, part) for one in self.buffers.values() for part in one.plan.parts if one.name(part) == name]
        return next((found for pair in named if (found := self.holder(*pair, step)) is not None), None)

    def fetch(self, partial: Path, buffer: RemoteBuffer, part: FilePlan, step: int) -> ShardEntry:
        """Write a file here that lies in the memory of a node that does not see the run's folder."""
        home, name = buffer.home, buffer.name(part)
        shard = ShardEntry.model_validate(self.ask(home, "describe", name=name, step=step)["shard"])
        if shard.name != name:
            raise StateError(f"node {home.name} told of {shard.name} when it was asked for {name}")
        newest = newest_on_disk(partial.parent)[0] if part.still else None  # what never changes may get a second name
        file = PeerFile(home.host, home.port, name, step, part.image.bytes)
        with contextlib.closing(PeerReader(self._key)) as far:
            before = None if newest is None else open_checkpoint(Path(newest.address))
            receive_shard(partial, shard, part, lambda begin, out: far.read(file, begin, out), before)
        return shard

    # -- words

    def ask(self, member: Member, kind: str, **fields: Any) -> dict[str, Any]:
        """Ask a node's shelf something and wait for the answer; StateError where there is none."""
        try:
            with contextlib.closing(call((member.host, member.port), self._key)) as end:
                told = peer_request(end, kind, **fields)
        except (OSError, HandshakeFailed, ValueError) as error:
            raise StateError(f"node {member.name} cannot be asked: {error}") from None
        if "error" in told:
            raise StateError(f"node {member.name}: {told['error']}")
        return told

    def send(self, member: Member, kind: str, **fields: Any) -> None:
        """Say something to a node; that it is gone is heard of elsewhere."""
        with contextlib.suppress(ChannelClosed, OSError):
            member.line.send(kind, **fields)

    def _of_places(self) -> Iterable[Member]:
        return {id(place): place for place in self._places.values()}.values()


def _pages(folder: Path, attempt: int, member: Member, told: Mapping[str, Any]) -> Path | None:
    """Where a node's stacks can be read: in the run's folder, also if the node does not see that."""
    if not member.apart or not told["path"]:
        return Path(told["path"]) if told["path"] else None
    path = folder / f"{attempt:04d}-{member.name}-{Path(told['path']).stem[:40]}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(str(told.get("text", "")), errors="replace")
    return path


def _seen(told: dict[str, Any]) -> WorkerStack:
    frames = tuple(Frame(**frame) for frame in told.pop("frames"))
    return WorkerStack(**told | {"frames": frames, "missing": tuple(told["missing"])})
