"""Nodes that come: what they and the agent that leads say of it. Real connections and processes, and no workers."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.agent.desk import Desk
from headway.agent.kept import Kept
from headway.agent.lease import Right
from headway.agent.team import Team
from headway.state import Line
from headway.state.far import read_line
from headway.state.trust import admit, call
from headway.track import RunFolder, create_run

KEY = "a key of the tests, and long enough"
SILENT_S = 100.0


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = create_run(tmp_path, "r", "r")
    run.key_file.write_text(KEY)
    return run


@pytest.fixture
def team(run: RunFolder) -> Iterator[Team]:
    """That of an agent that leads."""
    listener = socket.create_server(("127.0.0.1", 0))
    right = Right(run.leases, "vm-0", *listener.getsockname()[:2])
    right.begin()
    team = Team(KEY, listener, {}, right, Kept(), Desk(run), SILENT_S)
    yield team
    team.close()


def joined(team: Team, name: str, pid: int = 1) -> Line:
    """A node of this name, that says no more than hello."""
    line = Line(call((team.right.host, team.right.port), KEY))
    line.send(
        "hello", name=name, machine="the-first", domain="", slots=1, host="127.0.0.1", port=1, pid=pid,
        free_bytes=0, files={}, apart=False,
    )  # fmt: skip
    return line


def test_whose_a_rank_is_that_another_asks_for(team: Team) -> None:
    with contextlib.closing(joined(team, "n1", 4711)), contextlib.closing(joined(team, "n1", 4712)) as second:
        while not (told := second.receive(0.05)):
            team.attend()
        assert [message.kind for message in told] == ["taken"]
        assert (told[0].fields["pid"], told[0].fields["machine"]) == (4711, "the-first")


def test_a_rank_that_is_taken_is_told_once_and_given_up_after_a_while(run: RunFolder) -> None:
    calls = list[dict[str, Any]]()

    def refuse(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = listener.accept()
                admit(end, KEY)
                calls.append(json.loads(read_line(end)))
                line = Line(end)
                line.send("taken", pid=4711, machine="the-first", silent_s=1.0)
                kept.append(line)

    kept = list[Line]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Right(run.leases, "vm-0", *listener.getsockname()[:2]).begin()
        threading.Thread(target=refuse, args=(listener,), daemon=True).start()
        command = [sys.executable, "-m", "headway.agent.node", "--run", str(run.path), "--name", "n1", "--slots", "1"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    for line in kept:
        line.close()
    assert done.returncode == 1
    assert len(calls) > 1
    assert {call["name"] for call in calls} == {"n1"}
    assert [line.split("n1: ", 1)[1] for line in done.stderr.splitlines()] == [
        "this rank is taken, by process 4711 on the-first; waiting 2 s, for it may be about to go",
        "this node is in the run already: process 4711 on the-first",
    ]
