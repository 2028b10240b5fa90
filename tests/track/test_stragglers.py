"""Who keeps the others waiting: hand-made moments, and small simulations of how meshes wait."""

import random

import pytest

from headway.track.heartbeat import Arrival, HeartbeatPages, HeartbeatWriter
from headway.track.stragglers import Straggler, straggler

MS = 1_000_000
STEP = 100 * MS
UPTIME = 86_400 * 10**9


def make_arrivals(late: dict[int, list[int]], forward: dict[int, list[int]] | None = None) -> dict[int, list[Arrival]]:
    """Steps of 100 ms; each rank's data is so many ms late, and its forward pass takes so many."""
    arrivals = {}
    for rank, own in late.items():
        takes = forward[rank] if forward else [30] * len(own)
        arrivals[rank] = [
            Arrival(step, UPTIME + step * STEP + behind * MS, UPTIME + step * STEP + (behind + length) * MS)
            for step, (behind, length) in enumerate(zip(own, takes, strict=True), 1)
        ]
    return arrivals


def test_worker_with_late_data_is_the_straggler() -> None:
    result = straggler(make_arrivals({0: [0] * 20, 1: [10] * 20, 2: [1] * 20}))
    # 10 ms after the first and 9 after the last of the two others: 9.5 after their median, of steps of 100 ms
    assert result == Straggler(1, pytest.approx(0.095), "data", 20)


@pytest.mark.parametrize(("late", "expected"), [(4, False), (5, False), (6, True)])
def test_straggler_must_be_late_by_a_twentieth_of_a_step(late: int, expected: bool) -> None:
    assert (straggler(make_arrivals({0: [0] * 20, 1: [late] * 20})) is not None) == expected


@pytest.mark.parametrize(("times", "expected"), [(15, False), (16, True), (20, True)])
def test_straggler_must_be_last_in_four_of_five_steps(times: int, expected: bool) -> None:
    late = [30] * times + [0] * (20 - times)
    result = straggler(make_arrivals({0: [1] * 20, 1: late}))
    assert (result is not None) == expected
    if result is not None:
        assert (result.rank, result.steps, result.share) == (1, times, pytest.approx(0.29))


def test_only_the_last_rank_counts() -> None:
    """Two that take turns at being last are each late in every step, and nobody is the straggler."""
    turns = [30 if step % 2 else 20 for step in range(20)]
    assert straggler(make_arrivals({0: [0] * 20, 1: [0] * 20, 2: turns, 3: [50 - late for late in turns]})) is None


def test_enough_steps_must_be_common_to_all_ranks() -> None:
    arrivals = make_arrivals({0: [0] * 25, 1: [10] * 25})
    assert straggler({rank: own[:19] for rank, own in arrivals.items()}) is None
    assert straggler({0: arrivals[0][:22], 1: arrivals[1][3:]}) is None  # 19 common ones
    assert straggler({0: arrivals[0][:23], 1: arrivals[1][3:]}) is not None
    assert straggler({0: arrivals[0][:22], 1: arrivals[1][3:]}, steps=19) is not None
    pending = [*arrivals[1][:19], Arrival(20, 0, 0)]
    assert straggler({0: arrivals[0][:20], 1: pending}) is None
    assert straggler({0: arrivals[0]}) is None
    assert straggler({}) is None
    assert straggler({0: [], 1: []}) is None


def test_only_recent_steps_count() -> None:
    mended = make_arrivals({0: [0] * 60, 1: [30] * 40 + [0] * 20})
    assert straggler(mended) is None
    fresh = make_arrivals({0: [0] * 60, 1: [0] * 40 + [30] * 20})
    assert straggler(fresh) == Straggler(1, pytest.approx(0.3, abs=0.01), "data", 20)


def test_step_time_is_from_data_to_data() -> None:
    """Two of three steps are missing, but for the first: gaps of three steps tell nothing of how long one takes."""
    whole = make_arrivals({0: [0] * 60, 1: [8] * 60})
    holes = {
        rank: [arrival for arrival in own if arrival.step % 3 == 0 or arrival.step < 3] for rank, own in whole.items()
    }
    assert straggler(holes) == Straggler(1, pytest.approx(0.08), "data", 20)


def test_replica_with_long_forward_pass_is_the_straggler() -> None:
    arrivals = make_arrivals({0: [0] * 20, 1: [0] * 20}, {0: [30] * 20, 1: [50] * 20})
    assert straggler(arrivals) == Straggler(1, pytest.approx(0.2), "forward", 20)


def test_costlier_of_two_delays_is_reported() -> None:
    # 1 has its data 15 ms later; 0 takes 25 ms longer then, and is done 10 ms later
    arrivals = make_arrivals({0: [0] * 20, 1: [15] * 20}, {0: [55] * 20, 1: [30] * 20})
    assert straggler(arrivals) == Straggler(1, pytest.approx(0.15), "data", 20)
    # 0 takes 50 ms longer, and is done 40 ms later
    arrivals = make_arrivals({0: [0] * 20, 1: [10] * 20}, {0: [80] * 20, 1: [30] * 20})
    assert straggler(arrivals) == Straggler(0, pytest.approx(0.4), "forward", 20)


def test_data_delays_are_found_without_forward_marks() -> None:
    arrivals = make_arrivals({0: [0] * 20, 1: [10] * 20})
    bare = {rank: [Arrival(arrival.step, arrival.data_ns, 0) for arrival in own] for rank, own in arrivals.items()}
    result = straggler(bare)
    assert result is not None
    assert result.what == "data"
    alike = make_arrivals({0: [0] * 20, 1: [0] * 20})
    assert straggler({0: alike[0], 1: [Arrival(arrival.step, arrival.data_ns, 0) for arrival in alike[1]]}) is None


# -- simulations


def simulate(
    ranks: int,
    data: dict[int, float] | None = None,
    block: dict[int, float] | None = None,
    *,
    mesh: str = "copies",
    noise: float = 0.2,
    seed: int = 0,
    blocks: int = 8,
    steps: int = 64,
) -> dict[int, list[Arrival]]:
    """Milliseconds: data 2, a block forward 4 and backward 8; `data` and `block` say who takes how much longer.

    Copies wait for each other at the end of a step; shards before each block as well; stages for the one before them.
    """
    chance = random.Random(seed)
    arrivals: dict[int, list[Arrival]] = {rank: [] for rank in range(ranks)}
    begin = 1000.0
    for step in range(1, steps + 1):
        ready = [begin + 2 + (data or {}).get(rank, 0) + abs(chance.gauss(0, noise)) for rank in range(ranks)]
        at = list(ready)
        if mesh == "stages":
            for rank in range(1, ranks):
                at[rank] = max(at[rank], at[rank - 1] + 4 * blocks)
        for _ in range(blocks):
            if mesh == "shards":
                at = [max(at)] * ranks
            at = [t + 4 + (block or {}).get(rank, 0) + abs(chance.gauss(0, noise)) for rank, t in enumerate(at)]
        for rank in range(ranks):
            moments = (round(t * MS) for t in (ready[rank], at[rank]))
            arrivals[rank].append(Arrival(step, *moments))
        begin = max(at) + 8 * blocks
    return arrivals


@pytest.mark.parametrize("mesh", ["copies", "shards"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_straggler_among_equal_ranks(mesh: str, ranks: int) -> None:
    for seed in range(10):
        assert straggler(simulate(ranks, mesh=mesh, seed=seed, noise=2.0)) is None


@pytest.mark.parametrize("mesh", ["copies", "shards"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_late_data_is_not_blamed_on_waiting_ranks(mesh: str, ranks: int) -> None:
    """On shards the others' forward passes are as much longer as they waited."""
    for slow in range(ranks):
        result = straggler(simulate(ranks, {slow: 30}, mesh=mesh, seed=slow))
        # a step of 2 + 30 + 12 * 8 ms
        assert result is not None
        assert (result.rank, result.what, result.share) == (slow, "data", pytest.approx(30 / 128, abs=0.02))


def test_slow_blocks_show_fully_on_replicas_and_by_one_block_on_shards() -> None:
    copies = straggler(simulate(4, block={2: 6}))
    assert copies is not None
    assert (copies.rank, copies.what, copies.share) == (2, "forward", pytest.approx(48 / 146, abs=0.02))
    shards = straggler(simulate(4, block={2: 12}, mesh="shards"))
    assert shards is not None
    assert (shards.rank, shards.what, shards.share) == (2, "forward", pytest.approx(12 / 194, abs=0.01))
    assert straggler(simulate(4, block={2: 6}, mesh="shards")) is None  # 6 of 146 ms


def test_pipeline_stages_are_not_compared_with_each_other() -> None:
    pipeline = simulate(2, mesh="stages")
    wrongly = straggler(pipeline)
    assert wrongly is not None
    assert wrongly.what == "forward"
    assert straggler(pipeline, stages=2) is None
    late = straggler(simulate(2, {1: 30}, mesh="stages"), stages=2)
    assert late is not None
    assert (late.rank, late.what) == (1, "data")


def test_ranks_of_one_stage_are_compared() -> None:
    """Ranks 0 and 1 are the first stage, 2 and 3 the second; 3 is slower than 2."""
    first, second = simulate(2), simulate(2, block={1: 6})
    later = [
        [Arrival(arrival.step, arrival.data_ns, arrival.forward_ns + 40 * MS) for arrival in second[rank]]
        for rank in (0, 1)
    ]
    result = straggler({0: first[0], 1: first[1], 2: later[0], 3: later[1]}, stages=2)
    assert result is not None
    assert (result.rank, result.what) == (3, "forward")


def test_straggler_from_written_heartbeats() -> None:
    pulses = HeartbeatPages(2)
    beats = [HeartbeatWriter(pulses.page(rank)) for rank in range(2)]
    for step in range(1, 26):
        for beat in beats:
            beat.step(step)
            beat.ready()
            beat.forward()
    arrivals = {rank: pulses.arrivals(rank) for rank in range(2)}
    pulses.close()
    slow = [Arrival(arrival.step, arrival.data_ns + 10**9, arrival.forward_ns + 10**9) for arrival in arrivals[1]]
    result = straggler({0: arrivals[0], 1: slow})
    assert result is not None
    assert (result.rank, result.what) == (1, "data")
