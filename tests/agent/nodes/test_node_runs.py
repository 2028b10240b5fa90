"""Runs on several nodes, each with its own agent: the same bits as on one node, also after the loss of a node."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from conftest import Lab, Lived, assert_same, when
from eventually import CEILING_S, eventually
from headway.agent import Attempt, new_run, resume_run
from headway.agent.fd_store import FdStore
from headway.agent.nodes.lease import LeaderLease, newest_lease
from headway.agent.nodes.membership import Membership
from headway.agent.nodes.node_group import NodeGroup
from headway.agent.remote.folder_server import RunFolderServer
from headway.agent.workers.workers import NodeLost
from headway.cli.launch import start_launcher
from headway.errors import UsageError, WorkerError
from headway.recipe import Assignment, FaultPlan, Recipe
from headway.recipe.faults import AGENT
from headway.state import Channel
from headway.state.handshake import connect
from headway.state.object_store import open_store
from headway.state.store_checkpoint import list_remote
from headway.track import Recorder, account, read_run, record_path, write_json
from headway.track.run_folder import RunFolder
from headway.track.runs import create_run

SETTINGS = {"train.steps": 10, "train.restarts": 3, "checkpoint.every_steps": 5, "checkpoint.memory_every_steps": 1}
KEY = "a key of the tests, and long enough"
SILENT_S = 5.0
PATIENT = {"train.silent_node_s": 100.0}  # a machine that has much to do may say nothing for long


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory, make_lab, recipe) -> Lived:
    """An undisturbed run of two workers on one node."""
    lived = make_lab(tmp_path_factory.mktemp("unharmed")).train(recipe(SETTINGS), workers=2)
    assert lived.outcome.state == "finished", lived.outcome
    return lived


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    """No process of a node outlives its run."""
    yield
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if "headway.agent.nodes.node_agent" in _command(child)
    ]
    assert not left


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def resumed(lived: Lived) -> list[int]:
    return [event["step"] for event in lived.events("resumed")]


def assert_newest_copies(lived: Lived, before: int) -> None:
    """After each lost node the run resumed from the newest replicated state; usually the last one."""
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
    """A pause in which earlier snapshots are replicated."""
    return FaultPlan().stall("start", step, 2.0, rank, attempt)


def recorded_so_far(lab: Lab, kind: str) -> list[dict]:
    """Events that leaders below a folder have recorded; incomplete lines do not count."""
    lines = [line for path in lab.root.glob("*/events/*-agent.jsonl") for line in path.read_text().splitlines(True)]
    return [event for line in lines if line.endswith("\n") and (event := json.loads(line))["kind"] == kind]


def lose_node_of(lab: Lab, rank: int) -> None:
    """Kill a worker and the agent of its node."""
    worker = psutil.Process([event["pid"] for event in recorded_so_far(lab, "worker") if event["rank"] == rank][-1])
    agent = worker.parent().parent()
    assert "headway.agent.nodes.node_agent" in _command(agent)
    agent.kill()
    worker.kill()


@pytest.mark.slow
def test_lost_node_is_replaced_by_a_spare_with_replicated_snapshots(
    lab: Lab, recipe, tmp_path: Path, unharmed: Lived, monkeypatch
) -> None:
    """Step 7 waits until the snapshot of step 6 is on two nodes. No save to disk is due before the last."""
    url = f"file://{tmp_path}/store"
    store = {"checkpoint.every_steps": 100, "checkpoint.store": {"url": url, "every_steps": 4, "keep_last": 9}}
    for module in ("hang_detector", "worker_monitor"):
        monkeypatch.setattr(f"headway.agent.supervise.{module}.LEAST_S", CEILING_S)  # it is no hang that is under test
    lies_on_two = lambda: any(event["step"] == 6 for event in recorded_so_far(lab, "copied"))  # noqa: E731
    when(lies_on_two, lambda: lose_node_of(lab, 1), patience_s=CEILING_S)
    faults = FaultPlan().add("hang", step=7, rank=1)
    lived = lab.train(recipe(SETTINGS | PATIENT | store), workers=2, nodes=2, spares=1, faults=faults)
    assert_same(lived, unharmed)
    assert resumed(lived) == [0, 6]
    assert_uploaded(lived, url)
    again = resume_run(lived.run, ["train.steps=12"], nodes=None, spares=None)
    assert (again.nodes, again.spares) == (2, 1)
    (recovery,) = lived.ways_on
    assert re.fullmatch(r"node n\d was lost: its agent is gone; resuming from step \d \(memory\)", recovery)
    assert sized(lived) == [2, 2]
    key = lived.run.key_file
    assert key.stat().st_mode & 0o777 == 0o600
    assert newest_lease(lived.run.leases).number == 2  # one per attempt


@pytest.mark.slow
def test_snapshots_of_nodes_are_uploaded_even_if_no_save_to_disk_is_due(lab: Lab, recipe, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    store = {"url": url, "every_steps": 4, "keep_last": 9}
    lived = lab.train(recipe(SETTINGS | {"checkpoint.store": store, "checkpoint.every_steps": 100}), workers=2, nodes=2)
    assert lived.outcome.state == "finished", lived.outcome
    assert_uploaded(lived, url)


def assert_uploaded(lived: Lived, url: str) -> None:
    uploaded = list_remote(open_store(f"{url}/{lived.run.name}"))
    assert uploaded[-1].step == 10
    assert {entry.step for entry in uploaded} <= {4, 8, 10}  # one requested during another upload is skipped
    assert max(path.name for path in lived.run.checkpoints.glob("step-*")) == "step-00000010"


def test_run_ends_if_all_nodes_fail_to_start(lab: Lab, recipe, monkeypatch) -> None:
    """It says why, and does not wait."""
    monkeypatch.setenv("PYTHONPATH", str(lab.root / "broken"))
    (lab.root / "broken").mkdir(parents=True)
    (lab.root / "broken" / "psutil.py").write_text("raise ImportError('this disk is not there')")
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2)
    assert lived.outcome.state == "failed"
    assert "the agents of all nodes have ended" in lived.outcome.reason
    assert "this disk is not there" in lived.outcome.reason


@pytest.mark.slow
def test_without_a_spare_the_run_resumes_with_fewer_workers(lab: Lab, recipe, unharmed: Lived) -> None:
    faults = after_copies(6, 0).add("kill-node", step=6, rank=0)
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2, faults=faults)
    (recovery,) = lived.ways_on
    assert re.fullmatch(r"node n0 was lost: .*; resuming from step 5 .*, with one worker instead of 2", recovery)
    assert (resumed(lived), sized(lived)) == ([0, 5], [2, 1])
    # the same change of workers at the same step, without a fault
    truth = lab.train(recipe(SETTINGS | {"train.restarts": 0}), workers=2, faults=FaultPlan().kill(6))
    truth = lab.resume(truth.run, workers=1)
    losses = [[event["loss"] for event in run.events("step") if event["step"] > 5] for run in (lived, truth)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(losses[0]) == 5


@pytest.mark.slow
def test_suspended_agent_is_excluded(lab: Lab, recipe, unharmed: Lived) -> None:
    faults = after_copies(7, 1).add("stop-node", step=7, rank=1)
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2, spares=1, faults=faults)
    assert_same(lived, unharmed)
    (recovery,) = lived.ways_on
    lost = re.match(r"node (n\d) was lost: its agent has sent nothing for 5 s; resuming from step", recovery)
    assert lost is not None
    assert not lived.events("hang", "agent"), "its worker is not to blame"
    silent = next(event for event in lived.events("node", "agent") if event["node"] == lost[1])
    assert "is stopped by a signal and has sent nothing for" in silent["text"]
    end_stopped_agents(lived.run.path)


def end_stopped_agents(run: Path) -> None:
    """Continue the stopped agents of a run; they find it over, and go."""
    for process in psutil.process_iter():
        if f"--run {run} --name" in _command(process):
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.mark.slow
def test_agent_stopped_before_the_first_step_is_named_in_log_and_report(lab: Lab, recipe, unharmed: Lived) -> None:
    """It never joins, or joins and falls silent: the spare has its place."""

    def agent_of_n1() -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if "--name n1 " in _command(child)]

    when(agent_of_n1, lambda: agent_of_n1()[0].suspend(), patience_s=CEILING_S)
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2, spares=1)
    assert_same(lived, unharmed)
    incidents = [incident.text for incident in account(read_run(lived.run)).incidents]
    named = [text for text in incidents if "n1" in text and ("starting without" in text or "sent nothing for" in text)]
    assert named, incidents
    end_stopped_agents(lived.run.path)


@pytest.mark.slow
def test_dead_worker_costs_no_node(lab: Lab, recipe, unharmed: Lived) -> None:
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2, faults=after_copies(7, 1).kill(7, 1))
    assert_same(lived, unharmed)
    assert resumed(lived) == [0, 6]
    assert "worker 1 was killed by signal 9" in lived.ways_on[0]


@pytest.mark.slow
def test_node_that_fails_twice_in_a_row_is_excluded(lab: Lab, recipe, unharmed: Lived) -> None:
    """One restart is allowed; a second happens only because the node is to blame."""
    faults = FaultPlan().kill(4, 1).kill(4, 1, attempt=2)
    lived = lab.train(recipe(SETTINGS | {"train.restarts": 1}), workers=2, nodes=2, spares=1, faults=faults)
    assert_same(lived, unharmed)
    assert re.search(r"without node n\d, where 2 attempts failed in a row", lived.ways_on[-1])
    assert resumed(lived) == [0, 3, 3]


@pytest.mark.slow
def test_two_nodes_are_lost_in_succession(lab: Lab, recipe, unharmed: Lived) -> None:
    faults = after_copies(4, 1).add("kill-node", step=4, rank=1)
    faults = faults.stall("start", 8, 2.0, 0, 2).add("kill-node", step=8, rank=0, attempt=2)
    lived = lab.train(recipe(SETTINGS), workers=2, nodes=2, spares=2, faults=faults)
    assert_same(lived, unharmed)
    assert_newest_copies(lived, before=7)


@pytest.mark.slow
def test_agents_on_each_machine_find_each_other(recipe: Callable[..., Recipe], tmp_path: Path, unharmed: Lived) -> None:
    """As an engine starts them: they share only the run's folder."""
    attempt = new_run(recipe(SETTINGS), tmp_path, name="both", workers=2)
    command = [sys.executable, "-c", "from headway.cli.main import main; main()", "agent", "--run", "both"]
    command += ["--runs", str(tmp_path), "--nodes", "2", "--workers", "2", "--host", "127.0.0.1", "--rank"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    second = subprocess.Popen([*command, "1"], env=environment)
    first = subprocess.run([*command, "0"], env=environment, capture_output=True, text=True, timeout=CEILING_S)
    assert first.returncode == 0, first.stderr
    assert second.wait(CEILING_S) == 0
    lived = Lived(RunFolder(attempt.run), None)
    assert (lived.chain, lived.digest) == (unharmed.chain, unharmed.digest)


@pytest.mark.slow
def test_next_leader_finds_the_nodes_and_their_snapshots(recipe, tmp_path: Path, unharmed: Lived) -> None:
    """The leader is killed; its launcher starts another, and the nodes connect to that one."""
    attempt = new_run(recipe(SETTINGS), tmp_path, workers=2, nodes=2)
    faults = FaultPlan().stall("start", 7, 1.0).add("kill", point="watch", step=6, rank=AGENT)
    launcher = start_launcher(attempt.model_copy(update={"threads": 1, "faults": faults}))
    assert launcher.wait(CEILING_S) == 0
    lived = Lived(attempt.folder, None)
    assert (lived.chain, lived.digest) == (unharmed.chain, unharmed.digest)
    (recovery,) = lived.ways_on
    assert re.fullmatch(r"the agent died; resuming from step \d \(memory\)", recovery)
    assert max(resumed(lived)) >= 1, "however new a state had its replica"


# -- the agent that leads and what nodes tell it, by real connections, without workers


@dataclass
class Clock:
    """A clock set by the test."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Led:
    """A node group whose nodes send scripted messages."""

    group: NodeGroup
    clock: Clock
    run: RunFolder
    lines: dict[str, Channel] = field(default_factory=dict)

    def join(self, name: str) -> None:
        """Have a node call, and have it be ready."""
        self.lines[name] = line = Channel(connect((self.group.nodes.lease.host, self.group.nodes.lease.port), KEY))
        line.send(
            "hello", name=name, machine=name, domain="", slots=1, host="127.0.0.1", port=1, pid=1, free_bytes=0,
            files={}, apart=False,
        )  # fmt: skip
        line.send("ready")
        self.until(lambda: name in [member.name for member in self.group.nodes.able()])

    def tell_that_they_live(self, *names: str) -> None:
        """Have nodes say now how their workers are, and the group hear it."""
        for name in names:
            self.lines[name].send("pulses", pages={}, states={})
        self.until(lambda: all(self.group.nodes.members[name].last_seen == self.clock.now for name in names))

    def until(self, is_true: Callable[[], bool]) -> None:
        eventually(lambda: (self.group.attend(), is_true())[1])

    def begin(self, workers: int) -> dict[int, str]:
        """Give workers their places, and have them live there; where they are."""
        assert self.group.place_ranks(workers)
        places = {rank: self.group.node(rank).name for rank in range(workers)}
        place = {"run": "r", "attempt": 1, "workers": workers, "device": "cpu", "threads": 1, "log": "log"}
        for rank, name in places.items():
            self.group.assign(Assignment(**place, rank=rank, rendezvous="tcp://h:1", asked_ns=1))
            self.lines[name].send("worker", rank=rank, pid=100 + rank)
        self.until(lambda: len(self.group.pids()) == workers)
        return places


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Led]:
    run = create_run(tmp_path, "r", "r")
    listener, clock = socket.create_server(("127.0.0.1", 0)), Clock()
    right = LeaderLease(run.leases, "n0", *listener.getsockname()[:2])
    right.begin()
    fd_store, server = FdStore(), RunFolderServer(run)
    nodes = Membership(KEY, listener, {}, right, fd_store, server, SILENT_S, clock)
    led = Led(NodeGroup(nodes, fd_store, server), clock, run)
    yield led
    led.group.close()
    for line in led.lines.values():
        line.close()


def test_silent_node_is_lost_with_its_workers(led: Led) -> None:
    for name in ("n0", "n1", "n2"):
        led.join(name)
    assert led.begin(2) == {0: "n0", 1: "n1"}
    led.clock.now += SILENT_S
    led.tell_that_they_live("n0", "n2")
    assert led.group.poll() == []
    assert set(led.group.nodes.members) == {"n0", "n1", "n2"}, "silent for as long as it may be"
    led.clock.now += 0.01
    assert [(end.rank, end.pid) for end in led.group.poll()] == [(1, 101)]
    assert led.group.lost_nodes == [("n1", f"its agent has sent nothing for {SILENT_S:g} s")]
    assert (set(led.group.nodes.members), led.group.pids()) == ({"n0", "n2"}, {0: 100})
    assert led.begin(2) == {0: "n0", 1: "n2"}, "the spare has its place"
    assert led.group.lost_nodes == []


def test_agent_stopped_before_it_joins_is_named_and_ends_the_wait(led: Led, recipe) -> None:
    run = led.run
    write_json(run.recipe_file, recipe({"train.join_s": 40.0}).model_dump())
    led.join("n0")
    led.until(lambda: bool(led.group.nodes.able()))
    agents = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    os.kill(agents[1].pid, signal.SIGSTOP)
    led.group.processes = list(agents)
    eventually(lambda: psutil.Process(agents[1].pid).status() == psutil.STATUS_STOPPED)
    attempt = Attempt(run=run.path, number=1, workers=2, nodes=2, device="cpu", threads=1)

    def pass_time() -> None:
        led.clock.now += 1.0
        led.tell_that_they_live("n0")

    stopped = f"node n1 (process {agents[1].pid}, stopped by a signal)"
    try:
        with (
            Recorder(record_path(run.events, 1, "agent"), attempt=1, process="agent") as recorder,
            pytest.raises(WorkerError, match=r"too few nodes for 2 workers after 4\d s: ") as ended,
        ):
            led.group.gather(attempt, None, recorder, pass_time)  # type: ignore[arg-type] # no worker starts
        assert f"{stopped} did not join (joined: n0)" in ended.value.message
        assert "train.join_s" in (ended.value.hint or "")
        (said,) = [event["text"] for record in read_run(run) for event in record.events if event["kind"] == "waiting"]
        assert said.startswith(f"waiting for {stopped} for 15 s, at most ")
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


def test_lost_spare_costs_no_worker(led: Led) -> None:
    for name in ("n0", "n1"):
        led.join(name)
    led.begin(1)
    led.lines["n1"].close()
    led.until(lambda: "n1" not in led.group.nodes.members)
    assert (led.group.poll(), led.group.lost_nodes, led.group.pids()) == ([], [], {0: 100})
    assert not led.group.place_ranks(2), "only one slot is left"


def test_silent_agent_is_named_before_its_node_is_lost(led: Led) -> None:
    for name in ("n0", "n1", "n2"):
        led.join(name)
    led.begin(2)
    led.clock.now += 0.4 * SILENT_S
    led.tell_that_they_live("n1", "n2")
    assert led.group.heard_at() == pytest.approx(led.clock.now - 0.4 * SILENT_S), "nothing is known since"
    assert led.group.node_events == []
    led.clock.now += 0.2 * SILENT_S
    led.tell_that_they_live("n1", "n2")
    led.group.poll()
    (silent,) = led.group.node_events
    assert (silent.node, silent.state) == ("n0", "silent")
    assert silent.text == "node n0: its agent (process 1) has sent nothing for 3.0 s"
    led.tell_that_they_live("n0")
    assert led.group.node_events[1].text == "node n0: its agent is heard again after 3.0 s"
    assert led.group.heard_at() == led.clock.now


def test_node_lost_before_it_had_workers_is_recorded_and_gets_none(led: Led, tmp_path: Path) -> None:
    for name in ("n0", "n1"):
        led.join(name)
    assert led.group.place_ranks(2)
    led.clock.now += SILENT_S + 0.01
    led.tell_that_they_live("n0")
    led.group.survey()
    (lost,) = [event for event in led.group.node_events if event.state == "lost"]
    assert lost.text == "node n1, without workers, was lost: its agent has sent nothing for 5 s"
    attempt = Attempt(run=tmp_path / "r", number=1, workers=2, nodes=2, device="cpu", threads=1)
    with pytest.raises(NodeLost, match="node n1 was lost before its workers started"):
        list(led.group.assign_all(attempt, None))


def test_more_nodes_than_workers_are_refused(lab: Lab, recipe) -> None:
    with pytest.raises(UsageError, match="--nodes 3, but only 2 workers"):
        lab.train(recipe(SETTINGS), workers=2, nodes=3)
