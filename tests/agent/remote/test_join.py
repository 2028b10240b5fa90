"""Nodes that come: what they and the agent that leads say of it. Real connections and processes, and no workers."""

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
from headway.agent.nodes.node_group import NodeGroup
from headway.agent.remote.folder_server import RunFolderServer
from headway.state import Channel, Message
from headway.state.handshake import call, server_handshake
from headway.state.peer_read import read_line
from headway.track import RunFolder, create_run, lock_run

KEY = "a key of the tests, and long enough"
SILENT_S = 100.0


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = create_run(tmp_path, "r", "r")
    run.key_file.write_text(KEY)
    return run


@pytest.fixture
def team(run: RunFolder) -> Iterator[NodeGroup]:
    """That of an agent that leads."""
    listener = socket.create_server(("127.0.0.1", 0))
    right = LeaderLease(run.leases, "vm-0", *listener.getsockname()[:2])
    right.begin()
    team = NodeGroup(KEY, listener, {}, right, FdStore(), RunFolderServer(run), SILENT_S)
    yield team
    team.close()


def joined(team: NodeGroup, name: str, pid: int = 1) -> Channel:
    """A node of this name, that says no more than hello."""
    line = Channel(call((team.right.host, team.right.port), KEY))
    line.send(
        "hello", name=name, machine="the-first", domain="", slots=1, host="127.0.0.1", port=1, pid=pid,
        free_bytes=0, files={}, apart=False,
    )  # fmt: skip
    return line


def told(team: NodeGroup, line: Channel) -> list[Message]:
    """What a node hears first."""
    while not (heard := line.receive(0.05)):
        team.attend()
    return heard


def test_whose_a_rank_is_that_another_asks_for(team: NodeGroup) -> None:
    with contextlib.closing(joined(team, "n1", 4711)) as first:
        assert told(team, first)[0].kind == "welcome"
        with contextlib.closing(joined(team, "n1", 4712)) as second:
            (refused,) = told(team, second)
            assert refused.kind == "taken"
            assert (refused.fields["pid"], refused.fields["machine"]) == (4711, "the-first")


@contextlib.contextmanager
def refusing(run: RunFolder) -> Iterator[list[str]]:
    """An agent that leads and that tells whoever calls that its rank is taken; gives the names of those that did."""
    calls, lines = list[str](), list[Channel]()

    def refuse(listener: socket.socket) -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            try:
                server_handshake(end, KEY)
                calls.append(json.loads(read_line(end))["name"])
            except ConnectionError:  # one that only looked
                end.close()
                continue
            lines.append(Channel(end))
            lines[-1].send("taken", pid=4711, machine="the-first", silent_s=0.5)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        LeaderLease(run.leases, "vm-0", *listener.getsockname()[:2]).begin()
        threading.Thread(target=refuse, args=(listener,), daemon=True).start()
        yield calls
    for line in lines:
        line.close()


def said(*words: str) -> list[str]:
    """What a command says until it has failed, without the time and its name."""
    done = subprocess.run([sys.executable, *words], stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    return [re.sub(r"^[\d:]{8} \S+: ", "", line) for line in done.stderr.splitlines()]


REFUSED = [
    "this rank is taken, by process 4711 on the-first; waiting 1 s, for it may be about to go",
    "this node is in the run already: process 4711 on the-first",
]


def test_a_rank_that_is_taken_is_told_once_and_given_up_after_a_while(run: RunFolder) -> None:
    with refusing(run) as calls:
        words = said("-m", "headway.agent.nodes.node_agent", "--run", str(run.path), "--name", "n1", "--slots", "1")
    assert words == REFUSED
    assert len(calls) > 1
    assert set(calls) == {"n1"}


def test_the_first_of_a_run_that_is_led_already_joins(recipe, tmp_path: Path) -> None:
    """Its command was killed, and the keeper of the agent that it had lead lives on."""
    run = new_run(recipe(), tmp_path, name="r", workers=2).folder
    run.key_file.write_text(KEY)
    words = ("-m", "headway.cli.main", "agent", "--run", "r", "--runs", str(tmp_path), "--nodes", "2", "--rank", "0")
    with lock_run(run):
        assert not leader_answers(run)
        with refusing(run) as calls:
            assert leader_answers(run)
            joined = said(*words)
    assert joined[0].startswith(f"process {os.getpid()} leads run r already: joining it (headway logs r --follow")
    assert joined[1:] == REFUSED
    assert set(calls) == {f"{socket.gethostname()}-0"}
