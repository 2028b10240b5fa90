"""Runs on several nodes, each with an agent of its own: the same bits as on one, and after a node is lost too."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from conftest import Lab, Lived, assert_same
from headway.agent import new_run, resume_run
from headway.agent.lease import newest_lease
from headway.cli.launch import start_keeper
from headway.errors import UsageError
from headway.recipe import FaultPlan, Recipe
from headway.recipe.faults import AGENT
from headway.state.remote import list_remote
from headway.state.store import open_store
from headway.track.runs import RunFolder

SETTINGS = {"train.steps": 10, "train.restarts": 3, "checkpoint.every_steps": 5, "checkpoint.memory_every_steps": 1}
PATIENT = {"train.silent_node_s": 100.0}  # a machine that has much to do may say nothing for long


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> Lived:
    """Two workers on one node, that nothing happened to."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    return lived


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    """No process of a node outlives its run."""
    yield
    left = [one for one in psutil.Process().children(recursive=True) if "headway.agent.node" in _command(one)]
    assert not left


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def resumed(lived: Lived) -> list[int]:
    return [event["step"] for event in lived.events("resumed")]


def assert_newest_copies(lived: Lived, before: int) -> None:
    """After each lost node the run went back to the newest state that lay on two nodes then; usually the last one."""
    copied, at = [0], list[int]()
    for record in sorted(lived.run.events.glob("*-agent.jsonl")):
        steps = [json.loads(line) for line in record.read_text().splitlines()]
        copied += [event["step"] for event in steps if event["kind"] == "copied"]
        at.append(max(copied))
    assert resumed(lived)[1:] == at[:-1]
    assert max(resumed(lived)) <= before


def sized(lived: Lived) -> list[int]:
    """The workers of each attempt."""
    return [event["workers"] for event in lived.events("attempt", "agent")]


def after_copies(step: int, rank: int, attempt: int = 1) -> FaultPlan:
    """A moment in which what was saved before reaches a second node."""
    return FaultPlan().stall("start", step, 2.0, rank, attempt)


def test_a_lost_node_is_replaced_by_a_spare_from_its_neighbours_memory(lab: Lab, recipe, unharmed: Lived) -> None:
    faults = after_copies(7, 1).add("kill-node", step=7, rank=1)
    lived = lab.train(recipe(SETTINGS | PATIENT), workers=2, nodes=2, spares=1, faults=faults)
    assert_same(lived, unharmed)
    assert_newest_copies(lived, before=6)
    again = resume_run(lived.run, ["train.steps=12"], nodes=None, spares=None)
    assert (again.nodes, again.spares) == (2, 1)
    (told,) = lived.ways_on
    assert re.fullmatch(r"node n\d was lost: its agent is gone; back to step \d, from memory", told)
    assert sized(lived) == [2, 2]
    key = lived.run.key_file
    assert key.stat().st_mode & 0o777 == 0o600
    assert newest_lease(lived.run.leases).number == 2  # one an attempt


def test_what_nodes_have_is_uploaded_even_where_no_save_to_disk_is_due(lab: Lab, recipe, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    store = {"url": url, "every_steps": 4, "keep_last": 9}
    lived = lab.train(recipe(SETTINGS | {"checkpoint.store": store, "checkpoint.every_steps": 100}), workers=2, nodes=2)
    assert lived.outcome.state == "finished", lived.outcome
    there = list_remote(open_store(f"{url}/{lived.run.name}"))
    assert there[-1].step == 10
    assert {entry.step for entry in there} <= {4, 8, 10}  # one that comes while another is on its way is left out
    assert max(path.name for path in lived.run.checkpoints.glob("step-*")) == "step-00000010"


def test_nodes_that_all_end_as_they_start_end_the_run(lab: Lab, recipe, monkeypatch) -> None:
    """It says why, and does not wait for anybody."""
    monkeypatch.setenv("PYTHONPATH", str(lab.root / "broken"))
    (lab.root / "broken").mkdir(parents=True)
    (lab.root / "broken" / "psutil.py").write_text("raise ImportError('this disk is not there')")
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2)
    assert lived.outcome.state == "failed"
    assert "the agents of all nodes have ended" in lived.outcome.reason
    assert "this disk is not there" in lived.outcome.reason


@pytest.mark.slow
def test_without_a_spare_it_goes_on_with_fewer_workers(lab: Lab, recipe, unharmed: Lived) -> None:
    faults = after_copies(6, 0).add("kill-node", step=6, rank=0)
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2, faults=faults)
    (told,) = lived.ways_on
    assert re.fullmatch(r"node n0 was lost: .*; back to step 5, from .*, with one worker instead of 2", told)
    assert (resumed(lived), sized(lived)) == ([0, 5], [2, 1])
    # the same change of workers at the same step, without a fault
    truth = lab.train(recipe(SETTINGS | {"train.restarts": 0}), workers=2, faults=FaultPlan().kill(6))
    truth = lab.resume(truth.run, workers=1)
    losses = [[event["loss"] for event in one.events("step") if event["step"] > 5] for one in (lived, truth)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(losses[0]) == 5


@pytest.mark.slow
def test_an_agent_that_was_stopped_is_done_without(lab: Lab, recipe, unharmed: Lived) -> None:
    faults = after_copies(7, 1).add("stop-node", step=7, rank=1)
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2, spares=1, faults=faults)
    assert_same(lived, unharmed)
    (told,) = lived.ways_on
    assert re.match(r"node n\d was lost: it has said nothing for 5 s; back to step", told)
    for process in psutil.process_iter():
        if f"--run {lived.run.path} --name" in _command(process):
            process.send_signal(signal.SIGCONT)  # it finds the run over, and goes
            process.kill()


@pytest.mark.slow
def test_a_worker_that_dies_costs_no_node(lab: Lab, recipe, unharmed: Lived) -> None:
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2, faults=after_copies(7, 1).kill(7, 1))
    assert_same(lived, unharmed)
    assert resumed(lived) == [0, 6]
    assert "worker 1 was killed by signal 9" in lived.ways_on[0]


@pytest.mark.slow
def test_a_node_that_fails_twice_in_a_row_is_done_without(lab: Lab, recipe, unharmed: Lived) -> None:
    """One try is allowed without progress: only because the second failure is the node's own is there a third."""
    faults = FaultPlan().kill(4, 1).kill(4, 1, attempt=2)
    lived = lab.train(recipe(SETTINGS | {"train.restarts": 1}), workers=2, nodes=2, spares=1, faults=faults)
    assert_same(lived, unharmed)
    assert re.search(r"without node n\d, where 2 attempts failed in a row", lived.ways_on[-1])
    assert resumed(lived) == [0, 3, 3]


@pytest.mark.slow
def test_two_nodes_lost_one_after_the_other(lab: Lab, recipe, unharmed: Lived) -> None:
    faults = after_copies(4, 1).add("kill-node", step=4, rank=1)
    faults = faults.stall("start", 8, 2.0, 0, 2).add("kill-node", step=8, rank=0, attempt=2)
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2, spares=2, faults=faults)
    assert_same(lived, unharmed)
    assert_newest_copies(lived, before=7)


@pytest.mark.slow
def test_agents_on_each_machine_find_each_other(recipe: Callable[..., Recipe], tmp_path: Path, unharmed: Lived) -> None:
    """As an engine starts them, without a word to each other but the run's folder."""
    attempt = new_run(recipe(SETTINGS), tmp_path, name="both", workers=2)
    command = [sys.executable, "-c", "from headway.cli.main import main; main()", "agent", "--run", "both"]
    command += ["--runs", str(tmp_path), "--nodes", "2", "--workers", "2", "--host", "127.0.0.1", "--rank"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    second = subprocess.Popen([*command, "1"], env=environment)
    first = subprocess.run([*command, "0"], env=environment, capture_output=True, text=True, timeout=120)
    assert first.returncode == 0, first.stderr
    assert second.wait(30) == 0
    lived = Lived(RunFolder(attempt.run), None)
    assert (lived.chain, lived.digest) == (unharmed.chain, unharmed.digest)


@pytest.mark.slow
def test_the_next_agent_to_lead_finds_the_nodes_and_what_they_keep(recipe, tmp_path: Path, unharmed: Lived) -> None:
    """The agent that leads is killed; its keeper starts another, and the nodes call that one."""
    attempt = new_run(recipe(SETTINGS), tmp_path, workers=2, nodes=2)
    faults = FaultPlan().stall("start", 7, 1.0).add("kill", point="watch", step=6, rank=AGENT)
    keeper = start_keeper(attempt.model_copy(update={"threads": 1, "faults": faults}))
    assert keeper.wait(120) == 0
    lived = Lived(attempt.folder, None)
    assert (lived.chain, lived.digest) == (unharmed.chain, unharmed.digest)
    (told,) = lived.ways_on
    assert re.fullmatch(r"the agent died; back to step \d, from memory", told)
    assert max(resumed(lived)) >= 5


def test_more_nodes_than_workers_are_refused(lab: Lab, recipe) -> None:
    with pytest.raises(UsageError, match="--nodes 3, and 2 workers"):
        lab.train(recipe(SETTINGS), workers=2, nodes=3)
