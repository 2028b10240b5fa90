"""Deadlines: who minds them, what is missed, and that nobody waits for ever who missed one."""

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


def log(seed: int, jobs: int = 12) -> JobTrace:
    """Jobs of one GPU, each with a deadline; all times are whole steps."""
    random = Random(seed)
    submit = np.array(sorted(STEP_S * random.randint(0, 30) for _ in range(jobs)))
    duration = np.array([STEP_S * random.randint(1, 8) for _ in range(jobs)])
    deadline = submit + duration + np.array([STEP_S * random.randint(0, 40) for _ in range(jobs)])
    names, none = tuple(f"j{number}" for number in range(jobs)), np.full(jobs, np.nan)
    zeros = np.zeros(jobs, np.int64)
    return JobTrace(names, submit, duration, zeros + 1, zeros, ("all",), none, deadline)


def ends(trace: JobTrace) -> list[float]:
    """By the textbook on one GPU: in each step whoever has the earliest deadline works."""
    left, now, found = dict(enumerate(trace.duration_s.tolist())), 0.0, [math.nan] * len(trace)
    while left:
        there = [job for job in left if trace.submit_s[job] <= now]
        now += STEP_S
        if there:
            job = min(there, key=lambda one: (trace.deadline_s[one], one))
            left[job] -= STEP_S
            if left[job] <= 0:
                found[job] = now
                del left[job]
    return found


FREE = SimulationSetup("a100", 1, 1, preemptible=1.0, save_every_s=STEP_S, restart_s=0.0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_earliest_deadline_first_is_what_the_textbook_says(seed: int) -> None:
    """Where stopping costs nothing; and then it misses none if that can be."""
    trace = log(seed)
    outcome = simulate(trace, FREE, POLICIES["edf"])
    late = [end > deadline for end, deadline in zip(ends(trace), trace.deadline_s, strict=True)]
    assert summary(outcome)["deadlines"] == len(trace)
    if not any(late):
        assert summary(outcome)["deadline_misses"] == 0
    assert sorted(outcome.end_s - trace.submit_s[0]) == pytest.approx(sorted(np.array(ends(trace)) - trace.submit_s[0]))
    assert summary(outcome)["deadline_misses"] == sum(late)


@pytest.mark.parametrize("name", ["headway", "fifo"])
def test_misses_are_counted_one_by_one_and_a_log_without_deadlines_has_none(name: str) -> None:
    trace = log(3)
    trace = replace(trace, deadline_s=np.where(np.arange(len(trace)) % 3, trace.deadline_s, np.nan))
    outcome = simulate(trace, FREE, POLICIES[name])
    pairs = zip(outcome.end_s.tolist(), trace.deadline_s.tolist(), strict=True)
    assert summary(outcome)["deadline_misses"] == len([end for end, deadline in pairs if end > deadline]) > 0
    assert summary(outcome)["deadlines"] == 8
    bare = replace(trace, deadline_s=np.full(len(trace), np.nan))
    assert summary(simulate(bare, FREE, POLICIES[name]))["deadline_misses"] == 0


def of_one_node(*jobs: Job) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 1, ["n"])
    snapshot.tenants.join("all", 1)
    snapshot.submit(jobs)
    return snapshot


def first(snapshot: ClusterSnapshot, now: float) -> str:
    return snapshot.jobs.names[decide(snapshot, now, POLICIES["headway"])[0].job]


@pytest.mark.parametrize(
    ("what", "deadline_s", "had_s", "want"),
    [
        ("no deadline: as they came", math.inf, 3 * 3600.0, "other"),
        ("with slack a level lower", 5e5, 3 * 3600.0, "x"),
        ("further away than it has run", 1e5 + 3 * 3600.0 + 1, 3 * 3600.0, "x"),
        ("not further", 1e5 + 3 * 3600.0, 3 * 3600.0, "other"),
        ("it has passed", 9e4, 0.0, "other"),
    ],
)
def test_slack(what: str, deadline_s: float, had_s: float, want: str) -> None:
    """Beside a job that came earlier and has had three GPU-hours."""
    snapshot = of_one_node(Job("other", "all", 1, 1.0), Job("x", "all", 1, 2.0, deadline_s=deadline_s))
    snapshot.jobs.ran_s[snapshot.queue] = [3 * 3600.0, had_s]
    assert first(snapshot, 1e5) == want


def test_who_missed_its_deadline_is_first_after_four_weeks_and_not_after_one() -> None:
    snapshot = of_one_node(Job("late", "all", 1, 0.0, deadline_s=10.0), Job("x", "all", 1, 0.0))
    assert first(snapshot, 6 * DAY_S) == "x"
    snapshot.end(snapshot.jobs.rows["x"])
    snapshot.submit([Job("new", "all", 1, 8 * DAY_S)])
    assert first(snapshot, 8 * DAY_S) == "new"
    assert first(snapshot, LATE_DUE_S + 1) == "late"


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))])
def test_levels_of_a_job_only_rise_until_it_is_due(seed: int) -> None:
    """Whether it waits or runs: what keeps jobs from stopping each other in turn."""
    random = Random(seed)
    for _ in range(10):
        snapshot = of_one_node(Job("x", "all", 1, 0.0, deadline_s=random.choice([3.0, 12.0, 40.0, math.inf]) * DAY_S))
        (row,), levels = snapshot.queue.tolist(), list[int]()
        while snapshot.now_s < 45 * DAY_S:
            snapshot.advance(snapshot.now_s + random.uniform(0.1, 3) * DAY_S)
            if random.random() < 0.5 and not snapshot.jobs.running[row]:
                place = snapshot.nodes.room(snapshot.nodes.pools[0]).find(1)
                assert place is not None
                snapshot.start(row, 0, place)
            elif random.random() < 0.5 and snapshot.jobs.running[row]:
                snapshot.stop(row)
            levels += LeastServedPreemption().levels(snapshot, np.array([row]), snapshot.now_s).tolist()
        rising = [level for level in levels if level != DUE]
        assert rising == sorted(rising)


def test_a_record_has_deadlines(tmp_path: Path) -> None:
    path = tmp_path / "headway.jsonl.gz"
    simulate(log(1), FREE, POLICIES["headway"], record=path)
    assert list(replay(path)) == [None] * len(list(replay(path)))
    snapshot = state_at(path, float(log(1).submit_s[4])).snapshot
    row = next(iter(snapshot.jobs.rows.values()))
    assert snapshot.jobs.deadline_s[row] == log(1).deadline_s[int(snapshot.jobs.names[row][1:])]
    again = ClusterSnapshot.from_json(snapshot.to_json())
    assert again.to_json() == snapshot.to_json()


@pytest.mark.parametrize("deadline_s", [5.0, 4.0, math.nan])
def test_a_deadline_before_the_job_comes_is_refused(deadline_s: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="job x: deadline_s is"):
        of_one_node(Job("x", "all", 1, 5.0, deadline_s=deadline_s))
    if deadline_s == deadline_s:
        (tmp_path / "log.csv").write_text(f"job_id,submit_s,duration_s,num_gpus,deadline_s\nx,5,1,1,{deadline_s}\n")
        with pytest.raises(UsageError, match="line 2: job x has its deadline_s before"):
            read_trace(tmp_path / "log.csv")
