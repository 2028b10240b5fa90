"""Of the jobs that may be stopped those yield that lose least, and then there is room."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.decide import MIN_RUN_S, decide
from headway.cluster.jobs import Job
from headway.cluster.nodes import DRAINING
from headway.cluster.policies import POLICIES
from headway.cluster.record import carry_out
from headway.cluster.snapshot import Snapshot
from headway.cluster.yielding import Yielding

SIZE = 4


def running(sizes: list[int], ages: list[int], nodes: int) -> Snapshot:
    """Jobs that were started one after the other, each as soon as there was room, and have run for a while."""
    snapshot = Snapshot()
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


@settings(max_examples=300, deadline=None)
@given(cases)
def test_room_is_made_where_it_can_be_and_for_single_nodes_at_the_least_loss(case) -> None:
    nodes, jobs, gpus = case
    snapshot = running([size for size, _ in jobs], [age for _, age in jobs], nodes)
    pool, active = snapshot.nodes.pools[0], snapshot.active
    room = snapshot.nodes.room(pool)
    if room.find(gpus) is not None or not len(active):
        return
    yielding = Yielding(snapshot, active, snapshot.now_s)
    chosen = yielding.cheapest(room, 0, gpus, np.ones(len(active), np.bool_))

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
    yielding = Yielding(snapshot, snapshot.active, snapshot.now_s)
    assert yielding.lost_gpu_s.tolist() == [2 * (100 + 60), 2 * (0 + 60)]
    chosen = yielding.cheapest(snapshot.nodes.room(snapshot.nodes.pools[0]), 0, 2, np.ones(2, np.bool_))
    assert chosen is not None
    assert chosen.tolist() == [1]


@pytest.mark.parametrize(("age", "stops"), [(MIN_RUN_S - 1, 0), (MIN_RUN_S, 1), (2000.0, 1)])
def test_a_new_job_stops_one_that_has_had_more_and_has_run_for_a_while(age: float, stops: int) -> None:
    """Four GPUs with their next half hour are at the end of the first level, two GPU-hours, from the start."""
    snapshot = running([4], [int(age)], 1)
    snapshot.submit([Job("new", "all", 1, submit_s=10_000.0)])
    decisions = decide(snapshot, 10_000.0, POLICIES["headway"])
    assert [one.kind for one in decisions] == ["stop", "start"] * stops
    carry_out(snapshot, decisions)
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
    carry_out(snapshot, decide(snapshot, 10_000.0, POLICIES["headway"]))
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
    carry_out(snapshot, decisions)
