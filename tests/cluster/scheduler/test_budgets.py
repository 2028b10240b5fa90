"""Budgets: a tenant that has spent its GPU-hours of the month runs on what idles, or waits."""

import math
from pathlib import Path

import numpy as np
import pytest

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import apply_decisions, replay
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.tenants import MONTH_S
from headway.cluster.scheduler.wait_reasons import explain_wait
from headway.cluster.simulate import JobTrace, SimulationSetup, simulate
from headway.errors import UsageError


def cluster(hours: float = 10.0) -> ClusterSnapshot:
    """Eight GPUs, half of them for a tenant with a budget and half for one without."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 8, ["n"])
    snapshot.tenants.join("poor", 4, budget_gpu_h=hours)
    snapshot.tenants.join("rich", 4)
    return snapshot


def act(snapshot: ClusterSnapshot, now: float, policy: str = "headway") -> list[str]:
    snapshot.advance(now)
    decisions = decide(snapshot, now, POLICIES[policy])
    apply_decisions(snapshot, decisions)
    return [f"{one.kind} {snapshot.jobs.names[one.job]}" for one in decisions]


def test_hours_are_counted_in_the_month_they_fall_into() -> None:
    snapshot = cluster()
    snapshot.submit([Job("x", "poor", 4)])
    act(snapshot, 0.0)
    snapshot.advance(3600.0)
    assert snapshot.tenants.spent_gpu_s[0] == 4 * 3600
    snapshot.advance(MONTH_S - 100)
    assert snapshot.tenants.over_budget().tolist() == [True, False]
    snapshot.advance(MONTH_S + 50)
    assert snapshot.tenants.spent_gpu_s[0] == 4 * 50
    snapshot.advance(4 * MONTH_S + 7)
    assert snapshot.tenants.spent_gpu_s[0] == 4 * 7
    assert snapshot.tenants.over_budget().tolist() == [False, False]


def test_a_month_that_ends_just_now() -> None:
    snapshot = cluster()
    snapshot.submit([Job("x", "poor", 4)])
    act(snapshot, 0.0)
    for now in (MONTH_S / 2, MONTH_S):
        snapshot.advance(now)
    assert snapshot.tenants.spent_gpu_s[0] == 0


def spent(preemptible: bool, name: str = "x") -> ClusterSnapshot:
    snapshot = cluster()
    snapshot.tenants.spent_gpu_s[0] = 36_000.0
    snapshot.submit([Job(name, "poor", 4, preemptible=preemptible)])
    return snapshot


def test_what_can_be_stopped_runs_on_what_idles_and_gives_way_to_all() -> None:
    snapshot = spent(preemptible=True)
    assert act(snapshot, 0.0) == ["start x"]
    snapshot.submit([Job("large", "rich", 6, submit_s=0.0, preemptible=True)])
    snapshot.jobs.ran_s[snapshot.jobs.rows["large"]] = 1e6  # it has had far more, and goes first still
    assert act(snapshot, 1000.0) == ["stop x", "start large"]
    assert act(snapshot, 20 * 86400.0) == [], "not even when it has waited for long"
    assert act(snapshot, MONTH_S + 1) == ["stop large", "start x"], "a new month, and it is due"


@pytest.mark.parametrize(("policy", "preemptible"), [("headway", False), ("kueue", False), ("kueue", True)])
def test_what_nobody_can_stop_waits_and_is_told_why(policy: str, preemptible: bool) -> None:
    snapshot = spent(preemptible)
    assert act(snapshot, 0.0, policy) == []
    told = explain_wait(snapshot, 0.0, POLICIES[policy], "x")
    assert told.reason.code == "budget"
    assert told.reason.sentence == "tenant poor has spent its 10 GPU-hours of this month, and this cannot be stopped"
    assert act(snapshot, MONTH_S, policy) == ["start x"]


def test_it_is_last_whatever_its_priority() -> None:
    snapshot = cluster()
    snapshot.tenants.spent_gpu_s[0] = 36_000.0
    snapshot.submit([Job("x", "poor", 8, 0.0, 9, True), Job("y", "rich", 8, 1.0)])
    assert act(snapshot, 2.0) == ["start y"]


def test_nothing_is_owed_to_it() -> None:
    snapshot = spent(preemptible=False)
    assert snapshot.tenants.lacks().tolist() == [0, 0]
    snapshot.tenants.spent_gpu_s[0] = 0.0
    assert snapshot.tenants.lacks().tolist() == [4, 0]


def test_a_budget_is_its_children_s_too() -> None:
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 8, ["n"])
    snapshot.tenants.join("department", 8, budget_gpu_h=1.0)
    snapshot.tenants.join("team", 4, "department")
    snapshot.tenants.join("other", 4, "department")
    snapshot.submit([Job("x", "team", 4)])
    act(snapshot, 0.0)
    snapshot.advance(1000.0)
    assert snapshot.tenants.over_budget().tolist() == [True, True, True]
    again = ClusterSnapshot.from_json(snapshot.to_json())
    assert again.to_json() == snapshot.to_json()
    assert again.tenants.over_budget().tolist() == [True, True, True]


def test_a_simulated_tenant_without_means_waits_for_the_next_month(tmp_path: Path) -> None:
    """Four GPUs for six hours are 24 GPU-hours, and it has 10 a month: a second job waits for the next."""
    trace = JobTrace(
        ("a", "b", "c"), np.array([0.0, 30_000.0, 30_000.0]), np.array([21_600.0, 3600.0, 3600.0]), np.array([4, 4, 4]),
        np.array([0, 0, 1]), ("poor", "rich"), np.full(3, math.nan), np.full(3, math.nan),
    )  # fmt: skip
    path = tmp_path / "x.jsonl.gz"
    setup = SimulationSetup("a100", 8, 1, {"poor": 4, "rich": 4}, preemptible=0.0, budgets={"poor": 10.0})
    outcome = simulate(trace, setup, POLICIES["headway"], record=path)
    assert outcome.first_start_s[[0, 2]].tolist() == [0.0, 30_000.0]
    assert MONTH_S <= outcome.first_start_s[1] <= MONTH_S + 3600
    assert list(replay(path)) == [None] * len(list(replay(path)))
    with pytest.raises(UsageError, match="tenant x has a budget and no guarantee"):
        simulate(trace, SimulationSetup("a100", 8, 1, budgets={"x": 1.0}), POLICIES["headway"])


@pytest.mark.parametrize("hours", [-1.0, 0.0, math.nan, math.inf])
def test_budgets_that_are_none(hours: float) -> None:
    with pytest.raises(UsageError, match="tenant x: budget is"):
        ClusterSnapshot().tenants.join("x", budget_gpu_h=hours)
