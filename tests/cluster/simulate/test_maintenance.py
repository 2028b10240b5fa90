"""Nodes that will be away: nothing is on them then, and nobody loses work by it."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_log import log

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import apply_decisions, replay
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.nodes import LEAD_S
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.wait_reasons import explain_wait
from headway.cluster.simulate import MaintenanceWindow, SimulationSetup, simulate
from headway.errors import UsageError

FROM_S, TO_S = 20_000.0, 30_000.0


def cluster(away: int = 1, nodes: int = 2) -> ClusterSnapshot:
    """Nodes of four GPUs, of which the first ones go away."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 4, [f"n{number}" for number in range(nodes)])
    snapshot.tenants.join("all", 4 * nodes)
    snapshot.nodes.announce([f"n{number}" for number in range(away)], FROM_S, TO_S)
    return snapshot


def act(snapshot: ClusterSnapshot, now: float, policy: str = "headway") -> list[str]:
    snapshot.advance(now)
    decisions = decide(snapshot, now, POLICIES[policy])
    assert all(one.reason.sentence for one in decisions)
    told = [f"{one.kind} {snapshot.jobs.names[one.job]} {one.place.nodes.tolist()}" for one in decisions]
    apply_decisions(snapshot, decisions)
    return told


@pytest.mark.parametrize(
    ("what", "now", "limit_s", "preemptible", "nodes"),
    [
        ("it ends before", 0.0, FROM_S - LEAD_S, False, [0]),
        ("it ends after", 0.0, FROM_S - LEAD_S + 1, False, [1]),
        ("nobody knows", 0.0, math.inf, False, [1]),
        ("it can be moved", 0.0, math.inf, True, [0]),
        ("it could be moved, and that is not worth it", FROM_S - LEAD_S - 1799, math.inf, True, [1]),
        ("away", FROM_S + 1, 5.0, False, [1]),
        ("nearly away", FROM_S - LEAD_S, 5.0, False, [1]),
        ("back", TO_S, math.inf, False, [0]),
    ],
)
@pytest.mark.parametrize("policy", ["headway", "fifo", "slurm", "kueue"])
def test_where_a_job_lies(what: str, now: float, limit_s: float, preemptible: bool, nodes: list[int], policy: str):
    """Otherwise it would lie on the first node."""
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 2, limit_s=limit_s, preemptible=preemptible)])
    assert act(snapshot, now, policy) == [f"start x {nodes}"]


def test_what_ran_for_some_time_has_less_left() -> None:
    snapshot = cluster()
    (row,) = snapshot.submit([Job("x", "all", 2, limit_s=30_000.0)])
    snapshot.jobs.ran_s[row] = 12_000.0
    assert act(snapshot, 0.0) == ["start x [0]"]


@pytest.mark.parametrize("policy", ["headway", "fifo", "slurm", "kueue"])
def test_what_runs_saves_and_is_moved(policy: str) -> None:
    """Whether it can be stopped or not: its limit did not hold."""
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 4, limit_s=10_000.0)])
    assert act(snapshot, 0.0, policy) == ["start x [0]"]
    assert act(snapshot, FROM_S - LEAD_S - 1, policy) == []
    assert act(snapshot, FROM_S - LEAD_S, policy) == ["move x [0]"]
    (row,) = snapshot.queue.tolist()
    assert snapshot.jobs.done_s[row] == FROM_S - LEAD_S, "no work is lost"
    snapshot.jobs.limit_s[row] = math.inf
    assert act(snapshot, FROM_S - LEAD_S + 30, policy) == ["start x [1]"]


def test_nobody_is_stopped_where_a_job_cannot_lie() -> None:
    """The job on the node that goes away would lose less, and the new one could not stay there."""
    snapshot = cluster()
    snapshot.submit([Job("a", "all", 4, preemptible=True), Job("b", "all", 4, preemptible=True)])
    assert sorted(act(snapshot, 0.0)) == ["start a [0]", "start b [1]"]
    snapshot.jobs.ran_s[snapshot.active] = 1e5
    snapshot.submit([Job("new", "all", 4, submit_s=1900.0)])
    assert act(snapshot, 2000.0) == ["stop b [1]", "start new [1]"]


def test_why_a_job_waits_for_nodes_that_stay() -> None:
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 8)])
    assert act(snapshot, 0.0) == []
    told = explain_wait(snapshot, 0.0, POLICIES["headway"], "x")
    assert told.reason.code == "window"
    assert told.reason.sentence.startswith("finds 8 GPUs only on nodes that go away")


AWAY = (MaintenanceWindow(0, 2, FROM_S, TO_S), MaintenanceWindow(2, 3, 40_000.0, 60_000.0))


@pytest.mark.parametrize("policy", ["headway", "slurm", "kueue"])
def test_nothing_is_on_nodes_that_are_away(policy: str, tmp_path: Path) -> None:
    """By what was recorded: where each job lay from when to when."""
    path = tmp_path / "kept.jsonl.gz"
    setup = SimulationSetup("a100", 4, 4, away=AWAY, elastic=0.3)
    outcome = simulate(log(1, 50_000), setup, POLICIES[policy], record=path)
    assert outcome.stops["maintenance"] > 0, "logs where nothing is moved prove little"
    assert int((outcome.starts - 1).sum()) == sum(outcome.stops.values()) - outcome.stops["resize"]
    spans, lies = list[tuple[float, float, list[int]]](), dict[str, tuple[float, list[int]]]()
    with gzip.open(path, "rt") as file:
        for line in map(json.loads, file):
            for kind, name, (_, nodes, _), *_ in line.get("decided", ()):
                if kind in ("stop", "move", "resize"):
                    begin, on = lies.pop(name)
                    spans.append((begin, line["at"], on))
                if kind in ("start", "resize"):
                    lies[name] = line["at"], nodes
            if "end" in line:
                begin, on = lies.pop(line["end"])
                spans.append((begin, line["at"], on))
    assert not lies
    for begin, end, on in spans:
        for one in AWAY:
            there = any(one.first <= node < one.end for node in on)
            assert not there or end <= one.from_s or begin >= one.to_s
    assert list(replay(path)) == [None] * len(list(replay(path)))


def test_a_snapshot_keeps_them() -> None:
    snapshot = cluster()
    again = ClusterSnapshot.from_json(snapshot.to_json())
    assert again.to_json() == snapshot.to_json()
    assert again.nodes.windows(again.nodes.pools[0]) == [("n0", FROM_S, TO_S)]


@pytest.mark.parametrize(
    ("names", "away_s", "back_s", "says"),
    [
        (["n1", "x"], 1.0, 2.0, "node x is to be away, and there is none"),
        (["n1"], 2.0, 2.0, "nodes are away from 2.0 s to 2.0 s"),
        (["n1"], math.nan, 2.0, "nodes are away from nan s"),
        (["n1"], 1.0, math.inf, "to inf s"),
        (["n1", "n0"], 25_000.0, 35_000.0, "node n0 is away from 20000 s to 30000 s already"),
    ],
)
def test_bad_times_are_refused(names: list[str], away_s: float, back_s: float, says: str) -> None:
    snapshot = cluster()
    before = snapshot.to_json()
    with pytest.raises(UsageError, match=says):
        snapshot.nodes.announce(names, away_s, back_s)
    assert snapshot.to_json() == before


def test_nodes_that_a_simulated_cluster_does_not_have() -> None:
    with pytest.raises(UsageError, match="nodes 3 to 5 are to be away, and there are 4"):
        simulate(
            log(1, 50_000),
            replace(SimulationSetup("a100", 4, 4), away=(MaintenanceWindow(3, 5, 1.0, 2.0),)),
            POLICIES["fifo"],
        )
