"""Connections to ports of jobs: what arrives, who may, and how many."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("sqlalchemy")

import test_service_api
from test_service_api import NODE, Api

from eventually import eventually
from headway.cluster.engines import OVER, LaunchRequest
from headway.cluster.engines.submissions import request_to_json
from headway.cluster.service.connection import connect
from headway.cluster.service.host_starts import HostStarts
from headway.cluster.service.job_streams import (
    IDLE_S,
    MOST_OF_USER,
    MOST_STREAMS,
    WINDOW_BYTES,
    Direction,
    JobStreams,
)
from headway.cluster.service.messages import StartReport, WantedStart
from headway.cluster.service.node_streams import listens
from headway.cluster.service.service_engine import ServiceEngine
from headway.errors import EngineError, UsageError
from service_process import ServiceProcess

api, database = test_service_api.api, test_service_api.database
ECHO = """
import socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        while part := self.request.recv(65536):
            self.request.sendall(part)
        self.request.sendall(b"end")
class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
with Server(("127.0.0.1", 0), Echo) as server:
    open("port.new", "w").write(str(server.server_address[1]))
    __import__("os").rename("port.new", "port")
    server.serve_forever()
"""


@pytest.mark.parametrize("seed", range(20))
def test_repeated_and_cut_requests_lose_and_double_no_byte(seed: int) -> None:
    rng = Random(seed)
    sent, direction, received = rng.randbytes(5 * WINDOW_BYTES // 2), Direction(), bytearray()
    offset, ended = 0, False
    while not ended:
        if rng.random() < 0.5:
            begin = max(offset - rng.choice((0, 0, 1000)), 0)  # an answer was lost
            part = sent[begin : begin + rng.choice((1, 1000, 300_000))]
            offset = direction.put(begin, part, begin + len(part) == len(sent))
            assert offset - len(received) <= 2 * WINDOW_BYTES
        else:
            part, ended = direction.get(len(received))
            if not ended and rng.random() < 0.3:
                part = b""  # the answer was lost
            received += part
    assert bytes(received) == sent


def test_part_beyond_a_gap_or_the_end_is_refused() -> None:
    direction = Direction()
    assert direction.put(0, b"abc", False) == 3
    for offset in (4, -1):
        with pytest.raises(UsageError, match="and 3 is the next"):
            direction.put(offset, b"", False)
    assert direction.get(2) == (b"c", False)
    for offset in (1, 4):
        with pytest.raises(UsageError, match="2 to 3 are there"):
            direction.get(offset)
    assert direction.put(3, b"", True) == 3
    assert direction.put(1, b"bc", True) == 3
    with pytest.raises(UsageError):
        direction.put(3, b"d", False)


def test_full_direction_takes_no_more_until_it_is_read() -> None:
    direction = Direction()
    assert direction.put(0, bytes(WINDOW_BYTES + 1), True) == WINDOW_BYTES
    assert direction.full
    assert not direction.ended  # the last byte is still to come
    assert direction.put(WINDOW_BYTES, b"x", True) == WINDOW_BYTES
    direction.get(1)
    assert direction.put(WINDOW_BYTES, b"x", True) == WINDOW_BYTES + 1
    assert direction.ended


def test_open_connections_are_limited_and_silent_ones_closed() -> None:
    now, changed = [0.0], list[str]()
    streams = JobStreams(lambda: now[0], changed.append)
    opened = [streams.open_port("ann", "n1", None, "1:1:0", 80) for _ in range(MOST_OF_USER)]
    with pytest.raises(EngineError, match=f"'ann' has {MOST_OF_USER} open"):
        streams.open_port("ann", "n1", None, "1:1:0", 80)
    for number in range(MOST_STREAMS - MOST_OF_USER):
        streams.open_port(f"user-{number}", "n2", None, "1:1:0", 80)
    with pytest.raises(EngineError, match=f"the service has {MOST_STREAMS} open"):
        streams.open_port("bob", "n1", None, "1:1:0", 80)
    assert len(streams.wanted("n1")) == MOST_OF_USER
    now[0] = IDLE_S
    streams.of_node(opened[0].id, None)
    streams.of_user(opened[0].id, "ann")
    streams.of_node(opened[1].id, None)  # but not its user
    with pytest.raises(EngineError, match="node n1 has not answered for 60 s"):
        streams.of_user(opened[2].id, "ann")  # but not its node
    now[0] = IDLE_S + 1
    assert streams.of_user(opened[0].id, "ann") is opened[0]
    with pytest.raises(UsageError, match="no stream"):
        streams.of_user(opened[1].id, "ann")
    assert streams.wanted("n1") == ()
    assert changed.count("n1") > MOST_OF_USER
    streams.open_port("bob", "n1", None, "1:1:0", 80)


def test_stream_is_of_its_user_and_its_node_only() -> None:
    streams = JobStreams(lambda: 0.0, lambda _: None)
    stream = streams.open_port("ann", "n1", "f" * 64, "1:1:0", 80)
    for peer in (None, "e" * 64):
        with pytest.raises(UsageError, match="no stream"):
            streams.of_node(stream.id, peer)
    with pytest.raises(UsageError, match="no stream"):
        streams.of_user(stream.id, "bob")
    assert streams.wanted("n1")
    assert streams.of_node(stream.id, "f" * 64) is stream
    assert not streams.wanted("n1")  # an agent that starts anew does not connect again
    streams.close(stream, "no process listens")
    with pytest.raises(EngineError, match="no process listens"):
        streams.of_user(stream.id, "ann")


def test_waiting_side_hears_of_a_part_at_once() -> None:
    async def wait() -> bytes:
        direction = Direction()
        waiting = asyncio.create_task(direction.wait(lambda: direction.next > 0))
        await asyncio.sleep(0)
        direction.put(0, b"x", False)
        await waiting
        return direction.get(0)[0]

    assert asyncio.run(wait()) == b"x"


def test_only_running_jobs_have_ports_and_their_node_is_told(api: Api) -> None:
    waits = api.submit(gpus=2, site={"priority": "-1"})
    job = api.submit(gpus=1)
    tasks = api.submit(gpus=0, array=2)
    (start,) = (start for start in api.sync() + api.sync(node="n2") if start.key.startswith(f"{job}:"))
    node = api.get(f"/api/v1/jobs/{job}")[0]["placement"][0]["node"]
    api.sync(StartReport(start.key, "running"), node=node)
    api.post(f"/api/v1/jobs/{waits}/cancel")
    refusals = {waits: "only running", tasks: "tasks have ports of their own", "none": "no job"}
    for name, words in refusals.items():
        answer = api.post(f"/api/v1/jobs/{name}/streams", {"port": 6006})
        assert answer.status_code in (400, 409), answer.text
        assert words in answer.text
    for port in (0, 65536, "x"):
        assert api.post(f"/api/v1/jobs/{job}/streams", {"port": port}).status_code == 422
    stream = api.post(f"/api/v1/jobs/{job}/streams", {"port": 6006}).json()["stream"]
    report = {"report": {"node": node, "starts": [{"key": start.key, "state": "running"}]}}
    told = api.post("/api/v1/sync", report, NODE).json()["orders"]["streams"]
    assert told == [{"id": stream, "start": start.key, "port": 6006, "follow": False}]
    failure = f"/api/v1/node-streams/{stream}/failure"
    assert api.post(failure, {"reason": "nothing listens"}, NODE).status_code == 200
    assert api.post("/api/v1/sync", report, NODE).json()["orders"]["streams"] == []
    assert "nothing listens" in str(api.get(f"/api/v1/streams/{stream}?offset=0"))
    assert f"port 6006 of job {job}" in str(api.get("/api/v1/audit"))


def test_port_of_another_rank_is_asked_of_its_node(api: Api) -> None:
    job = api.submit(gpus=2, machines=2)
    for node in ("n1", "n2"):
        (start,) = api.sync(node=node)
        api.sync(StartReport(start.key, "running"), node=node)
    opened = api.post(f"/api/v1/jobs/{job}/streams", {"port": 6006, "rank": 1}).json()
    assert opened["node"] == "n2"
    told = {
        node: api.post("/api/v1/sync", {"report": {"node": node}}, NODE).json()["orders"]["streams"]
        for node in ("n1", "n2")
    }
    assert told == {"n1": [], "n2": [{"id": opened["stream"], "start": f"{job}:1:1", "port": 6006, "follow": False}]}
    answer = api.post(f"/api/v1/jobs/{job}/streams", {"port": 6006, "rank": 2})
    assert (answer.status_code, answer.json()["error"]) == (400, f"job {job} has no rank 2")


def test_port_is_the_jobs_only_if_its_processes_listen(tmp_path: Path) -> None:
    starts, key = HostStarts(tmp_path), "7:1:0"
    (tmp_path / "echo.py").write_text(f"import os; os.chdir({str(tmp_path)!r}){ECHO}")
    request = LaunchRequest("echo", (sys.executable, str(tmp_path / "echo.py")), tmp_path)
    starts.begin(WantedStart(key, "run", (), 0, ("m1",), 1, None, request_to_json(request)))

    def is_of_job(port: int) -> bool:
        return listens(tmp_path / "starts", key, port)

    try:
        eventually((tmp_path / "port").exists)
        port = int((tmp_path / "port").read_text())
        assert is_of_job(port)
        with socket.create_server(("127.0.0.1", 0)) as other:
            assert not is_of_job(other.getsockname()[1])
        assert not listens(tmp_path / "starts", "8:1:0", port)
        pid = next((tmp_path / "starts").glob("*/pid"))
        began = pid.read_text()
        pid.write_text(f"{os.getpid()} {os.getsid(0)}")
        assert is_of_job(port)  # a child of the job, in a session of its own
        pid.write_text(began)
    finally:
        eventually(lambda: starts.signal(key, (signal.SIGKILL,)) or starts.report()[0].state == "exited")
    assert not is_of_job(port)


@pytest.fixture(params=["local", "joined"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceProcess]:
    """A service with one node: of its own, or one that has joined over TLS as on another machine."""
    joined = request.param == "joined"
    service = ServiceProcess(tmp_path / "runs", *(["--no-local-node", "--tls"] if joined else ["--gpus", "0"]))
    service.start()
    agent = None
    try:
        if joined:
            (tmp_path / "token").write_text(connect(service.runs).post("/api/v1/join-tokens", {})["token"])
            agent = join(service, tmp_path)
            eventually(lambda: connect(service.runs).get("/api/v1/nodes"), (tmp_path / "agent.log").read_text)
        yield service
    finally:
        if agent is not None:
            agent.terminate()
            agent.wait()
        service.stop()


def join(service: ServiceProcess, folder: Path) -> "subprocess.Popen[bytes]":
    """The process of the agent of a node that joins."""
    program = [sys.executable, "-c", "from headway.cli.main import main; main()", "node", "join"]
    url = connect(service.runs).url
    fingerprint = service.log.read_text().split("fingerprint ")[1].split()[0]
    options = ["--token-file", str(folder / "token"), "--fingerprint", fingerprint, "--folder", str(folder / "node")]
    options.append("--jobs-as-root")  # of no effect for anybody else
    with (folder / "agent.log").open("wb") as log:
        return subprocess.Popen([*program, url, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


@pytest.mark.slow
def test_echo_server_of_a_job_answers_through_the_service(service: ServiceProcess, tmp_path: Path) -> None:
    engine, folder = ServiceEngine(service.runs), tmp_path / "job"
    folder.mkdir()
    (folder / "echo.py").write_text(f"import os; os.chdir({str(folder)!r}){ECHO}")
    job = engine.launch(LaunchRequest("echo", (sys.executable, str(folder / "echo.py")), folder))
    eventually((folder / "port").exists, service.log.read_text)
    eventually(lambda: engine.status([job])[job].state == "running")
    log, port = tmp_path / "forward.log", int((folder / "port").read_text())
    contents = [Random(number).randbytes(size) for number, size in enumerate((0, 1, 3_000_000, 100_000))]
    with forwarded(service, job, port, log) as local, ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda content: exchange(local, content), contents))
    assert answers == [content + b"end" for content in contents]
    assert log.read_text() == ""
    with socket.create_server(("127.0.0.1", 0)) as other:
        others = other.getsockname()[1]
        with forwarded(service, job, others, log) as local:
            assert exchange(local, b"") == b""
            eventually(lambda: f"no process of job {job} listens on 127.0.0.1:{others}" in log.read_text())
    with forwarded(service, job, port, log) as local, socket.create_connection(("127.0.0.1", local)) as channel:
        channel.sendall(b"x")
        assert channel.recv(1) == b"x"
        engine.cancel(job)
        assert not received_until_closed(channel)  # the job is gone, and with it the connection
    eventually(lambda: engine.status([job])[job].state in OVER)


@contextmanager
def forwarded(service: ServiceProcess, job: str, port: int, log: Path) -> Iterator[int]:
    """Yield the local port of a `headway port-forward`, whose stderr goes to a log."""
    program = [sys.executable, "-c", "from headway.cli.main import main; main()", "port-forward", job, f"{port}:0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*program, "--runs", str(service.runs)], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert f"port {port} of job {job} (echo)" in line, log.read_text()
            yield int(line.split(":")[1])
        finally:
            process.terminate()


def received_until_closed(channel: socket.socket) -> bytes:
    """What still comes; a connection may be closed or reset."""
    received = bytearray()
    with suppress(ConnectionResetError):
        while part := channel.recv(65536):
            received += part
    return bytes(received)


def exchange(port: int, content: bytes) -> bytes:
    """Send all and half-close, while receiving all."""
    with socket.create_connection(("127.0.0.1", port)) as channel, ThreadPoolExecutor() as pool:

        def send() -> None:
            channel.sendall(content)
            channel.shutdown(socket.SHUT_WR)

        sending, answer = pool.submit(send), bytearray()
        while part := channel.recv(65536):
            answer += part
        sending.result()
        return bytes(answer)
