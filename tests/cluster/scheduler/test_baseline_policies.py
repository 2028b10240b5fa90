"""Policies that stop jobs: least attained service, and the oracle that knows what is left."""

import math
from random import Random

import numpy as np
import pytest

from headway.cluster.scheduler.decide import MIN_RUN_S, decide
from headway.cluster.scheduler.decision_log import apply_decisions
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.simulate import JobTrace, SimulationSetup, simulate

STEP_S = 600.0


def log(seed: int, jobs: int = 12) -> JobTrace:
    """Jobs of one GPU; all times are whole steps."""
    random = Random(seed)
    submit = sorted(STEP_S * random.randint(0, 30) for _ in range(jobs))
    return JobTrace(
        tuple(f"j{number}" for number in range(jobs)),
        np.array(submit),
        np.array([STEP_S * random.randint(1, 12) for _ in range(jobs)]),
        np.ones(jobs, np.int64),
        np.zeros(jobs, np.int64),
        ("all",),
        np.full(jobs, np.nan),
        np.full(jobs, np.nan),
    )


def completions(trace: JobTrace) -> float:
    """Their sum on one GPU, by the textbook: in each step whoever has least left works."""
    left, now, total = dict(enumerate(trace.duration_s.tolist())), 0.0, 0.0
    while left:
        there = [job for job in left if trace.submit_s[job] <= now]
        now += STEP_S
        if there:
            job = min(there, key=lambda one: left[one])
            left[job] -= STEP_S
            if left[job] <= 0:
                total += now - float(trace.submit_s[job])
                del left[job]
    return total


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))])
def test_the_oracle_reaches_the_least_sum_of_completions(seed: int) -> None:
    """On one GPU, where stopping costs nothing, shortest remaining time first is the best there is."""
    trace = log(seed)
    setup = SimulationSetup("a100", 1, 1, preemptible=1.0, save_every_s=STEP_S, restart_s=0.0)
    found = {name: simulate(trace, setup, POLICIES[name]) for name in ("srtf", "sjf", "las", "fifo")}
    best = completions(trace)
    assert found["srtf"].completion_s.sum() == pytest.approx(best)
    assert all(one.completion_s.sum() >= best - 1e-6 for one in found.values())
    assert found["srtf"].stops["preemption"] > 0 or found["sjf"].completion_s.sum() == pytest.approx(best)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 20))])
def test_nobody_runs_who_has_had_more_than_one_that_waits(seed: int) -> None:
    """After a cycle: among jobs of one GPU, by doublings of the GPU-hours they have had. Those that were just stopped,
    as they lost least by it, may wait for the next."""
    random, snapshot = Random(seed), ClusterSnapshot()
    snapshot.nodes.join("h100", 1, [f"n{number}" for number in range(5)])
    snapshot.tenants.join("all", 5)
    now = 1e6
    for number in range(12):
        held, can_stop = random.choice([0.0, 1e3, 5e3, 2e4, 3e5]), random.random() < 0.8
        (row,) = snapshot.submit([Job(f"j{number}", "all", 1, preemptible=can_stop)])
        room = snapshot.nodes.room(snapshot.nodes.pools[0]).find(1)
        if room is not None:
            snapshot.start(row, 0, room)
            snapshot.jobs.since_s[row] = now - random.choice([MIN_RUN_S - 1, MIN_RUN_S, 9000.0])
        snapshot.jobs.ran_s[row] = held
    snapshot.now_s = now
    settled = {row for row in snapshot.active.tolist() if now - snapshot.jobs.since_s[row] >= MIN_RUN_S}
    settled -= set(np.flatnonzero(~snapshot.jobs.preemptible).tolist())
    waited = set(snapshot.queue.tolist())
    had = {row: float(snapshot.held_s(np.array([row]), now)[0]) / 3600 for row in snapshot.jobs.rows.values()}
    apply_decisions(snapshot, decide(snapshot, now, POLICIES["las"]))
    assert len(snapshot.active) == 5
    level = {row: 0 if hours < 1 else 1 + int(math.log2(hours)) for row, hours in had.items()}
    runs = [level[row] for row in snapshot.active.tolist() if row in settled]
    waits = [level[row] for row in snapshot.queue.tolist() if row in waited]
    assert max(runs, default=0) <= min(waits, default=99)


def test_who_ranks_without_being_told_is_last_and_nothing_breaks() -> None:
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", 1, ["n"])
    snapshot.tenants.join("all", 1)
    snapshot.submit([Job("told", "all", 1, 5.0), Job("untold", "all", 1, 1.0)], [100.0, math.nan])
    assert [snapshot.jobs.names[one.job] for one in decide(snapshot, 10.0, POLICIES["srtf"])] == ["told"]
