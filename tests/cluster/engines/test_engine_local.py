"""The engine of one machine."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_suite import *  # noqa: F403
from engine_suite import Rig, appears

from eventually import eventually
from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.local.engine import LocalEngine
from headway.cluster.engines.local.jobs import LocalJob, MachineCapacity, startable
from headway.cluster.engines.scripts import start_script
from headway.errors import EngineError, UsageError

OWNER = "headway.cluster.engines.local.daemon"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("local")
    return Rig(lambda: LocalEngine(folder / "queue", cpus=4, gpus=4), folder, machines=1, cpus=4, gpus=4)


def owner_of(place: Path) -> int:
    """The process that owns a queue."""
    words = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return next(pid for pid, line in words.items() if OWNER in line and str(place) in line)


def kill_owner(place: Path) -> None:
    pid = owner_of(place)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(pid))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Rig]:
    """A queue of its own, with room for one job."""
    made = Rig(lambda: LocalEngine(tmp_path / "queue", cpus=1, gpus=0), tmp_path, machines=1, cpus=1, gpus=0)
    yield made
    for folder in (tmp_path / "queue" / "jobs").glob("*"):  # of a test that failed
        made.engine.cancel(folder.name)
        made.over(folder.name)


def test_a_killed_owner_is_followed_by_one_that_knows(alone: Rig) -> None:
    first = alone.request("echo $$ >up; until [ -e end ]; do sleep 0.02; done; exit 4")
    second = alone.request("[ -e once ] && exit 0; echo >once; exit 75")
    running, waiting = alone.engine.launch(first), alone.engine.launch(second)
    pid = int(appears(first.folder / "up"))
    kill_owner(alone.folder / "queue")
    assert (alone.folder / "queue" / "owner.sock").exists()  # what it left behind is in nobody's way
    assert alone.until(running, "running").starts == 1
    assert alone.until(waiting, "waiting").starts == 0
    kill_owner(alone.folder / "queue")
    (first.folder / "end").touch()
    eventually(lambda: not psutil.pid_exists(pid))  # it ends while nobody looks
    status = alone.over(running)
    assert (status.state, status.exit_status, status.starts) == ("failed", 4, 1)
    assert alone.over(waiting).starts == 2


def test_one_just_started_hears_a_signal(alone: Rig) -> None:
    """Who is said to run may have no process yet."""
    for _ in range(5):
        request = alone.request("until [ -e told ]; do sleep 0.02; done")
        job = alone.engine.launch(request)
        alone.until(job, "running")
        alone.engine.signal(job, signal.SIGUSR1)
        (request.folder / "told").touch()
        status = alone.over(job)
        assert (status.state, status.starts) == ("finished", 2)


def test_a_command_that_runs_can_be_told(tmp_path: Path) -> None:
    """Its number is written before it does anything, however slow the script is that started it."""
    slow, task, start, log = (tmp_path / name for name in ("slow.sh", "task.sh", "start.sh", "log"))
    slow.write_text("unset BASH_ENV; trap 'sleep 0.2' DEBUG\n")
    task.write_text('cat pid; echo "$$ $PPID"\n')
    start.write_text(start_script(task, log, tmp_path))
    subprocess.run(["bash", start], env={**os.environ, "BASH_ENV": str(slow)}, check=True)
    written, true = log.read_text().splitlines()
    assert written == true


def test_secrets_die_with_the_owner(alone: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    first = alone.request("echo >up; until [ -e end ]; do sleep 0.02; done")
    running = alone.engine.launch(first)
    waiting = alone.engine.launch(alone.request("true", secrets=("A_SECRET",)))
    appears(first.folder / "up")
    kill_owner(alone.folder / "queue")
    (first.folder / "end").touch()
    status = alone.over(waiting)
    assert (status.state, status.starts) == ("failed", 0)
    assert "A_SECRET" in status.reason
    assert alone.over(running).state == "finished"


def test_the_owner_goes_when_nothing_is_left(alone: Rig) -> None:
    alone.over(alone.engine.launch(alone.request("true")))
    pid = owner_of(alone.folder / "queue")
    eventually(lambda: not psutil.pid_exists(pid))
    assert not (alone.folder / "queue" / "owner.sock").exists()
    assert alone.over(alone.engine.launch(alone.request("true"))).state == "finished"


def test_cancel_right_after_the_start_is_heard(alone: Rig) -> None:
    """It is told as soon as it has a process, and not only ended when its grace is over."""
    for _ in range(10):
        job = alone.engine.launch(alone.request("sleep 1000", grace_s=1000))
        alone.until(job, "running")
        alone.engine.cancel(job)
        assert alone.over(job).state == "cancelled"


def test_who_does_not_hear_the_limit_is_ended_at_it(alone: Rig) -> None:
    request = alone.request('trap "echo told" USR1; while :; do sleep 0.05; done', limit_s=4, grace_s=1)
    job = alone.engine.launch(request)
    status = alone.over(job)
    assert (status.state, status.exit_status) == ("failed", 137)
    assert "limit of 4 s" in status.reason
    assert alone.said(job) == ["told\n"]


def test_nothing_outlives_its_job(alone: Rig) -> None:
    request = alone.request("sleep 1000 & echo $! >pid")
    assert alone.over(alone.engine.launch(request)).state == "finished"
    pid = int((request.folder / "pid").read_text())
    eventually(lambda: not psutil.pid_exists(pid))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot hold a queue"):
        LocalEngine(tmp_path / "file" / "queue", cpus=1, gpus=0).launch(LaunchRequest("x", ("true",), tmp_path))


def test_nobody_overtakes(tmp_path: Path) -> None:
    room = MachineCapacity(4, ("0", "1", "2"))

    def job(number: int, state: str = "waiting", has: tuple[str, ...] = (), **asks: int) -> LocalJob:
        return LocalJob(f"{number:x}", number, LaunchRequest("x", ("true",), tmp_path, **asks), state=state, gpus=has)

    running = job(0, "running", ("1",), gpus=1)
    for waiting, started in [
        ([job(1, gpus=2), job(2)], [("1", ("0", "2")), ("2", ())]),
        ([job(1, gpus=3), job(2)], []),
        ([job(2, cpus=2), job(1, cpus=2)], [("1", ())]),
        ([job(1, cpus=3), job(2)], [("1", ())]),
    ]:
        assert [(one.id, gpus) for one, gpus in startable(room, [running, *waiting])] == started


def test_a_request_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    for change, word in [
        ({"name": "a b"}, "a b"),
        ({"name": "-x"}, "-x"),
        ({"command": ()}, "no command"),
        ({"command": ("a\0b",)}, "NUL"),
        ({"environment": {"A B": ""}}, "A B"),
        ({"secrets": ("A=B",)}, "A=B"),
        ({"machines": 0}, "machines"),
        ({"cpus": 0}, "cpus"),
        ({"limit_s": -1.0}, "limit_s"),
        ({"folder": Path("here")}, "absolute"),
    ]:
        fields = {"name": "x", "command": ("true",), "folder": tmp_path, **change}
        with pytest.raises(UsageError, match=word):
            LaunchRequest(**fields)  # type: ignore[arg-type]
