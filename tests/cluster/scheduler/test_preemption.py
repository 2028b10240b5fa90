"""Of the jobs that may be stopped those yield that lose least, and then there is room."""

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


def running(sizes: list[int], ages: list[int], nodes: int) -> ClusterSnapshot:
    """Jobs that were started one after the other, each as soon as there was room, and have run for a while."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", SIZE, [f"n{number}" for number in range(nodes)])
    snapshot.tenants.join("all", SIZE * nodes)
    for number, (gpus, age) in enumerate(zip(sizes, ages, strict=True)):
        (row,) = snapshot.submit([Job(f"j{number}", "all", gpus, preemptible=True, save_every_s=600, restart_s=60)])
        place = snapshot.nodes.room(snapshot.nodes.pools[0]).find(gpus)
        if place is not None:
            snapshot.start(row, 0, place)
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
def test_room_is_made_where_it_can_be_and_for_single_nodes_at_the_least_loss(case) -> None:
    nodes, jobs, gpus = case
    snapshot = running([size for size, _ in jobs], [age for _, age in jobs], nodes)
    pool, active = snapshot.nodes.pools[0], snapshot.active
    room = snapshot.nodes.room(pool)
    if room.find(gpus) is not None or not len(active):
        return
    yielding = PreemptionCandidates(snapshot, active, snapshot.now_s)
    chosen = yielding.cheapest_victims(room, 0, gpus, np.ones(len(active), np.bool_))

    def fits(stopped) -> bool:
        trial = snapshot.nodes.room(pool)
        for number in stopped:
            trial.give(snapshot.places[int(active[number])][1])
        return trial.find(gpus) is not None

    sets = [group for count in range(1, len(active) + 1) for group in combinations(range(len(active)), count)]
    costs = [yielding.lost_gpu_s[list(group)].sum() for group in sets if fits(group)]
    assert (chosen is not None) == bool(costs), "all of them together make room in an empty pool"
    if chosen is not None:
        assert fits(chosen.tolist())
        if gpus <= SIZE and all(len(snapshot.places[int(row)][1].nodes) == 1 for row in active):
            alone = [set(group) for group in sets if fits(group)]
            assert set(chosen.tolist()) in alone
            greedy = yielding.lost_gpu_s[chosen].sum()
            assert greedy <= 2 * min(costs) + 1e-9, "by cost a GPU, at most one job more than needed"


def test_loss_is_what_was_not_saved_and_the_restart_times_gpus() -> None:
    snapshot = running([2, 2], [700, 600], 1)
    yielding = PreemptionCandidates(snapshot, snapshot.active, snapshot.now_s)
    assert yielding.lost_gpu_s.tolist() == [2 * (100 + 60), 2 * (0 + 60)]
    chosen = yielding.cheapest_victims(snapshot.nodes.room(snapshot.nodes.pools[0]), 0, 2, np.ones(2, np.bool_))
    assert chosen is not None
    assert chosen.tolist() == [1]


@pytest.mark.parametrize(("age", "stops"), [(MIN_RUN_S - 1, 0), (MIN_RUN_S, 1), (2000.0, 1)])
def test_a_new_job_stops_one_that_has_had_more_and_has_run_for_a_while(age: float, stops: int) -> None:
    """Four GPUs with their next half hour are at the end of the first level, two GPU-hours, from the start."""
    snapshot = running([4], [int(age)], 1)
    snapshot.submit([Job("new", "all", 1, submit_s=10_000.0)])
    decisions = decide(snapshot, 10_000.0, POLICIES["headway"])
    assert [one.kind for one in decisions] == ["stop", "start"] * stops
    apply_decisions(snapshot, decisions)
    assert len(snapshot.active) == 1


def test_nobody_stops_a_job_that_cannot_be_stopped() -> None:
    snapshot = running([4], [9000], 1)
    snapshot.jobs.preemptible[:] = False
    snapshot.submit([Job("new", "all", 1, submit_s=10_000.0)])
    assert decide(snapshot, 10_000.0, POLICIES["headway"]) == []


def test_who_yields_is_not_started_again_by_its_own_stop() -> None:
    """No circle: what was stopped has had more, and the one it yielded to has had less."""
    snapshot = running([4], [9000], 1)
    snapshot.submit([Job("new", "all", 4, submit_s=10_000.0, preemptible=True)])
    apply_decisions(snapshot, decide(snapshot, 10_000.0, POLICIES["headway"]))
    names = [snapshot.jobs.names[int(row)] for row in snapshot.active]
    assert names == ["new"]
    snapshot.advance(10_000.0 + MIN_RUN_S)
    assert decide(snapshot, snapshot.now_s, POLICIES["headway"]) == []


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_nobody_is_stopped_for_gpus_of_a_node_that_is_drained(gpus: int) -> None:
    snapshot = running([4, 4], [9000, 9000], 2)
    snapshot.nodes.state[0] = DRAINING
    snapshot.submit([Job("new", "all", gpus, submit_s=10_000.0)])
    decisions = decide(snapshot, 10_000.0, POLICIES["headway"])
    stopped = [snapshot.jobs.names[one.job] for one in decisions if one.kind == "stop"]
    assert stopped == ([] if gpus == 8 else ["j1"])
    apply_decisions(snapshot, decisions)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))])
def test_what_a_tenant_does_not_lend_is_there_whoever_yields(seed: int) -> None:
    """Every job was started by the policy itself, some are stopped for others, and tenants lend little or nothing."""
    random, snapshot = Random(seed), ClusterSnapshot()
    snapshot.nodes.join("h100", 4, ["a", "b", "c"])
    lends = {"red": random.choice([0, 1, 2]), "blue": random.choice([0, 2, 4])}
    for name, lend in lends.items():
        snapshot.tenants.join(name, 6, borrow=random.choice([None, 2, 4]), lend=lend)
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
        stops += sum(one.kind == "stop" for one in decisions)
        apply_decisions(snapshot, decisions)
        used = dict(zip(lends, tenants.used[:2].tolist(), strict=True))
        assert 12 - sum(used.values()) >= sum(max(6 - used[name] - lends[name], 0) for name in lends)
    assert stops, "where nobody yields this proves little"


@pytest.mark.parametrize("name", ["headway", "las", "edf", "srtf"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 4))])
def test_nobody_may_stop_more_than_is_within_reach(name: str, seed: int) -> None:
    """The quick answer for all who wait, beside the exact one for each of them."""
    random, snapshot, stops, asked = Random(seed), ClusterSnapshot(), POLICIES[name].stops, 0
    assert stops is not None
    snapshot.nodes.join("h100", 4, ["a", "b", "c"])
    snapshot.tenants.join("red", 8)
    snapshot.tenants.join("blue", 4, budget_gpu_h=random.choice([None, 400]))
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
            waits, runs = (RankedJobs(some, stops.levels(snapshot, some, now)) for some in (queue, active))
            reach = stops.reach(snapshot, used, waits, runs, now)
            for at in range(len(queue)):
                one = RankedJobs(waits.rows[at : at + 1], waits.levels[at : at + 1])
                may = stops.may(snapshot, used, one, runs, now)
                assert snapshot.jobs.gpus[active[may]].sum() <= reach[at]
                asked += bool(may.any())
        apply_decisions(snapshot, decide(snapshot, now, POLICIES[name]))
    assert asked, "where nobody may stop anybody this proves little"


def lies_on(policy: str, *, preemptible: bool, count: int = 1) -> list[int]:
    """Nodes of single GPUs that wait: the first node is nearly full of what can be stopped, on the second one GPU is
    held by what cannot be, the third is empty."""
    snapshot = ClusterSnapshot()
    snapshot.nodes.join("h100", SIZE, ["n0", "n1", "n2"])
    snapshot.tenants.join("all", 3 * SIZE)
    for name, gpus, node in (("loose", 3, 0), ("firm", 1, 1)):
        (row,) = snapshot.submit([Job(name, "all", gpus, preemptible=name == "loose")])
        snapshot.start(row, 0, Placement(np.array([node], np.int32), np.array([gpus], np.int32)))
    snapshot.submit([Job(f"x{number}", "all", 1, preemptible=preemptible) for number in range(count)])
    return [int(one.place.nodes[0]) for one in decide(snapshot, 0.0, POLICIES[policy])]


def test_what_cannot_be_stopped_lies_together_so_that_other_nodes_can_be_emptied() -> None:
    assert lies_on("headway", preemptible=False, count=5) == [1, 1, 1, 0, 2], "then on the fullest again"
    assert lies_on("headway", preemptible=True) == [0], "the fullest"
    assert lies_on("fifo", preemptible=False) == [0], "who stops nobody has no use for it"
