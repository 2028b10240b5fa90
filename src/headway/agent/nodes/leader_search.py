"""How a node finds its leader, and takes over where there is none.

The newest lease of the run says where its leader listens. When no leader answers, a node that may lead asks the others
whether they hear one (lease.py says whose turn it is), takes the next lease, and starts a leader from what the one
before had shared with all nodes.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headway.agent.nodes.lease import newest_lease, take_lease, takeover_delay_s
from headway.agent.nodes.lease_record import LeaseRecord
from headway.agent.remote.join import RemoteRun
from headway.agent.supervise.outcome import AttemptOutcome, recorded_exit_status
from headway.errors import HeadwayError
from headway.state import Channel, Message, fence
from headway.state.handshake import HandshakeFailed, connect
from headway.state.peer_read import peer_request
from headway.track import RunFolder

SEARCH_S = 60.0
"""How long a node looks for a leader before it gives up."""
REPORT_AFTER_S = 3.0
SEND_S = 4.0
"""A leader that does not read for so long is not heard."""
CONNECT_S = 1.0
ASK_S = 0.5
"""Between two times that the other nodes are asked whether they hear the leader."""
SharedEntries = dict[str, dict[str, Any]]
"""Entries of the leader's fd store that another leader needs."""


class RankTaken(Exception):
    """Another process is this node."""


@dataclass
class LeaderSearch:
    """One node's search for its leader."""

    name: str
    run: RunFolder
    remote: RemoteRun | None = None
    """Of a run whose folder this machine does not see."""
    start_leader: Callable[[SharedEntries, LeaseRecord, int], "subprocess.Popen[bytes]"] | None = None
    """Starts a leader from shared entries, its lease, and the descriptor of a listener; None where this node never
    leads."""
    leader: "subprocess.Popen[bytes] | None" = None
    """The leader's process, where this node started it."""
    key: str = ""
    silent_s: float = 5.0
    """`train.silent_node_s`, as the leader says."""
    address: LeaseRecord | None = None
    """Where the leader was found."""
    _lease: int = 0
    """The number of the lease that the leader held when it was last heard."""
    _shared: SharedEntries = field(default_factory=dict)

    def find(self, host: str | None, stopping: Callable[[], bool]) -> Channel | None:
        """Connect to the leader; None if there is none for long. This node may take over once it serves at `host`."""
        began = asked = time.monotonic()
        reported = False
        while time.monotonic() < began + SEARCH_S:
            if not reported and time.monotonic() - began > REPORT_AFTER_S:
                reported = True
                self.print(f"waiting for the leader of run {self.run.name}")
            with contextlib.suppress(OSError, HandshakeFailed, ValueError):
                lease = self._newest()
                if lease is not None and lease.port:
                    end = connect((lease.host, lease.port), self.key, CONNECT_S)
                    end.settimeout(SEND_S)
                    self.address = lease
                    return Channel(end)
            if self.remote is not None and stopping():
                return None  # the user wants it to end, and there is no leader to save with
            if self.leader is not None and self.leader.poll() is not None and not self._shared:
                return None  # it ended before it led any node, and has printed why
            if host is not None and self._shared and time.monotonic() - asked > ASK_S:
                if recorded_exit_status(self.run) is not None:
                    return None  # the leader has ended because the run has
                try:
                    self._maybe_lead(host, time.monotonic() - began)
                except (HeadwayError, OSError) as error:
                    self.print(f"cannot lead: {error}")
                asked = time.monotonic()
            time.sleep(0.05)
        return None

    def _newest(self) -> LeaseRecord | None:
        """The run's newest lease, or the leader that this machine was told to join."""
        if self.remote is not None:
            self.key = self.remote.key
            host, port = self.remote.leader_address()
            return LeaseRecord(0, f"{host}:{port}", host, port)
        lease = newest_lease(self.run.leases)
        if lease is not None and lease.port:
            self.key = self.run.key_file.read_text().strip()
        return lease

    def _maybe_lead(self, host: str, waited_s: float) -> None:
        """Lead this run, if no agent does and it is this node's turn."""
        lease = newest_lease(self.run.leases)
        if "attempt" not in self._shared or lease is None or lease.number != self._lease or self.start_leader is None:
            return  # this node was never led, or another leads already
        nodes = self._shared.get("roster", {}).get("nodes", {})
        with ThreadPoolExecutor(len(nodes) or 1) as pool:
            answers = dict(zip(nodes, pool.map(self._hears_leader, nodes.values()), strict=True))
        delay_s = takeover_delay_s(self.name, answers | {self.name: False} if self.name in nodes else answers)
        if delay_s is None or waited_s < delay_s:
            return
        with socket.create_server((host, 0), backlog=64) as listener:
            own = LeaseRecord(lease.number + 1, self.name, *listener.getsockname()[:2])
            if take_lease(self.run.leases, own):
                self.print(f"no node hears leader {lease.lead}: taking over")
                fence(self.run.checkpoints)
                shared = self._shared | {"after": {"lead": lease.lead}}
                self.leader = self.start_leader(shared, own, listener.fileno())

    def _hears_leader(self, address: tuple[str, int]) -> bool | None:
        """Whether another node hears the leader; None where it does not answer."""
        try:
            with contextlib.closing(connect((address[0], address[1]), self.key, CONNECT_S, CONNECT_S)) as end:
                end.settimeout(CONNECT_S)
                return bool(peer_request(end, "lead")["hears"])
        except (OSError, HandshakeFailed, ValueError, KeyError):
            return None

    def note(self, message: Message) -> None:
        """Remember what the leader says of itself, and what another would need to lead."""
        fields = message.fields
        if message.kind == "taken":
            self.silent_s = fields["silent_s"]
            raise RankTaken(f"process {fields['pid']} on {fields.get('machine', 'its machine')}")
        if message.kind == "keep":
            self._shared[fields["name"]] = fields["fields"]
        elif message.kind == "lease":
            self._lease = fields["number"]
        elif message.kind == "welcome":
            self._lease, self.silent_s = fields["lease"], fields["silent_s"]
            assert self.address is not None, "there is a channel to it"
            lease = f"under lease {self.address.number} of {self.address.lead}, " if self.address.number else ""
            self.print(f"joined, {lease}at {self.address.host}:{self.address.port}")

    def exit_status(self) -> int:
        """What to exit with where there is no leader, after printing why."""
        if self.remote is not None:
            self.print(f"run {self.run.name} lost its leader; restart it where its folder is")
            return AttemptOutcome.STOPPED_CODE
        recorded = recorded_exit_status(self.run) if self._shared else None
        if recorded is not None:
            self.print(f"run {self.run.name} is over")
            return recorded
        if self.leader is not None:
            status = self.leader.wait()
            return AttemptOutcome.STOPPED_CODE if status < 0 and self.start_leader is None else status or 1
        self.print(f"run {self.run.name} has no leader")
        return 1

    def print(self, text: str) -> None:
        """Log a line."""
        print(f"{time.strftime('%H:%M:%S')} {self.name}: {text}", file=sys.stderr, flush=True)
