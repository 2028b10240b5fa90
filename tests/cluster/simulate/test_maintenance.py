"""Scheduled maintenance: no job runs on these nodes, and none loses work by it."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_trace import synthetic_trace

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import apply_decisions, replay
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.nodes import DRAIN_LEAD_S
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.wait_reasons import explain_wait
from headway.cluster.simulate import MaintenanceWindow, SimulationSetup, simulate
from headway.errors import UsageError

FROM_S, TO_S = 20_000.0, 30_000.0


def cluster(away: int = 1, nodes: int = 2) -> ClusterSnapshot:
    """Return nodes of four GPUs; the first ones have maintenance."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 4, [f"n{number}" for number in range(nodes)])
    snapshot.tenants.add_tenant("all", 4 * nodes)
    snapshot.nodes.schedule_maintenance([f"n{number}" for number in range(away)], FROM_S, TO_S)
    return snapshot


def run_cycle(snapshot: ClusterSnapshot, now: float, policy: str = "headway") -> list[str]:
    snapshot.advance(now)
    decisions = decide(snapshot, now, POLICIES[policy])
    assert all(decision.reason.sentence for decision in decisions)
    lines = [
        f"{decision.kind} {snapshot.jobs.names[decision.job]} {decision.placement.nodes.tolist()}"
        for decision in decisions
    ]
    apply_decisions(snapshot, decisions)
    return lines


@pytest.mark.parametrize(
    ("what", "now", "limit_s", "preemptible", "nodes"),
    [
        ("it ends before", 0.0, FROM_S - DRAIN_LEAD_S, False, [0]),
        ("it ends after", 0.0, FROM_S - DRAIN_LEAD_S + 1, False, [1]),
        ("no time limit", 0.0, math.inf, False, [1]),
        ("it can be moved", 0.0, math.inf, True, [0]),
        ("it could be moved, but that is not worth it", FROM_S - DRAIN_LEAD_S - 1799, math.inf, True, [1]),
        ("in maintenance", FROM_S + 1, 5.0, False, [1]),
        ("about to begin", FROM_S - DRAIN_LEAD_S, 5.0, False, [1]),
        ("over", TO_S, math.inf, False, [0]),
    ],
)
@pytest.mark.parametrize("policy", ["headway", "fifo", "slurm", "kueue"])
def test_job_avoids_nodes_with_maintenance_before_its_end(
    what: str, now: float, limit_s: float, preemptible: bool, nodes: list[int], policy: str
):
    """Without maintenance it would get the first node."""
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 2, limit_s=limit_s, preemptible=preemptible)])
    assert run_cycle(snapshot, now, policy) == [f"start x {nodes}"]


def test_time_already_run_counts_against_the_limit() -> None:
    snapshot = cluster()
    (row,) = snapshot.submit([Job("x", "all", 2, limit_s=30_000.0)])
    snapshot.jobs.ran_s[row] = 12_000.0
    assert run_cycle(snapshot, 0.0) == ["start x [0]"]


@pytest.mark.parametrize("policy", ["headway", "fifo", "slurm", "kueue"])
def test_running_job_saves_and_is_moved(policy: str) -> None:
    """Although it is not preemptible: its time limit did not hold."""
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 4, limit_s=10_000.0)])
    assert run_cycle(snapshot, 0.0, policy) == ["start x [0]"]
    assert run_cycle(snapshot, FROM_S - DRAIN_LEAD_S - 1, policy) == []
    assert run_cycle(snapshot, FROM_S - DRAIN_LEAD_S, policy) == ["move x [0]"]
    (row,) = snapshot.queue.tolist()
    assert snapshot.jobs.done_s[row] == FROM_S - DRAIN_LEAD_S, "no work is lost"
    snapshot.jobs.limit_s[row] = math.inf
    assert run_cycle(snapshot, FROM_S - DRAIN_LEAD_S + 30, policy) == ["start x [1]"]


def test_no_job_is_preempted_on_nodes_the_new_one_cannot_use() -> None:
    """The job on the node with maintenance would lose less, but the new one could not stay there."""
    snapshot = cluster()
    snapshot.submit([Job("a", "all", 4, preemptible=True), Job("b", "all", 4, preemptible=True)])
    assert sorted(run_cycle(snapshot, 0.0)) == ["start a [0]", "start b [1]"]
    snapshot.jobs.ran_s[snapshot.active] = 1e5
    snapshot.submit([Job("new", "all", 4, submit_s=1900.0)])
    assert run_cycle(snapshot, 2000.0) == ["stop b [1]", "start new [1]"]


def test_explanation_names_maintenance() -> None:
    snapshot = cluster()
    snapshot.submit([Job("x", "all", 8)])
    assert run_cycle(snapshot, 0.0) == []
    explanation = explain_wait(snapshot, 0.0, POLICIES["headway"], "x")
    assert explanation.reason.code == "window"
    assert explanation.reason.sentence.startswith("8 GPUs are free only on nodes with maintenance")


AWAY = (MaintenanceWindow(0, 2, FROM_S, TO_S), MaintenanceWindow(2, 3, 40_000.0, 60_000.0))


@pytest.mark.parametrize("policy", ["headway", "slurm", "kueue"])
def test_no_job_runs_on_nodes_in_maintenance(policy: str, tmp_path: Path) -> None:
    """By the decision log: which nodes each job held, and when."""
    path = tmp_path / "log.jsonl.gz"
    setup = SimulationSetup("a100", 4, 4, away=AWAY, elastic=0.3)
    result = simulate(synthetic_trace(1, 50_000), setup, POLICIES[policy], record=path)
    assert result.stops["maintenance"] > 0, "a trace without moves proves little"
    assert int((result.starts - 1).sum()) == sum(result.stops.values()) - result.stops["resize"]
    spans, held = list[tuple[float, float, list[int]]](), dict[str, tuple[float, list[int]]]()
    with gzip.open(path, "rt") as file:
        for line in map(json.loads, file):
            for kind, name, (_, nodes, _), *_ in line.get("decided", ()):
                if kind in ("stop", "move", "resize"):
                    begin, nodes_held = held.pop(name)
                    spans.append((begin, line["at"], nodes_held))
                if kind in ("start", "resize"):
                    held[name] = line["at"], nodes
            if "end" in line:
                begin, nodes_held = held.pop(line["end"])
                spans.append((begin, line["at"], nodes_held))
    assert not held
    for begin, end, nodes_held in spans:
        for window in AWAY:
            overlaps = any(window.first <= node < window.end for node in nodes_held)
            assert not overlaps or end <= window.from_s or begin >= window.to_s
    assert list(replay(path)) == [None] * len(list(replay(path)))


def test_snapshot_keeps_maintenance() -> None:
    snapshot = cluster()
    restored = ClusterSnapshot.from_json(snapshot.to_json())
    assert restored.to_json() == snapshot.to_json()
    assert restored.nodes.maintenance(restored.nodes.pools[0]) == [("n0", FROM_S, TO_S)]


@pytest.mark.parametrize(
    ("names", "away_s", "back_s", "message"),
    [
        (["n1", "x"], 1.0, 2.0, "maintenance of unknown node 'x'"),
        (["n1"], 2.0, 2.0, "maintenance is from 2.0 s to 2.0 s"),
        (["n1"], math.nan, 2.0, "maintenance is from nan s"),
        (["n1"], 1.0, math.inf, "to inf s"),
        (["n1", "n0"], 25_000.0, 35_000.0, "node n0 already has maintenance from 20000 s to 30000 s"),
    ],
)
def test_invalid_maintenance_is_rejected(names: list[str], away_s: float, back_s: float, message: str) -> None:
    snapshot = cluster()
    before = snapshot.to_json()
    with pytest.raises(UsageError, match=message):
        snapshot.nodes.schedule_maintenance(names, away_s, back_s)
    assert snapshot.to_json() == before


def test_maintenance_of_nodes_outside_the_cluster_is_rejected() -> None:
    with pytest.raises(UsageError, match="maintenance of nodes 3 to 5; the cluster has 4"):
        simulate(
            synthetic_trace(1, 50_000),
            replace(SimulationSetup("a100", 4, 4), away=(MaintenanceWindow(3, 5, 1.0, 2.0),)),
            POLICIES["fifo"],
        )
