"""A node leaves a run that goes on: whether it may, and what the leader does."""

import json
import os
import threading
from pathlib import Path

import pytest
from test_node_runs import KEY, SETTINGS, Led, led, recorded_so_far, resumed, sized, unharmed  # noqa: F401

from conftest import Lab, Lived, assert_same, when
from eventually import CEILING_S
from headway.agent.attempt import Attempt
from headway.agent.nodes.leave import effect_of_leaving, node_of_machine
from headway.agent.nodes.members import unreachable_member
from headway.agent.supervise.recover import NodeCapacity
from headway.cli.agent import leave
from headway.errors import RunError, UsageError
from headway.track import Recorder, account, create_run, read_run, record_path

TWO, ONE_OR_TWO = (2,), (1, 2)


@pytest.mark.parametrize(
    ("slots", "counts", "fewest", "has_workers", "refused", "workers"),
    [
        ({"a": 1, "b": 1, "c": 1}, ONE_OR_TWO, 1, True, False, 2),  # a spare
        ({"a": 1, "b": 2}, ONE_OR_TWO, 2, True, False, 2),  # room elsewhere
        ({"a": 1, "b": 1}, ONE_OR_TWO, 1, True, False, 1),  # it shrinks
        ({"a": 1, "b": 1}, ONE_OR_TWO, 2, True, True, 2),  # it must not
        ({"a": 1, "b": 1}, TWO, 1, True, True, 2),  # the mesh cannot
        ({"a": 2}, ONE_OR_TWO, 1, True, True, 2),  # the only node
        ({"a": 1, "b": 1}, TWO, 2, False, False, 2),  # a spare itself
    ],
)
def test_effect_of_leaving(slots, counts, fewest, has_workers, refused, workers) -> None:
    effect = effect_of_leaving(NodeCapacity(2, tuple(slots.items()), counts, fewest), "a", has_workers)
    assert (effect.refused, effect.workers) == (refused, workers)
    if refused:
        room = sum(slots.values()) - slots["a"]
        assert effect.text.startswith("node a cannot leave: the run needs room for")
        assert effect.text.endswith(f"the other nodes have {room}")


def test_machine_with_one_node_needs_no_name() -> None:
    members = {name: unreachable_member(name) for name in ("vm-0", "gpu-1-1", "gpu-1-2")}
    assert node_of_machine("vm", members) == ("vm-0", "")
    assert node_of_machine("gpu-1", members)[0] is None
    assert "machine x has no nodes" in node_of_machine("x", members)[1]


@pytest.fixture
def two_of_three(led: Led, recipe, tmp_path: Path) -> Led:  # noqa: F811
    """Two workers on n0 and n1; n2 is a spare."""
    run = tmp_path / "r"
    (run / "recipe.json").write_text(
        recipe(SETTINGS | {"train.fewest_workers": 2, "model.vocab_size": 300}).model_dump_json()
    )
    (run / "key").write_text(KEY)
    for name in ("n0", "n1", "n2"):
        led.join(name)
    led.begin(2)
    led.group._attempt = Attempt(run=run, number=1, workers=2, nodes=2, device="cpu", threads=1)
    return led


def test_leader_lets_a_node_go_once_its_workers_are_elsewhere(two_of_three: Led, tmp_path: Path, capsys) -> None:
    group = two_of_three.group
    command = threading.Thread(target=lambda: leave("n1", run="r", runs=tmp_path, json=True))
    command.start()
    two_of_three.until(lambda: group.leaving_with_workers() == ("n1",))
    group.let_leave()
    assert "n1" in group.nodes.members, "its workers still run"
    assert group.place_ranks(2)
    assert [group.node(rank).name for rank in range(2)] == ["n0", "n2"]
    assert group.leaving_with_workers() == ()
    group.let_leave()
    two_of_three.until(lambda: not command.is_alive())
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "node": "n1", "workers": 2, "text": "its workers move to other nodes, 2 as before", "state": "left", "run": "r",
    }  # fmt: skip
    bye = [message for message in two_of_three.lines["n1"].receive() if message.kind == "bye"]
    assert [(message.fields["status"], message.fields["left"]) for message in bye] == [(0, True)]
    assert [event.state for event in group.node_events] == ["leaving", "left"]
    assert group.lost_nodes == []


def test_node_that_cannot_be_replaced_may_not_leave(two_of_three: Led, tmp_path: Path) -> None:
    two_of_three.lines["n2"].close()
    two_of_three.until(lambda: "n2" not in two_of_three.group.nodes.members)
    errors = list[UsageError]()

    def ask(node: str) -> None:
        try:
            leave(node, run="r", runs=tmp_path)
        except UsageError as error:
            errors.append(error)

    for node, text in (("n1", "the run needs room for 2 workers, the other nodes have 1"), ("n7", "no node 'n7'")):
        command = threading.Thread(target=ask, args=(node,))
        command.start()
        two_of_three.until(lambda command=command: not command.is_alive())
        assert text in errors[-1].message
        assert "nodes of the run: n0, n1" in (errors[-1].hint or "")
    assert two_of_three.group.leaving_with_workers() == ()


def test_no_node_leaves_a_run_that_is_over(tmp_path: Path) -> None:
    run = create_run(tmp_path, "r", "r")
    with Recorder(record_path(run.events, 1, "agent"), attempt=1, process="agent") as recorder:
        recorder.event("end", outcome="finished", reason="all steps done")
    with pytest.raises(RunError, match="run r is not running: it has finished"):
        leave(run="r", runs=tmp_path)


def test_leading_node_is_told_how_another_comes_to_lead(two_of_three: Led, tmp_path: Path) -> None:
    errors = list[UsageError]()

    def ask() -> None:
        try:
            leave("n0", run="r", runs=tmp_path)
        except UsageError as error:
            errors.append(error)

    command = threading.Thread(target=ask)
    command.start()
    two_of_three.until(lambda: not command.is_alive())
    pids = f"1 {os.getppid()} {os.getpid()}"  # the node said that its process is 1
    assert errors[0].message.startswith(f"node n0 leads the run and cannot leave; kill -9 {pids} on n0 makes another")
    assert two_of_three.group.leaving_with_workers() == ()


@pytest.mark.slow
def test_node_leaves_and_the_run_has_the_same_bits(lab: Lab, recipe, unharmed: Lived) -> None:  # noqa: F811
    """With `restarts = 0`: it is no failure. No step is done twice."""

    def kept() -> bool:
        return any(event["step"] >= 3 for event in recorded_so_far(lab, "kept"))

    def ask() -> None:
        (run,) = (path.parent.name for path in lab.root.glob("*/key"))
        leave("n1", run=run, runs=lab.root)

    when(kept, ask, patience_s=CEILING_S)
    slow = SETTINGS | {"train.restarts": 0}
    lived = lab.train(recipe(slow), workers=2, nodes=2, spares=1)
    assert_same(lived, unharmed)
    assert sized(lived) == [2, 2]
    steps = [event["step"] for event in lived.events("step")]
    assert steps == sorted(set(steps)), "no step was done twice"
    assert lived.ways_on == [f"node n1 left on request; resuming from step {resumed(lived)[1]} (memory)"]
    assert not any("failure" in event for event in lived.events("end", "agent"))
    texts = [incident.text for incident in account(read_run(lived.run)).incidents]
    assert "node n1 left on request" in texts
