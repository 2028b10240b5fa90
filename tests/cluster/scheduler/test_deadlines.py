"""Deadlines: which policies respect them, what is missed, and that no late job waits forever."""

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.decision_log import replay, state_at
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.least_served import DUE, LATE_DUE_S, LeastServedPreemption
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.simulate import JobTrace, SimulationSetup, read_trace, simulate, summary
from headway.errors import UsageError

STEP_S, DAY_S = 600.0, 86400.0


def random_trace(seed: int, jobs: int = 12) -> JobTrace:
    """Return single-GPU jobs with deadlines; all times are multiples of a step."""
    random = Random(seed)
    submit = np.array(sorted(STEP_S * random.randint(0, 30) for _ in range(jobs)))
    duration = np.array([STEP_S * random.randint(1, 8) for _ in range(jobs)])
    deadline = submit + duration + np.array([STEP_S * random.randint(0, 40) for _ in range(jobs)])
    names, none = tuple(f"j{number}" for number in range(jobs)), np.full(jobs, np.nan)
    zeros = np.zeros(jobs, np.int64)
    return JobTrace(names, submit, duration, zeros + 1, zeros, ("all",), none, deadline)


def ends(trace: JobTrace) -> list[float]:
    """Return ends on one GPU by the textbook: in each step the job with the earliest deadline runs."""
    left, now, ended = dict(enumerate(trace.duration_s.tolist())), 0.0, [math.nan] * len(trace)
    while left:
        arrived = [job for job in left if trace.submit_s[job] <= now]
        now += STEP_S
        if arrived:
            job = min(arrived, key=lambda candidate: (trace.deadline_s[candidate], candidate))
            left[job] -= STEP_S
            if left[job] <= 0:
                ended[job] = now
                del left[job]
    return ended


FREE = SimulationSetup("a100", 1, 1, preemptible=1.0, save_every_s=STEP_S, restart_s=0.0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_edf_matches_the_textbook(seed: int) -> None:
    """Where preemption costs nothing; it then misses none if that is possible."""
    trace = random_trace(seed)
    result = simulate(trace, FREE, POLICIES["edf"])
    late = [end > deadline for end, deadline in zip(ends(trace), trace.deadline_s, strict=True)]
    assert summary(result)["deadlines"] == len(trace)
    if not any(late):
        assert summary(result)["deadline_misses"] == 0
    assert sorted(result.end_s - trace.submit_s[0]) == pytest.approx(sorted(np.array(ends(trace)) - trace.submit_s[0]))
    assert summary(result)["deadline_misses"] == sum(late)


@pytest.mark.parametrize("name", ["headway", "fifo"])
def test_deadline_misses_are_counted_and_a_trace_without_deadlines_has_none(name: str) -> None:
    trace = random_trace(3)
    trace = replace(trace, deadline_s=np.where(np.arange(len(trace)) % 3, trace.deadline_s, np.nan))
    result = simulate(trace, FREE, POLICIES[name])
    pairs = zip(result.end_s.tolist(), trace.deadline_s.tolist(), strict=True)
    assert summary(result)["deadline_misses"] == len([end for end, deadline in pairs if end > deadline]) > 0
    assert summary(result)["deadlines"] == 8
    bare = replace(trace, deadline_s=np.full(len(trace), np.nan))
    assert summary(simulate(bare, FREE, POLICIES[name]))["deadline_misses"] == 0


def single_gpu_cluster(*jobs: Job) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 1, ["n"])
    snapshot.tenants.add_tenant("all", 1)
    snapshot.submit(jobs)
    return snapshot


def first_to_start(snapshot: ClusterSnapshot, now: float) -> str:
    return snapshot.jobs.names[decide(snapshot, now, POLICIES["headway"])[0].job]


@pytest.mark.parametrize(
    ("what", "deadline_s", "had_s", "want"),
    [
        ("no deadline: by submit time", math.inf, 3 * 3600.0, "other"),
        ("with slack a level lower", 5e5, 3 * 3600.0, "x"),
        ("further away than it has run", 1e5 + 3 * 3600.0 + 1, 3 * 3600.0, "x"),
        ("not further", 1e5 + 3 * 3600.0, 3 * 3600.0, "other"),
        ("deadline passed", 9e4, 0.0, "other"),
    ],
)
def test_job_with_slack_counts_one_level_lower(what: str, deadline_s: float, had_s: float, want: str) -> None:
    """Compared with a job that was submitted earlier and has had three GPU-hours."""
    snapshot = single_gpu_cluster(Job("other", "all", 1, 1.0), Job("x", "all", 1, 2.0, deadline_s=deadline_s))
    snapshot.jobs.ran_s[snapshot.queue] = [3 * 3600.0, had_s]
    assert first_to_start(snapshot, 1e5) == want


def test_job_that_missed_its_deadline_is_due_after_four_weeks_not_one() -> None:
    snapshot = single_gpu_cluster(Job("late", "all", 1, 0.0, deadline_s=10.0), Job("x", "all", 1, 0.0))
    assert first_to_start(snapshot, 6 * DAY_S) == "x"
    snapshot.end(snapshot.jobs.rows["x"])
    snapshot.submit([Job("new", "all", 1, 8 * DAY_S)])
    assert first_to_start(snapshot, 8 * DAY_S) == "new"
    assert first_to_start(snapshot, LATE_DUE_S + 1) == "late"


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))])
def test_level_of_a_job_only_rises_until_it_is_due(seed: int) -> None:
    """Waiting or running: this keeps jobs from preempting each other in turn."""
    random = Random(seed)
    for _ in range(10):
        snapshot = single_gpu_cluster(
            Job("x", "all", 1, 0.0, deadline_s=random.choice([3.0, 12.0, 40.0, math.inf]) * DAY_S)
        )
        (row,), levels = snapshot.queue.tolist(), list[int]()
        while snapshot.now_s < 45 * DAY_S:
            snapshot.advance(snapshot.now_s + random.uniform(0.1, 3) * DAY_S)
            if random.random() < 0.5 and not snapshot.jobs.running[row]:
                placement = snapshot.nodes.free_gpus(snapshot.nodes.pools[0]).find(1)
                assert placement is not None
                snapshot.start(row, 0, placement)
            elif random.random() < 0.5 and snapshot.jobs.running[row]:
                snapshot.stop([row])
            levels += LeastServedPreemption().levels(snapshot, np.array([row]), snapshot.now_s).tolist()
        rising = [level for level in levels if level != DUE]
        assert rising == sorted(rising)


def test_decision_log_keeps_deadlines(tmp_path: Path) -> None:
    path = tmp_path / "headway.jsonl.gz"
    simulate(random_trace(1), FREE, POLICIES["headway"], record=path)
    assert list(replay(path)) == [None] * len(list(replay(path)))
    snapshot = state_at(path, float(random_trace(1).submit_s[4])).snapshot
    row = next(iter(snapshot.jobs.rows.values()))
    assert snapshot.jobs.deadline_s[row] == random_trace(1).deadline_s[int(snapshot.jobs.names[row][1:])]
    restored = ClusterSnapshot.from_json(snapshot.to_json())
    assert restored.to_json() == snapshot.to_json()


@pytest.mark.parametrize("deadline_s", [5.0, 4.0, math.nan])
def test_deadline_before_submission_is_rejected(deadline_s: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="job x: deadline_s is"):
        single_gpu_cluster(Job("x", "all", 1, 5.0, deadline_s=deadline_s))
    if deadline_s == deadline_s:
        (tmp_path / "trace.csv").write_text(f"job_id,submit_s,duration_s,num_gpus,deadline_s\nx,5,1,1,{deadline_s}\n")
        with pytest.raises(UsageError, match="line 2: job x: deadline_s is not after submit_s"):
            read_trace(tmp_path / "trace.csv")
