"""The agent of one node among several: has the workers there, and does what the leader says.

    leader (agent/supervise/supervisor.py, node_group.py)
      <- hello, ready, worker, exit, from (what a worker sends), pulses      -> welcome, state, assign, to, signal,
                                                                                dismiss, drop, stacks, bye
    this node: a zygote, workers (node_workers.py), the memory that they save into (snapshot_server.py)

A node decides nothing. It relays what its workers report, holds what they save, and serves it to other nodes. When the
channel to the leader is cut, its workers are ended and what they saved stays: the node looks for a leader for a while
(leader_search.py), so that another finds everything as it was.
"""

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from headway.agent.fd_store import FdStore
from headway.agent.nodes.leader_search import SEARCH_S, LeaderSearch, RankTaken
from headway.agent.nodes.node_workers import NodeWorkers
from headway.agent.nodes.snapshot_server import SnapshotServer
from headway.agent.saving.buffers import available_memory
from headway.agent.supervise.stop_signals import StopSignals
from headway.agent.workers.env import network_variables, without_key
from headway.agent.workers.worker_group import WorkerGroup
from headway.agent.workers.zygote import ZygoteClient
from headway.state import Channel, ChannelClosed
from headway.track import RunFolder
from headway.track.access import adopt_umask

POLL_S = 0.1
TAKEN = 2.4
"""How many times `silent_s` a node waits for another of its name to end."""
SILENT = 1.6
"""How many times `silent_s` a leader may be silent; it sends something every second."""


@dataclass
class NodeAgent:
    """A node of a run."""

    search: LeaderSearch
    slots: int
    """Workers that fit here."""
    machine: str = ""
    """What the engine calls the machine; its own name where there is none."""
    domain: str = ""
    """What fails together with this node: a rack, a power supply."""
    left: bool = False
    """Whether it left on request, before the run was over."""
    _preempted: bool = False
    _stop_signals: StopSignals = field(default_factory=StopSignals)

    def serve(self) -> int:
        """Until the run has ended, or has no leader any more; return the exit status."""
        adopt_umask(self.search.run.path)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        search, refused_at = self.search, 0.0
        server: SnapshotServer | None = None
        zygote: ZygoteClient | None = None
        with contextlib.ExitStack() as stack:
            while True:
                leader = search.find(server.host if server else None, lambda: self._preempted)
                if leader is None:
                    return search.exit_status()
                if server is None:
                    stacks = search.run.stacks if search.remote else None
                    server = SnapshotServer(leader.local_host(), search.key, search.run.checkpoints, stacks)
                    stack.callback(server.close)
                try:
                    self._greet(leader, server)
                    if zygote is None:
                        zygote = self._start_zygote(leader)
                        stack.callback(zygote.close)
                        group = stack.enter_context(contextlib.closing(WorkerGroup(zygote, FdStore())))
                        workers = NodeWorkers(group, server, search.key, search.remote)
                    status = self._follow(leader, server, zygote, workers)
                    if search.leader is not None:  # engines end what a command leaves behind; it has yet to record
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            search.leader.wait(SEARCH_S)
                    return status
                except RankTaken as taken:
                    wait_s = TAKEN * search.silent_s
                    if not refused_at:
                        refused_at = time.monotonic()
                        search.print(f"this rank is taken by {taken}; waiting up to {wait_s:.0f} s for it to end")
                    elif time.monotonic() - refused_at > wait_s:
                        search.print(f"this node is in the run already: {taken}")
                        return 1
                    time.sleep(1.0)
                except ChannelClosed:
                    server.leader_heard_at = 0.0
                    search.print("lost the connection to the leader")
                    if zygote is not None:
                        workers.dismiss()
                finally:
                    leader.close()

    def _greet(self, leader: Channel, server: SnapshotServer) -> None:
        name = self.search.name
        leader.send(
            "hello", name=name, machine=self.machine or name, domain=self.domain, slots=self.slots,
            host=server.host, port=server.port, pid=os.getpid(), free_bytes=available_memory(), files=server.steps(),
            apart=self.search.remote is not None,
        )  # fmt: skip

    def _on_signal(self, number: int, _frame: object) -> None:
        """A batch system announces that it takes this machine away: the run is to save and stop. A second request to
        stop, not only an announcement, ends this node at once."""
        self._preempted = True
        if number != signal.SIGUSR1:
            self._stop_signals.receive(number, time.monotonic())
        if self._stop_signals.asked > 1:
            if self.search.leader is not None:
                self.search.leader.kill()
            sys.exit(1)

    def _start_zygote(self, leader: Channel) -> ZygoteClient:
        """A zygote with the environment that the leader has for workers."""
        search = self.search
        while True:
            messages = leader.receive(SEARCH_S)
            for message in messages:
                search.note(message)
            for message in messages:
                if message.kind == "welcome":
                    log = search.run.logs / f"{message.fields['attempt']:04d}-{search.name}-zygote.log"
                    variables = message.fields["environment"] | network_variables(search.name, leader.local_host())
                    if search.remote is not None:
                        search.remote.start_forwarding()
                    return ZygoteClient.start(log, without_key(os.environ) | variables)

    def _follow(self, leader: Channel, server: SnapshotServer, zygote: ZygoteClient, workers: NodeWorkers) -> int:
        """Do what the leader says until the run is over; raise ChannelClosed when it is silent."""
        search, ready, heard_at = self.search, False, time.monotonic()
        assert search.address is not None, "there is a channel to it"
        while True:
            # 1 receive
            select.select([leader.fileno(), *workers.filenos()], [], [], POLL_S)
            for message in leader.receive():
                heard_at = server.leader_heard_at = time.monotonic()
                search.note(message)
                if message.kind == "bye":
                    self.left = bool(message.fields.get("left"))
                    search.print(
                        f"left run {search.run.name} on request" if self.left else f"run {search.run.name} is over"
                    )
                    return int(message.fields["status"])
                workers.obey(message)
            workers.start_assigned(search.address.host)
            # 2 report
            if self._preempted:
                self._preempted = False
                leader.send("warned")
            if not ready and zygote.ready(0.0):
                ready = True
                leader.send("ready")
            if ready:
                workers.report_exits(leader)
            workers.relay_messages(leader)
            workers.report_heartbeats(leader)
            # 3 notice a leader that is gone
            if time.monotonic() - heard_at > SILENT * search.silent_s:
                raise ChannelClosed


def main(arguments: list[str] | None = None) -> int:
    """`python -m headway.agent.nodes.node_agent --run RUN --name NAME --slots N [--domain D]`."""
    parser = argparse.ArgumentParser(prog="python -m headway.agent.nodes.node_agent")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--domain", default="")
    options = parser.parse_args(arguments)
    return NodeAgent(LeaderSearch(options.name, RunFolder(options.run)), options.slots, domain=options.domain).serve()


if __name__ == "__main__":
    sys.exit(main())
