"""Workers and spares, the zygote that forks them, and their takeover when an agent dies.

The zygote is real; its workers need no torch, and run what their assignment says instead of training.
"""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventually import CEILING_S, eventually
from headway.agent.fd_store import FdStore
from headway.agent.workers.worker_group import WorkerGroup
from headway.agent.workers.workers import WorkerExit
from headway.agent.workers.zygote import ZygoteClient
from headway.errors import WorkerError
from headway.recipe import Assignment
from headway.state import Channel, ChannelClosed

ZYGOTE = """
import os, signal, stat, sys, time, types
from headway.state import ChannelClosed


def sockets():
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode)
        except OSError:
            pass
    return count


def main(line):
    with open("/proc/self/comm", "w") as name:
        name.write("started")
    try:
        (message, *_) = line.receive(None)
    except ChannelClosed:
        return 7
    content = [os.pread(fd, 100, 0).decode() for fd in message.descriptors]
    assignment = message.fields["assignment"]
    line.send("here", rank=assignment["rank"], pid=os.getpid(), content=content, more=message.fields["more"],
              sockets=sockets())
    action, _, value = assignment["run"].partition(" ")
    if action == "exit":
        line.send("last message")
        return int(value)
    if action == "kill":
        os.kill(os.getpid(), int(value))
    try:
        while True:
            for message in line.receive(None):
                line.send("echo", said=message.fields["said"])
    except ChannelClosed:
        return 0


sys.modules["headway.train.worker"] = worker = types.ModuleType("headway.train.worker")
worker.main = main
import headway.train
headway.train.worker = worker
from headway.train import zygote
zygote.main(int(sys.argv[1]))
"""


@contextlib.contextmanager
def start_zygote(folder: Path) -> Iterator[ZygoteClient]:
    """A zygote whose workers need no torch, and whose log must stay empty."""
    (folder / "zygote.py").write_text(ZYGOTE)
    agent_end, zygote_end = Channel.pair()
    with contextlib.closing(zygote_end), (folder / "log").open("ab") as log:
        command = [sys.executable, str(folder / "zygote.py"), str(zygote_end.fileno())]
        process = subprocess.Popen(command, pass_fds=[zygote_end.fileno()], stdout=log, stderr=log)
    process.returncode = 0
    client = ZygoteClient(agent_end, process.pid, folder / "log")
    eventually(lambda: client.ready(1.0))
    yield client
    client.close()
    assert (folder / "log").read_text() == ""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteClient]:
    with start_zygote(tmp_path_factory.mktemp("zygote")) as client:
        yield client


@pytest.fixture
def zygote(shared: ZygoteClient) -> ZygoteClient:
    """The shared zygote, without children of an earlier test."""
    for pid in children(shared):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not shared.messages(0.0) and not children(shared))
    return shared


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[ZygoteClient]:
    """A zygote that the test may kill."""
    with start_zygote(tmp_path) as client:
        yield client


@pytest.fixture
def group(zygote: ZygoteClient) -> Iterator[WorkerGroup]:
    workers = WorkerGroup(zygote, FdStore())
    yield workers
    workers.close()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def place(rank: int, action: str = "stay") -> Assignment:
    return Assignment(
        run=action, attempt=1, rank=rank, workers=3, device="cpu", threads=1, log="", rendezvous="", asked_ns=0
    )


def children(zygote: ZygoteClient) -> set[int]:
    return {child.pid for child in psutil.Process(zygote.pid).children()}


def living(zygote: ZygoteClient) -> int:
    """How many processes it has after all requests so far; other messages are dropped."""
    zygote.ask()
    counts = eventually(lambda: [m.fields["living"] for m in zygote.messages(1.0) if m.kind == "listed"])
    return counts[0]


def spares(group: WorkerGroup, zygote: ZygoteClient, count: int) -> set[int]:
    """Fork up to `count` spares, wait until they run, and return the new ones."""
    before = children(zygote)
    group.fork(count)
    eventually(lambda: len(children(zygote)) == len(group._processes))
    born = children(zygote) - before
    # forked is not started: a process stopped before its first line does not die with its zygote
    eventually(lambda: all(Path(f"/proc/{pid}/comm").read_text() == "started\n" for pid in born))
    return born


def receive(line: Channel, count: int = 1) -> list[Any]:
    messages = list[Any]()
    eventually(lambda: messages.extend(line.receive(1.0)) or len(messages) >= count)
    return messages


def exits(group: WorkerGroup, count: int) -> list[WorkerExit]:
    exited = list[WorkerExit]()
    eventually(lambda: exited.extend(group.poll()) or len(exited) >= count)
    return exited


def echoes(line: Channel, word: str) -> bool:
    line.send("say", said=word)
    (message,) = receive(line)
    return message.fields == {"said": word}


# -- a worker group


def test_spares_get_their_assignment_and_descriptors(group: WorkerGroup, zygote: ZygoteClient) -> None:
    os.kill(zygote.pid, signal.SIGSTOP)  # so that it has all requests at once
    group.fork(3)
    os.kill(zygote.pid, signal.SIGCONT)
    eventually(lambda: len(children(zygote)) == 3)
    pids = children(zygote)
    assert (group.has_workers, group.pids(), group.channels()) == (False, {}, {})
    for rank in (0, 1, 2):
        memory = os.memfd_create("test")
        os.write(memory, f"of {rank}".encode())
        line = group.assign(place(rank), [memory], more=[rank])
        os.close(memory)
        (message,) = receive(line)
        assert (message.kind, message.fields["rank"], message.fields["more"]) == ("here", rank, [rank])
        assert message.fields["content"] == [f"of {rank}"]
        assert message.fields["sockets"] == 1, "only its own channel"
        eventually(lambda rank=rank: group.poll() == [] and rank in group.pids())
        assert group.pids()[rank] == message.fields["pid"]
        assert group.channels()[rank] is line
    assert set(group.pids().values()) == pids
    assert group.has_workers


def test_fork_creates_no_more_spares_than_asked(group: WorkerGroup, zygote: ZygoteClient) -> None:
    first = spares(group, zygote, 2)
    group.fork(2)
    group.fork(1)
    group.assign(place(0), [], more=0)
    group.fork(2)  # one is a worker now
    assert living(zygote) == len(children(zygote)) == 3
    assert first < children(zygote)


@pytest.mark.parametrize(("action", "code"), [("exit 0", 0), ("exit 75", 75), ("kill 9", -9), ("kill 11", -11)])
def test_exits_are_reported_and_last_messages_received(
    group: WorkerGroup, zygote: ZygoteClient, action: str, code: int
) -> None:
    spares(group, zygote, 2)
    line, other = group.assign(place(0, action), [], more=0), group.assign(place(1), [], more=0)
    (ended,) = exits(group, 1)
    assert (ended.rank, ended.code) == (0, code)
    assert group.pids().keys() == {1}
    kinds = [message.kind for message in receive(line, 1 + action.startswith("exit"))]
    assert kinds == ["here", "last message"][: len(kinds)]
    with pytest.raises(ChannelClosed):
        line.receive(CEILING_S)
    receive(other)
    assert echoes(other, "unmoved")


@pytest.mark.parametrize("reported", [True, False])
def test_dead_spare_gets_no_assignment(group: WorkerGroup, zygote: ZygoteClient, reported: bool) -> None:
    """Whether the agent knows of it or not; another is forked instead, and its exit is not reported."""
    victim = min(spares(group, zygote, 2))
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: not is_alive(victim))
    if reported:
        eventually(lambda: group.poll() == [] and not psutil.pid_exists(victim))
        eventually(lambda: group.poll() == [])
    group.fork(2)
    lines = [group.assign(place(rank), [], more=0) for rank in (0, 1)]
    assert [receive(line)[0].fields["rank"] for line in lines] == [0, 1]
    eventually(lambda: group.poll() == [] and len(group.pids()) == 2)
    assert victim not in group.pids().values()


def test_signals_reach_workers_and_not_spares(group: WorkerGroup, zygote: ZygoteClient) -> None:
    spares(group, zygote, 3)
    for rank in (0, 1):
        receive(group.assign(place(rank), [], more=0))
    eventually(lambda: group.poll() == [] and len(group.pids()) == 2)
    group.signal(signal.SIGKILL, [1])
    assert [(end.rank, end.code) for end in exits(group, 1)] == [(1, -9)]
    group.signal(signal.SIGKILL)
    assert [(end.rank, end.code) for end in exits(group, 1)] == [(0, -9)]
    group.signal(signal.SIGKILL)
    assert len(children(zygote)) == 1


def test_spares_stay_when_workers_are_dismissed(group: WorkerGroup, zygote: ZygoteClient) -> None:
    """Also those that the zygote has not reported yet: they make restarts fast."""
    spares(group, zygote, 2)
    workers = [receive(group.assign(place(rank), [], more=0))[0].fields["pid"] for rank in (0, 1)]
    eventually(lambda: group.poll() == [] and len(group.pids()) == 2)
    os.kill(workers[0], signal.SIGSTOP)
    ahead = spares(group, zygote, 2)
    group.dismiss()
    assert (group.has_workers, group.pids(), group.channels()) == (False, {}, {})
    eventually(lambda: group.poll() == [] and children(zygote) == ahead)
    group.fork(2)
    again = [receive(group.assign(place(rank), [], more=0))[0].fields["pid"] for rank in (0, 1)]
    assert set(again) == ahead == children(zygote)


def descriptors() -> Counter[str]:
    """Open descriptors of this process by target; sockets and pipes by inode."""
    gc.collect()
    targets = Counter[str]()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (a Path would keep one open)
        with contextlib.suppress(OSError):
            targets[os.readlink(f"/proc/self/fd/{name}")] += 1  # noqa: PTH115
    del targets[f"/proc/{os.getpid()}/fd"]
    return targets


def test_close_ends_all_processes(group: WorkerGroup, zygote: ZygoteClient) -> None:
    """Also stopped and unreported ones; no descriptor leaks, and the next group's processes are not ended."""
    before = descriptors()
    pids = spares(group, zygote, 3)
    receive(group.assign(place(0), [], more=0))
    eventually(lambda: group.poll() == [] and group.pids())
    pids |= spares(group, zygote, 4)  # two of them are not reported yet
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    group.close()
    assert children(zygote) == set()
    assert (group.has_workers, group.pids(), group.channels()) == (False, {}, {})
    assert not descriptors() - before  # those of earlier tests may close meanwhile
    following = WorkerGroup(zygote, FdStore())
    following.fork(1)
    again = following.assign(place(0), [], more=0)
    (message,) = receive(again)
    eventually(lambda: following.poll() == [] and following.pids() == {0: message.fields["pid"]})
    eventually(lambda: following.poll() == [] and children(zygote) == {message.fields["pid"]})
    assert echoes(again, "still here")
    following.close()
    assert children(zygote) == set()


# -- takeover


def take_over(group: WorkerGroup, zygote: ZygoteClient) -> tuple[WorkerGroup, ZygoteClient]:
    """Another agent's group and zygote, from what a launcher would hold; those of the dead agent are not used again."""
    fd_store = FdStore(entries={name: entry for name, entry in group._fd_store.entries.items() if name != "crew"})
    entry = group._fd_store.get("crew")
    if entry is not None:
        fd_store.put("crew", [os.dup(descriptor) for descriptor in entry.descriptors], **entry.fields)
    next_zygote = ZygoteClient.take_over(os.dup(zygote.fileno()), zygote.pid, "")
    for process in group._processes.values():
        process.channel.close()
    group._processes.clear()
    following = WorkerGroup(next_zygote, fd_store)
    following.adopt()
    return following, next_zygote


def end(group: WorkerGroup, zygote: ZygoteClient) -> None:
    """Close a group without its zygote, which its fixture closes."""
    group.close()
    socket.socket(fileno=os.dup(zygote.fileno())).close()
    zygote._channel.close()


def test_workers_continue_under_the_next_agent(group: WorkerGroup, zygote: ZygoteClient) -> None:
    """They notice nothing, and their messages meanwhile arrive. Spares and unknown processes are ended."""
    spares(group, zygote, 2)
    for rank in (0, 1):
        receive(group.assign(place(rank), [], more=0))
    eventually(lambda: group.poll() == [] and len(group.pids()) == 2)
    pids = group.pids()
    spares(group, zygote, 2)
    group.hold()
    group.channels()[1].send("say", said="for the next agent")
    os.write(group.channels()[0].fileno(), b'{"kind": "say", "said": "cut o')  # it dies in the middle of a message
    following, next_zygote = take_over(group, zygote)
    assert following.pids() == pids
    assert following.has_workers
    lines = following.channels()
    assert echoes(lines[0], "hello")
    assert receive(lines[1])[0].fields == {"said": "for the next agent"}
    eventually(lambda: following.poll() == [] and children(zygote) == set(pids.values()))
    spares(following, zygote, 1)
    third = following.assign(place(2), [], more=0)
    assert receive(third)[0].fields["rank"] == 2
    following.signal(signal.SIGKILL)
    eventually(lambda: following.poll() == [] or True)
    end(following, next_zygote)


@pytest.mark.parametrize("reported", [True, False])
def test_worker_that_exited_meanwhile_is_reported_to_the_next_agent(
    group: WorkerGroup, zygote: ZygoteClient, reported: bool
) -> None:
    """Also if the dead agent already knew of it."""
    spares(group, zygote, 2)
    for rank in (0, 1):
        receive(group.assign(place(rank), [], more=0))
    eventually(lambda: group.poll() == [] and len(group.pids()) == 2)
    group.hold()
    pids = group.pids()
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(pids[1]))
    if reported:
        assert [end.rank for end in exits(group, 1)] == [1]
    following, next_zygote = take_over(group, zygote)
    assert exits(following, 1) == [WorkerExit(1, pids[1], -9)]
    assert following.pids() == {0: pids[0]}
    following.fork(1)  # its report comes after all others
    again = list[WorkerExit]()
    eventually(lambda: again.extend(following.poll()) or all(process.pid for process in following._processes.values()))
    assert again == [], "reported once"
    end(following, next_zygote)


def test_workers_that_were_not_stored_are_ended_by_the_next_agent(group: WorkerGroup, zygote: ZygoteClient) -> None:
    """The agent died during their start-up."""
    spares(group, zygote, 2)
    for rank in (0, 1):
        receive(group.assign(place(rank), [], more=0))
    os.kill(max(children(zygote)), signal.SIGSTOP)
    following, next_zygote = take_over(group, zygote)
    assert not following.has_workers
    eventually(lambda: following.poll() == [] and not children(zygote))
    end(following, next_zygote)


# -- the zygote itself


def test_dead_zygote_is_reported_with_its_log_tail(mortal: ZygoteClient, tmp_path: Path) -> None:
    """Its workers die with it, stopped or not."""
    group = WorkerGroup(mortal, FdStore())
    pids = spares(group, mortal, 3)
    os.kill(max(pids), signal.SIGSTOP)
    (tmp_path / "log").write_text("what happened\n")
    os.kill(mortal.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"exited with status -9: what happened"):
        eventually(lambda: group.poll() and False)
    eventually(lambda: not any(is_alive(pid) for pid in pids))
    group.close()
    (tmp_path / "log").write_text("")


def test_zygote_exits_when_its_channel_is_closed(mortal: ZygoteClient) -> None:
    """As long as a launcher holds it too, all processes stay."""
    group = WorkerGroup(mortal, FdStore())
    pids = spares(group, mortal, 2)
    line = group.assign(place(0), [], more=0)
    receive(line)
    launcher_end = os.dup(mortal.fileno())
    mortal._channel.close()
    with contextlib.closing(Channel(socket.socket(fileno=os.dup(launcher_end)))) as launcher_channel:
        assert living(ZygoteClient(launcher_channel, mortal.pid, Path(), ready=True)) == 2
    assert echoes(line, "still here")
    os.close(launcher_end)
    eventually(lambda: not any(is_alive(pid) for pid in (*pids, mortal.pid)))
    for process in list(group._processes.values()):
        process.channel.close()
