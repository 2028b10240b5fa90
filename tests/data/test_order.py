import hashlib
from math import isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data import Split, count_windows, held_out, order_at, split_windows, window_order
from headway.data.order import after_skips
from headway.errors import DataError
from thinned import examples

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 99, 100, 101, 1000, 1023, 1025, 4097]
MASK = (1 << 64) - 1


def scalar_sample(split: Split, seed: int, number: int) -> int:
    """The same definition in plain integers, one sample at a time."""
    epoch, position = divmod(number, split.training)
    inner = scalar_permute(position, split.training, scalar_keys(split.key, "epoch", seed, epoch))
    return scalar_permute(inner + split.held_out, split.windows, scalar_keys(split.key, "split"))


def scalar_keys(*parts: object) -> list[int]:
    digest = hashlib.sha256("/".join(["headway-order-1", *map(str, parts)]).encode()).digest()
    words = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8)]
    return [(words[r % 4] + r * 0x9E3779B97F4A7C15) & MASK for r in range(6)]


def scalar_permute(x: int, size: int, keys: list[int]) -> int:
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        row, column = divmod(x, columns)
        for r in range(0, 6, 2):
            row = (row + scalar_hash(column + keys[r], rows)) % rows
            column = (column + scalar_hash(row + keys[r + 1], columns)) % columns
        x = row * columns + column
        if x < size:
            return x


def scalar_hash(x: int, size: int) -> int:
    x = (x & MASK) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9 & MASK
    return ((x >> 32) * size) >> 32


@settings(deadline=None, max_examples=examples(60))
@given(
    windows=st.integers(1, 2**62),
    fraction=st.sampled_from([0.0, 0.01, 0.3]),
    seed=st.integers(0, 2**64),
    first=st.integers(0, 2**63),
)
def test_vectorized_order_equals_plain_integer_arithmetic(windows, fraction, seed, first):
    split = split_windows(windows, fraction, "0123456789abcdef")
    assert window_order(split, seed, first, 5).tolist() == [scalar_sample(split, seed, first + i) for i in range(5)]


@pytest.mark.parametrize("windows", SIZES)
@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_each_epoch_sees_each_training_window_once(windows, fraction):
    split = split_windows(windows, fraction, "v")
    aside = set(held_out(split).tolist())
    assert len(aside) == split.held_out
    for epoch in range(3):
        seen = window_order(split, 7, epoch * split.training, split.training).tolist()
        assert sorted([*seen, *aside]) == list(range(windows))


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(1, 300), st.integers(0, 10**12), st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_chunking_does_not_matter(windows, first, counts):
    split = split_windows(windows, 0.05, "v")
    parts, at = [], first
    for count in counts:
        parts.append(window_order(split, 3, at, count))
        at += count
    assert np.array_equal(np.concatenate(parts), window_order(split, 3, first, sum(counts)))


def test_offsets_pick_rows_of_steps():
    split = split_windows(50, 0.1, "v")
    offsets = np.array([3, 4, 11, 12, 91, 92])
    assert np.array_equal(order_at(split, 1, 40, offsets), window_order(split, 1, 40, 100)[offsets])


def test_works_at_the_far_end_of_the_cursor():
    split = split_windows(1000, 0.01, "v")
    far = 2**63
    assert sorted(window_order(split, 0, far - far % split.training, split.training)) == sorted(
        window_order(split, 0, 0, split.training)
    )


def test_epochs_seeds_and_versions_differ():
    split = split_windows(1000, 0.01, "v")
    size = split.training
    base = window_order(split, 0, 0, size)
    for other in (
        window_order(split, 0, size, size),
        window_order(split, 1, 0, size),
        window_order(Split(split.windows, split.held_out, "w"), 0, 0, size),
    ):
        # Two independent orders agree in one place on average.
        assert np.count_nonzero(base == other) < 10


def test_held_out_does_not_depend_on_the_seed_and_grows_with_the_fraction():
    small, large = split_windows(1000, 0.01, "v"), split_windows(1000, 0.1, "v")
    assert small.held_out == 10
    assert held_out(small).tolist() == held_out(large).tolist()[:10]
    assert set(held_out(small).tolist()) != set(held_out(Split(1000, 10, "another version")).tolist())


@st.composite
def ranges(draw):
    """Ranges in order, some of which touch."""
    result, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=5)):
        result.append((at + gap, at + gap + length))
        at += gap + length
    return result


@given(st.integers(0, 60), st.integers(1, 9), ranges())
def test_a_batch_begins_at_the_first_cursor_without_skipped_samples(cursor, batch, skips):
    skipped = {sample for first, end in skips for sample in range(first, end)}
    want = cursor
    while skipped & set(range(want, want + batch)):
        want += 1
    assert after_skips(cursor, batch, skips) == want


@given(st.integers(1, 8), ranges(), st.integers(0, 10))
def test_a_run_with_skips_sees_no_skipped_sample_and_none_twice(batch, skips, start):
    seen, cursor = [], start
    for _ in range(30):
        cursor = after_skips(cursor, batch, skips)
        seen += range(cursor, cursor + batch)
        cursor += batch
    assert not set(seen) & {sample for first, end in skips for sample in range(first, end)}
    assert seen == sorted(set(seen))
    if not skips:
        assert seen == list(range(start, start + 30 * batch))


def test_skips_worked_by_hand():
    skips = [(8, 16), (20, 22)]
    wants = {0: 0, 4: 4, 5: 16, 8: 16, 15: 16, 16: 16, 17: 22, 21: 22, 22: 22}
    assert {cursor: after_skips(cursor, 4, skips) for cursor in wants} == wants
    assert after_skips(5, 6, skips) == 22  # behind the first range there is no room for six
    assert after_skips(7, 4, ()) == 7


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("windows", [2, 3, 5, 16, 37])
def test_every_window_is_equally_likely_at_every_position(windows):
    split = split_windows(windows, 0, "v")
    epochs = 2000
    table = window_order(split, 0, 0, epochs * windows).reshape(epochs, windows)
    for position in range(windows):
        freedom = windows - 1
        result = chi_square(np.bincount(table[:, position], minlength=windows))
        assert result < freedom + 6 * (2 * freedom) ** 0.5, (position, result)


def test_neighbours_in_the_order_are_not_neighbours_in_the_data():
    split = split_windows(100_000, 0, "v")
    ids = window_order(split, 0, 0, 100_000)
    steps = np.diff(ids)
    # Of a random order: about one step in 50,000 is to a neighbour; no lag correlation beyond 1/sqrt(n).
    assert np.count_nonzero(np.abs(steps) == 1) < 20
    for lag in (1, 2, 3, 316, 317):
        assert abs(np.corrcoef(ids[:-lag], ids[lag:])[0, 1]) < 0.02
    # Pairs (this sample's block, the next one's) fill a 20 x 20 grid evenly.
    pairs = np.bincount(ids[:-1] // 5000 * 20 + ids[1:] // 5000, minlength=400)
    assert chi_square(pairs) < 399 + 6 * (2 * 399) ** 0.5


@pytest.mark.parametrize(
    ("windows", "fraction", "want"),
    [(1, 0.4, 0), (2, 0.01, 1), (10, 0.01, 1), (1000, 0.01, 10), (1000, 0, 0), (3, 0.49, 1), (2, 0.99, 1)],
)
def test_held_out_count(windows, fraction, want):
    assert split_windows(windows, fraction, "v").held_out == want


def test_bad_numbers():
    with pytest.raises(DataError, match="no window"):
        split_windows(0, 0.1, "v")
    with pytest.raises(DataError, match="fraction"):
        split_windows(10, 1.0, "v")
    with pytest.raises(DataError, match=r"no window of 8 \+ 1 tokens fits: the longest shard has 8") as error:
        count_windows([8, 3], 8)
    assert "data.seq to 7" in error.value.hint
    assert count_windows([9, 17, 18, 8], 8) == [1, 1, 2, 0]
