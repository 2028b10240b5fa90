"""The engine of this machine."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_suite import *  # noqa: F403
from engine_suite import EngineHarness, appears

from eventually import eventually
from headway.cluster.engines import LaunchRequest
from headway.cluster.engines.local.engine import LocalEngine
from headway.cluster.engines.local.jobs import LocalJob, MachineCapacity, startable
from headway.cluster.engines.scripts import start_script
from headway.errors import EngineError, EngineUnreachable, UsageError

DAEMON = "headway.cluster.engines.local.daemon"


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> EngineHarness:
    folder = tmp_path_factory.mktemp("local")
    return EngineHarness(lambda: LocalEngine(folder / "queue", cpus=4, gpus=4), folder, machines=1, cpus=4, gpus=4)


def daemon_pid(queue: Path) -> int:
    command_lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return next(pid for pid, line in command_lines.items() if DAEMON in line and str(queue) in line)


def kill_daemon(queue: Path) -> None:
    pid = daemon_pid(queue)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(pid))


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[EngineHarness]:
    """A fresh queue, with room for one job."""
    harness = EngineHarness(
        lambda: LocalEngine(tmp_path / "queue", cpus=1, gpus=0), tmp_path, machines=1, cpus=1, gpus=0
    )
    yield harness
    for folder in (tmp_path / "queue" / "jobs").glob("*"):  # of a test that failed
        harness.engine.cancel(folder.name)
        harness.over(folder.name)


def test_stopped_daemon_is_unreachable(queue: EngineHarness) -> None:
    prober = LocalEngine(queue.folder / "queue", cpus=1, gpus=0, probe_s=0.2)
    prober.probe()  # there is no daemon, and none is needed
    job = queue.engine.launch(queue.request("sleep 1000", grace_s=0))
    LocalEngine(queue.folder / "queue", probe_s=60).probe()
    pid = daemon_pid(queue.folder / "queue")
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineUnreachable, match=r"does not answer within 0\.2 s"):
            prober.probe()
    finally:
        os.kill(pid, signal.SIGCONT)
    queue.engine.cancel(job)
    assert queue.over(job).state == "cancelled"


def test_next_daemon_takes_over_the_jobs_of_a_killed_one(queue: EngineHarness) -> None:
    first = queue.request("echo $$ >up; until [ -e end ]; do sleep 0.02; done; exit 4")
    second = queue.request("[ -e once ] && exit 0; echo >once; exit 75")
    running, waiting = queue.engine.launch(first), queue.engine.launch(second)
    pid = int(appears(first.folder / "up"))
    kill_daemon(queue.folder / "queue")
    assert (queue.folder / "queue" / "owner.sock").exists()  # its stale socket does no harm
    assert queue.until(running, "running").starts == 1
    assert queue.until(waiting, "waiting").starts == 0
    kill_daemon(queue.folder / "queue")
    (first.folder / "end").touch()
    eventually(lambda: not psutil.pid_exists(pid))  # it ends while there is no daemon
    status = queue.over(running)
    assert (status.state, status.exit_status, status.starts) == ("failed", 4, 1)
    assert queue.over(waiting).starts == 2


def test_job_just_started_receives_a_signal(queue: EngineHarness) -> None:
    """A job in state running may have no process yet."""
    for _ in range(5):
        request = queue.request("until [ -e signalled ]; do sleep 0.02; done")
        job = queue.engine.launch(request)
        queue.until(job, "running")
        queue.engine.signal(job, signal.SIGUSR1)
        (request.folder / "signalled").touch()
        status = queue.over(job)
        assert (status.state, status.starts) == ("finished", 2)


def test_pid_is_written_before_the_command_runs(tmp_path: Path) -> None:
    """However slow the script is that starts it."""
    slow, task, start, log = (tmp_path / name for name in ("slow.sh", "task.sh", "start.sh", "log"))
    slow.write_text("unset BASH_ENV; trap 'sleep 0.2' DEBUG\n")
    task.write_text('cat pid; echo "$$ $PPID"\n')
    start.write_text(start_script(task, log, tmp_path))
    subprocess.run(["bash", start], env={**os.environ, "BASH_ENV": str(slow)}, check=True)
    written, actual = log.read_text().splitlines()
    assert written == actual


def test_secrets_die_with_the_daemon(queue: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    first = queue.request("echo >up; until [ -e end ]; do sleep 0.02; done")
    running = queue.engine.launch(first)
    waiting = queue.engine.launch(queue.request("true", secrets=("A_SECRET",)))
    appears(first.folder / "up")
    kill_daemon(queue.folder / "queue")
    (first.folder / "end").touch()
    status = queue.over(waiting)
    assert (status.state, status.starts) == ("failed", 0)
    assert "A_SECRET" in status.reason
    assert queue.over(running).state == "finished"


def test_daemon_exits_when_no_job_is_left(queue: EngineHarness) -> None:
    queue.over(queue.engine.launch(queue.request("true")))
    pid = daemon_pid(queue.folder / "queue")
    eventually(lambda: not psutil.pid_exists(pid))
    assert not (queue.folder / "queue" / "owner.sock").exists()
    assert queue.over(queue.engine.launch(queue.request("true"))).state == "finished"


def test_cancel_right_after_the_start_takes_effect(queue: EngineHarness) -> None:
    """It is signalled as soon as it has a process, not only killed after its grace period."""
    for _ in range(10):
        job = queue.engine.launch(queue.request("sleep 1000", grace_s=1000))
        queue.until(job, "running")
        queue.engine.cancel(job)
        assert queue.over(job).state == "cancelled"


def test_job_that_ignores_its_time_limit_is_killed(queue: EngineHarness) -> None:
    request = queue.request('trap "echo signalled" USR1; while :; do sleep 0.05; done', limit_s=4, grace_s=1)
    job = queue.engine.launch(request)
    status = queue.over(job)
    assert (status.state, status.exit_status) == ("failed", 137)
    assert "limit of 4 s" in status.reason
    assert queue.output(job) == ["signalled\n"]


def test_background_processes_are_killed_with_their_job(queue: EngineHarness) -> None:
    request = queue.request("sleep 1000 & echo $! >pid")
    assert queue.over(queue.engine.launch(request)).state == "finished"
    pid = int((request.folder / "pid").read_text())
    eventually(lambda: not psutil.pid_exists(pid))


def test_queue_in_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot create a queue"):
        LocalEngine(tmp_path / "file" / "queue", cpus=1, gpus=0).launch(LaunchRequest("x", ("true",), tmp_path))


def test_jobs_start_in_order_of_submission(tmp_path: Path) -> None:
    capacity = MachineCapacity(4, ("0", "1", "2"))

    def job(number: int, state: str = "waiting", gpus_held: tuple[str, ...] = (), **asks: int) -> LocalJob:
        return LocalJob(
            f"{number:x}", number, LaunchRequest("x", ("true",), tmp_path, **asks), state=state, gpus=gpus_held
        )

    running = job(0, "running", ("1",), gpus=1)
    for waiting, expected in [
        ([job(1, gpus=2), job(2)], [("1", ("0", "2")), ("2", ())]),
        ([job(1, gpus=3), job(2)], []),
        ([job(2, cpus=2), job(1, cpus=2)], [("1", ())]),
        ([job(1, cpus=3), job(2)], [("1", ())]),
    ]:
        assert [(started.id, gpus) for started, gpus in startable(capacity, [running, *waiting])] == expected


def test_invalid_request_names_the_bad_field(tmp_path: Path) -> None:
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
