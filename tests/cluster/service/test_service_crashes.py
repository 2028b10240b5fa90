"""The real service and its node, killed at any write: no job lost, none started twice, none left behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("sqlalchemy")

from eventually import eventually
from headway.cluster.engines import OVER, LaunchRequest
from headway.cluster.service.faults import VARIABLE
from headway.cluster.service.service_engine import ServiceEngine
from headway.errors import EngineError
from service_process import ServiceProcess, headway, headway_json

NODE = "headway.cluster.service.node_process"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    service = ServiceProcess(tmp_path / "runs", "--cpus", "4", "--gpus", "2")
    yield service
    service.stop()


def node_agents(runs: Path) -> list[int]:
    lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if NODE in line and any(str(runs) in word for word in line)]


def request(folder: Path, name: str, script: str, **options: object) -> LaunchRequest:
    folder.mkdir(exist_ok=True)
    return LaunchRequest(name, ("bash", "-c", script), folder, grace_s=5, **options)  # type: ignore[arg-type]


def test_jobs_outlive_a_killed_service_and_are_found_by_the_next(service: ServiceProcess, tmp_path: Path) -> None:
    service.start()
    engine, folder = ServiceEngine(service.runs), tmp_path / "job"
    script = "echo $$ >>pids; until [ -e end ]; do sleep 0.05; done"
    running = engine.launch(request(folder, "long", script, gpus=2))
    waiting = engine.launch(request(folder, "next", "echo ran >>next", gpus=1))
    eventually(lambda: engine.status([running])[running].state == "running")
    service.kill()
    eventually(lambda: not node_agents(service.runs))
    (pid,) = (folder / "pids").read_text().split()
    assert psutil.pid_exists(int(pid))
    (folder / "end").touch()
    eventually(lambda: not psutil.pid_exists(int(pid)))  # it ends while nothing watches it
    service.start()
    eventually(lambda: all(status.state in OVER for status in engine.status([running, waiting]).values()))
    assert {status.state for status in engine.status([running, waiting]).values()} == {"finished"}
    assert (folder / "pids").read_text().split() == [pid]
    assert (folder / "next").read_text() == "ran\n"


@pytest.mark.slow
def test_killed_agent_of_a_node_is_replaced_and_finds_its_jobs(service: ServiceProcess, tmp_path: Path) -> None:
    service.start()
    engine, folder = ServiceEngine(service.runs), tmp_path / "job"
    job = engine.launch(request(folder, "long", "echo $$ >>pids; until [ -e end ]; do sleep 0.05; done; exit 3"))
    eventually(lambda: engine.status([job])[job].state == "running")
    (agent,) = node_agents(service.runs)
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: set(node_agents(service.runs)) - {agent})
    (folder / "end").touch()
    eventually(lambda: engine.status([job])[job].state in OVER)
    status = engine.status([job])[job]
    assert (status.state, status.exit_status, status.starts) == ("failed", 3, 1)
    assert len((folder / "pids").read_text().split()) == 1


@pytest.mark.slow
def test_second_service_of_a_folder_is_refused(service: ServiceProcess) -> None:
    service.start()
    error = headway(service.runs, "up", "--port", "0", status=1)
    assert "a service already runs" in error
    assert headway_json(service.runs, "queue") == []


@pytest.mark.slow
def test_start_with_other_nodes_is_refused_while_a_killed_service_s_job_runs(tmp_path: Path) -> None:
    emulated = ServiceProcess(tmp_path / "runs", "--emulate", "2x4")
    emulated.start()
    engine, folder = ServiceEngine(emulated.runs), tmp_path / "job"
    job = engine.launch(request(folder, "long", "echo $$ >>pids; until [ -e end ]; do sleep 0.05; done", gpus=4))
    eventually(lambda: engine.status([job])[job].state == "running")
    emulated.kill()
    eventually(lambda: not node_agents(emulated.runs))
    error = headway(emulated.runs, "up", "--port", "0", status=2)
    assert "this start leaves out: 1 on node-" in error
    assert "headway up --emulate 2x4" in error
    emulated.start()
    (folder / "end").touch()
    eventually(lambda: engine.status([job])[job].state == "finished")
    emulated.stop()
    assert len((folder / "pids").read_text().split()) == 1


def lives(service: ServiceProcess, folder: Path, fault: int | None) -> int:
    """Submit jobs to a service that dies at a write, start it again, and check what became of them; return how often
    it died."""
    deaths, engine, jobs = 0, ServiceEngine(service.runs), dict[str, str]()
    service.start({} if fault is None else {VARIABLE: str(fault)}, wait=False)
    scripts = {
        "short": "echo >>short",
        "saves": '[ "$HEADWAY_START" = 2 ] || { echo >>saves-1; exit 75; }; echo >>saves-2',
        "fails": "echo >>fails; exit 4",
        "cancelled": "trap 'exit 75' USR1; echo $$ >>cancelled; while :; do sleep 0.05; done",
    }

    def insist(act: object) -> bool:
        """Do something, with a service that is started again whenever it has died."""
        nonlocal deaths
        if not service.alive:
            deaths += 1
            service.start(wait=False)
        try:
            act()  # type: ignore[operator]
        except EngineError:
            return False
        return True

    for name, script in scripts.items():
        eventually(lambda: insist(engine.probe), service.log.read_text, poll_s=0.05)
        body = {"request": request_json(request(folder, name, script, gpus=1)), "key": name}

        def submit(name: str = name, body: dict[str, object] = body) -> None:
            jobs[name] = engine.connection.post("/api/v1/jobs", body)["id"]

        eventually(lambda: insist(submit), service.log.read_text, poll_s=0.05)
    eventually(lambda: insist(lambda: None) and (folder / "cancelled").exists(), service.log.read_text)
    eventually(lambda: insist(lambda: engine.cancel(jobs["cancelled"])), service.log.read_text, poll_s=0.05)
    states: dict[str, str] = {}

    def over() -> bool:
        answers = engine.status(list(jobs.values()))
        states.update({name: answers[job].state for name, job in jobs.items()})
        return all(state in OVER for state in states.values())

    def all_over() -> bool:
        return insist(over) and len(states) == len(jobs) and all(state in OVER for state in states.values())

    eventually(all_over, service.log.read_text, poll_s=0.05)
    assert states == {"short": "finished", "saves": "finished", "fails": "failed", "cancelled": "cancelled"}, fault
    for name in ("short", "saves-1", "saves-2", "fails"):
        assert len((folder / name).read_text().splitlines()) == 1, (fault, name)
    pids = (folder / "cancelled").read_text().split()
    assert len(pids) == 1, (fault, pids)
    assert not psutil.pid_exists(int(pids[0])), fault
    return deaths


def request_json(asked: LaunchRequest) -> dict[str, object]:
    from headway.cluster.engines.submissions import request_to_json

    return request_to_json(asked)


@pytest.mark.parametrize(
    "fault", [9, pytest.param(3, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.slow)]
)
def test_killed_at_a_write_nothing_is_lost_or_done_twice(service: ServiceProcess, tmp_path: Path, fault: int) -> None:
    assert lives(service, tmp_path / "job", fault) == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_every_write_nothing_is_lost_or_done_twice(tmp_path: Path) -> None:
    """They are tried in order until the service outlives one."""
    for fault in range(1, 200):
        service = ServiceProcess(tmp_path / f"runs-{fault}", "--cpus", "4", "--gpus", "2")
        try:
            if lives(service, tmp_path / f"job-{fault}", fault) == 0:
                assert fault > 20
                return
        finally:
            service.stop()
    raise AssertionError("the service never came to its end")


@pytest.mark.slow
def test_agent_killed_around_the_start_of_a_command_starts_it_once(service: ServiceProcess, tmp_path: Path) -> None:
    """At each write of the node's agent, before and after the process exists."""
    for fault in (1, 2, 3):
        service.start({"HEADWAY_KILL_NODE_AT_WRITE": str(fault)})
        engine, folder = ServiceEngine(service.runs), tmp_path / f"job-{fault}"
        job = engine.launch(request(folder, "once", "echo >>ran"))
        eventually(lambda: engine.status([job])[job].state in OVER, service.log.read_text)  # noqa: B023
        assert engine.status([job])[job].state == "finished"
        assert (folder / "ran").read_text() == "\n"
        service.stop()
