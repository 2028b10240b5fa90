"""Schedules against the longest path through their operations, and against published bubbles."""

from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import UsageError
from headway.plan.pipeline import SCHEDULES, StageTime, check_schedule, simulate
from thinned import examples

ONE_CHUNK = ("gpipe", "1f1b", "zero-bubble")
Operation = tuple[str, int, int]  # kind, microbatch, virtual stage


def operations(schedule: str, rank: int, ranks: int, chunks: int, microbatches: int) -> list[Operation]:
    """The operations of a rank in order, as in the schedule's paper."""
    groups = [range(first, min(first + ranks, microbatches)) for first in range(0, microbatches, ranks)]
    own = range(rank, ranks * chunks, ranks)
    forwards = [("F", m, stage) for group in groups for stage in own for m in group]
    backwards = [("B", m, stage) for group in groups for stage in reversed(own) for m in group]
    warm_up = {
        "gpipe": microbatches,
        "1f1b": ranks - rank - 1,
        "zero-bubble": ranks - rank - 1,
        "interleaved": (ranks - rank - 1) * 2 + (chunks - 1) * ranks,
    }[schedule]
    ahead, rest = forwards[:warm_up], forwards[warm_up:]
    done = list(ahead)
    waiting: list[Operation] = []
    for turn, backward in enumerate(backwards):
        done += [*rest[turn : turn + 1], backward]
        if schedule == "zero-bubble":
            waiting.append(("W", *backward[1:]))
            if len(waiting) > rank:
                done.append(waiting.pop(0))
    return done + waiting


def duration(operation: Operation, stages: list[StageTime], schedule: str) -> float:
    kind, _, index = operation
    stage = stages[index]
    if kind == "F":
        return stage.forward
    if kind == "W":
        return stage.weight_grad
    return stage.input_grad + (0 if schedule == "zero-bubble" else stage.weight_grad)


def longest_path(schedule: str, stages: list[StageTime], ranks: int, microbatches: int, transfer_s: float) -> float:
    """The end of the last operation: the longest path through the graph of operations."""
    delays: dict[Operation, dict[Operation, float]] = {}
    for rank in range(ranks):
        order = operations(schedule, rank, ranks, len(stages) // ranks, microbatches)
        delays |= {operation: {} for operation in order}
        for before, after in pairwise(order):
            delays[after][before] = 0.0
    for (kind, m, stage), needs in delays.items():
        if kind == "B":
            needs.setdefault(("F", m, stage), 0.0)
        if kind == "W":
            needs.setdefault(("B", m, stage), 0.0)
        neighbour = (kind, m, stage - 1 if kind == "F" else stage + 1)
        if kind != "W" and neighbour in delays:
            needs[neighbour] = transfer_s if ranks > 1 else 0.0
    ends: dict[Operation, float] = {}
    for operation in TopologicalSorter(delays).static_order():
        start = max((ends[before] + delay for before, delay in delays[operation].items()), default=0.0)
        ends[operation] = start + duration(operation, stages, schedule)
    return max(ends.values())


def most_held(schedule: str, order: list[Operation]) -> int:
    """The most forwards whose last backward is outstanding."""
    held = most = 0
    for kind, _, _ in order:
        held += 1 if kind == "F" else -1 if kind == ("W" if schedule == "zero-bubble" else "B") else 0
        most = max(most, held)
    assert held == 0
    return most


def random_stages(random: Random, count: int) -> list[StageTime]:
    """Stages of a kind that hits an edge case: any, nearly even, heavy ends, ties and zeros."""
    kind = random.choice(["any", "near", "ends", "whole", "even"])
    base = [random.uniform(0.5, 1.5) for _ in range(3)]
    if kind == "any":
        return [StageTime(random.random(), random.random(), random.random()) for _ in range(count)]
    if kind == "near":
        return [StageTime(*(time * random.uniform(1, 1.01) for time in base)) for _ in range(count)]
    if kind == "ends":
        return [StageTime(*(time * (1.3 if index in (0, count - 1) else 1) for time in base)) for index in range(count)]
    if kind == "whole":
        return [StageTime(random.randint(0, 3), random.randint(0, 3), random.randint(0, 3)) for _ in range(count)]
    return [StageTime(*base)] * count


def random_case(seed: int, most_microbatches: int) -> tuple[str, list[StageTime], int, int, float]:
    random = Random(seed)
    schedule, ranks = random.choice(SCHEDULES), random.randint(1, 7)
    chunks = random.randint(2, 4) if schedule == "interleaved" else 1
    microbatches = random.randint(1, most_microbatches // chunks)
    if schedule == "interleaved":
        microbatches += -microbatches % ranks
    transfer_s = random.choice([0.0, 0.01, 1.0, random.random()])
    return schedule, random_stages(random, ranks * chunks), ranks, microbatches, transfer_s


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[StageTime], int, int, float]:
    return random_case(draw(st.integers(0, 2**32)), draw(st.sampled_from([4, 12, 40])))


@settings(max_examples=examples(300), deadline=None)
@given(case=cases())
def test_short_steps_take_the_longest_path(case: tuple[str, list[StageTime], int, int, float]) -> None:
    assert simulate(*case).seconds == pytest.approx(longest_path(*case), rel=1e-9)


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 200), marks=pytest.mark.slow)], ids=str)
def test_skipping_cycles_of_a_long_step_changes_nothing(seeds: range) -> None:
    for seed in seeds:
        case = random_case(seed, most_microbatches=500)
        assert simulate(*case).seconds == pytest.approx(longest_path(*case), rel=1e-9), seed


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_even_stages_take_the_longest_path(schedule: str, ranks: int) -> None:
    chunks = 3 if schedule == "interleaved" else 1
    for times in [(1, 1, 1), (1, 2, 0.5), (2, 0.3, 1.1), (0.3, 2, 1.1), (1, 1.5, 7), (0, 1, 1), (1, 0, 0)]:
        for microbatches in [ranks, 2 * ranks, 4 * ranks] + ([1, 2, 4, 11] if chunks == 1 else []):
            case = (schedule, [StageTime(*times)] * ranks * chunks, ranks, microbatches, 0.0)
            assert simulate(*case).seconds == pytest.approx(longest_path(*case), rel=1e-9)


def test_busy_and_in_flight_match_the_operation_lists() -> None:
    for seed in range(100):
        schedule, stages, ranks, microbatches, transfer_s = random_case(seed, most_microbatches=24)
        timeline = simulate(schedule, stages, ranks, microbatches, transfer_s)
        for rank in range(ranks):
            order = operations(schedule, rank, ranks, len(stages) // ranks, microbatches)
            work = sum(duration(operation, stages, schedule) for operation in order)
            assert timeline.busy[rank] == pytest.approx(work), (seed, rank)
            assert timeline.in_flight[rank] == most_held(schedule, order), (seed, rank)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 5), (4, 8), (8, 8), (8, 3), (16, 384)])
def test_published_bubbles_of_even_stages(ranks: int, microbatches: int) -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473): (p - 1) / m of the ideal time, divided by v when interleaved."""
    stage = StageTime(1.0, 1.3, 0.7)
    for schedule in ("gpipe", "1f1b"):
        shares = simulate(schedule, [stage] * ranks, ranks, microbatches).idle_shares
        assert shares == pytest.approx([(ranks - 1) / (microbatches + ranks - 1)] * ranks)
    if microbatches % ranks == 0:
        for chunks in (2, 4):
            shares = simulate("interleaved", [stage] * ranks * chunks, ranks, microbatches).idle_shares
            assert shares == pytest.approx([(ranks - 1) / (chunks * microbatches + ranks - 1)] * ranks)


def test_published_bubble_of_zero_bubble() -> None:
    """Qi et al. 2023 (arXiv:2401.10241): (p - 1)(F + B - W), a third of 1f1b's when the three are equal."""
    for stage in (StageTime(1, 1, 1), StageTime(1.0, 1.2, 0.8)):
        timeline = simulate("zero-bubble", [stage] * 8, 8, 24)
        assert timeline.seconds - timeline.busy[0] == pytest.approx(
            7 * (stage.forward + stage.input_grad - stage.weight_grad)
        )
    thirds = [simulate(schedule, [StageTime(1, 1, 1)] * 8, 8, 24).seconds - 72 for schedule in ("zero-bubble", "1f1b")]
    assert thirds == pytest.approx([7, 21])


def test_published_memory() -> None:
    assert simulate("gpipe", [StageTime(1, 1, 1)] * 4, 4, 9).in_flight == (9, 9, 9, 9)
    assert simulate("1f1b", [StageTime(1, 1, 1)] * 4, 4, 9).in_flight == (4, 3, 2, 1)
    assert simulate("1f1b", [StageTime(1, 1, 1)] * 4, 4, 2).in_flight == (2, 2, 2, 1)
    assert simulate("zero-bubble", [StageTime(1, 1, 1)] * 4, 4, 9).in_flight == (4, 4, 4, 4)
    # Two ranks of two chunks warm up with 2 * 1 + 2 and 2 forwards, and do one more before the first backward.
    assert simulate("interleaved", [StageTime(1, 1, 1)] * 4, 2, 6).in_flight == (5, 3)


def test_two_uneven_ranks_by_hand() -> None:
    """Rank 0: F0 ends at 1, F1 at 2, B0 at 13, B1 at 22. Rank 1: F0 at 3.5, B0 at 10.5, F1 at 12.5, B1 at 19.5."""
    stages = [StageTime(1, 1, 1), StageTime(2, 3, 4)]
    timeline = simulate("1f1b", stages, 2, 2, transfer_s=0.5)
    assert timeline.seconds == 22
    assert timeline.busy == (6, 18)
    # Rank 1 keeps both weight gradients for last: F0 and B0 end at 6.5, F1 and B1 at 11.5, W0 and W1 at 19.5.
    assert simulate("zero-bubble", stages, 2, 2, transfer_s=0.5).seconds == 19.5


@pytest.mark.parametrize("microbatches", [4, 100, 700, 900, 3000, 10**6])
def test_slowest_rank_may_emerge_late(microbatches: int) -> None:
    """Rank 0 is the slowest by a thousandth; rank 2, with the longer path in and out, decides the first 800."""
    stages = [StageTime(0.5005, 0.2505, 0.25), StageTime(0.1, 0.05, 0.05), StageTime(0.5, 0.25, 0.25)]
    by_rank_2 = 1.001 + 0.2 + microbatches * 1.0
    # Rank 0 waits for the first microbatch to return less two forwards, and as long at the end.
    by_rank_0 = microbatches * 1.001 + 2 * (0.2 + 1.0 - 2 * 0.5005)
    seconds = simulate("1f1b", stages, 3, microbatches).seconds
    assert seconds == pytest.approx(max(by_rank_0, by_rank_2), rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_slowest_rank_determines_long_steps(schedule: str) -> None:
    random = Random(7)
    ranks, chunks = 6, 3 if schedule == "interleaved" else 1
    stages = [StageTime(random.random(), random.random(), random.random()) for _ in range(ranks)] * chunks
    slowest = max(chunks * (stage.forward + stage.input_grad + stage.weight_grad) for stage in stages)
    long, longer = (simulate(schedule, stages, ranks, count).seconds for count in (600_000, 1_200_000))
    assert (longer - long) / 600_000 == pytest.approx(slowest, rel=1e-9)


def test_zero_bubble_may_lose_to_1f1b_on_uneven_stages() -> None:
    """Rank 1 waits for rank 0's forwards, and 1f1b fills the wait; zero-bubble is always one microbatch behind."""
    stages = [StageTime(10, 0, 0), StageTime(0, 0, 10)]
    assert simulate("1f1b", stages, 2, 8).seconds == 8 * 10 + 10
    assert simulate("zero-bubble", stages, 2, 8).seconds == 8 * 10 + 2 * 10


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_transfers_cost_a_round_trip_per_rank(ranks: int) -> None:
    """1f1b has `ranks` microbatches in flight: that many need one round trip, transfers included."""
    stages = [StageTime(1, 0.8, 1.1)] * ranks
    few, more = (simulate("1f1b", stages, ranks, turns * ranks, transfer_s=0.3).seconds for turns in (5, 105))
    assert (more - few) / 100 == pytest.approx(ranks * 2.9 + 2 * (ranks - 1) * 0.3)


@settings(max_examples=examples(200), deadline=None)
@given(case=cases())
def test_no_schedule_beats_its_bounds(case: tuple[str, list[StageTime], int, int, float]) -> None:
    _, stages, ranks, microbatches, transfer_s = case
    timeline = simulate(*case)
    forwards, gradients = sum(s.forward for s in stages), sum(s.input_grad for s in stages)
    trip = forwards + gradients + (2 * (len(stages) - 1) * transfer_s if ranks > 1 else 0)
    slack = 1 + 1e-9
    assert max(timeline.busy) <= timeline.seconds * slack
    assert trip <= timeline.seconds * slack
    if len(stages) == ranks:
        # The slowest rank waits for its first input, and its work on every microbatch follows.
        for rank, stage in enumerate(stages):
            entry = sum(s.forward for s in stages[:rank]) + (rank * transfer_s if ranks > 1 else 0)
            work = microbatches * (stage.forward + stage.input_grad + stage.weight_grad)
            assert entry + work <= timeline.seconds * slack
    assert all(-1e-9 <= share < 1 + 1e-9 for share in timeline.idle_shares)


@settings(max_examples=examples(200), deadline=None)
@given(case=cases(), index=st.integers(0, 100), more=st.floats(0.001, 2))
def test_more_work_or_slower_transfers_never_shorten_a_step(
    case: tuple[str, list[StageTime], int, int, float], index: int, more: float
) -> None:
    schedule, stages, ranks, microbatches, transfer_s = case
    seconds = simulate(*case).seconds
    at = index % len(stages)
    slack = 1 - 1e-9
    assert simulate(schedule, stages, ranks, microbatches, transfer_s + more).seconds >= seconds * slack
    for field in ("forward", "input_grad", "weight_grad"):
        slower = replace(stages[at], **{field: getattr(stages[at], field) + more})
        changed = [*stages[:at], slower, *stages[at + 1 :]]
        assert simulate(schedule, changed, ranks, microbatches, transfer_s).seconds >= seconds * slack


@settings(max_examples=examples(200), deadline=None)
@given(
    times=st.tuples(*[st.floats(0, 3)] * 3),
    ranks=st.integers(1, 8),
    microbatches=st.integers(1, 40),
    transfer_s=st.sampled_from([0.0, 0.05, 2.0]),
)
def test_zero_bubble_is_no_slower_than_1f1b_on_even_stages(
    times: tuple[float, float, float], ranks: int, microbatches: int, transfer_s: float
) -> None:
    stages = [StageTime(*times)] * ranks
    plain = simulate("1f1b", stages, ranks, microbatches, transfer_s)
    split = simulate("zero-bubble", stages, ranks, microbatches, transfer_s)
    assert split.seconds <= plain.seconds * (1 + 1e-9)
    assert split.busy == plain.busy
    assert max(split.in_flight) == max(plain.in_flight)


def test_transfers_on_one_rank_take_nothing() -> None:
    for schedule in ONE_CHUNK:
        assert simulate(schedule, [StageTime(1, 2, 3)], 1, 5, transfer_s=9.0).seconds == 30
    assert simulate("interleaved", [StageTime(1, 2, 3), StageTime(1, 1, 2)], 1, 5, transfer_s=9.0).seconds == 50


def test_stages_without_work_take_no_time() -> None:
    timeline = simulate("1f1b", [StageTime(0, 0, 0)] * 3, 3, 50)
    assert timeline.seconds == 0
    assert timeline.idle_shares == (0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("2f2b", 4, 1, 8, 32), "2f2b", "1f1b"),
        (("1f1b", 0, 1, 8, 32), "0 ranks", "1 or more"),
        (("gpipe", 4, 1, 0, 32), "0 microbatches", "1 or more"),
        (("1f1b", 4, 2, 8, 32), "one chunk", "interleaved"),
        (("zero-bubble", 4, 2, 8, 32), "one chunk", "chunks = 1"),
        (("interleaved", 4, 1, 8, 32), "at least two chunks", "1f1b"),
        (("interleaved", 4, 2, 10, 32), "multiple of 4", "use 8 or 12 microbatches"),
        (("interleaved", 4, 2, 3, 32), "multiple of 4", "use 4 microbatches"),
        (("interleaved", 4, 4, 8, 15), "15 layers cannot fill 16", "at most 15"),
        (("1f1b", 8, 1, 8, 7), "7 layers cannot fill 8", "at most 7"),
    ],
)
def test_invalid_schedules_are_rejected(arguments: tuple[str, int, int, int, int], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        check_schedule(*arguments)
    assert hint in (caught.value.hint or "")


def test_valid_schedules_are_accepted() -> None:
    for schedule in ONE_CHUNK:
        check_schedule(schedule, ranks=4, chunks=1, microbatches=3, layers=4)
    check_schedule("interleaved", ranks=4, chunks=2, microbatches=8, layers=9)


def test_invalid_steps_are_not_simulated() -> None:
    with pytest.raises(UsageError, match="multiple of 2"):
        simulate("interleaved", [StageTime(1, 1, 1)] * 4, 2, 3)
    with pytest.raises(AssertionError):
        StageTime(1, -1, 1)
