"""Placement of gangs against brute force: all placements under the documented rule."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cluster.scheduler.placement import FreeGpus, Placement
from thinned import examples


def free_nodes(most_nodes: int = 6) -> st.SearchStrategy[tuple[int, list[int]]]:
    """Node size, and free GPUs per node."""
    return st.integers(1, 8).flatmap(
        lambda size: st.tuples(st.just(size), st.lists(st.integers(0, size), max_size=most_nodes))
    )


def make_free_gpus(size: int, free: list[int]) -> FreeGpus:
    return FreeGpus(np.array(free, np.int32), size)


def all_placements(size: int, free: list[int], gpus: int) -> Iterator[dict[int, int]]:
    """Yield all placements under the rule: as many whole nodes as the gang fills, and one more for the remainder."""
    whole, rest = divmod(gpus, size)
    empty = [node for node, count in enumerate(free) if count == size]
    for chosen in combinations(empty, whole):
        filled = dict.fromkeys(chosen, size)
        if not rest:
            yield filled
        for node, count in enumerate(free):
            if rest and node not in filled and count >= rest:
                yield filled | {node: rest}


def as_dict(placement: Placement) -> dict[int, int]:
    gpus = dict(zip(placement.nodes.tolist(), placement.gpus.tolist(), strict=True))
    assert len(gpus) == len(placement.nodes), "duplicate node"
    return gpus


@settings(max_examples=examples(100), deadline=None)
@given(free_nodes())
def test_gang_is_placed_exactly_if_it_fits(case):
    size, free = case
    for gpus in range(1, sum(free) + 2):
        placement = make_free_gpus(size, free).find(gpus)
        possible = list(all_placements(size, free, gpus))
        assert (placement is not None) == bool(possible), (gpus, free)
        if placement is not None:
            assert as_dict(placement) in possible
            assert placement.total == gpus


@settings(max_examples=examples(100), deadline=None)
@given(free_nodes())
def test_remainder_goes_to_the_fullest_node_that_fits(case):
    size, free = case
    for gpus in range(1, sum(free) + 1):
        placement = make_free_gpus(size, free).find(gpus)
        if placement is not None and gpus % size:
            chosen = as_dict(placement)
            (last,) = [node for node, count in chosen.items() if count < size]
            others = [count for node, count in enumerate(free) if node not in chosen and count >= gpus % size]
            assert free[last] <= min(others, default=size)


@settings(max_examples=examples(100), deadline=None)
@given(free_nodes(), st.randoms(use_true_random=False))
def test_packing_prefers_the_most_packed_then_the_fullest_node(case, random):
    size, free = case
    packed = [random.randint(0, size - count) for count in free]
    for gpus in range(1, size):
        placement = make_free_gpus(size, free).find(gpus, pack_with=np.array(packed, np.int32))
        able = [node for node, count in enumerate(free) if count >= gpus]
        assert (placement is not None) == bool(able)
        if placement is not None:
            assert as_dict(placement) == {min(able, key=lambda node: (-packed[node], free[node], node)): gpus}


@settings(max_examples=examples(100), deadline=None)
@given(free_nodes())
def test_all_gangs_up_to_the_largest_fit_and_no_larger_one(case):
    size, free = case
    largest = make_free_gpus(size, free).largest_gang()
    fitting = [gpus for gpus in range(1, sum(free) + size + 1) if make_free_gpus(size, free).find(gpus) is not None]
    assert fitting == list(range(1, largest + 1))


@settings(max_examples=examples(70), deadline=None)
@given(free_nodes(12), st.lists(st.integers(1, 24), max_size=12), st.randoms(use_true_random=False))
def test_taking_and_releasing_in_any_order_restores_the_free_gpus(case, gangs, random):
    size, free = case
    free_gpus, held = make_free_gpus(size, free), []
    for gpus in gangs:
        placement = free_gpus.find(gpus)
        if placement is not None:
            free_gpus.take(placement)
            held.append(placement)
        assert (free_gpus.free >= 0).all()
        assert_counts(free_gpus)
    random.shuffle(held)
    for placement in held:
        free_gpus.release(placement)
        assert_counts(free_gpus)
    assert free_gpus.free.tolist() == free


def assert_counts(free_gpus: FreeGpus) -> None:
    """Assert that incremental counts equal fresh ones."""
    fresh = FreeGpus(free_gpus.free, free_gpus.size, free_gpus.domains)
    assert (free_gpus.total, free_gpus.whole_nodes, free_gpus.largest_gang()) == (
        fresh.total,
        fresh.whole_nodes,
        fresh.largest_gang(),
    )
    for gpus in range(1, free_gpus.size + 2):
        actual, expected = free_gpus.find(gpus), fresh.find(gpus)
        assert (actual and as_dict(actual)) == (expected and as_dict(expected))


# -- domains of the network


@st.composite
def nested(draw: st.DrawFn) -> tuple[int, list[int], list[list[int]]]:
    """Node size, free GPUs per node, and the domains of each node on two levels: racks, and blocks of two racks."""
    size = draw(st.integers(1, 4))
    free = draw(st.lists(st.sampled_from([0, 1, size // 2, size, size, size]), min_size=1, max_size=7))
    racks = [draw(st.integers(0, 3)) for _ in free]
    return size, free, [racks, [rack // 2 for rack in racks]]


def span(placement: dict[int, int], domains: list[list[int]]) -> int:
    """Return the smallest level with all nodes of a placement in one domain; the number of levels if there is none."""
    together = [len({level[node] for node in placement}) == 1 for level in domains]
    return next((level for level, same_domain in enumerate(together) if same_domain), len(domains))


@settings(max_examples=examples(100), deadline=None)
@given(nested())
def test_gang_within_a_level_is_placed_exactly_if_it_fits(case):
    size, free, domains = case
    for within in range(2):
        free_gpus = FreeGpus(np.array(free, np.int32), size, np.array(domains, np.int32))
        fitting = []
        for gpus in range(1, sum(free) + 2):
            placement = free_gpus.find(gpus, within)
            possible = [
                candidate for candidate in all_placements(size, free, gpus) if span(candidate, domains) <= within
            ]
            assert (placement is not None) == bool(possible), (gpus, within)
            if placement is not None:
                assert as_dict(placement) in possible
                fitting.append(gpus)
        assert fitting == list(range(1, free_gpus.largest_gang(within) + 1)), "all smaller ones, and none larger"


@settings(max_examples=examples(100), deadline=None)
@given(nested())
def test_gang_is_placed_in_the_smallest_domain_that_fits(case):
    size, free, domains = case
    free_gpus = FreeGpus(np.array(free, np.int32), size, np.array(domains, np.int32))
    for gpus in range(1, sum(free) + 2):
        placement = free_gpus.find(gpus)
        possible = list(all_placements(size, free, gpus))
        assert (placement is not None) == bool(possible)
        if placement is not None:
            assert span(as_dict(placement), domains) == min(span(candidate, domains) for candidate in possible)


def test_of_two_domains_the_one_with_least_to_spare_is_used():
    racks = np.array([[0, 0, 0, 1, 1]], np.int32)
    placement = FreeGpus(np.full(5, 8, np.int32), 8, racks).find(16)
    assert placement is not None
    assert placement.nodes.tolist() == [3, 4]


@settings(max_examples=examples(100), deadline=None)
@given(nested(), st.data())
def test_copy_respects_its_limit_and_is_independent(case, data):
    size, free, domains = case
    free_gpus = FreeGpus(np.array(free, np.int32), size, np.array(domains, np.int32))
    free_gpus.find(1)
    most = [data.draw(st.integers(0, size)) for _ in free]
    copy = free_gpus.copy(np.array(most, np.int32))
    assert copy.free.tolist() == [min(pair) for pair in zip(free, most, strict=True)]
    assert_counts(copy)
    placement = copy.find(1)
    if placement is not None:
        copy.take(placement)
    assert free_gpus.free.tolist() == free
    assert_counts(free_gpus)


def test_trying_placements_does_not_change_the_nodes():
    free = np.array([4, 2], np.int32)
    free_gpus = FreeGpus(free, 4)
    placement = free_gpus.find(6)
    assert placement is not None
    free_gpus.take(placement)
    assert free.tolist() == [4, 2]
    assert free_gpus.free.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "free", "gpus", "want"),
    [
        ("the fullest node", [8, 3, 5, 2], 2, {3: 2}),
        ("the fullest that fits", [8, 3, 5, 2], 4, {2: 4}),
        ("the first of equals", [5, 5], 2, {0: 2}),
        ("an empty node if no other fits", [8, 3], 4, {0: 4}),
        ("a whole node", [7, 8], 8, {1: 8}),
        ("a gang of a node's size is not split", [7, 7], 8, None),
        ("whole nodes, the remainder on a partly used one", [8, 8, 3, 8], 18, {0: 8, 1: 8, 2: 2}),
        ("the remainder on one more empty node", [8, 8, 1, 8], 18, {0: 8, 1: 8, 3: 2}),
        ("enough GPUs, but no node for the remainder", [8, 8, 1, 1], 18, None),
        ("a small gang is not split either", [1, 1, 1], 2, None),
        ("no nodes", [], 1, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_placement_examples(name, free, gpus, want):
    placement = make_free_gpus(8, free).find(gpus)
    assert (as_dict(placement) if placement else None) == want
