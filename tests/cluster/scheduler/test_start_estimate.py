"""Start estimates: small clusters with known answers, and what an estimate must not depend on."""

import math
from random import Random

import numpy as np
import pytest

from headway.cluster.scheduler.history import JobHistory
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.nodes import DRAINING
from headway.cluster.scheduler.placement import Placement
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.start_estimate import StartEstimate, estimate_start, quantile
from headway.errors import UsageError

NOW = 100_000.0


def cluster(nodes: int = 1, tenants: tuple[str, ...] = ("red",)) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 8, [f"n{number}" for number in range(nodes)])
    for name in tenants:
        snapshot.tenants.add_tenant(name, 8 * nodes // len(tenants))
    return snapshot


def history_of(durations: list[float], gpus: int = 8, every_s: float = 10_000.0) -> JobHistory:
    """Return a history of similar jobs that arrived one by one, with these run times."""
    history = JobHistory()
    for number, seconds in enumerate(durations):
        at = NOW - every_s * (len(durations) - number + 1)
        history.submitted(Job(f"past-{number}", "red", gpus, submit_s=at))
        history.ended(f"past-{number}", at + seconds, seconds)
    history.arrivals.clear()  # no more arrivals, unless a test adds them
    return history


def add_running(
    snapshot: ClusterSnapshot, history: JobHistory, name: str, since: float, node: int = 0, gpus: int = 8
) -> None:
    job = Job(name, "red", gpus, submit_s=since)
    snapshot.advance(since)
    (row,) = snapshot.submit([job])
    snapshot.start(row, 0, Placement(np.array([node], np.int32), np.array([gpus], np.int32)))
    history.submitted(job)
    history.arrivals.clear()


def add_waiting(snapshot: ClusterSnapshot, history: JobHistory, name: str = "mine", gpus: int = 8) -> None:
    job = Job(name, "red", gpus, submit_s=NOW)
    snapshot.advance(NOW)
    snapshot.submit([job])
    history.submitted(job)
    history.arrivals.clear()


def estimate_behind(durations: list[float], since: float, policy: str = "fifo", **more: int) -> StartEstimate:
    """Estimate the start of a job that waits for another, which has held all GPUs since a time."""
    snapshot, history = cluster(), history_of(durations)
    add_running(snapshot, history, "other", since)
    add_waiting(snapshot, history)
    return estimate_start(snapshot, "mine", NOW, POLICIES[policy], history, **more)


@pytest.mark.parametrize("policy", ["fifo", "kueue", "slurm"])
@pytest.mark.parametrize("worked", [100.0, 400.0, 900.0])
def test_equal_run_times_give_the_remaining_time(policy: str, worked: float) -> None:
    estimate = estimate_behind([1000.0] * 100, NOW - worked, policy, futures=99)
    assert estimate.p50_s == pytest.approx(1000.0 - worked, rel=0.1, abs=30.0)
    assert estimate.p50_s <= estimate.p90_s <= 1.5 * (1000.0 - worked) + 30


@pytest.mark.parametrize("worked", [10.0, 3000.0])
def test_exponential_run_times_leave_the_same_however_long_a_job_has_run(worked: float) -> None:
    """Half end within ln 2, nine of ten within ln 10 of the mean, from now on."""
    rng = Random(1)
    durations = [rng.expovariate(1 / 4000.0) for _ in range(500)]
    estimate = estimate_behind(durations, NOW - worked, futures=399)
    assert estimate.p50_s == pytest.approx(4000 * math.log(2), rel=0.2)
    assert estimate.p90_s == pytest.approx(4000 * math.log(10), rel=0.2)


def test_job_that_has_run_for_long_is_expected_to_run_for_long() -> None:
    durations = [100.0] * 90 + [50_000.0] * 10
    assert estimate_behind(durations, NOW - 10.0).p50_s < 500
    assert estimate_behind(durations, NOW - 1000.0).p50_s > 20_000


def test_the_first_of_two_nodes_to_be_free_counts() -> None:
    """Two jobs with exponential run times: the first of them ends twice as soon."""
    rng = Random(2)
    snapshot, history = cluster(2), history_of([rng.expovariate(1 / 4000.0) for _ in range(500)])
    for node in range(2):
        add_running(snapshot, history, f"other-{node}", NOW - 50.0, node)
    add_waiting(snapshot, history)
    estimate = estimate_start(snapshot, "mine", NOW, POLICIES["fifo"], history, futures=399)
    assert estimate.p50_s == pytest.approx(2000 * math.log(2), rel=0.2)


def test_later_arrivals_that_pass_a_gang_delay_it() -> None:
    """Single-GPU jobs arrive as fast as they end: where they pass a gang, it waits as long as they arrive."""
    estimates = {}
    for policy in ("fifo", "kueue"):
        snapshot, history = cluster(), history_of([2000.0] * 100, gpus=1, every_s=900.0)
        for number in range(8):
            add_running(snapshot, history, f"other-{number}", NOW - 1900 + 230 * number, gpus=1)
        add_waiting(snapshot, history)
        for number in range(150):
            history.submitted(Job(f"arrival-{number}", "red", 1, submit_s=NOW - 100 * (150 - number)))
        estimates[policy] = estimate_start(snapshot, "mine", NOW, POLICIES[policy], history, futures=5)
    assert estimates["fifo"].p90_s < 4000
    assert estimates["kueue"].p50_s > 3 * estimates["fifo"].p50_s


def test_true_durations_and_limits_do_not_matter() -> None:
    """Neither the true duration nor the time limit of any job."""
    estimates = []
    for known, limit in ((math.nan, math.inf), (5.0, 600.0)):
        snapshot, history = cluster(), history_of([1000.0, 3000.0] * 50)
        add_running(snapshot, history, "other", NOW - 100)
        add_waiting(snapshot, history)
        snapshot.jobs.known_s[:2], snapshot.jobs.limit_s[:2] = known, limit
        before = snapshot.to_json()
        estimates.append(estimate_start(snapshot, "mine", NOW, POLICIES["headway"], history))
        assert snapshot.to_json() == before, "an estimate changes nothing"
    assert estimates[0] == estimates[1]


def test_estimate_is_deterministic_per_seed() -> None:
    durations = [500.0, 1000.0, 5000.0] * 30
    assert estimate_behind(durations, NOW - 10) == estimate_behind(durations, NOW - 10)
    assert estimate_behind(durations, NOW - 10).futures != estimate_behind(durations, NOW - 10, seed=1).futures


def test_job_that_may_never_start_has_an_infinite_estimate() -> None:
    snapshot, history = cluster(), history_of([100.0] * 10)
    add_waiting(snapshot, history)
    snapshot.nodes.state[0] = DRAINING
    estimate = estimate_start(snapshot, "mine", NOW, POLICIES["fifo"], history, futures=3)
    assert estimate.p50_s == estimate.p90_s == math.inf


def test_estimate_of_a_job_that_is_not_waiting_is_rejected() -> None:
    snapshot, history = cluster(), history_of([100.0] * 10)
    add_running(snapshot, history, "other", NOW)
    for name in ("other", "nobody"):
        with pytest.raises(UsageError, match=f"job {name} is not waiting"):
            estimate_start(snapshot, name, NOW, POLICIES["fifo"], history)


@pytest.mark.parametrize(("count", "p50", "p90"), [(9, 5.0, 9.0), (19, 10.0, 18.0), (99, 50.0, 90.0), (1, 1.0, 1.0)])
def test_kth_of_n_draws_is_the_quantile_k_of_n_plus_one(count: int, p50: float, p90: float) -> None:
    draws = [float(number + 1) for number in range(count)]
    assert (quantile(draws, 0.5), quantile(draws, 0.9)) == (pytest.approx(p50), pytest.approx(p90))
