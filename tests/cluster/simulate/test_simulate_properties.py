"""Simulated logs: what must hold of every one, and first come first served against a simulator of its own."""

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

STOPS_NOBODY = ["fifo", "kueue", "slurm", "sjf"]
ALL = [*STOPS_NOBODY, "headway"]
CYCLE_S = 30.0
SETUP = SimulationSetup("a100", 4, 2, preemptible=0.7)


def trace_of(jobs: list[tuple[float, float, int, str]], limits: list[float] | None = None) -> JobTrace:
    """Of (submit_s, duration_s, gpus, tenant)."""
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


def logs(times: st.SearchStrategy[float], seconds: st.SearchStrategy[float], gpus: int = 8) -> st.SearchStrategy[Any]:
    job = st.tuples(times, seconds, st.integers(1, gpus), st.sampled_from(["red", "blue", "green"]))
    return st.lists(job, min_size=1, max_size=14).map(sorted)


some = logs(st.floats(0, 4000), st.one_of(st.floats(0, 60), st.floats(0, 20_000)))
# Long enough for jobs to be stopped: they run some minutes before they may be.
crowded = logs(st.integers(0, 20_000).map(float), st.integers(1, 40_000).map(float))


def watched(policy: Policy) -> Policy:
    """The same policy; each cycle checks the snapshot it is given."""

    def order(snapshot: ClusterSnapshot, now: float) -> Any:
        nodes, free = snapshot.nodes, snapshot.nodes.gpus.copy()
        fixed = np.zeros_like(free)
        for row, (pool, place) in snapshot.places.items():
            assert place.total == snapshot.jobs.gpus[row], "a gang is whole or not there"
            assert len(set(place.nodes.tolist())) == len(place.nodes)
            free[place.nodes + nodes.pools[pool].first] -= place.gpus
            fixed[place.nodes + nodes.pools[pool].first] += place.gpus * (not snapshot.jobs.preemptible[row])
        assert (free >= 0).all(), "more GPUs than there are"
        assert (free == nodes.free).all()
        assert (fixed == nodes.fixed).all()
        assert set(snapshot.places) == set(snapshot.active.tolist())
        assert not set(snapshot.queue.tolist()) & set(snapshot.active.tolist())
        assert snapshot.now_s == now
        return policy.order(snapshot, now)

    return replace(policy, order=order)


def lost(outcome: SimulationResult) -> float:
    """GPU-seconds, by all causes together."""
    return sum(outcome.lost_gpu_s.values())


def usage(outcome: SimulationResult, times: Any) -> Any:
    """GPUs that jobs hold which were started once, at some times."""
    once = outcome.starts == 1
    holds = (outcome.first_start_s[once] <= times[:, None]) & (times[:, None] < outcome.end_s[once])
    return holds @ outcome.trace.gpus[once]


def many(seed: int, most_s: float = 20_000.0, step_s: float = 1.0) -> list[tuple[float, float, int, str]]:
    """A log longer than those that hypothesis makes."""
    random = Random(seed)

    def seconds(most: float) -> float:
        return step_s * random.randint(1, round(most / step_s))

    return sorted(
        (seconds(most_s), seconds(random.choice((100, 2000, 40_000))), random.choice((1, 1, 2, 3, 4, 5, 8)), tenant)
        for tenant in random.choices(["red", "blue", "green"], k=80)
    )


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(15), deadline=None)
@given(jobs=st.one_of(some, crowded))
def test_of_every_log(name, jobs):
    hold(name, jobs)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_of_longer_logs(name, seed):
    outcome = hold(name, many(seed))
    stops = name not in (*STOPS_NOBODY, "edf")  # there are no deadlines
    assert (outcome.starts > 1).any() == stops, "logs that stop nobody prove little"


def hold(name: str, jobs: list[tuple[float, float, int, str]]) -> SimulationResult:
    """What must hold of a log under a policy."""
    trace, ended = trace_of(jobs), []
    outcome = simulate(trace, SETUP, watched(POLICIES[name]), ended.append)
    assert np.isfinite(outcome.end_s).all(), "every job ends"
    assert sum(ended) == len(trace)
    assert (outcome.starts >= 1).all()
    assert (outcome.first_start_s >= trace.submit_s).all()
    slack = 1e-6
    assert (outcome.end_s - outcome.first_start_s >= trace.duration_s - slack).all()
    assert (outcome.delay_s >= -slack).all()
    assert (usage(outcome, outcome.first_start_s) <= SETUP.gpus).all(), "more GPUs than there are"
    assert (outcome.used <= SETUP.gpus).all()
    assert np.isin(outcome.first_start_s, outcome.times).all(), "jobs start in cycles"
    assert (np.diff(outcome.times) >= CYCLE_S - slack).all()
    if name in STOPS_NOBODY:
        assert (outcome.starts == 1).all()
        assert outcome.end_s == pytest.approx(outcome.first_start_s + trace.duration_s)
        assert lost(outcome) == 0
    return outcome


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("restart_s", [0.0, 120.0])
@settings(max_examples=examples(12), deadline=None)
@given(jobs=crowded)
def test_gpu_seconds_are_work_or_lost(name, restart_s, jobs):
    trace = trace_of(jobs)
    outcome = simulate(trace, replace(SETUP, restart_s=restart_s, preemptible=1.0), POLICIES[name])
    work = float((trace.duration_s * trace.gpus).sum())
    assert outcome.used_gpu_s == pytest.approx(work + lost(outcome), rel=1e-9, abs=1e-3)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 3))])
def test_gpu_seconds_of_longer_logs_are_work_or_lost(seed):
    trace = trace_of(many(seed))
    outcome = simulate(trace, replace(SETUP, preemptible=1.0), POLICIES["headway"])
    assert lost(outcome) > 0
    assert outcome.used_gpu_s == pytest.approx(float((trace.duration_s * trace.gpus).sum()) + lost(outcome))


def test_a_job_that_is_stopped_before_it_has_restarted_loses_only_what_it_held():
    trace = trace_of([(0.0, 301.0, 6, "red"), (300.0, 1.0, 3, "red"), (660.0, 1.0, 3, "red")])
    outcome = simulate(trace, replace(SETUP, restart_s=600.0, preemptible=1.0), POLICIES["headway"])
    work = float((trace.duration_s * trace.gpus).sum())
    assert outcome.used_gpu_s == pytest.approx(work + lost(outcome))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(7), deadline=None)
@given(jobs=some, seed=st.integers(0, 3))
def test_the_same_input_gives_the_same_arrays(name, jobs, seed):
    one, other = (simulate(trace_of(jobs), replace(SETUP, seed=seed), POLICIES[name]) for _ in range(2))
    for field in ("first_start_s", "end_s", "starts", "times", "used", "waiting"):
        assert getattr(one, field).tobytes() == getattr(other, field).tobytes()
    assert (one.used_gpu_s, one.lost_gpu_s, one.owed_gpu_s) == (other.used_gpu_s, other.lost_gpu_s, other.owed_gpu_s)


def test_a_seed_draws_other_limits_and_policies_without_limits_do_not_care():
    chance = np.random.default_rng(0)
    submit, duration = np.sort(chance.uniform(0, 30_000, 80)), chance.uniform(100, 5000, 80)
    gpus = chance.choice([1, 2, 3, 4, 8], 80)
    trace = trace_of([(*job, "red") for job in zip(submit.tolist(), duration.tolist(), gpus.tolist(), strict=True)])
    ends = {
        name: {simulate(trace, replace(SETUP, seed=seed), POLICIES[name]).end_s.tobytes() for seed in range(4)}
        for name in ("fifo", "slurm")
    }
    assert len(ends["fifo"]) == 1
    assert len(ends["slurm"]) > 1


# -- nodes that fail


WEAK = SimulationSetup("a100", 4, 3, node_days=0.2, repair_s=3600.0, spares=1, restart_s=0.0, preemptible=1.0)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 2))])
def test_of_logs_with_failures(name, seed):
    trace = trace_of(many(seed))
    outcome = simulate(trace, replace(WEAK, seed=seed), watched(POLICIES[name]))
    assert outcome.stops["failure"] > 0, "logs where nothing fails prove little"
    assert np.isfinite(outcome.end_s).all(), "every job ends"
    assert (outcome.used <= WEAK.gpus).all(), "a spare is used in place of another only"
    assert int((outcome.starts - 1).sum()) == sum(outcome.stops.values())
    work = float((trace.duration_s * trace.gpus).sum())
    assert outcome.used_gpu_s == pytest.approx(work + lost(outcome))
    again = simulate(trace, replace(WEAK, seed=seed), POLICIES[name])
    assert again.end_s.tobytes() == outcome.end_s.tobytes()


def test_a_job_that_would_need_the_spares_is_refused():
    with pytest.raises(UsageError, match="job job-0 asks for 12 GPUs"):
        simulate(trace_of([(0.0, 9.0, 12, "red")]), replace(WEAK, node_days=None), POLICIES["fifo"])


def test_spares_are_none_of_the_gpus_that_use_is_measured_by():
    outcome = simulate(trace_of([(0.0, 900.0, 8, "red")]), replace(WEAK, node_days=None), POLICIES["fifo"])
    assert outcome.gpus == WEAK.gpus
    assert summary(outcome)["utilization"] == pytest.approx(1.0)


# -- first come, first served, on one node


def first_come_first_served(jobs: list[tuple[float, float, int, str]], gpus: int) -> list[float]:
    """Starts of jobs: nobody before those who came earlier, and everybody as soon as its GPUs are free."""
    running, starts, now = list[tuple[float, int]](), list[float](), 0.0
    for submit, seconds, count, _ in jobs:
        now = max(now, submit)
        while gpus - sum(held for end, held in running if end > now) < count:
            now = min(end for end, _ in running if end > now)
        running.append((now + seconds, count))
        starts.append(now)
    return starts


# On a grid of the cycle's length every event has a cycle of its own: jobs start at once.
grid = st.integers(0, 40).map(lambda number: CYCLE_S * number)


@settings(max_examples=examples(40), deadline=None)
@given(logs(grid, grid.filter(bool)))
def test_fifo_is_first_come_first_served(jobs):
    outcome = simulate(trace_of(jobs), SimulationSetup("a100", 8, 1), POLICIES["fifo"])
    assert outcome.first_start_s.tolist() == first_come_first_served(jobs, 8)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 5))])
def test_fifo_is_first_come_first_served_in_longer_logs(seed):
    jobs = many(seed, step_s=CYCLE_S)
    outcome = simulate(trace_of(jobs), SimulationSetup("a100", 8, 1), POLICIES["fifo"])
    assert outcome.first_start_s.tolist() == first_come_first_served(jobs, 8)


@settings(max_examples=examples(40), deadline=None)
@given(logs(grid, grid.filter(bool)))
def test_with_exact_limits_and_order_of_arrival_backfill_delays_no_first_job(jobs):
    """The first job that has to wait starts as early as under first come, first served."""
    jobs = [(at, seconds, gpus, "red") for at, seconds, gpus, _ in jobs]
    trace = trace_of(jobs, [seconds for _, seconds, _, _ in jobs])
    policy = replace(POLICIES["slurm"], order=POLICIES["fifo"].order)
    outcome = simulate(trace, SimulationSetup("a100", 8, 1), policy)
    plain = np.array(first_come_first_served(jobs, 8))
    late = np.flatnonzero(plain > trace.submit_s)
    if len(late):
        assert outcome.first_start_s[late[0]] <= plain[late[0]]


@settings(max_examples=examples(30), deadline=None)
@given(jobs=logs(st.floats(0, 1000), st.floats(1, 500)))
def test_a_job_alone_waits_for_the_next_cycle_at_most(jobs):
    """On a cluster with room for all."""
    outcome = simulate(trace_of(jobs), SimulationSetup("a100", 8, 14), POLICIES["fifo"])
    assert (outcome.first_start_s - outcome.trace.submit_s <= CYCLE_S).all()


# -- numbers


def finite(found: dict[str, Any]) -> bool:
    return all(finite(value) if isinstance(value, dict) else math.isfinite(value) for value in found.values())


def test_the_numbers_of_a_small_log():
    """One node: the second job waits for the first, both need all of it."""
    outcome = simulate(
        trace_of([(0.0, 300.0, 8, "red"), (0.0, 600.0, 8, "blue")]), SimulationSetup("a100", 8, 1), POLICIES["fifo"]
    )
    assert outcome.end_s.tolist() == [300.0, 900.0]
    assert outcome.delay_s.tolist() == [0.0, 300.0]
    found = summary(outcome)
    assert found["jobs"] == 2
    assert found["mean_jct_s"] == 600.0
    assert found["mean_delay_s"] == 150.0
    assert found["worst_delay_s"] == 300.0
    assert found["mean_first_wait_s"] == 150.0
    assert found["utilization"] == pytest.approx(1.0)
    assert found["preemptions"] == 0
    assert outcome.guaranteed_gpu_s == pytest.approx(8 * 900.0)
    # Guarantees are by demand, 3 and 5: blue lacks its 5 for 300 s. Red has nothing to run after that.
    assert outcome.owed_gpu_s == pytest.approx(5 * 300.0)


def test_a_log_of_jobs_that_take_no_time_has_numbers_too():
    outcome = simulate(trace_of([(5.0, 0.0, 1, "red")]), SETUP, POLICIES["fifo"])
    assert outcome.end_s.tolist() == [5.0]
    assert finite(summary(outcome))


@settings(max_examples=examples(20), deadline=None)
@given(jobs=some)
def test_summaries_are_finite_and_in_their_bounds(jobs):
    outcome = simulate(trace_of([*jobs, (4000.0, 10.0, 1, "red")]), SETUP, POLICIES["kueue"])
    found = summary(outcome)
    assert finite(found)
    assert 0 <= found["utilization"] <= 1 + 1e-9
    assert 0 <= found["quota_deficit"] <= 1
    assert found["p50_jct_s"] <= found["p90_jct_s"] <= found["p99_jct_s"]
    assert found["mean_delay_s"] <= found["worst_delay_s"]


# -- bad input


@pytest.mark.parametrize(
    ("name", "setup", "says"),
    [
        ("a job larger than the cluster", SimulationSetup("a100", 2, 1), "job job-1 asks for 3 GPUs"),
        (
            "guarantees above the cluster",
            SimulationSetup("a100", 8, 1, {"red": 5, "blue": 4}),
            "guarantees add up to 9 GPUs",
        ),
        (
            "a tenant without a guarantee",
            SimulationSetup("a100", 8, 1, {"red": 5}),
            "tenant blue has jobs and no guarantee",
        ),
        ("a negative guarantee", SimulationSetup("a100", 8, 1, {"red": 5, "blue": -1}), "tenant blue: guarantee is -1"),
        ("nodes without GPUs", SimulationSetup("a100", 0, 1), "0 GPUs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_setups_are_refused_in_one_sentence(name, setup, says):
    with pytest.raises(UsageError, match=says) as error:
        simulate(trace_of([(0.0, 5.0, 1, "red"), (1.0, 5.0, 3, "blue")]), setup, POLICIES["fifo"])
    assert "\n" not in error.value.message
