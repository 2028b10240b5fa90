"""Whether a Ray cluster is alive: what follows from who answers, and a real cluster whose raylet was killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from eventually import eventually
from headway.cluster.engines.ray.engine import _connect
from headway.cluster.engines.ray.liveness import Answer, Liveness, RayletAddress, answers, judge
from headway.errors import EngineUnreachable
from headway.recipe import to_toml

GCS = ("head", 1)
HEAD = RayletAddress("head", 2, head=True, here=False)
HEAD_HERE = RayletAddress("head", 2, head=True, here=True)
OTHER_HERE = RayletAddress("me", 3, head=False, here=True)
SECOND_HERE = RayletAddress("me", 4, head=False, here=True)
ELSEWHERE = RayletAddress("them", 5, head=False, here=False)


@pytest.mark.parametrize(
    ("raylets", "down", "state", "reason"),
    [
        ([HEAD_HERE], {}, "alive", ""),
        ([HEAD, OTHER_HERE, ELSEWHERE], {}, "alive", ""),
        ([HEAD, OTHER_HERE, ELSEWHERE], {5: "silent"}, "alive", ""),  # a lost node elsewhere
        ([HEAD, OTHER_HERE, SECOND_HERE], {3: "refused"}, "alive", ""),
        ([HEAD_HERE], {1: "refused"}, "dead", "nothing listens there"),
        ([HEAD_HERE], {1: "silent"}, "hung", "its GCS does not answer"),
        (None, {}, "hung", "its GCS does not list its nodes"),
        ([], {}, "dead", "no raylet on its head node"),
        ([HEAD_HERE], {2: "refused"}, "dead", "no raylet on its head node"),
        ([HEAD_HERE], {2: "silent"}, "hung", "no raylet on its head node"),
        ([HEAD, ELSEWHERE], {}, "dead", "no raylet on this machine"),
        ([HEAD, OTHER_HERE], {3: "refused"}, "dead", "no raylet on this machine"),
        ([HEAD, OTHER_HERE, SECOND_HERE], {3: "refused", 4: "silent"}, "hung", "no raylet on this machine"),
    ],
)
def test_liveness_follows_from_who_answers(
    raylets: list[RayletAddress] | None, down: dict[int, Answer], state: str, reason: str
) -> None:
    liveness = judge(lambda _, port: down.get(port, "yes"), GCS, lambda: raylets)
    assert liveness.state == state
    assert reason in liveness.reason


@pytest.mark.parametrize(
    ("here", "loopback"), [("127.0.0.1", True), ("10.0.0.7", False)], ids=["on loopback", "at its main address"]
)
def test_raylet_on_loopback_is_told_from_one_at_the_main_address(here: str, loopback: bool) -> None:
    """Ray turns 127.0.0.1 into the main address, where a cluster on loopback does not listen."""
    raylets = [RayletAddress("10.0.0.7", 2, head=True, here=False), RayletAddress(here, 3, head=False, here=True)]
    assert judge(lambda _, _port: "yes", ("127.0.0.1", 1), lambda: raylets) == Liveness("alive", loopback=loopback)


def test_connection_that_hangs_ends_at_its_limit() -> None:
    released, fake = threading.Event(), SimpleNamespace(shutdown=lambda: None, init=lambda **_: released.wait())
    with pytest.raises(EngineUnreachable, match=r"at 127\.0\.0\.1:1 answers, but did not accept this process within 0"):
        _connect(fake, "127.0.0.1:1", 0.05)
    released.set()


def test_error_of_a_connection_is_raised_where_it_was_asked_for() -> None:
    def fail(**_: object) -> None:
        raise ConnectionError("refused")

    with pytest.raises(ConnectionError, match="refused"):
        _connect(SimpleNamespace(init=fail), "127.0.0.1:1", 300)


def test_servers_that_answer_hang_or_are_gone_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (
            answers("127.0.0.1", port, timeout_s=0.05) == "silent"
        )  # accepted by the kernel, as for a stopped process

        def greet() -> None:
            for _ in range(2):  # the first is the one above
                client, _ = server.accept()
                with client:
                    client.recv(1)

        thread = threading.Thread(target=greet)
        thread.start()
        assert answers("127.0.0.1", port, timeout_s=60) == "yes"
        thread.join()
    assert answers("127.0.0.1", port, timeout_s=60) == "refused"


# -- a real cluster


@pytest.fixture
def desk(tmp_path: Path, recipe) -> Iterator["Desk"]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'headway[ray]'")
    started = Desk(tmp_path, to_toml(recipe({"train.steps": 6})))
    yield started
    started.stop()


class Desk:
    """A user's folder, with a Ray cluster of its own that `address = "local"` finds."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder = folder
        (folder / "r.toml").write_text(recipe)
        self.settings("local")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "RAY_TMPDIR": f"/tmp/ray-{os.getpid()}",  # short, as sockets need
            "RAY_USAGE_STATS_ENABLED": "0",
            "HEADWAY_ENGINES": str(folder / "engines.toml"),
            "HEADWAY_RUNS": str(folder / "runs"),
        }
        Path(self.environment["RAY_TMPDIR"]).mkdir()

    def settings(self, address: str) -> None:
        (self.folder / "engines.toml").write_text(f'[ray]\naddress = "{address}"\n')

    def headway(self, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        program = [sys.executable, "-c", "from headway.cli.main import main; main()", *words]
        return subprocess.run(
            program, env=self.environment | environment, cwd=self.folder, capture_output=True, text=True
        )

    def jobs(self) -> dict[str, dict[str, object]]:
        done = self.headway("jobs", "--json")
        assert done.returncode == 0, done.stderr
        return {job["run"]: job for job in json.loads(done.stdout)}

    @property
    def address(self) -> str:
        return (Path(self.environment["RAY_TMPDIR"]) / "ray/ray_current_cluster").read_text().strip()

    def processes(self, name: str = "") -> list[psutil.Process]:
        """The processes of its clusters, by the folder in their command lines or environment."""
        folder, processes = self.environment["RAY_TMPDIR"], list[psutil.Process]()
        for process in psutil.process_iter(["name"]):
            try:
                owned = process.environ().get("RAY_TMPDIR") == folder or folder in " ".join(process.cmdline())
            except psutil.Error:
                continue
            if owned and name in process.info["name"] and process.pid != os.getpid():
                processes.append(process)
        return processes

    def stop(self) -> None:
        for process in self.processes():
            process.kill()
        eventually(lambda: not self.processes())
        subprocess.run(["rm", "-rf", self.environment["RAY_TMPDIR"]], check=True)


@pytest.mark.slow
def test_verbs_report_a_cluster_whose_raylet_died_and_requeue_replaces_a_local_one(desk: Desk) -> None:
    assert desk.headway("submit", "r.toml", "--engine", "ray", "--on", "cpux1", "--name", "a").returncode == 0
    assert desk.headway("submit", "r.toml", "--engine", "local", "--on", "cpux1", "--name", "b").returncode == 0
    eventually(lambda: {job["state"] for job in desk.jobs().values()} == {"finished"}, desk.jobs, poll_s=1)
    long = ("submit", "r.toml", "--engine", "ray", "--on", "cpux1", "--name", "c", "--set", "train.steps=100000")
    assert desk.headway(*long).returncode == 0
    eventually(lambda: desk.jobs()["c"]["state"] == "running", desk.jobs, poll_s=1)

    dead, (raylet,) = desk.address, desk.processes("raylet")
    raylet.send_signal(signal.SIGSTOP)
    desk.settings(dead)
    assert "does not answer" not in desk.jobs()["b"]["reason"]
    assert "no raylet on its head node" in str(desk.jobs()["a"]["unreachable"])
    assert "within 5 s" in desk.headway("cancel", "a").stderr
    raylet.kill()
    eventually(lambda: not raylet.is_running() or raylet.status() == psutil.STATUS_ZOMBIE)

    jobs = desk.jobs()
    assert {name: job["state"] for name, job in jobs.items()} == {"a": "finished", "b": "finished", "c": "unknown"}
    assert jobs["a"]["reason"] == "all steps done (from its records)"
    assert (jobs["c"]["unreachable"], jobs["b"]["unreachable"]) == (
        f"no Ray cluster answers at {dead}: its GCS answers, but no raylet on its head node does",
        None,
    )
    table = desk.headway("jobs").stdout
    assert "ray is unreachable: no Ray cluster answers at" in table
    assert max(map(len, table.splitlines())) <= 80
    elsewhere = desk.headway("jobs", "--runs", "runs", HEADWAY_RUNS="others").stdout
    assert "headway requeue RUN --runs runs" in elsewhere
    for words in (["cancel", "c"], ["requeue", "c"], ["submit", "r.toml", "--engine", "ray", "--on", "cpux1"]):
        refused = desk.headway(*words)
        assert refused.returncode == 1, refused
        assert "no raylet on its head node does" in refused.stderr
        assert "hint:  ray start --head" in refused.stderr
    assert sorted(path.name for path in (desk.folder / "runs").glob("[a-z]*")) == ["a", "b", "c"], "none is left"

    desk.settings("local")
    assert "no Ray cluster runs on this machine" in str(desk.jobs()["a"]["unreachable"])
    assert desk.address == dead, "a query starts no cluster"
    requeued = desk.headway("requeue", "c", "--json")
    assert requeued.returncode == 0, requeued.stderr
    assert desk.address != dead
    eventually(lambda: desk.jobs()["c"]["state"] == "running", desk.jobs, poll_s=1)


@pytest.mark.slow
def test_cluster_on_loopback_is_reached_by_its_address_without_any_variable(desk: "Desk") -> None:
    """It used to be looked for at the main address, for ten minutes."""
    assert desk.headway("nodes", "--engine", "ray").returncode == 0  # starts it
    desk.settings(desk.address)
    done = desk.headway("doctor", "--engine", "ray", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["engine"]["machines"]) == 1
