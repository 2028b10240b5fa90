"""Nodes that join, and what they and the leader report: real connections and processes, no workers."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.agent import new_run
from headway.agent.fd_store import FdStore
from headway.agent.nodes.leader import leader_answers
from headway.agent.nodes.lease import LeaderLease
from headway.agent.nodes.membership import Membership
from headway.agent.remote.folder_server import RunFolderServer
from headway.state import Channel, Message
from headway.state.handshake import connect, server_handshake
from headway.track import RunFolder, create_run, lock_run

KEY = "a key of the tests, and long enough"
SILENT_S = 100.0


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = create_run(tmp_path, "r", "r")
    run.key_file.write_text(KEY)
    return run


@pytest.fixture
def nodes(run: RunFolder) -> Iterator[Membership]:
    """The nodes of a leader."""
    listener = socket.create_server(("127.0.0.1", 0))
    lease = LeaderLease(run.leases, "vm-0", *listener.getsockname()[:2])
    lease.begin()
    nodes = Membership(KEY, listener, {}, lease, FdStore(), RunFolderServer(run), SILENT_S)
    yield nodes
    nodes.close(1)


def join(nodes: Membership, name: str, pid: int = 1) -> Channel:
    """Connect a node of this name that sends nothing but hello."""
    channel = Channel(connect((nodes.lease.host, nodes.lease.port), KEY))
    channel.send(
        "hello", name=name, machine="the-first", domain="", slots=1, host="127.0.0.1", port=1, pid=pid,
        free_bytes=0, files={}, apart=False,
    )  # fmt: skip
    return channel


def first_messages(nodes: Membership, channel: Channel) -> list[Message]:
    """Return what a node receives first."""
    while not (messages := channel.receive(0.05)):
        nodes.poll()
    return messages


def test_second_node_of_a_rank_is_told_who_has_it(nodes: Membership) -> None:
    with contextlib.closing(join(nodes, "n1", 4711)) as first:
        assert first_messages(nodes, first)[0].kind == "welcome"
        with contextlib.closing(join(nodes, "n1", 4712)) as second:
            (refused,) = first_messages(nodes, second)
            assert refused.kind == "taken"
            assert (refused.fields["pid"], refused.fields["machine"]) == (4711, "the-first")


@contextlib.contextmanager
def refusing(run: RunFolder) -> Iterator[list[str]]:
    """A leader that tells every caller that its rank is taken; yields the names of the callers."""
    callers, channels = list[str](), list[Channel]()

    def refuse(listener: socket.socket) -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            try:
                stream = server_handshake(end, KEY)
                callers.append(json.loads(stream.readline())["name"])
            except ConnectionError:  # a probe
                end.close()
                continue
            channels.append(Channel(stream))
            channels[-1].send("taken", pid=4711, machine="the-first", silent_s=0.5)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        LeaderLease(run.leases, "vm-0", *listener.getsockname()[:2]).begin()
        threading.Thread(target=refuse, args=(listener,), daemon=True).start()
        yield callers
    for channel in channels:
        channel.close()


def stderr_of(*words: str) -> list[str]:
    """Run a command that fails; return its messages without times and names."""
    done = subprocess.run([sys.executable, *words], stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    return [re.sub(r"^[\d:]{8} \S+: ", "", line) for line in done.stderr.splitlines()]


REFUSED = [
    "this rank is taken by process 4711 on the-first; waiting up to 1 s for it to end",
    "this node is in the run already: process 4711 on the-first",
]


def test_taken_rank_is_reported_once_and_given_up_later(run: RunFolder) -> None:
    with refusing(run) as callers:
        messages = stderr_of(
            "-m", "headway.agent.nodes.node_agent", "--run", str(run.path), "--name", "n1", "--slots", "1"
        )
    assert messages == REFUSED
    assert len(callers) > 1
    assert set(callers) == {"n1"}


def test_rank_0_joins_a_run_that_already_has_a_leader(recipe, tmp_path: Path) -> None:
    """Its command was killed, and the launcher of its leading agent lives on."""
    run = new_run(recipe(), tmp_path, name="r", workers=2).folder
    run.key_file.write_text(KEY)
    words = ("-m", "headway.cli.main", "agent", "--run", "r", "--runs", str(tmp_path), "--nodes", "2", "--rank", "0")
    with lock_run(run):
        assert not leader_answers(run)
        with refusing(run) as callers:
            assert leader_answers(run)
            messages = stderr_of(*words)
    assert messages[0].startswith(f"process {os.getpid()} already leads run r: joining it (headway logs r --follow")
    assert messages[1:] == REFUSED
    assert set(callers) == {f"{socket.gethostname()}-0"}
