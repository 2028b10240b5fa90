"""The nodes that have joined a run: who is there, who was lost, and the leader lease under which they are led.

Nodes call (node_agent.py); whoever has the run's key is let in. A node whose channel is cut, or that reports nothing
for `train.silent_node_s`, is lost. What another agent needs to lead in this one's place is sent to the first few nodes
whenever it changes.
"""

import contextlib
import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from headway.agent.fd_store import FdStore
from headway.agent.nodes.lease import VOTERS, LeaderLease, LeaseSuperseded
from headway.agent.nodes.members import Member
from headway.agent.remote.folder_server import RunFolderServer
from headway.errors import StateError
from headway.state import Channel, ChannelClosed, Message
from headway.state.handshake import HandshakeFailed, PendingHandshakes, connect, server_handshake
from headway.state.peer_read import peer_request
from headway.state.signed_stream import SignedStream

ALIVE_S = 1.0
"""Between two signs of life to nodes, and two looks at the leases."""
POLL_S = 0.05
ANSWER_S = 60.0
"""How long a leader that is busy may take to answer a request to leave."""
SHARED = ("attempt", "pieces", "newest", "copied", "roster")
"""Entries of the fd store that another leader needs."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Membership:
    """All nodes of a run."""

    def __init__(
        self,
        key: str,
        listener: socket.socket,
        environment: Mapping[str, str],
        lease: LeaderLease,
        fd_store: FdStore,
        folder_server: RunFolderServer,
        silent_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key, self.lease, self.now = key, lease, now
        self._listener, self._environment, self._fd_store = listener, dict(environment), fd_store
        self._folder_server, self._silent_s, self._signed = folder_server, silent_s, 0.0
        fd_store.on_put = self._share
        self.abdicated = False
        """Whether another agent leads, so that nothing may be sent to nodes any more."""
        self.members: dict[str, Member] = {}
        self.suspects: dict[str, str] = {}
        """Machines that get no workers any more, and why."""
        self.on_message: Callable[[Member, Message], None] = lambda _member, _message: None
        """Called with what nodes report of their workers."""
        self.on_lost: Callable[[Member, str], None] = lambda _member, _how: None
        self.on_silence: Callable[[Member, float], None] = lambda _member, _silent_s: None
        """Called when a node was silent for half of the time after which it is lost, and when it is heard again."""
        self.on_leave: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _request: {"error": "not ready"}
        """Called with a request that a node leave; returns the answer."""
        self._leave_requests = SimpleQueue[tuple[Mapping[str, Any], SimpleQueue[dict[str, Any]]]]()
        self._attempt = 1
        self._joining: SimpleQueue[Member] = SimpleQueue()
        self._pending = PendingHandshakes()
        threading.Thread(target=self._accept, name="membership", daemon=True).start()

    # -- joining

    def _accept(self) -> None:
        """In a thread: each caller gets a thread of its own, so that a silent one keeps no other waiting."""
        while True:
            try:
                end, address = self._listener.accept()
            except OSError:
                return
            if self._pending.admit(end, address[0]):
                threading.Thread(target=self._handshake, args=(end, address[0]), daemon=True).start()

    def _handshake(self, end: socket.socket, address: str) -> None:
        try:
            try:
                stream = server_handshake(end, self.key)
            finally:
                self._pending.finish(address)
            stream.settimeout(self._silent_s)  # a node that does not read for so long is lost
            request = json.loads(stream.readline())
            if request["kind"] == "leave":
                self._answer_leave(stream, request)
                return
            if request["kind"] != "hello":
                self._folder_server.serve(stream, request)
                return
            fields = {key: value for key, value in request.items() if key not in ("kind", "descriptors")}
            if not NAME.fullmatch(fields["name"]):
                raise ValueError("not the name of a node")
            self._joining.put(Member(line=Channel(stream), **fields))
        except (HandshakeFailed, OSError, ValueError, TypeError, KeyError, Empty):
            end.close()

    def _answer_leave(self, end: SignedStream, request: Mapping[str, Any]) -> None:
        """In a caller's thread: pass requests to `poll`, and send its answers until the caller hangs up."""
        end.settimeout(None)
        while True:
            answers = SimpleQueue[dict[str, Any]]()
            self._leave_requests.put((request, answers))
            end.sendall(json.dumps(answers.get(timeout=ANSWER_S)).encode() + b"\n")
            request = json.loads(end.readline())

    def _join(self, member: Member) -> None:
        if (known := self.members.get(member.name)) is not None:
            if known.pid != member.pid and self.now() - known.last_seen < self._silent_s:
                member.send("taken", pid=known.pid, machine=known.machine, silent_s=self._silent_s)
                member.line.close()
                return
            self._lose(known, "called again")
        self.members[member.name] = member
        member.last_seen = self.now()
        member.copies = {name: list(steps) for name, steps in member.files.items()}
        member.send(
            "welcome",
            attempt=self._attempt,
            environment=self._environment,
            lease=self.lease.number,
            silent_s=self._silent_s,
        )
        for name in SHARED:
            if (entry := self._fd_store.get(name)) is not None:
                self._share(name, entry.fields)
        self._store_roster()

    # -- polling

    def poll(self) -> None:
        """Process what nodes have sent; notice who joined and who is lost. Raise LeaseSuperseded."""
        while not self._joining.empty():
            self._join(self._joining.get())
        while not self._leave_requests.empty():
            request, answers = self._leave_requests.get()
            answers.put(self.on_leave(request))
        for member in list(self.members.values()):
            try:
                for message in member.line.receive():
                    self._hear(member)
                    self.on_message(member, message)
            except ChannelClosed:
                self._lose(member, "its agent is gone")
                continue
            silent_s = self.now() - member.last_seen
            if silent_s > self._silent_s:
                self._lose(member, f"its agent has sent nothing for {self._silent_s:g} s")
            elif silent_s > self._silent_s / 2 and not member.silent:
                member.silent = True
                self.on_silence(member, silent_s)
        if self.now() - self._signed > ALIVE_S:
            self._signed = self.now()
            self.broadcast("alive")
            if self.lease.lost():
                self.abdicated = True
                raise LeaseSuperseded

    def _hear(self, member: Member) -> None:
        silent_s, member.last_seen = self.now() - member.last_seen, self.now()
        if member.silent:
            member.silent = False
            self.on_silence(member, silent_s)

    def wait(self, timeout_s: float) -> None:
        """Wait for a message at most so long, then poll."""
        select.select(self.filenos(), [], [], timeout_s)
        self.poll()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = float("inf")) -> None:
        """Poll until a condition holds, at most so long."""
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.poll()

    def survey(self) -> None:
        """Poll until every node has reported or is lost: where one was lost for its silence, others may be silent."""
        began = self.now()
        self.wait_until(lambda: all(member.last_seen >= began for member in self.members.values()))

    def filenos(self) -> list[int]:
        """Descriptors to select on."""
        return [member.line.fileno() for member in self.members.values()]

    def able(self) -> list[Member]:
        """Nodes that can have workers, sorted by name; those that see the run folder first."""
        members = [member for member in self.members.values() if member.ready and not member.leaving]
        ready = [member for member in members if member.machine not in self.suspects]
        return sorted(ready, key=lambda member: (member.apart, member.name))

    def _lose(self, member: Member, how: str) -> None:
        member.line.close()
        if self.members.get(member.name) is member:
            del self.members[member.name]
            self._store_roster()
        self.on_lost(member, how)

    def dismiss(self, member: Member) -> None:
        """Have a node exit that was asked to leave."""
        member.send("bye", status=0, left=True)
        member.line.close()
        del self.members[member.name]
        self._store_roster()

    # -- leading

    def begin_attempt(self, number: int) -> None:
        """Nodes that join from now on are told of this attempt."""
        self._attempt = max(number, 1)

    def claim(self) -> None:
        """Take the lease of another attempt; raise LeaseSuperseded where another agent has it."""
        if not self.lease.claim():
            self.abdicated = True
            raise LeaseSuperseded
        self._fd_store.put("lease", number=self.lease.number, lead=self.lease.lead)
        self.broadcast("lease", number=self.lease.number)

    def candidates(self) -> list[Member]:
        """Nodes that could lead: the first few that see the run's leases."""
        names = sorted(name for name, member in self.members.items() if not member.apart)
        return [self.members[name] for name in names[:VOTERS]]

    def _store_roster(self) -> None:
        self._fd_store.put("roster", nodes={member.name: [member.host, member.port] for member in self.candidates()})

    def _share(self, name: str, fields: dict[str, Any]) -> None:
        if name in SHARED:
            for member in self.candidates():
                member.send("keep", name=name, fields=fields)

    # -- messages

    def broadcast(self, kind: str, **fields: Any) -> None:
        """Send a message to all nodes."""
        for member in list(self.members.values()):
            member.send(kind, **fields)

    def request(self, member: Member, kind: str, **fields: Any) -> dict[str, Any]:
        """Ask a node's snapshot server and wait for the answer; raise StateError where there is none."""
        try:
            with contextlib.closing(connect((member.host, member.port), self.key)) as end:
                answer = peer_request(end, kind, **fields)
        except (OSError, HandshakeFailed, ValueError) as error:
            raise StateError(f"cannot reach node {member.name}: {error}") from None
        if "error" in answer:
            raise StateError(f"node {member.name}: {answer['error']}")
        return answer

    def close(self, exit_status: int) -> None:
        """The run is over: nodes exit with this status, unless another agent leads them."""
        for member in list(self.members.values()):
            if not self.abdicated:
                member.send("bye", status=exit_status)
            member.line.close()
        self._listener.close()
