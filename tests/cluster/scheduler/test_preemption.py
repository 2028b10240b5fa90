"""Preemption picks the victims that lose least, and then the gang fits."""

import math
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.scheduler.decide import MIN_RUN_S, decide
from headway.cluster.scheduler.decision_log import apply_decisions
from headway.cluster.scheduler.jobs import Job
from headway.cluster.scheduler.nodes import DRAINING
from headway.cluster.scheduler.placement import Placement
from headway.cluster.scheduler.policies import POLICIES
from headway.cluster.scheduler.policy import RankedJobs
from headway.cluster.scheduler.preemption import PreemptionCandidates
from headway.cluster.scheduler.snapshot import ClusterSnapshot
from thinned import examples

SIZE = 4


def cluster_with_jobs(sizes: list[int], ages: list[int], nodes: int) -> ClusterSnapshot:
    """Return a cluster with jobs that were started in order where they fit, and have run for a while."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", SIZE, [f"n{number}" for number in range(nodes)])
    snapshot.tenants.add_tenant("all", SIZE * nodes)
    for number, (gpus, age) in enumerate(zip(sizes, ages, strict=True)):
        (row,) = snapshot.submit([Job(f"j{number}", "all", gpus, preemptible=True, save_every_s=600, restart_s=60)])
        placement = snapshot.nodes.free_gpus(snapshot.nodes.pools[0]).find(gpus)
        if placement is not None:
            snapshot.start(row, 0, placement)
            snapshot.jobs.since_s[row] = 10_000.0 - age
    snapshot.now_s = 10_000.0
    return snapshot


cases = st.integers(1, 3).flatmap(
    lambda nodes: st.tuples(
        st.just(nodes),
        st.lists(
            st.tuples(st.integers(1, SIZE * nodes), st.sampled_from([0, 100, 599, 600, 601, 1300])),
            min_size=1,
            max_size=6,
        ),
        st.integers(1, SIZE * nodes),
    )
)


@settings(max_examples=examples(100), deadline=None)
@given(cases)
def test_victims_make_a_gang_fit_and_are_cheap_on_a_single_node(case) -> None:
    nodes, jobs, gpus = case
    snapshot = cluster_with_jobs([size for size, _ in jobs], [age for _, age in jobs], nodes)
    pool, active = snapshot.nodes.pools[0], snapshot.active
    free_gpus = snapshot.nodes.free_gpus(pool)
    if free_gpus.find(gpus) is not None or not len(active):
        return
    candidates = PreemptionCandidates(snapshot, active, snapshot.now_s)
    chosen = candidates.cheapest_victims(free_gpus, 0, gpus, np.ones(len(active), np.bool_))

    def fits(stopped) -> bool:
        trial = snapshot.nodes.free_gpus(pool)
        for number in stopped:
            trial.release(snapshot.placements[int(active[number])][1])
        return trial.find(gpus) is not None

    sets = [group for count in range(1, len(active) + 1) for group in combinations(range(len(active)), count)]
    costs = [candidates.lost_gpu_s[list(group)].sum() for group in sets if fits(group)]
    assert (chosen is not None) == bool(costs), "preempting all of them empties the pool"
    if chosen is not None:
        assert fits(chosen.tolist())
        if gpus <= SIZE and all(len(snapshot.placements[int(row)][1].nodes) == 1 for row in active):
            alone = [set(group) for group in sets if fits(group)]
            assert set(chosen.tolist()) in alone
            greedy = candidates.lost_gpu_s[chosen].sum()
            assert greedy <= 2 * min(costs) + 1e-9, "by cost per GPU, at most one job more than needed"


def test_loss_is_unsaved_work_and_restart_times_gpus() -> None:
    snapshot = cluster_with_jobs([2, 2], [700, 600], 1)
    candidates = PreemptionCandidates(snapshot, snapshot.active, snapshot.now_s)
    assert candidates.lost_gpu_s.tolist() == [2 * (100 + 60), 2 * (0 + 60)]
    chosen = candidates.cheapest_victims(snapshot.nodes.free_gpus(snapshot.nodes.pools[0]), 0, 2, np.ones(2, np.bool_))
    assert chosen is not None
    assert chosen.tolist() == [1]


@pytest.mark.parametrize(("age", "stops"), [(MIN_RUN_S - 1, 0), (MIN_RUN_S, 1), (2000.0, 1)])
def test_new_job_preempts_one_that_has_had_more_after_its_minimum_run_time(age: float, stops: int) -> None:
    """Four GPUs with their next half hour, two GPU-hours, are beyond the first level from the start."""
    snapshot = cluster_with_jobs([4], [int(age)], 1)
    snapshot.submit([Job("new", "all", 1, submit_s=10_000.0)])
    decisions = decide(snapshot, 10_000.0, POLICIES["headway"])
    assert [decision.kind for decision in decisions] == ["stop", "start"] * stops
    apply_decisions(snapshot, decisions)
    assert len(snapshot.active) == 1


def test_non_preemptible_job_is_never_preempted() -> None:
    snapshot = cluster_with_jobs([4], [9000], 1)
    snapshot.jobs.preemptible[:] = False
    snapshot.submit([Job("new", "all", 1, submit_s=10_000.0)])
    assert decide(snapshot, 10_000.0, POLICIES["headway"]) == []


def test_victim_does_not_preempt_the_job_it_yielded_to() -> None:
    """No cycle: the victim has had more than the job it yielded to."""
    snapshot = cluster_with_jobs([4], [9000], 1)
    snapshot.submit([Job("new", "all", 4, submit_s=10_000.0, preemptible=True)])
    apply_decisions(snapshot, decide(snapshot, 10_000.0, POLICIES["headway"]))
    names = [snapshot.jobs.names[int(row)] for row in snapshot.active]
    assert names == ["new"]
    snapshot.advance(10_000.0 + MIN_RUN_S)
    assert decide(snapshot, snapshot.now_s, POLICIES["headway"]) == []


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_no_job_is_preempted_on_a_draining_node(gpus: int) -> None:
    snapshot = cluster_with_jobs([4, 4], [9000, 9000], 2)
    snapshot.nodes.state[0] = DRAINING
    snapshot.submit([Job("new", "all", gpus, submit_s=10_000.0)])
    decisions = decide(snapshot, 10_000.0, POLICIES["headway"])
    stopped = [snapshot.jobs.names[decision.job] for decision in decisions if decision.kind == "stop"]
    assert stopped == ([] if gpus == 8 else ["j1"])
    apply_decisions(snapshot, decisions)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))])
def test_preemption_leaves_free_what_tenants_do_not_lend(seed: int) -> None:
    """The policy starts and preempts all jobs itself, and tenants lend little or nothing."""
    random, snapshot = Random(seed), ClusterSnapshot()
    snapshot.nodes.add_pool("h100", 4, ["a", "b", "c"])
    lends = {"red": random.choice([0, 1, 2]), "blue": random.choice([0, 2, 4])}
    for name, lend in lends.items():
        snapshot.tenants.add_tenant(name, 6, borrow=random.choice([None, 2, 4]), lend=lend)
    tenants, stops = snapshot.tenants, 0
    for cycle in range(40):
        now = cycle * 4 * 3600.0
        snapshot.advance(now)
        for row in random.sample(snapshot.active.tolist(), len(snapshot.active) // 4):
            snapshot.end(row)
        for number in range(3):
            tenant = random.choice(list(lends))
            most = snapshot.allowance(tenants.rows[tenant])
            gpus = min(random.choice([1, 1, 2, 4, 6, 8]), most)
            snapshot.submit([Job(f"{cycle}-{number}", tenant, gpus, now, preemptible=random.random() < 0.9)])
        decisions = decide(snapshot, now, POLICIES["headway"])
        stops += sum(decision.kind == "stop" for decision in decisions)
        apply_decisions(snapshot, decisions)
        used = dict(zip(lends, tenants.used[:2].tolist(), strict=True))
        assert 12 - sum(used.values()) >= sum(max(6 - used[name] - lends[name], 0) for name in lends)
    assert stops, "without preemptions this proves little"


@pytest.mark.parametrize("name", ["headway", "las", "edf", "srtf"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))])
def test_reach_bounds_what_a_job_may_preempt(name: str, seed: int) -> None:
    """The quick bound for all waiting jobs against the exact answer for each."""
    random, snapshot, rules, checked = Random(seed), ClusterSnapshot(), POLICIES[name].preemption, 0
    assert rules is not None
    snapshot.nodes.add_pool("h100", 4, ["a", "b", "c"])
    snapshot.tenants.add_tenant("red", 8)
    snapshot.tenants.add_tenant("blue", 4, budget_gpu_h=random.choice([None, 400]))
    for cycle in range(40):
        now = snapshot.now_s + random.choice([600.0, 4 * 3600.0, 86400.0])
        snapshot.advance(now)
        for row in random.sample(snapshot.active.tolist(), len(snapshot.active) // 5):
            snapshot.end(row)
        jobs = [Job(
            f"{cycle}-{number}", random.choice(["red", "blue"]), random.choice([1, 2, 4, 8]), now,
            priority=random.choice([0, 0, 1]), preemptible=random.random() < 0.8,
            kind=random.choice(["batch", "batch", "interactive", "service"]),
            deadline_s=now + random.choice([math.inf, 5e4, 5e6]),
        ) for number in range(2)]  # fmt: skip
        snapshot.submit(jobs, [random.uniform(1e3, 1e6) for _ in jobs])
        queue, active, used = snapshot.queue, snapshot.active, snapshot.tenants.used[:2]
        if len(queue) and len(active):
            waiting, running = (RankedJobs(some, rules.levels(snapshot, some, now)) for some in (queue, active))
            reach = rules.reach(snapshot, used, waiting, running, now)
            for at in range(len(queue)):
                head = RankedJobs(waiting.rows[at : at + 1], waiting.levels[at : at + 1])
                allowed = rules.may_preempt(snapshot, used, head, running, now)
                assert snapshot.jobs.gpus[active[allowed]].sum() <= reach[at]
                checked += bool(allowed.any())
        apply_decisions(snapshot, decide(snapshot, now, POLICIES[name]))
    assert checked, "without allowed preemptions this proves little"


def nodes_used(policy: str, *, preemptible: bool, count: int = 1) -> list[int]:
    """Return the nodes that single-GPU jobs get: the first is nearly full of a preemptible job, the second has one GPU
    of a non-preemptible job, the third is empty."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.add_pool("h100", SIZE, ["n0", "n1", "n2"])
    snapshot.tenants.add_tenant("all", 3 * SIZE)
    for name, gpus, node in (("loose", 3, 0), ("firm", 1, 1)):
        (row,) = snapshot.submit([Job(name, "all", gpus, preemptible=name == "loose")])
        snapshot.start(row, 0, Placement(np.array([node], np.int32), np.array([gpus], np.int32)))
    snapshot.submit([Job(f"x{number}", "all", 1, preemptible=preemptible) for number in range(count)])
    return [int(decision.placement.nodes[0]) for decision in decide(snapshot, 0.0, POLICIES[policy])]


def test_non_preemptible_jobs_are_packed_on_few_nodes() -> None:
    assert nodes_used("headway", preemptible=False, count=5) == [1, 1, 1, 0, 2], "then the fullest again"
    assert nodes_used("headway", preemptible=True) == [0], "the fullest"
    assert nodes_used("fifo", preemptible=False) == [0], "a policy without preemption does not pack"
