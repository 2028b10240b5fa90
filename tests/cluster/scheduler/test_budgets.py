"""Budgets: a tenant that has spent its GPU-hours of the month runs on idle GPUs, or waits."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import numpy as np
import pytest

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import apply_decisions, replay
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.wait_reasons import explain_wait
from headway.cluster.simulate import JobTrace, SimulationSetup, simulate
from headway.errors import UsageError

DAY_S = 86400.0
MONTH_S = 31 * DAY_S
"""January: second 0 is the beginning of 1970 unless it is set."""


def cluster(hours: float = 10.0) -> ClusterSnapshot:
    """Return a cluster of eight GPUs, half guaranteed to a tenant with a budget and half to one without."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 8, ["n"])
    snapshot.tenants.add_tenant("poor", 4, budget_gpu_h=hours)
    snapshot.tenants.add_tenant("rich", 4)
    return snapshot


def run_cycle(snapshot: ClusterSnapshot, now: float, policy: str = "headway") -> list[str]:
    snapshot.advance(now)
    decisions = decide(snapshot, now, POLICIES[policy])
    apply_decisions(snapshot, decisions)
    return [f"{decision.kind} {snapshot.jobs.names[decision.job]}" for decision in decisions]


def test_gpu_hours_count_in_the_month_they_fall_into() -> None:
    snapshot = cluster()
    snapshot.submit([Job("x", "poor", 4)])
    run_cycle(snapshot, 0.0)
    snapshot.advance(3600.0)
    assert snapshot.tenants.spent_gpu_s[0] == 4 * 3600
    snapshot.advance(MONTH_S - 100)
    assert snapshot.tenants.over_budget().tolist() == [True, False]
    snapshot.advance(MONTH_S + 50)
    assert snapshot.tenants.spent_gpu_s[0] == 4 * 50
    snapshot.advance((31 + 28 + 31 + 30) * DAY_S + 7)
    assert snapshot.tenants.spent_gpu_s[0] == 4 * 7
    assert snapshot.tenants.over_budget().tolist() == [False, False]


def test_spending_resets_exactly_at_the_end_of_a_month() -> None:
    snapshot = cluster()
    snapshot.submit([Job("x", "poor", 4)])
    run_cycle(snapshot, 0.0)
    for now in (MONTH_S / 2, MONTH_S):
        snapshot.advance(now)
    assert snapshot.tenants.spent_gpu_s[0] == 0


@pytest.mark.parametrize("seed", range(20))
def test_spending_is_what_ran_since_the_first_of_the_month(seed: int) -> None:
    """By the calendar of the standard library, over two years from any day, leap days included."""
    rng = Random(seed)
    zero = datetime(2023, 1, 1, tzinfo=UTC).timestamp() + rng.uniform(0, 365 * DAY_S)
    snapshot = cluster()
    snapshot.set_calendar(zero)
    snapshot.submit([Job("x", "poor", 4)])
    run_cycle(snapshot, 0.0)
    for now in sorted(rng.uniform(0, 730 * DAY_S) for _ in range(40)):
        snapshot.advance(now)
        today = datetime.fromtimestamp(zero + now, UTC)
        first = datetime(today.year, today.month, 1, tzinfo=UTC).timestamp()
        assert snapshot.tenants.spent_gpu_s[0] == pytest.approx(4 * min(zero + now - first, now), abs=1e-3)
    again = ClusterSnapshot.from_json(snapshot.to_json())
    assert (again.unix_zero_s, again.to_json()) == (snapshot.unix_zero_s, snapshot.to_json())


def test_spending_of_another_month_does_not_count_after_an_outage() -> None:
    """The scheduler's clock stands still meanwhile; the calendar does not."""
    snapshot = cluster()
    november = datetime(2026, 11, 30, 23, tzinfo=UTC).timestamp()
    snapshot.set_calendar(november)
    snapshot.submit([Job("x", "poor", 4)])
    run_cycle(snapshot, 0.0)
    snapshot.advance(60.0)
    snapshot.set_calendar(november + 600)
    assert snapshot.tenants.spent_gpu_s[0] == 240
    snapshot.set_calendar(november + 3600)
    assert snapshot.tenants.spent_gpu_s[0] == 0


def over_budget(preemptible: bool, name: str = "x") -> ClusterSnapshot:
    snapshot = cluster()
    snapshot.tenants.spent_gpu_s[0] = 36_000.0
    snapshot.submit([Job(name, "poor", 4, preemptible=preemptible)])
    return snapshot


def test_preemptible_job_over_budget_runs_on_idle_gpus_and_yields_to_all() -> None:
    snapshot = over_budget(preemptible=True)
    assert run_cycle(snapshot, 0.0) == ["start x"]
    snapshot.submit([Job("large", "rich", 6, submit_s=0.0, preemptible=True)])
    snapshot.jobs.ran_s[snapshot.jobs.rows["large"]] = 1e6  # it has had far more, and still goes first
    assert run_cycle(snapshot, 1000.0) == ["stop x", "start large"]
    assert run_cycle(snapshot, 20 * 86400.0) == [], "not even when it has waited for long"
    assert run_cycle(snapshot, MONTH_S + 1) == ["stop large", "start x"], "a new month, and it is due"


@pytest.mark.parametrize(("policy", "preemptible"), [("headway", False), ("kueue", False), ("kueue", True)])
def test_non_preemptible_job_over_budget_waits_and_the_reason_says_so(policy: str, preemptible: bool) -> None:
    snapshot = over_budget(preemptible)
    assert run_cycle(snapshot, 0.0, policy) == []
    explanation = explain_wait(snapshot, 0.0, POLICIES[policy], "x")
    assert explanation.reason.code == "budget"
    assert explanation.reason.sentence == "tenant poor has spent this month's 10 GPU-hours; job is not preemptible"
    assert run_cycle(snapshot, MONTH_S, policy) == ["start x"]


def test_job_over_budget_is_last_whatever_its_priority() -> None:
    snapshot = cluster()
    snapshot.tenants.spent_gpu_s[0] = 36_000.0
    snapshot.submit([Job("x", "poor", 8, 0.0, 9, True), Job("y", "rich", 8, 1.0)])
    assert run_cycle(snapshot, 2.0) == ["start y"]


def test_tenant_over_budget_is_owed_nothing() -> None:
    snapshot = over_budget(preemptible=False)
    assert snapshot.tenants.unmet_gpus().tolist() == [0, 0]
    snapshot.tenants.spent_gpu_s[0] = 0.0
    assert snapshot.tenants.unmet_gpus().tolist() == [4, 0]


def test_children_share_the_budget_of_their_parent() -> None:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 8, ["n"])
    snapshot.tenants.add_tenant("department", 8, budget_gpu_h=1.0)
    snapshot.tenants.add_tenant("team", 4, "department")
    snapshot.tenants.add_tenant("other", 4, "department")
    snapshot.submit([Job("x", "team", 4)])
    run_cycle(snapshot, 0.0)
    snapshot.advance(1000.0)
    assert snapshot.tenants.over_budget().tolist() == [True, True, True]
    again = ClusterSnapshot.from_json(snapshot.to_json())
    assert again.to_json() == snapshot.to_json()
    assert again.tenants.over_budget().tolist() == [True, True, True]


def test_simulated_tenant_over_budget_waits_for_the_next_month(tmp_path: Path) -> None:
    """Four GPUs for two and a half hours are all 10 GPU-hours of a month: a second job waits for the next month."""
    trace = JobTrace(
        ("a", "b", "c"), np.array([0.0, 30_000.0, 30_000.0]), np.array([9000.0, 3600.0, 3600.0]), np.array([4, 4, 4]),
        np.array([0, 0, 1]), ("poor", "rich"), np.array([9000.0, 3600.0, 3600.0]), np.full(3, math.nan),
    )  # fmt: skip
    path = tmp_path / "x.jsonl.gz"
    setup = SimulationSetup("a100", 8, 1, {"poor": 4, "rich": 4}, preemptible=0.0, budgets={"poor": 10.0})
    result = simulate(trace, setup, POLICIES["headway"], record=path)
    assert result.first_start_s[[0, 2]].tolist() == [0.0, 30_000.0]
    assert MONTH_S <= result.first_start_s[1] <= MONTH_S + 3600
    assert list(replay(path)) == [None] * len(list(replay(path)))
    february = replace(setup, unix_zero_s=datetime(2027, 2, 1, tzinfo=UTC).timestamp())
    first_start_s = simulate(trace, february, POLICIES["headway"], record=tmp_path / "y.jsonl.gz").first_start_s[1]
    assert 28 * DAY_S <= first_start_s <= 28 * DAY_S + 3600
    assert list(replay(tmp_path / "y.jsonl.gz")) == [None] * len(list(replay(tmp_path / "y.jsonl.gz")))
    with pytest.raises(UsageError, match="tenant x has a budget but no guarantee"):
        simulate(trace, SimulationSetup("a100", 8, 1, budgets={"x": 1.0}), POLICIES["headway"])


@pytest.mark.parametrize("hours", [-1.0, 0.0, math.nan, math.inf])
def test_invalid_budget_is_rejected(hours: float) -> None:
    with pytest.raises(UsageError, match="tenant x: budget is"):
        ClusterSnapshot().tenants.add_tenant("x", budget_gpu_h=hours)
