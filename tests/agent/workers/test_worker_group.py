"""Workers and spares, and the zygote that forks them: who is there, who has ended, who takes over when an agent dies.

The zygote is the real one; its workers know no torch, and do what their assignment says instead of training.
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
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode)
        except OSError:
            pass
    return found


def main(line):
    with open("/proc/self/comm", "w") as name:
        name.write("there")
    try:
        (told, *_) = line.receive(None)
    except ChannelClosed:
        return 7
    content = [os.pread(fd, 100, 0).decode() for fd in told.descriptors]
    assignment = told.fields["assignment"]
    line.send("here", rank=assignment["rank"], pid=os.getpid(), content=content, more=told.fields["more"],
              sockets=sockets())
    deed, _, value = assignment["run"].partition(" ")
    if deed == "exit":
        line.send("last words")
        return int(value)
    if deed == "kill":
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
def a_zygote(folder: Path) -> Iterator[ZygoteClient]:
    """One whose workers need no torch, and which has nothing to complain of."""
    (folder / "zygote.py").write_text(ZYGOTE)
    ours, theirs = Channel.pair()
    with contextlib.closing(theirs), (folder / "log").open("ab") as log:
        command = [sys.executable, str(folder / "zygote.py"), str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=log, stderr=log)
    process.returncode = 0
    made = ZygoteClient(ours, process.pid, folder / "log")
    eventually(lambda: made.ready(1.0))
    yield made
    made.close()
    assert (folder / "log").read_text() == ""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteClient]:
    with a_zygote(tmp_path_factory.mktemp("zygote")) as made:
        yield made


@pytest.fixture
def zygote(shared: ZygoteClient) -> ZygoteClient:
    """Without any child of the test before, if that left some."""
    for pid in children(shared):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not shared.messages(0.0) and not children(shared))
    return shared


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[ZygoteClient]:
    """One that is the test's own."""
    with a_zygote(tmp_path) as made:
        yield made


@pytest.fixture
def crew(zygote: ZygoteClient) -> Iterator[WorkerGroup]:
    made = WorkerGroup(zygote, FdStore())
    yield made
    made.close()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def place(rank: int, deed: str = "stay") -> Assignment:
    return Assignment(
        run=deed, attempt=1, rank=rank, workers=3, device="cpu", threads=1, log="", rendezvous="", asked_ns=0
    )


def children(zygote: ZygoteClient) -> set[int]:
    return {child.pid for child in psutil.Process(zygote.pid).children()}


def living(zygote: ZygoteClient) -> int:
    """How many processes it has, once it has done all that it was asked for; what else it tells is lost."""
    zygote.ask()
    told = list[int]()
    eventually(lambda: told.extend(m.fields["living"] for m in zygote.messages(1.0) if m.kind == "listed") or told)
    return told[0]


def spares(crew: WorkerGroup, zygote: ZygoteClient, count: int) -> set[int]:
    """Have so many spares, and wait until they are there; those that are new."""
    before = children(zygote)
    crew.fork(count)
    eventually(lambda: len(children(zygote)) == len(crew._processes))
    born = children(zygote) - before
    # forked is not yet there: one that is stopped before its first line does not die with its zygote
    eventually(lambda: all(Path(f"/proc/{pid}/comm").read_text() == "there\n" for pid in born))
    return born


def hear_from(line: Channel, count: int = 1) -> list[Any]:
    found = list[Any]()
    eventually(lambda: found.extend(line.receive(1.0)) or len(found) >= count)
    return found


def exits(crew: WorkerGroup, count: int) -> list[WorkerExit]:
    found = list[WorkerExit]()
    eventually(lambda: found.extend(crew.poll()) or len(found) >= count)
    return found


def said_back(line: Channel, word: str) -> bool:
    line.send("say", said=word)
    (message,) = hear_from(line)
    return message.fields == {"said": word}


# -- a crew


def test_places_go_to_spares_with_what_belongs_to_them(crew: WorkerGroup, zygote: ZygoteClient) -> None:
    os.kill(zygote.pid, signal.SIGSTOP)  # so that it has all requests at once
    crew.fork(3)
    os.kill(zygote.pid, signal.SIGCONT)
    eventually(lambda: len(children(zygote)) == 3)
    there = children(zygote)
    assert (crew.has_workers, crew.pids(), crew.channels()) == (False, {}, {})
    for rank in (0, 1, 2):
        memory = os.memfd_create("test")
        os.write(memory, f"of {rank}".encode())
        line = crew.assign(place(rank), [memory], more=[rank])
        os.close(memory)
        (message,) = hear_from(line)
        assert (message.kind, message.fields["rank"], message.fields["more"]) == ("here", rank, [rank])
        assert message.fields["content"] == [f"of {rank}"]
        assert message.fields["sockets"] == 1, "its own line, and nobody else's"
        eventually(lambda rank=rank: crew.poll() == [] and rank in crew.pids())
        assert crew.pids()[rank] == message.fields["pid"]
        assert crew.channels()[rank] is line
    assert set(crew.pids().values()) == there
    assert crew.has_workers


def test_there_are_as_many_spares_as_asked_for_and_no_more(crew: WorkerGroup, zygote: ZygoteClient) -> None:
    first = spares(crew, zygote, 2)
    crew.fork(2)
    crew.fork(1)
    crew.assign(place(0), [], more=0)
    crew.fork(2)  # one is at work now
    assert living(zygote) == len(children(zygote)) == 3
    assert first < children(zygote)


@pytest.mark.parametrize(("deed", "code"), [("exit 0", 0), ("exit 75", 75), ("kill 9", -9), ("kill 11", -11)])
def test_ends_are_told_and_last_words_heard(crew: WorkerGroup, zygote: ZygoteClient, deed: str, code: int) -> None:
    spares(crew, zygote, 2)
    line, other = crew.assign(place(0, deed), [], more=0), crew.assign(place(1), [], more=0)
    (ended,) = exits(crew, 1)
    assert (ended.rank, ended.code) == (0, code)
    assert crew.pids().keys() == {1}
    kinds = [message.kind for message in hear_from(line, 1 + deed.startswith("exit"))]
    assert kinds == ["here", "last words"][: len(kinds)]
    with pytest.raises(ChannelClosed):
        line.receive(CEILING_S)
    hear_from(other)
    assert said_back(other, "unmoved")


@pytest.mark.parametrize("heard", [True, False])
def test_a_spare_that_died_gets_no_place(crew: WorkerGroup, zygote: ZygoteClient, heard: bool) -> None:
    """Whether the agent knows of it or not; another is forked instead, and its end is nobody's."""
    victim = min(spares(crew, zygote, 2))
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: not is_alive(victim))
    if heard:
        eventually(lambda: crew.poll() == [] and not psutil.pid_exists(victim))
        eventually(lambda: crew.poll() == [])
    crew.fork(2)
    lines = [crew.assign(place(rank), [], more=0) for rank in (0, 1)]
    assert [hear_from(line)[0].fields["rank"] for line in lines] == [0, 1]
    eventually(lambda: crew.poll() == [] and len(crew.pids()) == 2)
    assert victim not in crew.pids().values()


def test_signals_reach_workers_and_not_spares(crew: WorkerGroup, zygote: ZygoteClient) -> None:
    spares(crew, zygote, 3)
    for rank in (0, 1):
        hear_from(crew.assign(place(rank), [], more=0))
    eventually(lambda: crew.poll() == [] and len(crew.pids()) == 2)
    crew.signal(signal.SIGKILL, [1])
    assert [(one.rank, one.code) for one in exits(crew, 1)] == [(1, -9)]
    crew.signal(signal.SIGKILL)
    assert [(one.rank, one.code) for one in exits(crew, 1)] == [(0, -9)]
    crew.signal(signal.SIGKILL)
    assert len(children(zygote)) == 1


def test_spares_stay_when_workers_are_dismissed(crew: WorkerGroup, zygote: ZygoteClient) -> None:
    """Also those that the zygote has not told of yet: they are what makes a restart short."""
    spares(crew, zygote, 2)
    workers = [hear_from(crew.assign(place(rank), [], more=0))[0].fields["pid"] for rank in (0, 1)]
    eventually(lambda: crew.poll() == [] and len(crew.pids()) == 2)
    os.kill(workers[0], signal.SIGSTOP)
    ahead = spares(crew, zygote, 2)
    crew.dismiss()
    assert (crew.has_workers, crew.pids(), crew.channels()) == (False, {}, {})
    eventually(lambda: crew.poll() == [] and children(zygote) == ahead)
    crew.fork(2)
    again = [hear_from(crew.assign(place(rank), [], more=0))[0].fields["pid"] for rank in (0, 1)]
    assert set(again) == ahead == children(zygote)


def descriptors() -> Counter[str]:
    """What this process has open, by what it is: sockets and pipes by their own numbers."""
    gc.collect()
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (a Path would keep one open)
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}")] += 1  # noqa: PTH115
    del found[f"/proc/{os.getpid()}/fd"]
    return found


def test_all_go_in_the_end(crew: WorkerGroup, zygote: ZygoteClient) -> None:
    """Stopped ones and unborn ones, too; no descriptor stays, and those of a next crew are not mistaken for them."""
    before = descriptors()
    there = spares(crew, zygote, 3)
    hear_from(crew.assign(place(0), [], more=0))
    eventually(lambda: crew.poll() == [] and crew.pids())
    there |= spares(crew, zygote, 4)  # of two of which it has not heard
    for pid in there:
        os.kill(pid, signal.SIGSTOP)
    crew.close()
    assert children(zygote) == set()
    assert (crew.has_workers, crew.pids(), crew.channels()) == (False, {}, {})
    assert not descriptors() - before  # some of earlier tests may go in between
    following = WorkerGroup(zygote, FdStore())
    following.fork(1)
    again = following.assign(place(0), [], more=0)
    (message,) = hear_from(again)
    eventually(lambda: following.poll() == [] and following.pids() == {0: message.fields["pid"]})
    eventually(lambda: following.poll() == [] and children(zygote) == {message.fields["pid"]})
    assert said_back(again, "alone")
    following.close()
    assert children(zygote) == set()


# -- the next agent's


def succeed(crew: WorkerGroup, zygote: ZygoteClient) -> tuple[WorkerGroup, ZygoteClient]:
    """Another agent's crew and zygote, from what a keeper would hold; those of the dead are not used any more."""
    kept = FdStore(entries={name: thing for name, thing in crew._fd_store.entries.items() if name != "crew"})
    thing = crew._fd_store.get("crew")
    if thing is not None:
        kept.put("crew", [os.dup(descriptor) for descriptor in thing.descriptors], **thing.fields)
    next_zygote = ZygoteClient.take_over(os.dup(zygote.fileno()), zygote.pid, "")
    for process in crew._processes.values():
        process.channel.close()
    crew._processes.clear()
    following = WorkerGroup(next_zygote, kept)
    following.adopt()
    return following, next_zygote


def end(crew: WorkerGroup, zygote: ZygoteClient) -> None:
    """Leave without ending the zygote, which its fixture does."""
    crew.close()
    socket.socket(fileno=os.dup(zygote.fileno())).close()
    zygote._channel.close()


def test_workers_go_on_under_the_next_agent(crew: WorkerGroup, zygote: ZygoteClient) -> None:
    """They notice nothing, and what they said meanwhile is heard. Spares and whoever is not known are ended."""
    spares(crew, zygote, 2)
    for rank in (0, 1):
        hear_from(crew.assign(place(rank), [], more=0))
    eventually(lambda: crew.poll() == [] and len(crew.pids()) == 2)
    pids = crew.pids()
    spares(crew, zygote, 2)
    crew.hold()
    crew.channels()[1].send("say", said="heard by the next")
    os.write(crew.channels()[0].fileno(), b'{"kind": "say", "said": "cut o')  # it dies in the middle of a word
    following, its_zygote = succeed(crew, zygote)
    assert following.pids() == pids
    assert following.has_workers
    lines = following.channels()
    assert said_back(lines[0], "hello")
    assert hear_from(lines[1])[0].fields == {"said": "heard by the next"}
    eventually(lambda: following.poll() == [] and children(zygote) == set(pids.values()))
    spares(following, zygote, 1)
    third = following.assign(place(2), [], more=0)
    assert hear_from(third)[0].fields["rank"] == 2
    following.signal(signal.SIGKILL)
    eventually(lambda: following.poll() == [] or True)
    end(following, its_zygote)


@pytest.mark.parametrize("told", [True, False])
def test_a_worker_that_ended_meanwhile_is_told_to_the_next_agent(
    crew: WorkerGroup, zygote: ZygoteClient, told: bool
) -> None:
    """Also if the dead agent had heard of it, and took that with it."""
    spares(crew, zygote, 2)
    for rank in (0, 1):
        hear_from(crew.assign(place(rank), [], more=0))
    eventually(lambda: crew.poll() == [] and len(crew.pids()) == 2)
    crew.hold()
    pids = crew.pids()
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(pids[1]))
    if told:
        assert [one.rank for one in exits(crew, 1)] == [1]
    following, its_zygote = succeed(crew, zygote)
    assert exits(following, 1) == [WorkerExit(1, pids[1], -9)]
    assert following.pids() == {0: pids[0]}
    following.fork(1)  # of which it tells after all that it has to say of the others
    told = list[WorkerExit]()
    eventually(lambda: told.extend(following.poll()) or all(one.pid for one in following._processes.values()))
    assert told == [], "once"
    end(following, its_zygote)


def test_workers_that_nobody_kept_are_ended_by_the_next_agent(crew: WorkerGroup, zygote: ZygoteClient) -> None:
    """The agent died before they were well under way."""
    spares(crew, zygote, 2)
    for rank in (0, 1):
        hear_from(crew.assign(place(rank), [], more=0))
    os.kill(max(children(zygote)), signal.SIGSTOP)
    following, its_zygote = succeed(crew, zygote)
    assert not following.has_workers
    eventually(lambda: following.poll() == [] and not children(zygote))
    end(following, its_zygote)


# -- the zygote itself


def test_a_zygote_that_died_is_told_with_its_last_words(mortal: ZygoteClient, tmp_path: Path) -> None:
    """And its workers die with it, stopped or not."""
    crew = WorkerGroup(mortal, FdStore())
    there = spares(crew, mortal, 3)
    os.kill(max(there), signal.SIGSTOP)
    (tmp_path / "log").write_text("what happened\n")
    os.kill(mortal.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"exited with status -9: what happened"):
        eventually(lambda: crew.poll() and False)
    eventually(lambda: not any(is_alive(pid) for pid in there))
    crew.close()
    (tmp_path / "log").write_text("")


def test_all_go_when_nobody_holds_the_zygotes_line(mortal: ZygoteClient) -> None:
    """As long as a keeper has it too, they stay."""
    crew = WorkerGroup(mortal, FdStore())
    there = spares(crew, mortal, 2)
    line = crew.assign(place(0), [], more=0)
    hear_from(line)
    keepers = os.dup(mortal.fileno())
    mortal._channel.close()
    with contextlib.closing(Channel(socket.socket(fileno=os.dup(keepers)))) as keepers_line:
        assert living(ZygoteClient(keepers_line, mortal.pid, Path(), ready=True)) == 2
    assert said_back(line, "still here")
    os.close(keepers)
    eventually(lambda: not any(is_alive(pid) for pid in (*there, mortal.pid)))
    for process in list(crew._processes.values()):
        process.channel.close()
