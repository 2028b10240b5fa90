"""When jobs start: small clusters where it can be worked out, and what an estimate must not depend on."""

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
    snapshot.nodes.join("h100", 8, [f"n{number}" for number in range(nodes)])
    for name in tenants:
        snapshot.tenants.join(name, 8 * nodes // len(tenants))
    return snapshot


def past(took: list[float], gpus: int = 8, every_s: float = 10_000.0) -> JobHistory:
    """Jobs alike, each alone, of so many seconds."""
    history = JobHistory()
    for number, seconds in enumerate(took):
        at = NOW - every_s * (len(took) - number + 1)
        history.submitted(Job(f"past-{number}", "red", gpus, submit_s=at))
        history.ended(f"past-{number}", at + seconds, seconds)
    history.came.clear()  # nobody comes any more, unless a test says so
    return history


def runs(snapshot: ClusterSnapshot, history: JobHistory, name: str, since: float, node: int = 0, gpus: int = 8) -> None:
    job = Job(name, "red", gpus, submit_s=since)
    snapshot.advance(since)
    (row,) = snapshot.submit([job])
    snapshot.start(row, 0, Placement(np.array([node], np.int32), np.array([gpus], np.int32)))
    history.submitted(job)
    history.came.clear()


def waits(snapshot: ClusterSnapshot, history: JobHistory, name: str = "mine", gpus: int = 8) -> None:
    job = Job(name, "red", gpus, submit_s=NOW)
    snapshot.advance(NOW)
    snapshot.submit([job])
    history.submitted(job)
    history.came.clear()


def told(took: list[float], since: float, policy: str = "fifo", **more: int) -> StartEstimate:
    """Of a job that waits for another that has all GPUs since a time."""
    snapshot, history = cluster(), past(took)
    runs(snapshot, history, "other", since)
    waits(snapshot, history)
    return estimate_start(snapshot, "mine", NOW, POLICIES[policy], history, **more)


@pytest.mark.parametrize("policy", ["fifo", "kueue", "slurm"])
@pytest.mark.parametrize("worked", [100.0, 400.0, 900.0])
def test_all_jobs_take_a_thousand_seconds(policy: str, worked: float) -> None:
    found = told([1000.0] * 100, NOW - worked, policy, futures=99)
    assert found.p50_s == pytest.approx(1000.0 - worked, rel=0.1, abs=30.0)
    assert found.p50_s <= found.p90_s <= 1.5 * (1000.0 - worked) + 30


@pytest.mark.parametrize("worked", [10.0, 3000.0])
def test_lives_without_memory_leave_as_much_however_long_a_job_has_run(worked: float) -> None:
    """Exponential: half end within ln 2, nine of ten within ln 10 of the mean, from now on."""
    chance = Random(1)
    took = [chance.expovariate(1 / 4000.0) for _ in range(500)]
    found = told(took, NOW - worked, futures=399)
    assert found.p50_s == pytest.approx(4000 * math.log(2), rel=0.2)
    assert found.p90_s == pytest.approx(4000 * math.log(10), rel=0.2)


def test_one_that_has_run_for_long_runs_for_long_still() -> None:
    took = [100.0] * 90 + [50_000.0] * 10
    assert told(took, NOW - 10.0).p50_s < 500
    assert told(took, NOW - 1000.0).p50_s > 20_000


def test_of_two_nodes_the_first_that_is_free() -> None:
    """Two jobs of exponential lives: the first of them ends twice as soon."""
    chance = Random(2)
    snapshot, history = cluster(2), past([chance.expovariate(1 / 4000.0) for _ in range(500)])
    for node in range(2):
        runs(snapshot, history, f"other-{node}", NOW - 50.0, node)
    waits(snapshot, history)
    found = estimate_start(snapshot, "mine", NOW, POLICIES["fifo"], history, futures=399)
    assert found.p50_s == pytest.approx(2000 * math.log(2), rel=0.2)


def test_those_who_come_later_and_pass_are_counted() -> None:
    """Single GPUs come as fast as they end: where nobody waits behind a gang, it waits for as long as they come."""
    found = {}
    for policy in ("fifo", "kueue"):
        snapshot, history = cluster(), past([2000.0] * 100, gpus=1, every_s=900.0)
        for number in range(8):
            runs(snapshot, history, f"other-{number}", NOW - 1900 + 230 * number, gpus=1)
        waits(snapshot, history)
        for number in range(150):
            history.submitted(Job(f"came-{number}", "red", 1, submit_s=NOW - 100 * (150 - number)))
        found[policy] = estimate_start(snapshot, "mine", NOW, POLICIES[policy], history, futures=5)
    assert found["fifo"].p90_s < 4000
    assert found["kueue"].p50_s > 3 * found["fifo"].p50_s


def test_what_nobody_may_know_changes_nothing() -> None:
    """Neither the true duration nor the limit of any job, nor the seed of another question."""
    found = []
    for known, limit in ((math.nan, math.inf), (5.0, 600.0)):
        snapshot, history = cluster(), past([1000.0, 3000.0] * 50)
        runs(snapshot, history, "other", NOW - 100)
        waits(snapshot, history)
        snapshot.jobs.known_s[:2], snapshot.jobs.limit_s[:2] = known, limit
        before = snapshot.to_json()
        found.append(estimate_start(snapshot, "mine", NOW, POLICIES["headway"], history))
        assert snapshot.to_json() == before, "a question changes nothing"
    assert found[0] == found[1]


def test_the_same_question_has_the_same_answer_and_another_seed_another() -> None:
    took = [500.0, 1000.0, 5000.0] * 30
    assert told(took, NOW - 10) == told(took, NOW - 10)
    assert told(took, NOW - 10).futures != told(took, NOW - 10, seed=1).futures


def test_who_may_never_start_is_told_so() -> None:
    snapshot, history = cluster(), past([100.0] * 10)
    waits(snapshot, history)
    snapshot.nodes.state[0] = DRAINING
    found = estimate_start(snapshot, "mine", NOW, POLICIES["fifo"], history, futures=3)
    assert found.p50_s == found.p90_s == math.inf


def test_who_does_not_wait_has_no_estimate() -> None:
    snapshot, history = cluster(), past([100.0] * 10)
    runs(snapshot, history, "other", NOW)
    for name in ("other", "nobody"):
        with pytest.raises(UsageError, match=f"job {name} does not wait"):
            estimate_start(snapshot, name, NOW, POLICIES["fifo"], history)


@pytest.mark.parametrize(("count", "p50", "p90"), [(9, 5.0, 9.0), (19, 10.0, 18.0), (99, 50.0, 90.0), (1, 1.0, 1.0)])
def test_quantiles_of_n_draws_are_at_k_of_n_plus_one(count: int, p50: float, p90: float) -> None:
    draws = [float(number + 1) for number in range(count)]
    assert (quantile(draws, 0.5), quantile(draws, 0.9)) == (pytest.approx(p50), pytest.approx(p90))
