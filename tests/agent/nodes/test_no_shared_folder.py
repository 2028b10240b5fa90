"""Machines that see no common folder: what one of them leads, the others join, and it all comes to the same bits.

Each machine has a root of its own and an empty folder where the one that leads has the run (only root can do that).
What they say to each other is proven without whole runs in test_desk.py and test_joining.py.
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
from machines import Machines, machines

from conftest import Lived
from headway.agent.nodes.store_lease import lease_in_store
from headway.recipe import Recipe
from headway.state.object_store import open_store
from headway.state.store_checkpoint import list_remote
from headway.track import read_run
from headway.track.runs import RunFolder

CAN_HIDE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs nothing "$0"', tempfile.gettempdir()]


def can_hide() -> bool:
    """Whether this user may give a process disks of its own: root may, outside of most containers."""
    return shutil.which("unshare") is not None and subprocess.run(CAN_HIDE, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_hide(), reason="needs a user who may hide a folder from a process (root)"),
]

SETTINGS = {"train.steps": 10, "train.restarts": 3, "checkpoint.every_steps": 5, "checkpoint.memory_every_steps": 1}
LONG = SETTINGS | {"train.steps": 200, "checkpoint.every_steps": 100}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> Callable[[dict], Lived]:
    """Two workers on one machine, that nothing happened to."""
    known = dict[int, Lived]()

    def live(settings: dict) -> Lived:
        steps = settings["train.steps"]
        if steps not in known:
            known[steps] = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(settings), workers=2)
            assert known[steps].outcome.state == "finished", known[steps].outcome
        return known[steps]

    return live


def assert_one_record(there: Machines) -> None:
    """All workers' records and logs are where the run is, and whole."""
    for record in read_run(there.run):
        assert record.skipped == 0, record.header
    processes = {record.header.process for record in read_run(there.run) if record.header.attempt == 1}
    assert processes >= {"agent", "rank-0", "rank-1"}
    assert (there.run.logs / "0001-rank-1.log").exists()


def test_a_machine_without_the_folder_joins(recipe, tmp_path, unharmed) -> None:
    with machines(recipe(SETTINGS), tmp_path, count=2, spares=0, workers=2, apart=free_port()) as there:
        there.start(1)
        there.start(0)
        assert there.ends() == {0: 0, 1: 0}, there.said()
        there.assert_same_end(unharmed(SETTINGS))
        assert there.ways_on == []
        assert_one_record(there)
        assert list(there.root(1).rglob("*")) == []  # it leaves nothing


def test_a_spare_without_the_folder_takes_the_place_of_another(recipe, tmp_path, unharmed) -> None:
    with machines(recipe(LONG), tmp_path, count=2, spares=1, workers=2, apart=free_port()) as there:
        for number in range(3):
            there.start(number)
        there.until(lambda: there.copied() > 20)
        there.lose(1)
        assert there.ends() == {0: 0, 2: 0}, there.said()
        there.assert_same_end(unharmed(LONG))
        (told,) = there.ways_on
        assert re.fullmatch(r"node \S+-1 was lost: its agent is gone; resuming from step \d+ \(memory\)", told)
        assert_one_record(there)


def test_without_a_spare_it_goes_on_with_fewer_workers_and_with_more_again(recipe, tmp_path) -> None:
    with machines(recipe(LONG), tmp_path, count=2, spares=0, workers=2, apart=free_port()) as there:
        there.start(0)
        there.start(1)
        there.until(lambda: there.copied() > 20)
        there.lose(1)
        there.until(lambda: len(there.events("attempt")) == 2)
        there.start(1)
        assert there.ends() == {0: 0, 1: 0}, there.said()
        assert [event["workers"] for event in there.events("attempt")] == [2, 1, 2]
        assert_one_record(there)


def test_a_restart_from_disk_hands_the_files_over(recipe, tmp_path, unharmed) -> None:
    """All of it is stopped and started again: what a machine far from the disk goes on from comes over the line."""
    with machines(recipe(LONG), tmp_path, count=2, spares=0, workers=2, apart=free_port()) as there:
        there.start(0)
        there.start(1)
        there.until(lambda: there.copied() > 20)
        there.processes[1].terminate()
        assert there.ends() == {0: 75, 1: 75}, there.said()
        there.start(0)
        there.start(1)
        assert there.ends() == {0: 0, 1: 0}, there.said()
        there.assert_same_end(unharmed(LONG))
        resumed = [event["step"] for event in there.lived.events("resumed")]
        assert len(resumed) == 2
        assert resumed[1] > 20
        assert_one_record(there)


def test_the_machine_that_leads_is_lost(recipe, tmp_path) -> None:
    with machines(recipe(LONG), tmp_path, count=2, spares=0, workers=2, apart=free_port()) as there:
        there.start(0)
        there.start(1)
        there.until(lambda: there.copied() > 5)
        there.lose(0)
        assert there.ends() == {1: 75}, there.said()
        assert "nobody leads run run any more, whose folder is not here" in there.said()


@contextlib.contextmanager
def two_by_the_store(recipe: Callable[..., Recipe], folder: Path, until: int) -> Iterator[Machines]:
    """Two machines that train by a store, which has a checkpoint of this step."""
    (folder / "store").mkdir()
    base = f"file://{folder}/store"
    kept = {"checkpoint.every_steps": 20, "checkpoint.store": {"url": base, "every_steps": 20}}
    with machines(recipe(LONG | kept), folder, count=2, spares=0, workers=2, store=f"{base}/run") as there:
        there.start(0)
        there.start(1)
        there.until(lambda: any(entry.step >= until for entry in list_remote(open_store(there.store))))
        yield there


def test_other_machines_go_on_from_the_store(recipe, tmp_path, unharmed) -> None:
    """The machine that leads is lost with the folder. Another one has it made from the store, and the rest find it."""
    with two_by_the_store(recipe, tmp_path, until=40) as there:
        there.lose(0)
        assert there.ends() == {1: 75}, there.said()
        assert "nobody leads run run any more" in there.said()
        first = lease_in_store(there.store)
        there.start(2, rank=0)
        there.start(1)
        assert there.ends() == {1: 0, 2: 0}, there.said()
        there.run = RunFolder(there.root(2) / "run")
        there.assert_same_end(unharmed(LONG))
        assert first is not None
        assert lease_in_store(there.store).number == first.number + 1
        resumed = [event["step"] for event in there.lived.events("resumed")]
        assert resumed[0] == 0  # of the machine that was lost
        assert resumed[1] >= 40
        attempts = {record.header.attempt for record in read_run(there.run)}
        assert attempts == {1, 2}


def test_the_next_agent_to_lead_is_found_at_the_same_door(recipe, tmp_path, unharmed) -> None:
    """The agent that leads is killed; its keeper starts another, and the machine that joined calls that one."""
    with machines(recipe(LONG), tmp_path, count=2, spares=0, workers=2, apart=free_port()) as there:
        there.start(0)
        there.start(1)
        there.until(lambda: there.copied() > 20)
        (agent,) = [one for one in there.everything_of(0) if one.cmdline()[1:3] == ["-m", "headway.agent"]]
        agent.kill()
        assert there.ends() == {0: 0, 1: 0}, there.said()
        there.assert_same_end(unharmed(LONG))
        (told,) = there.ways_on
        assert re.fullmatch(r"the agent died; resuming from step \d+ \(memory\)", told)
        assert_one_record(there)


def test_who_begins_later_leads_and_the_one_before_puts_nothing_there(recipe, tmp_path, unharmed) -> None:
    """Somebody starts the run again elsewhere, while it runs: by the store there is one that leads."""
    with two_by_the_store(recipe, tmp_path, until=20) as there:
        there.start(2, rank=0)
        assert there.ends() == {0: 1, 1: 0, 2: 0}, there.said()
        assert "another machine's agent leads this run now" in there.said()
        there.run = RunFolder(there.root(2) / "run")
        there.assert_same_end(unharmed(LONG))
        assert lease_in_store(there.store).number == 2
        assert len(there.events("attempt")) == 2
