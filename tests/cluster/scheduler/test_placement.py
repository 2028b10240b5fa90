"""Places of gangs against a truth by brute force: all ways to choose nodes under the documented rule."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.scheduler.placement import FreeGpus, Placement
from thinned import examples


def rooms(most_nodes: int = 6) -> st.SearchStrategy[tuple[int, list[int]]]:
    """A node's size, and free GPUs of each node."""
    return st.integers(1, 8).flatmap(
        lambda size: st.tuples(st.just(size), st.lists(st.integers(0, size), max_size=most_nodes))
    )


def make(size: int, free: list[int]) -> FreeGpus:
    return FreeGpus(np.array(free, np.int32), size)


def ways(size: int, free: list[int], gpus: int) -> Iterator[dict[int, int]]:
    """All places under the rule: as many whole nodes as the gang fills, and one more node for what is left over."""
    whole, rest = divmod(gpus, size)
    empty = [node for node, count in enumerate(free) if count == size]
    for chosen in combinations(empty, whole):
        filled = dict.fromkeys(chosen, size)
        if not rest:
            yield filled
        for node, count in enumerate(free):
            if rest and node not in filled and count >= rest:
                yield filled | {node: rest}


def as_dict(place: Placement) -> dict[int, int]:
    found = dict(zip(place.nodes.tolist(), place.gpus.tolist(), strict=True))
    assert len(found) == len(place.nodes), "a node is named twice"
    return found


@settings(max_examples=examples(100), deadline=None)
@given(rooms())
def test_a_gang_finds_a_place_where_there_is_one_and_only_there(case):
    size, free = case
    for gpus in range(1, sum(free) + 2):
        place = make(size, free).find(gpus)
        possible = list(ways(size, free, gpus))
        assert (place is not None) == bool(possible), (gpus, free)
        if place is not None:
            assert as_dict(place) in possible
            assert place.total == gpus


@settings(max_examples=examples(100), deadline=None)
@given(rooms())
def test_what_does_not_fill_a_node_goes_to_the_fullest_that_has_room(case):
    size, free = case
    for gpus in range(1, sum(free) + 1):
        place = make(size, free).find(gpus)
        if place is not None and gpus % size:
            found = as_dict(place)
            (last,) = [node for node, count in found.items() if count < size]
            others = [count for node, count in enumerate(free) if node not in found and count >= gpus % size]
            assert free[last] <= min(others, default=size)


@settings(max_examples=examples(100), deadline=None)
@given(rooms(), st.randoms(use_true_random=False))
def test_beside_others_it_goes_where_most_of_them_are_and_of_such_nodes_to_the_fullest(case, random):
    size, free = case
    beside = [random.randint(0, size - count) for count in free]
    for gpus in range(1, size):
        place = make(size, free).find(gpus, beside=np.array(beside, np.int32))
        able = [node for node, count in enumerate(free) if count >= gpus]
        assert (place is not None) == bool(able)
        if place is not None:
            assert as_dict(place) == {min(able, key=lambda node: (-beside[node], free[node], node)): gpus}


@settings(max_examples=examples(100), deadline=None)
@given(rooms())
def test_the_largest_gang_finds_a_place_all_smaller_ones_too_and_no_larger_one(case):
    size, free = case
    largest = make(size, free).largest()
    found = [gpus for gpus in range(1, sum(free) + size + 1) if make(size, free).find(gpus) is not None]
    assert found == list(range(1, largest + 1))


@settings(max_examples=examples(70), deadline=None)
@given(rooms(12), st.lists(st.integers(1, 24), max_size=12), st.randoms(use_true_random=False))
def test_what_is_taken_and_given_back_in_any_order_leaves_the_room_as_it_was(case, gangs, random):
    size, free = case
    room, held = make(size, free), []
    for gpus in gangs:
        place = room.find(gpus)
        if place is not None:
            room.take(place)
            held.append(place)
        assert (room.free >= 0).all()
        assert_counts(room)
    random.shuffle(held)
    for place in held:
        room.give(place)
        assert_counts(room)
    assert room.free.tolist() == free


def assert_counts(room: FreeGpus) -> None:
    """What is counted along the way is what a fresh count gives."""
    fresh = FreeGpus(room.free, room.size, room.domains)
    assert (room.total, room.whole, room.largest()) == (fresh.total, fresh.whole, fresh.largest())
    for gpus in range(1, room.size + 2):
        one, other = room.find(gpus), fresh.find(gpus)
        assert (one and as_dict(one)) == (other and as_dict(other))


# -- domains of the network


@st.composite
def nested(draw: st.DrawFn) -> tuple[int, list[int], list[list[int]]]:
    """A node's size, free GPUs of each node, and of two levels the domain of each: racks, and blocks of two racks."""
    size = draw(st.integers(1, 4))
    free = draw(st.lists(st.sampled_from([0, 1, size // 2, size, size, size]), min_size=1, max_size=7))
    racks = [draw(st.integers(0, 3)) for _ in free]
    return size, free, [racks, [rack // 2 for rack in racks]]


def span(way: dict[int, int], domains: list[list[int]]) -> int:
    """The smallest level that has all nodes of a place in one domain; the next after all levels if none has."""
    together = [len({level[node] for node in way}) == 1 for level in domains]
    return next((level for level, one in enumerate(together) if one), len(domains))


@settings(max_examples=examples(100), deadline=None)
@given(nested())
def test_a_gang_that_must_lie_in_one_domain_finds_a_place_where_there_is_one(case):
    size, free, domains = case
    for within in range(2):
        room = FreeGpus(np.array(free, np.int32), size, np.array(domains, np.int32))
        found = []
        for gpus in range(1, sum(free) + 2):
            place = room.find(gpus, within)
            possible = [way for way in ways(size, free, gpus) if span(way, domains) <= within]
            assert (place is not None) == bool(possible), (gpus, within)
            if place is not None:
                assert as_dict(place) in possible
                found.append(gpus)
        assert found == list(range(1, room.largest(within) + 1)), "all smaller ones, and none larger"


@settings(max_examples=examples(100), deadline=None)
@given(nested())
def test_a_gang_lies_as_close_as_there_is_room(case):
    size, free, domains = case
    room = FreeGpus(np.array(free, np.int32), size, np.array(domains, np.int32))
    for gpus in range(1, sum(free) + 2):
        place = room.find(gpus)
        possible = list(ways(size, free, gpus))
        assert (place is not None) == bool(possible)
        if place is not None:
            assert span(as_dict(place), domains) == min(span(way, domains) for way in possible)


def test_of_two_domains_the_one_with_least_to_spare():
    racks = np.array([[0, 0, 0, 1, 1]], np.int32)
    place = FreeGpus(np.full(5, 8, np.int32), 8, racks).find(16)
    assert place is not None
    assert place.nodes.tolist() == [3, 4]


@settings(max_examples=examples(100), deadline=None)
@given(nested(), st.data())
def test_a_copy_has_no_more_than_it_may_and_is_its_own(case, data):
    size, free, domains = case
    room = FreeGpus(np.array(free, np.int32), size, np.array(domains, np.int32))
    room.find(1)
    most = [data.draw(st.integers(0, size)) for _ in free]
    copy = room.copy(np.array(most, np.int32))
    assert copy.free.tolist() == [min(pair) for pair in zip(free, most, strict=True)]
    assert_counts(copy)
    place = copy.find(1)
    if place is not None:
        copy.take(place)
    assert room.free.tolist() == free
    assert_counts(room)


def test_the_nodes_themselves_learn_nothing():
    free = np.array([4, 2], np.int32)
    room = FreeGpus(free, 4)
    place = room.find(6)
    assert place is not None
    room.take(place)
    assert free.tolist() == [4, 2]
    assert room.free.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "free", "gpus", "want"),
    [
        ("the fullest node", [8, 3, 5, 2], 2, {3: 2}),
        ("the fullest that has room", [8, 3, 5, 2], 4, {2: 4}),
        ("the first of equals", [5, 5], 2, {0: 2}),
        ("an empty node if no other has room", [8, 3], 4, {0: 4}),
        ("a whole node", [7, 8], 8, {1: 8}),
        ("a gang of a node's size is not cut up", [7, 7], 8, None),
        ("whole nodes, the rest beside others", [8, 8, 3, 8], 18, {0: 8, 1: 8, 2: 2}),
        ("the rest in one more empty node", [8, 8, 1, 8], 18, {0: 8, 1: 8, 3: 2}),
        ("enough GPUs, and no node for the rest", [8, 8, 1, 1], 18, None),
        ("a small gang is not cut up either", [1, 1, 1], 2, None),
        ("nothing at all", [], 1, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_places(name, free, gpus, want):
    place = make(8, free).find(gpus)
    assert (as_dict(place) if place else None) == want
