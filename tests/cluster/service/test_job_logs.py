"""Logs of jobs that are on their nodes only: who gets them, what a job cannot make of them, when they are gone."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pwd import getpwuid, struct_passwd

import pytest

pytest.importorskip("sqlalchemy")

from access_world import NODE_TOKEN, AccessWorld, access_world
from service_verbs import URL, Terminal

from eventually import eventually
from headway.cluster.engines import OVER, LaunchRequest
from headway.cluster.engines.submissions import request_to_json
from headway.cluster.service.connection import ServiceConnection
from headway.cluster.service.job_streams import WINDOW_BYTES
from headway.cluster.service.messages import NodeReport, StartReport
from headway.cluster.service.node_logs import KEPT_S, PRUNE_S, NodeLogs, is_here, log_in
from headway.cluster.service.node_process import run_agent
from headway.cluster.service.outcome import RankResult
from headway.errors import EngineError, UsageError

KEY = "7:2:1"


def written(path: Path, text: str = "printed\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("key", ["7:2:1", "7_3:1:0"])
def test_log_is_found_in_the_job_s_folder_or_here(tmp_path: Path, key: str) -> None:
    logs, folder = NodeLogs(tmp_path / "logs"), tmp_path / "job"
    folder.mkdir()
    place = logs.place(key, folder, None)
    assert place == log_in(folder, key)
    written(place, "there")
    with logs.open(key) as log:
        assert log.read() == b"there"
    own = logs.place("8:1:0", None, None)
    assert own.parent == tmp_path / "logs"
    written(own, "here")
    with NodeLogs(tmp_path / "logs").open("8:1:0") as log:  # the next agent's
        assert log.read() == b"here"


@pytest.mark.parametrize("key", ["../../etc/passwd", "7:2", "7:2:1/..", "a:1:0", "", "7:2:1\n"])
def test_what_is_no_start_names_no_file(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError, match="is no start of a job"):
        NodeLogs(tmp_path / "logs").open(key)


def linked_file(log: Path, secret: Path) -> None:
    log.unlink()
    log.symlink_to(secret)


def linked_folder(log: Path, secret: Path) -> None:
    log.parent.rename(log.parent.parent / "moved")
    written(secret.parent / log.name, "secret")
    log.parent.symlink_to(secret.parent)


def linked_jobs(log: Path, secret: Path) -> None:
    jobs = log.parent.parent
    jobs.rename(jobs.parent / "moved")
    written(secret.parent / log.parent.name / log.name, "secret")
    jobs.symlink_to(secret.parent)


def fifo(log: Path, _: Path) -> None:
    log.unlink()
    os.mkfifo(log)


@pytest.mark.parametrize("replace", [linked_file, linked_folder, linked_jobs, fifo])
def test_job_cannot_have_another_file_sent_for_its_log(tmp_path: Path, replace: Callable[[Path, Path], None]) -> None:
    logs, folder = NodeLogs(tmp_path / "logs"), tmp_path / "job"
    folder.mkdir()
    log = written(logs.place(KEY, folder, None))
    replace(log, written(tmp_path / "root" / "secret", "secret"))
    with pytest.raises(EngineError, match=r"cannot be read|was replaced"):
        logs.open(KEY)


def test_log_of_another_user_must_be_that_user_s_file(tmp_path: Path) -> None:
    logs, folder = NodeLogs(tmp_path / "logs"), tmp_path / "job"
    folder.mkdir()
    me = getpwuid(os.getuid())
    log = written(logs.place(KEY, folder, me))
    logs.open(KEY).close()
    other = struct_passwd((me.pw_name, "x", me.pw_uid + 1, *me[3:]))
    assert logs.place(KEY, folder, other) == log
    with pytest.raises(EngineError, match="was replaced"):
        logs.open(KEY)


def test_log_that_is_gone_is_named_and_old_ones_are_removed(tmp_path: Path) -> None:
    now = [1e9]
    logs, folder = NodeLogs(tmp_path / "logs", lambda: now[0]), tmp_path / "job"
    folder.mkdir()
    with pytest.raises(EngineError, match="log of start 2 of job 7, rank 1, is not on this node"):
        logs.open(KEY)
    log = written(logs.place(KEY, folder, None))
    log.unlink()
    with pytest.raises(EngineError, match="is gone"):
        logs.open(KEY)
    folder.joinpath("jobs", "7").rmdir()
    folder.joinpath("jobs").rmdir()
    folder.rmdir()
    with pytest.raises(EngineError, match=r"is gone: .* was removed"):
        logs.open(KEY)
    old = written(logs.place("8:1:0", None, None))
    os.utime(old, (now[0], now[0]))
    now[0] += KEPT_S
    logs.place("9:1:0", None, None)
    assert old.exists()
    now[0] += PRUNE_S
    logs.place("9:1:0", None, None)
    assert not old.exists()


def test_folder_that_only_others_see_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_here(tmp_path)
    assert not is_here(tmp_path / "none")

    def refuse(_: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert is_here(tmp_path)


# -- through the service


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AccessWorld]:
    (tmp_path / "service").mkdir()
    with access_world(tmp_path / "service") as world:
        yield world


@pytest.fixture
def terminal(
    world: AccessWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Terminal:
    return Terminal(world, tmp_path, monkeypatch, capsys)


@contextmanager
def agent_of(name: str, folder: Path) -> Iterator[None]:
    """The real agent of a node, which shares no folder with the user; its requests go to the service of the test."""
    stopping = threading.Event()
    connection = ServiceConnection(URL, NODE_TOKEN, keep=True)
    running = threading.Thread(target=run_agent, args=(name, folder, connection, lambda: not stopping.is_set()))
    running.start()
    try:
        yield
    finally:
        stopping.set()
        running.join()


def started(world: AccessWorld, script: str, folder: Path, **options: object) -> str:
    """A job that the service has started; its folder is on no node."""
    command = (sys.executable, "-c", script)
    request = LaunchRequest("job", command, folder, site={"tenant": "red"}, **options)  # type: ignore[arg-type]
    answer = world.ask("red-member", "POST", "/api/v1/jobs", {"request": request_to_json(request)})
    job = str(answer.json()["id"])
    eventually(lambda: world.cycle() or world.ask("root", "GET", f"/api/v1/jobs/{job}").json()[0]["starts"])
    return job


def state(world: AccessWorld, job: str) -> str:
    return str(world.ask("root", "GET", f"/api/v1/jobs/{job}").json()[0]["state"])


def test_log_of_a_node_without_the_folder_reaches_those_who_may_see_the_job(
    world: AccessWorld, terminal: Terminal, tmp_path: Path
) -> None:
    size = 3 * WINDOW_BYTES // 2
    script = f"import os; print(rank := os.environ['HEADWAY_MACHINE'], 'first'); print('x' * {size} * (rank == '0'))"
    with agent_of("n1", tmp_path / "n1"), agent_of("n2", tmp_path / "n2"):
        job = started(world, f"{script}; print('last', end='')", tmp_path / "nowhere" / "job", machines=2, gpus=3)
        eventually(lambda: state(world, job) in OVER)
        printed = terminal.type("red-viewer", "logs", job)
        assert printed.status == 0, printed.err
        texts = (f"0 first\n{'x' * size}\nlast\n", "1 first\n\nlast\n")
        assert printed.out == "".join(f"== {job}/0001-{rank}.log\n{text}" for rank, text in enumerate(texts))
        assert not (tmp_path / "nowhere").exists()
        one = terminal.type("red-admin", "logs", job, "--rank", "1", "--attempt", "1").out
        assert one == f"== {job}/0001-1.log\n{texts[1]}"
        other = terminal.type("blue-admin", "logs", job)
        assert (other.status, other.out) == (2, "")
        assert f"no run is called '{job}'" in other.err  # as if there were none
        for path in (tmp_path / "n1" / "logs").iterdir():
            path.unlink()
        half = terminal.type("root", "logs", job)
        assert "1 first" in half.out
        assert "note: the log of start 1 of job" in half.err
        gone = terminal.type("root", "logs", job, "--rank", "0")
        assert gone.status != 0
        assert "is not on this node" in gone.err


def test_followed_log_grows_until_the_job_is_over(world: AccessWorld, terminal: Terminal, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"print('begun', flush=True); print(open({str(gate)!r}).read(), flush=True)"
    with agent_of("n1", tmp_path / "n1"):
        job = started(world, script, tmp_path / "nowhere", gpus=1)
        eventually(lambda: state(world, job) == "running")
        received = threading.Event()
        put = world.plane.streams.of_node

        def watch(name: str, peer: str | None) -> object:
            stream = put(name, peer)
            if stream.sent["node"].next:  # the first line is on its way, and the job still runs
                received.set()
            return stream

        world.plane.streams.of_node = watch  # type: ignore[method-assign, assignment]

        def release() -> None:
            assert received.wait(60)
            gate.write_text("released")

        releasing = threading.Thread(target=release)
        releasing.start()
        printed = terminal.type("red-member", "logs", job, "--follow", "--json")
        releasing.join()
        assert [line.split('"line":')[1] for line in printed.out.splitlines()] == ['"begun"}', '"released"}']


def test_log_of_a_node_that_is_silent_or_removed_is_refused_with_a_sentence(world: AccessWorld) -> None:
    job = world.submit("red-member", "red", gpus=4, machines=2)
    world.cycle()
    world.run_all()
    (row,) = world.ask("root", "GET", f"/api/v1/jobs/{job}").json()
    nodes = [place["node"] for place in row["placement"]]
    assert world.ask("red-viewer", "GET", f"/api/v1/jobs/{job}/logs").json() == [
        {"start": 1, "rank": rank, "node": node} for rank, node in enumerate(nodes)
    ]
    wrong = world.ask("root", "POST", f"/api/v1/jobs/{job}/logs", {"start": 2}).json()
    assert wrong["error"] == f"job {job} has no start 2 with rank 0"
    stream = world.ask("red-viewer", "POST", f"/api/v1/jobs/{job}/logs", {"start": 1}).json()["stream"]
    assert "no stream" in world.ask("red-member", "GET", f"/api/v1/streams/{stream}", offset=0).text
    assert world.plane.streams.wanted(nodes[0])[0].start == f"{job}:1:0"
    for rank, node in enumerate(nodes):
        exited = StartReport(f"{job}:1:{rank}", "exited", RankResult(75, 1.0))
        world.plane.sync(NodeReport(node, (exited,)))
    world.plane.fleet.silence.silent_for = lambda *_: {nodes[0]}  # type: ignore[method-assign]
    answer = world.ask("root", "POST", f"/api/v1/jobs/{job}/logs", {"start": 1})
    assert answer.status_code == 409
    assert f"is on node {nodes[0]}, whose agent does not report" in answer.text


def test_logs_of_earlier_starts_are_asked_of_the_nodes_that_ran_them(world: AccessWorld) -> None:
    job = world.submit("red-member", "red", gpus=4, site={"preemptible": "yes"})
    places = []
    for start in (1, 2):
        world.cycle()
        world.run_all()
        (row,) = world.ask("root", "GET", f"/api/v1/jobs/{job}").json()
        places.append(row["placement"][0]["node"])
        world.plane.fleet.drain(places[-1])
        exited = StartReport(f"{job}:{start}:0", "exited", RankResult(75, 1.0))
        world.plane.sync(NodeReport(places[-1], (exited,)))
    world.plane.fleet.cordon(places[0], False)
    world.run_all()
    world.cycle()
    assert places == ["n1", "n2"]
    listed = world.ask("root", "GET", f"/api/v1/jobs/{job}/logs").json()
    assert [(log["start"], log["node"]) for log in listed] == [(1, "n1"), (2, "n2")]
