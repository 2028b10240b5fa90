"""Machines that share no folder join the leader, and the run ends with the same bits.

Each machine has its own runs folder and an empty one in place of the leader's (needs root). The protocol is tested
without complete runs in test_folder_server.py and test_join.py.
"""

import contextlib
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import Machines, make_machines

from conftest import Lived
from headway.agent.nodes.store_lease import lease_in_store
from headway.recipe import Recipe
from headway.state.object_store import open_store
from headway.state.store_checkpoint import list_remote
from headway.track import read_run
from headway.track.run_folder import RunFolder

HIDE_COMMAND = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs nothing "$0"', tempfile.gettempdir()]


def can_hide() -> bool:
    """Whether this user may mount in a private namespace: root may, outside of most containers."""
    return shutil.which("unshare") is not None and subprocess.run(HIDE_COMMAND, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_hide(), reason="needs root, to hide a folder from a process"),
]

SETTINGS = {"train.steps": 10, "train.restarts": 3, "checkpoint.every_steps": 5, "checkpoint.memory_every_steps": 1}
LONG = SETTINGS | {"train.steps": 200, "checkpoint.every_steps": 100}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def reference(tmp_path_factory, make_lab, recipe) -> Callable[[dict], Lived]:
    """Undisturbed runs of two workers on one machine, by settings."""
    known = dict[int, Lived]()

    def live(settings: dict) -> Lived:
        steps = settings["train.steps"]
        if steps not in known:
            known[steps] = make_lab(tmp_path_factory.mktemp("reference")).train(recipe(settings), workers=2)
            assert known[steps].outcome.state == "finished", known[steps].outcome
        return known[steps]

    return live


def assert_one_record(cluster: Machines) -> None:
    """All workers' records and logs are in the run's folder, and complete."""
    for record in read_run(cluster.run):
        assert record.skipped == 0, record.header
    processes = {record.header.process for record in read_run(cluster.run) if record.header.attempt == 1}
    assert processes >= {"agent", "rank-0", "rank-1"}
    assert (cluster.run.logs / "0001-rank-1.log").exists()


def test_machine_without_the_folder_joins(recipe, tmp_path, reference) -> None:
    with make_machines(recipe(SETTINGS), tmp_path, count=2, spares=0, workers=2, join_port=free_port()) as cluster:
        cluster.start(1)
        cluster.start(0)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.output()
        cluster.assert_same_end(reference(SETTINGS))
        assert cluster.recoveries == []
        assert_one_record(cluster)
        assert list(cluster.root(1).rglob("*")) == []  # nothing is left


def test_spare_without_the_folder_replaces_a_lost_machine(recipe, tmp_path, reference) -> None:
    with make_machines(recipe(LONG), tmp_path, count=2, spares=1, workers=2, join_port=free_port()) as cluster:
        for number in range(3):
            cluster.start(number)
        cluster.until(lambda: cluster.copied() > 20)
        cluster.lose(1)
        assert cluster.wait() == {0: 0, 2: 0}, cluster.output()
        cluster.assert_same_end(reference(LONG))
        (recovery,) = cluster.recoveries
        assert re.fullmatch(r"node \S+-1 was lost: its agent is gone; resuming from step \d+ \(memory\)", recovery)
        assert_one_record(cluster)


def test_without_a_spare_the_run_shrinks_and_grows_again(recipe, tmp_path) -> None:
    with make_machines(recipe(LONG), tmp_path, count=2, spares=0, workers=2, join_port=free_port()) as cluster:
        cluster.start(0)
        cluster.start(1)
        cluster.until(lambda: cluster.copied() > 20)
        cluster.lose(1)
        cluster.until(lambda: len(cluster.events("attempt")) == 2)
        cluster.start(1)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.output()
        assert [event["workers"] for event in cluster.events("attempt")] == [2, 1, 2]
        assert_one_record(cluster)


def test_restart_from_disk_sends_the_files(recipe, tmp_path, reference) -> None:
    """After a stop and a start, a machine without the disk receives the checkpoint over the network."""
    with make_machines(recipe(LONG), tmp_path, count=2, spares=0, workers=2, join_port=free_port()) as cluster:
        cluster.start(0)
        cluster.start(1)
        cluster.until(lambda: cluster.copied() > 20)
        cluster.processes[1].terminate()
        assert cluster.wait() == {0: 75, 1: 75}, cluster.output()
        cluster.start(0)
        cluster.start(1)
        assert cluster.wait() == {0: 0, 1: 0}, cluster.output()
        cluster.assert_same_end(reference(LONG))
        resumed = [event["step"] for event in cluster.ended_run.events("resumed")]
        assert len(resumed) == 2
        assert resumed[1] > 20
        assert_one_record(cluster)


def test_leader_is_lost(recipe, tmp_path) -> None:
    with make_machines(recipe(LONG), tmp_path, count=2, spares=0, workers=2, join_port=free_port()) as cluster:
        cluster.start(0)
        cluster.start(1)
        cluster.until(lambda: cluster.copied() > 5)
        cluster.lose(0)
        assert cluster.wait() == {1: 75}, cluster.output()
        assert "run run lost its leader; restart it where its folder is" in cluster.output()


@contextlib.contextmanager
def two_machines_with_store(recipe: Callable[..., Recipe], folder: Path, until: int) -> Iterator[Machines]:
    """Two machines that share an object store, once it has a checkpoint of this step."""
    (folder / "store").mkdir()
    base = f"file://{folder}/store"
    store = {"checkpoint.every_steps": 20, "checkpoint.store": {"url": base, "every_steps": 20}}
    with make_machines(recipe(LONG | store), folder, count=2, spares=0, workers=2, store=f"{base}/run") as cluster:
        cluster.start(0)
        cluster.start(1)
        cluster.until(lambda: any(entry.step >= until for entry in list_remote(open_store(cluster.store))))
        yield cluster


def test_other_machines_resume_from_the_store(recipe, tmp_path, reference) -> None:
    """The leader is lost with its folder. Another machine restores it from the store, and the rest join that one."""
    with two_machines_with_store(recipe, tmp_path, until=40) as cluster:
        cluster.lose(0)
        assert cluster.wait() == {1: 75}, cluster.output()
        assert "run run lost its leader" in cluster.output()
        first = lease_in_store(cluster.store)
        cluster.start(2, rank=0)
        cluster.start(1)
        assert cluster.wait() == {1: 0, 2: 0}, cluster.output()
        cluster.run = RunFolder(cluster.root(2) / "run")
        cluster.assert_same_end(reference(LONG))
        assert first is not None
        assert lease_in_store(cluster.store).number == first.number + 1
        resumed = [event["step"] for event in cluster.ended_run.events("resumed")]
        assert resumed[0] == 0  # of the lost machine
        assert resumed[1] >= 40
        attempts = {record.header.attempt for record in read_run(cluster.run)}
        assert attempts == {1, 2}


def test_next_leader_is_found_at_the_same_address(recipe, tmp_path, reference) -> None:
    """The leader is killed; its launcher starts another, and the machine that joined connects to that one."""
    with make_machines(recipe(LONG), tmp_path, count=2, spares=0, workers=2, join_port=free_port()) as cluster:
        cluster.start(0)
        cluster.start(1)
        cluster.until(lambda: cluster.copied() > 20)
        (agent,) = [process for process in cluster.processes_of(0) if process.cmdline()[1:3] == ["-m", "headway.agent"]]
        agent.kill()
        assert cluster.wait() == {0: 0, 1: 0}, cluster.output()
        cluster.assert_same_end(reference(LONG))
        (recovery,) = cluster.recoveries
        assert re.fullmatch(r"the agent died; resuming from step \d+ \(memory\)", recovery)
        assert_one_record(cluster)


def test_later_leader_supersedes_the_earlier_one(recipe, tmp_path, reference) -> None:
    """The run is started again elsewhere while it runs: the lease in the store admits one leader."""
    with two_machines_with_store(recipe, tmp_path, until=20) as cluster:
        cluster.start(2, rank=0)
        assert cluster.wait() == {0: 1, 1: 0, 2: 0}, cluster.output()
        assert "another machine's agent leads this run now" in cluster.output()
        cluster.run = RunFolder(cluster.root(2) / "run")
        cluster.assert_same_end(reference(LONG))
        assert lease_in_store(cluster.store).number == 2
        assert len(cluster.events("attempt")) == 2
