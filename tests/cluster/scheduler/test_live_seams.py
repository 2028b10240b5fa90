"""What a live cluster needs of the scheduler: CPUs, memory, machines, jobs without GPUs, starting and ending jobs."""

import numpy as np
import pytest

from headway.cluster.scheduler.decide import decide
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.least_served import LEAST_SERVED
from headway.cluster.scheduler.placement import Kept, Placement
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from headway.cluster.scheduler.submission_checks import OversizedJobError


def cluster(nodes: int = 2, gpus: int = 4, cpus: float = 8, gib: float = 16) -> ClusterSnapshot:
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", gpus, [f"n{number}" for number in range(nodes)])
    for number in range(nodes):
        snapshot.nodes.limit(f"n{number}", cpus, gib * 2**30)
    snapshot.tenants.add_tenant("red")
    return snapshot


def start(snapshot: ClusterSnapshot, *jobs: Job, now: float = 0.0) -> dict[str, dict[str, int]]:
    """Submit jobs, apply one cycle, and return the GPUs per node of those that start."""
    snapshot.advance(now)
    snapshot.submit(jobs)
    starts = {}
    for decision in decide(snapshot, now, LEAST_SERVED):
        if decision.kind == "start":
            first = snapshot.nodes.pools[decision.pool].first
            names = [snapshot.nodes.names[first + node] for node in decision.placement.nodes.tolist()]
            starts[snapshot.jobs.names[decision.job]] = dict(zip(names, decision.placement.gpus.tolist(), strict=True))
            snapshot.start(decision.job, decision.pool, decision.placement)
    return starts


@pytest.mark.parametrize(
    ("what", "jobs", "expected"),
    [
        ("CPUs", [Job("a", "red", 1, cpus=5), Job("b", "red", 1, cpus=5)], {"a": {"n0": 1}, "b": {"n1": 1}}),
        ("memory", [Job("a", "red", 1, memory_bytes=9 * 2**30)] * 1, {"a": {"n0": 1}}),
        ("one that waits for CPUs", [Job(n, "red", 1, cpus=8) for n in "abc"], {"a": {"n0": 1}, "b": {"n1": 1}}),
        ("no GPUs", [Job("a", "red", 4), Job("b", "red", 0, cpus=8)], {"a": {"n0": 4}, "b": {"n0": 0}}),
        ("two machines", [Job("a", "red", 2, machines=2, cpus=1)], {"a": {"n0": 1, "n1": 1}}),
        ("two machines without GPUs", [Job("a", "red", 0, machines=2, cpus=1)], {"a": {"n0": 0, "n1": 0}}),
        ("unequal counts", [Job("a", "red", 6, cpus=1)], {"a": {"n0": 4, "n1": 2}}),
        ("one machine", [Job("x", "red", 2), Job("a", "red", 4, machines=1)], {"x": {"n0": 2}, "a": {"n1": 4}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_placement_counts_every_resource(what: str, jobs: list[Job], expected: dict[str, dict[str, int]]) -> None:
    assert start(cluster(), *jobs) == expected


@pytest.mark.parametrize(
    ("job", "hint"),
    [
        (Job("a", "red", 1, cpus=9), "at most 8"),
        (Job("a", "red", 1, memory_bytes=17 * 2**30), "at most 16"),
        (Job("a", "red", 3, machines=3, cpus=1), "at most 2"),
        (Job("a", "red", 5, machines=1, cpus=1), "at most 4"),
    ],
)
def test_job_that_no_node_can_hold_is_refused_with_the_nearest_that_could(job: Job, hint: str) -> None:
    with pytest.raises(OversizedJobError) as error:
        cluster().submit([job])
    assert error.value.hint == hint


def test_ending_job_keeps_its_gpus_until_it_has_exited() -> None:
    snapshot = cluster(nodes=1)
    start(snapshot, Job("a", "red", 4, cpus=8, preemptible=True))
    row = snapshot.jobs.rows["a"]
    snapshot.tell_to_stop(row)
    assert (snapshot.nodes.free[0], snapshot.nodes.cpus_free[0]) == (0, 0)
    assert not len(snapshot.queue)
    assert start(snapshot, Job("b", "red", 1, cpus=1), now=10) == {}
    snapshot.exited(row, saved=True)
    assert snapshot.nodes.free[0] == 4
    assert snapshot.jobs.done_s[row] == 10
    assert snapshot.queue.tolist() == [row, snapshot.jobs.rows["b"]]


def test_displacing_start_is_counted_once_and_the_rest_stays_occupied() -> None:
    snapshot = cluster(nodes=1)
    start(snapshot, Job("a", "red", 4, cpus=8, preemptible=True))
    (other,) = snapshot.submit([Job("b", "red", 3, cpus=2, priority=1)])
    nodes = np.array([0], np.int32)
    kept = Kept(Placement(nodes, np.array([1], np.int32)), np.array([6.0]), np.array([0.0]))
    snapshot.tell_to_stop(snapshot.jobs.rows["a"], kept)
    snapshot.start(other, 0, Placement(nodes, np.array([3], np.int32)))
    snapshot.jobs.starting[other] = True
    assert (snapshot.nodes.free[0], snapshot.nodes.cpus_free[0], snapshot.tenants.used[0]) == (0, 0, 4)
    assert snapshot.settled.tolist() == []
    text = snapshot.to_json()
    assert ClusterSnapshot.from_json(text).to_json() == text
    snapshot.advance(5)
    snapshot.confirm(other)
    snapshot.exited(snapshot.jobs.rows["a"], saved=False)
    assert (snapshot.nodes.free[0], snapshot.nodes.cpus_free[0], snapshot.tenants.used[0]) == (1, 6, 3)
    assert (snapshot.settled.tolist(), float(snapshot.jobs.since_s[other])) == ([other], 5.0)


def test_starting_job_is_not_preempted() -> None:
    snapshot = cluster(nodes=1)
    start(snapshot, Job("a", "red", 4, preemptible=True))
    row = snapshot.jobs.rows["a"]
    snapshot.jobs.starting[row] = True
    snapshot.advance(1000)
    snapshot.submit([Job("b", "red", 4, submit_s=1000, priority=9)])
    assert [decision for decision in decide(snapshot, 1000, LEAST_SERVED) if decision.kind == "stop"] == []
    snapshot.jobs.starting[row] = False
    assert [decision.kind for decision in decide(snapshot, 1000, LEAST_SERVED)] == ["stop", "start"]


def test_no_job_is_preempted_for_one_that_would_still_lack_cpus() -> None:
    snapshot = cluster(nodes=1)
    start(snapshot, Job("a", "red", 4, cpus=1, preemptible=True), Job("b", "red", 0, cpus=7))
    snapshot.advance(1000)
    snapshot.submit([Job("c", "red", 4, submit_s=1000, priority=9, cpus=2)])
    before = snapshot.to_json()
    assert decide(snapshot, 1000, LEAST_SERVED) == []
    assert snapshot.to_json() == before


def test_held_job_waits_outside_the_queue_and_keeps_its_place() -> None:
    snapshot = cluster()
    first, second = snapshot.submit([Job("a", "red", 1), Job("b", "red", 1, submit_s=1)])
    snapshot.hold(first)
    assert (snapshot.queue.tolist(), int(snapshot.tenants.wanted[0])) == ([second], 1)
    text = snapshot.to_json()
    assert ClusterSnapshot.from_json(text).to_json() == text
    snapshot.unhold(first)
    assert (snapshot.queue.tolist(), int(snapshot.tenants.wanted[0])) == ([first, second], 2)


def test_job_that_is_stopped_right_after_its_start_does_not_reappear_in_the_queue() -> None:
    snapshot = cluster()
    start(snapshot, Job("a", "red", 1))
    snapshot.tell_to_stop(snapshot.jobs.rows["a"])
    snapshot.end(snapshot.jobs.rows["a"])
    (row,) = snapshot.submit([Job("b", "red", 1)])
    assert snapshot.queue.tolist() == [row]
