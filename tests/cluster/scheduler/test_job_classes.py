"""Kinds of jobs and priorities: which job is first, and which may preempt which."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from headway.cluster.scheduler.decide import MIN_RUN_S, decide
from headway.cluster.scheduler.decision_log import DecisionRecorder, apply_decisions, state_at
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.simulate import SimulationResult, SimulationSetup, read_trace, simulate
from headway.errors import UsageError

HOUR_S, WEEK_S = 3600.0, 7 * 86400.0


def cluster(*jobs: Job) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 1, ["n"])
    snapshot.tenants.add_tenant("all", 1)
    snapshot.tenants.add_tenant("other")
    snapshot.submit(jobs)
    return snapshot


def run_cycle(snapshot: ClusterSnapshot, now: float) -> list[str]:
    snapshot.advance(now)
    decisions = decide(snapshot, now, POLICIES["headway"])
    apply_decisions(snapshot, decisions)
    return [f"{decision.kind} {snapshot.jobs.names[decision.job]}" for decision in decisions]


def test_interactive_jobs_are_first_of_their_level_only() -> None:
    snapshot = cluster(Job("x", "all", 1, 0.0), Job("typing", "all", 1, 5.0, kind="interactive"))
    assert run_cycle(snapshot, 10.0) == ["start typing"]
    snapshot = cluster(Job("x", "all", 1, 0.0), Job("typing", "all", 1, 5.0, kind="interactive"))
    snapshot.jobs.ran_s[snapshot.jobs.rows["typing"]] = 10 * HOUR_S
    assert run_cycle(snapshot, 10.0) == ["start x"]


@pytest.mark.parametrize(
    ("kind", "min_run_s", "expected_s"),
    [("batch", 0.0, MIN_RUN_S), ("batch", 5000.0, 5000.0), ("interactive", 0.0, HOUR_S), ("interactive", 900.0, 900.0)],
)
def test_no_job_is_preempted_before_its_minimum_run_time(kind: str, min_run_s: float, expected_s: float) -> None:
    for age, want in ((expected_s - 1, []), (expected_s, ["stop x", "start new"])):
        snapshot = cluster(Job("x", "all", 1, preemptible=True, kind=kind, min_run_s=min_run_s))
        run_cycle(snapshot, 0.0)
        snapshot.jobs.ran_s[0] = 10 * HOUR_S
        snapshot.submit([Job("new", "all", 1)])
        assert run_cycle(snapshot, age) == want


RUNS = [(kind, priority, preemptible, had) for kind, priority, preemptible, had in product(
    ["batch", "service"], [0, 1, 2], [True, False], [0.0, 10 * HOUR_S]
)]  # fmt: skip


@pytest.mark.parametrize(("kind", "priority", "preemptible", "had_s"), RUNS)
def test_preemption_follows_priority_and_level(kind: str, priority: int, preemptible: bool, had_s: float) -> None:
    """A new job of priority 1 and a running one, by the documented rules."""
    snapshot = cluster(Job("x", "all", 1, priority=priority, preemptible=preemptible, kind=kind))
    run_cycle(snapshot, 0.0)
    snapshot.jobs.ran_s[0] = had_s
    snapshot.submit([Job("new", "all", 1, priority=1)])
    lower = priority < 1
    longer = priority == 1 and kind == "batch" and had_s > 0
    assert run_cycle(snapshot, 1000.0) == (["stop x", "start new"] if preemptible and (lower or longer) else [])


@pytest.mark.parametrize(("kind", "stopped"), [("batch", True), ("service", False)])
def test_due_job_goes_before_all_priorities_but_preempts_no_service(kind: str, stopped: bool) -> None:
    snapshot = cluster(Job("x", "all", 1, priority=5, preemptible=True, kind=kind))
    run_cycle(snapshot, 0.0)
    snapshot.submit([Job("due", "all", 1, 0.0), Job("high", "all", 1, 1.0, priority=3)])
    snapshot.jobs.ran_s[0] = 1e7
    assert run_cycle(snapshot, WEEK_S + 1) == (["stop x", "start due"] if stopped else [])


def test_borrowers_give_back_unless_they_are_services() -> None:
    for kind, want in (("batch", ["stop x", "start owed"]), ("service", [])):
        snapshot = cluster(Job("x", "other", 1, priority=0, preemptible=True, kind=kind))
        run_cycle(snapshot, 0.0)
        snapshot.submit([Job("owed", "all", 1, 0.0)])
        snapshot.jobs.ran_s[snapshot.jobs.rows["owed"]] = 1e4
        assert run_cycle(snapshot, 5 * HOUR_S) == want


def test_array_is_many_jobs_of_one_shape() -> None:
    jobs = Job("sweep", "all", 1, preemptible=True).array(3)
    assert [job.name for job in jobs] == ["sweep[0]", "sweep[1]", "sweep[2]"]
    assert all(replace(job, name="sweep", kind="batch") == Job("sweep", "all", 1, preemptible=True) for job in jobs)
    snapshot = cluster(*jobs)
    assert len(snapshot.queue) == 3
    assert run_cycle(snapshot, 1.0) == ["start sweep[0]"]


def simulate_column(folder: Path, column: str, *values: str) -> SimulationResult:
    """Simulate one GPU that a job holds for 10,000 s while two others of 1,000 s arrive, with a column set for each."""
    lines = (f"{name},{submit_s},{duration_s},1,{value}" for (name, submit_s, duration_s), value in zip(
        (("busy", 0, 10_000), ("x", 100, 1_000), ("y", 200, 1_000)), values, strict=True))  # fmt: skip
    (folder / "trace.csv").write_text("\n".join((f"job_id,submit_s,duration_s,num_gpus,{column}", *lines)))
    return simulate(
        read_trace(folder / "trace.csv"), SimulationSetup("h100", 1, 1, preemptible=0.0), POLICIES["headway"]
    )


@pytest.mark.parametrize(
    ("column", "value", "first"),
    [("priority", "0", "x"), ("priority", "3", "y"), ("kind", "interactive", "y"), ("kind", "array", "x")],
)
def test_trace_columns_set_the_order(tmp_path: Path, column: str, value: str, first: str) -> None:
    starts = dict(zip(("busy", "x", "y"), simulate_column(tmp_path, column, "", "", value).first_start_s, strict=True))
    assert starts[first] == 10_000
    assert sorted(starts.values()) == [0, 10_000, 11_000]


def test_trace_column_sets_preemptible(tmp_path: Path) -> None:
    """Beyond two GPU-hours the busy job yields to both, one after the other."""
    assert simulate_column(tmp_path, "preemptible", "no", "yes", "yes").stops["preemption"] == 0
    result = simulate_column(tmp_path, "preemptible", "yes", "no", "no")
    assert result.stops["preemption"] == 1
    assert (result.first_start_s[1:] < 10_000).all()


def test_trace_column_sets_restart_time(tmp_path: Path) -> None:
    ends = [
        simulate_column(tmp_path, "preemptible,restart_s", f"yes,{late}", "no,", "no,").end_s[0] for late in (0, 500)
    ]
    assert ends[1] - ends[0] == 500


def test_decision_log_and_snapshot_keep_job_kinds(tmp_path: Path) -> None:
    snapshot, path = cluster(), tmp_path / "x.jsonl.gz"
    recorder = DecisionRecorder(path, snapshot, POLICIES["headway"])
    jobs = [
        Job("x", "all", 1, kind="service", min_run_s=7.0, priority=2),
        Job("y", "all", 1, kind="interactive", deadline_s=9.0, sizes=((1, 1.0),)),
    ]
    for job in jobs:
        recorder.submitted(0.0, job)
    recorder.close()
    snapshot.submit(jobs)
    restored = state_at(path, 1.0).snapshot
    assert restored.to_json() == snapshot.to_json()
    assert ClusterSnapshot.from_json(restored.to_json()).to_json() == snapshot.to_json()
    assert np.array_equal(restored.jobs.min_run_s[:2], [7.0, HOUR_S])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kind": "daemon"}, "job x: unknown kind 'daemon'"),
        ({"min_run_s": -1.0}, "job x: min_run_s is -1.0"),
        ({"min_run_s": math.inf}, "job x: min_run_s is inf"),
        ({"min_run_s": math.nan}, "job x: min_run_s is nan"),
    ],
)
def test_invalid_kind_or_minimum_run_time_is_rejected(more: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cluster(Job("x", "all", 1, **more))


@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_invalid_array_size_is_rejected(count: float) -> None:
    with pytest.raises(UsageError, match="job x: array size is"):
        Job("x", "all", 1).array(count)


def test_preemption_happens_as_soon_as_the_minimum_run_time_is_over(tmp_path: Path) -> None:
    """Although no other event happens then: only time passes."""
    (tmp_path / "trace.csv").write_text(
        "job_id,submit_s,duration_s,num_gpus,priority,preemptible,min_run_s\n"
        "busy,0,50000,1,0,yes,700\n"
        "x,100,1000,1,3,no,\n"
    )
    result = simulate(read_trace(tmp_path / "trace.csv"), SimulationSetup("h100", 1, 1), POLICIES["headway"])
    assert result.first_start_s.tolist() == [0, 700]
