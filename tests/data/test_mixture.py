import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data import split_windows, window_order
from headway.data.mixture import (
    MAX_SLOTS,
    DataMixture,
    MixturePhase,
    mixed_order_at,
    samples_before,
    shares_of,
    shuffled_rows,
)
from headway.data.order import after_skips
from headway.data.steps import first_sample
from headway.errors import DataError
from thinned import examples


def mixture_of(phases, windows=None, holdout=0.1):
    """Phases are (first sample, weights); datasets have different numbers of windows."""
    count = len(phases[0][1])
    sizes = windows or [13 + 29 * i for i in range(count)]
    splits = tuple(split_windows(size, holdout, f"version {i}") for i, size in enumerate(sizes))
    return DataMixture(splits, tuple(MixturePhase(first, shares_of(weights)) for first, weights in phases), "key")


def whose(mixture, ids):
    """The dataset of each window id, by looking through all of them."""
    ranges = [
        range(start, start + split.windows) for start, split in zip(mixture.first_windows, mixture.splits, strict=True)
    ]
    return [next(i for i, own in enumerate(ranges) if window in own) for window in ids]


weights = st.lists(
    st.one_of(st.integers(0, 9), st.decimals(0, 1, places=2).map(float), st.sampled_from([1 / 3, 0.1234567, 1e-3])),
    min_size=1,
    max_size=6,
).filter(any)


@settings(deadline=None, max_examples=examples(8))
@given(weights)
def test_after_every_number_of_samples_each_data_set_has_had_its_share_rounded_down_or_up(weights):
    mixture = mixture_of([(0, weights)])
    total = 3000
    sequence = np.array(whose(mixture, mixed_order_at(mixture, 0, 0, np.arange(total))))
    for index, share in enumerate(shares_of(weights)):
        had = np.concatenate([[0], np.cumsum(sequence == index)])
        # floor(m * share) <= had <= ceil(m * share), in whole numbers
        scaled = np.arange(total + 1) * share.numerator
        assert (had >= scaled // share.denominator).all()
        assert (had <= -(-scaled // share.denominator)).all()


@pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.3], [0.75, 0.25], [5, 3, 1], [1, 0, 2], [0.98, 0.01, 0.01]])
def test_over_long_prefixes_too(weights):
    mixture = mixture_of([(0, weights)])
    for number in (10**6, 10**6 + 1, 123_456_789, 10**15 + 7):
        for had, share in zip(samples_before(mixture, number), shares_of(weights), strict=True):
            assert math.floor(number * share) <= had <= math.ceil(number * share)


PHASED = [(0, [2, 1, 1]), (700, [0, 1, 3]), (701, [1, 1, 1]), (1500, [0.6, 0.399, 0.001])]


@pytest.mark.parametrize("phases", [[(0, [0.7, 0.3])], [(0, [1])], PHASED])
def test_each_dataset_is_traversed_in_its_own_order_without_gaps_or_repeats(phases):
    mixture = mixture_of(phases)
    ids = mixed_order_at(mixture, 5, 0, np.arange(4000))
    owners = np.array(whose(mixture, ids))
    for index, (split, start) in enumerate(zip(mixture.splits, mixture.first_windows, strict=True)):
        mine = ids[owners == index] - start
        assert mine.tolist() == window_order(split, 5, 0, len(mine)).tolist()
        for epoch in range(len(mine) // split.training):
            seen = mine[epoch * split.training : (epoch + 1) * split.training]
            assert len(set(seen.tolist())) == split.training


def test_every_phase_keeps_its_own_shares_from_its_first_sample_on():
    mixture = mixture_of(PHASED)
    owners = np.array(whose(mixture, mixed_order_at(mixture, 0, 0, np.arange(4000))))
    for (first, weights), (end, _) in zip(PHASED, [*PHASED[1:], (4000, None)], strict=True):
        for index, share in enumerate(shares_of(weights)):
            had = np.cumsum(owners[first:end] == index)
            exact = [(m + 1) * share for m in range(end - first)]
            assert all(math.floor(x) <= h <= math.ceil(x) for h, x in zip(had.tolist(), exact, strict=True))


@settings(deadline=None, max_examples=examples(20))
@given(first=st.integers(0, 5000), offsets=st.lists(st.integers(0, 3000), min_size=1, max_size=20))
def test_any_sample_is_found_without_those_before(first, offsets):
    mixture = mixture_of(PHASED)
    whole = mixed_order_at(mixture, 3, 0, np.arange(8001))
    assert mixed_order_at(mixture, 3, first, np.array(offsets)).tolist() == whole[first + np.array(offsets)].tolist()
    assert samples_before(mixture, first) == np.bincount(whose(mixture, whole[:first]), minlength=3).tolist()


def test_far_samples_have_the_numbers_that_their_counts_say():
    mixture = mixture_of(PHASED)
    for first in (10**9 + 3, 10**15 + 1, 2**61):
        before = samples_before(mixture, first)
        ids = mixed_order_at(mixture, 1, first, np.arange(500))
        owners = np.array(whose(mixture, ids))
        for index, (split, start) in enumerate(zip(mixture.splits, mixture.first_windows, strict=True)):
            mine = ids[owners == index] - start
            assert mine.tolist() == window_order(split, 1, before[index], len(mine)).tolist()


@pytest.mark.parametrize(("weights", "batch"), [([1, 1], 2), ([3, 1], 4), ([1, 1, 1, 1], 8), ([63, 1], 64)])
def test_no_row_always_sees_the_same_dataset(weights, batch):
    mixture = mixture_of([(0, weights)])
    cursors = np.arange(600) * batch
    rows = shuffled_rows(mixture, cursors, batch, np.arange(batch))
    assert np.array_equal(np.sort(rows, axis=1), np.tile(np.arange(batch), (600, 1)))
    owners = np.array(whose(mixture, mixed_order_at(mixture, 0, 0, (cursors[:, None] + rows).ravel())))
    for row in owners.reshape(600, batch).T:
        assert set(row.tolist()) == set(range(len(weights)))
    some = shuffled_rows(mixture, cursors[5:7], batch, np.array([1, 0]))
    assert np.array_equal(some, rows[5:7, [1, 0]])


def test_a_mixture_of_one_equals_that_dataset():
    mixture = mixture_of([(0, [0.3])])
    assert mixed_order_at(mixture, 9, 40, np.arange(50)).tolist() == window_order(mixture.splits[0], 9, 40, 50).tolist()


def test_which_data_set_a_sample_is_of_does_not_depend_on_the_seed():
    mixture = mixture_of([(0, [0.5, 0.3, 0.2])])
    first, other = (mixed_order_at(mixture, seed, 0, np.arange(300)) for seed in (0, 1))
    assert whose(mixture, first) == whose(mixture, other)
    assert first.tolist() != other.tolist()


def test_rotation_by_hand():
    """Shares 3/4 and 1/4: sample j of b is due before place 4(j + 1), and gives way to a's, which are due earlier."""
    mixture = mixture_of([(0, [3, 1]), (6, [1, 1])])
    owners = "".join("ab"[i] for i in whose(mixture, mixed_order_at(mixture, 0, 0, np.arange(10))))
    assert owners == "aaab" + "aa" + "abab"


def test_shares_are_weights_as_people_wrote_them():
    assert shares_of([0.7, 0.3]) == (Fraction(7, 10), Fraction(3, 10))
    assert shares_of([1, 2]) == (Fraction(1, 3), Fraction(2, 3))
    assert shares_of([0.1, 0.2, 0.0]) == (Fraction(1, 3), Fraction(2, 3), 0)


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=7))
def test_shares_without_a_small_common_denominator_are_rounded_and_add_up_to_one(weights):
    shares = shares_of(weights)
    assert sum(shares) == 1
    assert all(MAX_SLOTS % share.denominator == 0 or share.denominator <= MAX_SLOTS for share in shares)
    assert math.lcm(*(share.denominator for share in shares)) <= MAX_SLOTS
    for weight, share in zip(weights, shares, strict=True):
        assert abs(weight / sum(weights) - share) < 1 / MAX_SLOTS


def test_a_share_too_small_to_be_had_is_refused():
    with pytest.raises(DataError, match="less than one sample in 65,536"):
        shares_of([1, 1.23e-7])
    with pytest.raises(DataError, match="all weights are 0"):
        shares_of([0, 0])


@st.composite
def runs(draw):
    """Batches that change, and ranges of samples to pass over."""
    steps = sorted(draw(st.sets(st.integers(2, 30), max_size=3)))
    batches = [(1, draw(st.integers(1, 9))), *((step, draw(st.integers(1, 9))) for step in steps)]
    skips, at = [], 0
    for _ in range(draw(st.integers(0, 4))):
        first = at + draw(st.integers(0, 25))
        at = first + draw(st.integers(1, 25))
        skips.append((first, at))
    return batches, skips


@settings(deadline=None, max_examples=examples(80))
@given(runs())
def test_first_sample_matches_a_simulated_loop(run):
    batches, skips = run
    cursor = 0
    for step in range(1, 45):
        batch = next(batch for first, batch in reversed(batches) if step >= first)
        cursor = after_skips(cursor, batch, skips)
        assert first_sample(step, batches, skips) == cursor
        cursor += batch


def test_a_step_far_away_is_arithmetic():
    assert first_sample(10**15, [(1, 8), (10**9, 16)], [(80, 96)]) == 8 * (10**9 - 1) + 16 + 16 * (10**15 - 10**9)
