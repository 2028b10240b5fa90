"""Baseline policies that preempt: least attained service, and the oracle that knows the remaining work."""

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


def random_trace(seed: int, jobs: int = 12) -> JobTrace:
    """Return single-GPU jobs; all times are multiples of a step."""
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
    """Return the sum of completions on one GPU by the textbook: in each step the job with least work left runs."""
    left, now, total = dict(enumerate(trace.duration_s.tolist())), 0.0, 0.0
    while left:
        arrived = [job for job in left if trace.submit_s[job] <= now]
        now += STEP_S
        if arrived:
            job = min(arrived, key=lambda candidate: left[candidate])
            left[job] -= STEP_S
            if left[job] <= 0:
                total += now - float(trace.submit_s[job])
                del left[job]
    return total


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))])
def test_srtf_minimizes_the_sum_of_completions_on_one_gpu(seed: int) -> None:
    """On one GPU, where preemption costs nothing, shortest remaining time first is optimal."""
    trace = random_trace(seed)
    setup = SimulationSetup("a100", 1, 1, preemptible=1.0, save_every_s=STEP_S, restart_s=0.0)
    results = {name: simulate(trace, setup, POLICIES[name]) for name in ("srtf", "sjf", "las", "fifo")}
    best = completions(trace)
    assert results["srtf"].completion_s.sum() == pytest.approx(best)
    assert all(result.completion_s.sum() >= best - 1e-6 for result in results.values())
    assert results["srtf"].stops["preemption"] > 0 or results["sjf"].completion_s.sum() == pytest.approx(best)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 20))])
def test_las_runs_no_job_of_a_higher_level_than_a_waiting_one(seed: int) -> None:
    """After a cycle, among single-GPU jobs, by doublings of the GPU-hours they have had. Jobs that were just preempted,
    as the cheapest victims, may wait for the next cycle."""
    random, snapshot = Random(seed), ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 1, [f"n{number}" for number in range(5)])
    snapshot.tenants.add_tenant("all", 5)
    now = 1e6
    for number in range(12):
        held, preemptible = random.choice([0.0, 1e3, 5e3, 2e4, 3e5]), random.random() < 0.8
        (row,) = snapshot.submit([Job(f"j{number}", "all", 1, preemptible=preemptible)])
        placement = snapshot.nodes.free_gpus(snapshot.nodes.pools[0]).find(1)
        if placement is not None:
            snapshot.start(row, 0, placement)
            snapshot.jobs.since_s[row] = now - random.choice([MIN_RUN_S - 1, MIN_RUN_S, 9000.0])
        snapshot.jobs.ran_s[row] = held
    snapshot.now_s = now
    stoppable = {row for row in snapshot.active.tolist() if now - snapshot.jobs.since_s[row] >= MIN_RUN_S}
    stoppable -= set(np.flatnonzero(~snapshot.jobs.preemptible).tolist())
    waited = set(snapshot.queue.tolist())
    had_h = {row: float(snapshot.held_s(np.array([row]), now)[0]) / 3600 for row in snapshot.jobs.rows.values()}
    apply_decisions(snapshot, decide(snapshot, now, POLICIES["las"]))
    assert len(snapshot.active) == 5
    level = {row: 0 if hours < 1 else 1 + int(math.log2(hours)) for row, hours in had_h.items()}
    running = [level[row] for row in snapshot.active.tolist() if row in stoppable]
    waiting = [level[row] for row in snapshot.queue.tolist() if row in waited]
    assert max(running, default=0) <= min(waiting, default=99)


def test_jobs_of_unknown_duration_rank_last_under_an_oracle() -> None:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 1, ["n"])
    snapshot.tenants.add_tenant("all", 1)
    snapshot.submit([Job("known", "all", 1, 5.0), Job("unknown", "all", 1, 1.0)], [100.0, math.nan])
    assert [snapshot.jobs.names[decision.job] for decision in decide(snapshot, 10.0, POLICIES["srtf"])] == ["known"]
