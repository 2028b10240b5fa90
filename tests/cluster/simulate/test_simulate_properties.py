"""Simulated traces: invariants of every one, and fifo against a separate simulator."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.policy import Policy
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.simulate import JobTrace, SimulationResult, SimulationSetup, simulate, summary
from headway.errors import UsageError
from thinned import examples

NON_PREEMPTING = ["fifo", "kueue", "slurm", "sjf"]
ALL = [*NON_PREEMPTING, "headway"]
CYCLE_S = 30.0
SETUP = SimulationSetup("a100", 4, 2, preemptible=0.7)


def trace_of(jobs: list[tuple[float, float, int, str]], limits: list[float] | None = None) -> JobTrace:
    """Return a trace of (submit_s, duration_s, gpus, tenant)."""
    submit, duration, gpus, tenant = zip(*jobs, strict=True)
    tenants = tuple(sorted(set(tenant)))
    return JobTrace(
        tuple(f"job-{number}" for number in range(len(jobs))),
        np.array(submit, np.float64),
        np.array(duration, np.float64),
        np.array(gpus, np.int64),
        np.array([tenants.index(name) for name in tenant], np.int64),
        tenants,
        np.array(limits if limits else [math.nan] * len(jobs)),
        np.full(len(jobs), math.nan),
    )


def traces(times: st.SearchStrategy[float], seconds: st.SearchStrategy[float], gpus: int = 8) -> st.SearchStrategy[Any]:
    job = st.tuples(times, seconds, st.integers(1, gpus), st.sampled_from(["red", "blue", "green"]))
    return st.lists(job, min_size=1, max_size=14).map(sorted)


short_traces = traces(st.floats(0, 4000), st.one_of(st.floats(0, 60), st.floats(0, 20_000)))
# Long enough for preemptions: jobs run some minutes before they may be preempted.
busy_traces = traces(st.integers(0, 20_000).map(float), st.integers(1, 40_000).map(float))


def checked(policy: Policy) -> Policy:
    """Return the same policy with a check of the snapshot in each cycle."""

    def order(snapshot: ClusterSnapshot, now: float) -> Any:
        nodes, free = snapshot.nodes, snapshot.nodes.gpus.copy()
        fixed = np.zeros_like(free)
        for row, (pool, placement) in snapshot.placements.items():
            assert placement.total == snapshot.jobs.gpus[row], "a gang holds all its GPUs"
            assert len(set(placement.nodes.tolist())) == len(placement.nodes)
            free[placement.nodes + nodes.pools[pool].first] -= placement.gpus
            fixed[placement.nodes + nodes.pools[pool].first] += placement.gpus * (not snapshot.jobs.preemptible[row])
        assert (free >= 0).all(), "more GPUs than exist"
        assert (free == nodes.free).all()
        assert (fixed == nodes.fixed).all()
        assert set(snapshot.placements) == set(snapshot.active.tolist())
        assert not set(snapshot.queue.tolist()) & set(snapshot.active.tolist())
        assert snapshot.now_s == now
        return policy.order(snapshot, now)

    return replace(policy, order=order)


def lost(result: SimulationResult) -> float:
    """Return the GPU-seconds lost by all causes."""
    return sum(result.lost_gpu_s.values())


def usage(result: SimulationResult, times: Any) -> Any:
    """Return the GPUs held, at given times, by jobs that were started once."""
    once = result.starts == 1
    holds = (result.first_start_s[once] <= times[:, None]) & (times[:, None] < result.end_s[once])
    return holds @ result.trace.gpus[once]


def long_trace(seed: int, most_s: float = 20_000.0, step_s: float = 1.0) -> list[tuple[float, float, int, str]]:
    """Return a longer trace than hypothesis makes."""
    random = Random(seed)

    def seconds(most: float) -> float:
        return step_s * random.randint(1, round(most / step_s))

    return sorted(
        (seconds(most_s), seconds(random.choice((100, 2000, 40_000))), random.choice((1, 1, 2, 3, 4, 5, 8)), tenant)
        for tenant in random.choices(["red", "blue", "green"], k=80)
    )


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(15), deadline=None)
@given(jobs=st.one_of(short_traces, busy_traces))
def test_every_trace_completes_within_the_cluster(name, jobs):
    simulate_and_check(name, jobs)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_longer_traces_complete_within_the_cluster(name, seed):
    result = simulate_and_check(name, long_trace(seed))
    stops = name not in (*NON_PREEMPTING, "edf")  # there are no deadlines
    assert (result.starts > 1).any() == stops, "traces without preemptions prove little"


def simulate_and_check(name: str, jobs: list[tuple[float, float, int, str]]) -> SimulationResult:
    """Simulate a trace under a policy, and check the invariants."""
    trace, ended = trace_of(jobs), []
    result = simulate(trace, SETUP, checked(POLICIES[name]), ended.append)
    assert np.isfinite(result.end_s).all(), "every job ends"
    assert sum(ended) == len(trace)
    assert (result.starts >= 1).all()
    assert (result.first_start_s >= trace.submit_s).all()
    slack = 1e-6
    assert (result.end_s - result.first_start_s >= trace.duration_s - slack).all()
    assert (result.delay_s >= -slack).all()
    assert (usage(result, result.first_start_s) <= SETUP.gpus).all(), "more GPUs than exist"
    assert (result.used <= SETUP.gpus).all()
    assert np.isin(result.first_start_s, result.times).all(), "jobs start in cycles"
    assert (np.diff(result.times) >= CYCLE_S - slack).all()
    if name in NON_PREEMPTING:
        assert (result.starts == 1).all()
        assert result.end_s == pytest.approx(result.first_start_s + trace.duration_s)
        assert lost(result) == 0
    return result


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("restart_s", [0.0, 120.0])
@settings(max_examples=examples(12), deadline=None)
@given(jobs=busy_traces)
def test_used_gpu_seconds_are_work_or_lost(name, restart_s, jobs):
    trace = trace_of(jobs)
    result = simulate(trace, replace(SETUP, restart_s=restart_s, preemptible=1.0), POLICIES[name])
    work = float((trace.duration_s * trace.gpus).sum())
    assert result.used_gpu_s == pytest.approx(work + lost(result), rel=1e-9, abs=1e-3)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_used_gpu_seconds_of_longer_traces_are_work_or_lost(seed):
    trace = trace_of(long_trace(seed))
    result = simulate(trace, replace(SETUP, preemptible=1.0), POLICIES["headway"])
    assert lost(result) > 0
    assert result.used_gpu_s == pytest.approx(float((trace.duration_s * trace.gpus).sum()) + lost(result))


def test_job_stopped_during_its_restart_loses_only_what_it_held():
    trace = trace_of([(0.0, 301.0, 6, "red"), (300.0, 1.0, 3, "red"), (660.0, 1.0, 3, "red")])
    result = simulate(trace, replace(SETUP, restart_s=600.0, preemptible=1.0), POLICIES["headway"])
    work = float((trace.duration_s * trace.gpus).sum())
    assert result.used_gpu_s == pytest.approx(work + lost(result))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(7), deadline=None)
@given(jobs=short_traces, seed=st.integers(0, 3))
def test_simulation_is_deterministic(name, jobs, seed):
    first, second = (simulate(trace_of(jobs), replace(SETUP, seed=seed), POLICIES[name]) for _ in range(2))
    for field in ("first_start_s", "end_s", "starts", "times", "used", "waiting"):
        assert getattr(first, field).tobytes() == getattr(second, field).tobytes()
    assert (first.used_gpu_s, first.lost_gpu_s, first.owed_gpu_s) == (
        second.used_gpu_s,
        second.lost_gpu_s,
        second.owed_gpu_s,
    )


def test_seed_changes_limits_which_only_backfill_uses():
    rng = np.random.default_rng(0)
    submit, duration = np.sort(rng.uniform(0, 30_000, 80)), rng.uniform(100, 5000, 80)
    gpus = rng.choice([1, 2, 3, 4, 8], 80)
    trace = trace_of([(*job, "red") for job in zip(submit.tolist(), duration.tolist(), gpus.tolist(), strict=True)])
    ends = {
        name: {simulate(trace, replace(SETUP, seed=seed), POLICIES[name]).end_s.tobytes() for seed in range(4)}
        for name in ("fifo", "slurm")
    }
    assert len(ends["fifo"]) == 1
    assert len(ends["slurm"]) > 1


# -- nodes that fail


FAILING = SimulationSetup("a100", 4, 3, node_days=0.2, repair_s=3600.0, spares=1, restart_s=0.0, preemptible=1.0)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 2))])
def test_traces_complete_despite_node_failures(name, seed):
    trace = trace_of(long_trace(seed))
    result = simulate(trace, replace(FAILING, seed=seed), checked(POLICIES[name]))
    assert result.stops["failure"] > 0, "traces without failures prove little"
    assert np.isfinite(result.end_s).all(), "every job ends"
    assert (result.used <= FAILING.gpus).all(), "a spare only replaces another node"
    assert int((result.starts - 1).sum()) == sum(result.stops.values())
    work = float((trace.duration_s * trace.gpus).sum())
    assert result.used_gpu_s == pytest.approx(work + lost(result))
    again = simulate(trace, replace(FAILING, seed=seed), POLICIES[name])
    assert again.end_s.tobytes() == result.end_s.tobytes()


def test_job_that_would_need_the_spares_is_rejected():
    with pytest.raises(UsageError, match="job job-0 requests 12 GPUs"):
        simulate(trace_of([(0.0, 9.0, 12, "red")]), replace(FAILING, node_days=None), POLICIES["fifo"])


def test_utilization_does_not_count_spares():
    result = simulate(trace_of([(0.0, 900.0, 8, "red")]), replace(FAILING, node_days=None), POLICIES["fifo"])
    assert result.gpus == FAILING.gpus
    assert summary(result)["utilization"] == pytest.approx(1.0)


# -- first come, first served, on one node


def first_come_first_served(jobs: list[tuple[float, float, int, str]], gpus: int) -> list[float]:
    """Return starts: no job before an earlier one, and each as soon as its GPUs are free."""
    running, starts, now = list[tuple[float, int]](), list[float](), 0.0
    for submit, seconds, count, _ in jobs:
        now = max(now, submit)
        while gpus - sum(held for end, held in running if end > now) < count:
            now = min(end for end, _ in running if end > now)
        running.append((now + seconds, count))
        starts.append(now)
    return starts


# On a grid of the cycle length every event has its own cycle: jobs start at once.
grid = st.integers(0, 40).map(lambda number: CYCLE_S * number)


@settings(max_examples=examples(40), deadline=None)
@given(traces(grid, grid.filter(bool)))
def test_fifo_is_first_come_first_served(jobs):
    result = simulate(trace_of(jobs), SimulationSetup("a100", 8, 1), POLICIES["fifo"])
    assert result.first_start_s.tolist() == first_come_first_served(jobs, 8)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_fifo_is_first_come_first_served_in_longer_traces(seed):
    jobs = long_trace(seed, step_s=CYCLE_S)
    result = simulate(trace_of(jobs), SimulationSetup("a100", 8, 1), POLICIES["fifo"])
    assert result.first_start_s.tolist() == first_come_first_served(jobs, 8)


@settings(max_examples=examples(40), deadline=None)
@given(traces(grid, grid.filter(bool)))
def test_backfill_with_exact_limits_does_not_delay_the_first_blocked_job(jobs):
    """The first job that has to wait starts as early as under first come, first served."""
    jobs = [(at, seconds, gpus, "red") for at, seconds, gpus, _ in jobs]
    trace = trace_of(jobs, [seconds for _, seconds, _, _ in jobs])
    policy = replace(POLICIES["slurm"], order=POLICIES["fifo"].order)
    result = simulate(trace, SimulationSetup("a100", 8, 1), policy)
    plain = np.array(first_come_first_served(jobs, 8))
    late = np.flatnonzero(plain > trace.submit_s)
    if len(late):
        assert result.first_start_s[late[0]] <= plain[late[0]]


@settings(max_examples=examples(30), deadline=None)
@given(jobs=traces(st.floats(0, 1000), st.floats(1, 500)))
def test_job_that_fits_waits_for_the_next_cycle_at_most(jobs):
    """On a cluster that fits all jobs."""
    result = simulate(trace_of(jobs), SimulationSetup("a100", 8, 14), POLICIES["fifo"])
    assert (result.first_start_s - result.trace.submit_s <= CYCLE_S).all()


# -- metrics


def finite(metrics: dict[str, Any]) -> bool:
    return all(finite(value) if isinstance(value, dict) else math.isfinite(value) for value in metrics.values())


def test_metrics_of_a_small_trace():
    """One node: the second job waits for the first, both need all of it."""
    result = simulate(
        trace_of([(0.0, 300.0, 8, "red"), (0.0, 600.0, 8, "blue")]), SimulationSetup("a100", 8, 1), POLICIES["fifo"]
    )
    assert result.end_s.tolist() == [300.0, 900.0]
    assert result.delay_s.tolist() == [0.0, 300.0]
    metrics = summary(result)
    assert metrics["jobs"] == 2
    assert metrics["mean_jct_s"] == 600.0
    assert metrics["mean_delay_s"] == 150.0
    assert metrics["worst_delay_s"] == 300.0
    assert metrics["mean_first_wait_s"] == 150.0
    assert metrics["utilization"] == pytest.approx(1.0)
    assert metrics["preemptions"] == 0
    assert result.guaranteed_gpu_s == pytest.approx(8 * 900.0)
    # Guarantees are by demand, 3 and 5: blue lacks its 5 for 300 s. Red has nothing to run after that.
    assert result.owed_gpu_s == pytest.approx(5 * 300.0)


def test_jobs_of_zero_duration_have_finite_metrics():
    result = simulate(trace_of([(5.0, 0.0, 1, "red")]), SETUP, POLICIES["fifo"])
    assert result.end_s.tolist() == [5.0]
    assert finite(summary(result))


@settings(max_examples=examples(20), deadline=None)
@given(jobs=short_traces)
def test_metrics_are_finite_and_within_bounds(jobs):
    result = simulate(trace_of([*jobs, (4000.0, 10.0, 1, "red")]), SETUP, POLICIES["kueue"])
    metrics = summary(result)
    assert finite(metrics)
    assert 0 <= metrics["utilization"] <= 1 + 1e-9
    assert 0 <= metrics["quota_deficit"] <= 1
    assert metrics["p50_jct_s"] <= metrics["p90_jct_s"] <= metrics["p99_jct_s"]
    assert metrics["mean_delay_s"] <= metrics["worst_delay_s"]


# -- invalid input


@pytest.mark.parametrize(
    ("name", "setup", "message"),
    [
        ("a job larger than the cluster", SimulationSetup("a100", 2, 1), "job job-1 requests 3 GPUs"),
        (
            "guarantees above the cluster",
            SimulationSetup("a100", 8, 1, {"red": 5, "blue": 4}),
            "guarantees add up to 9 GPUs",
        ),
        (
            "a tenant without a guarantee",
            SimulationSetup("a100", 8, 1, {"red": 5}),
            "tenant blue has jobs but no guarantee",
        ),
        ("a negative guarantee", SimulationSetup("a100", 8, 1, {"red": 5, "blue": -1}), "tenant blue: guarantee is -1"),
        ("nodes without GPUs", SimulationSetup("a100", 0, 1), "the largest gang is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_setup_is_rejected(name, setup, message):
    with pytest.raises(UsageError, match=message) as error:
        simulate(trace_of([(0.0, 5.0, 1, "red"), (1.0, 5.0, 3, "blue")]), setup, POLICIES["fifo"])
    assert "\n" not in error.value.message
