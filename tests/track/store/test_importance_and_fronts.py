"""Importance and fronts against formulas written out, and brute force."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.track.store.sweep_results import importances, pareto_front, rank_correlation, varied_keys


def grid(**axes: list[float]) -> list[dict[str, float]]:
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


def test_key_that_alone_decides_has_all_and_others_nothing() -> None:
    recipes = grid(lr=[1e-4, 1e-3, 1e-2], seed=[1, 2, 3, 4])
    first, second = importances(recipes, [abs(math.log10(recipe["lr"]) + 3) for recipe in recipes])
    assert (first.key, first.share, first.best, first.best_mean) == ("lr", 1.0, 1e-3, 0.0)
    assert (second.key, second.share) == ("seed", 0.0)


def test_share_is_that_of_an_analysis_of_variance() -> None:
    """Of a balanced grid with y = 3a + b: sums of squares by the textbook's table."""
    recipes = grid(a=[0, 1, 2], b=[0, 1, 2])
    rows = {row.key: row for row in importances(recipes, [3 * recipe["a"] + recipe["b"] for recipe in recipes])}
    # SS(a) = 3 * (9 + 0 + 9) = 54, SS(b) = 3 * (1 + 0 + 1) = 6, total 60.
    assert rows["a"].share == pytest.approx((54 - 2 * (6 / 6)) / 60)
    assert rows["b"].share == pytest.approx(0)  # 6 - 2 * 54/6 is less than nothing
    assert rows["a"].correlation == pytest.approx(rank_correlation([0, 0, 0, 1, 1, 1, 2, 2, 2], range(9)))


def test_noise_alone_explains_little_however_many_values_a_key_has() -> None:
    draw = random.Random(0)
    recipes = [{"lr": draw.random(), "seed": number % 10} for number in range(200)]
    for row in importances(recipes, [draw.gauss(0, 1) for _ in recipes]):
        assert row.share is not None
        assert row.share < 0.1


def test_numbers_of_a_random_search_are_cut_into_ranges() -> None:
    draw = random.Random(1)
    recipes = [{"lr": draw.random()} for _ in range(40)]
    (row,) = importances(recipes, [recipe["lr"] for recipe in recipes])
    assert row.values == 4
    assert row.share is not None
    assert row.share > 0.8
    assert row.correlation == pytest.approx(1)
    low, high = map(float, str(row.best).split(" to "))
    assert (low, round(high, 4)) == (
        float(f"{min(recipe['lr'] for recipe in recipes):.4g}"),
        round(sorted(recipe["lr"] for recipe in recipes)[9], 4),
    )


def test_odd_values_and_missing_results() -> None:
    recipes = [{"a": [1, 2], "b": True, "name": "x"}, {"a": [1, 2], "b": 1}, {"a": None, "b": "text"}, {"b": 1.0}]
    assert varied_keys(recipes) == ["a", "b"]
    assert [row.key for row in importances(recipes, [1.0, math.nan, 2.0, 2.5])] == ["a", "b"]
    assert importances(recipes, [1.0] * 4)[0].share is None
    assert importances([], []) == []


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=30))
def test_rank_correlation_is_the_correlation_of_ranks(pairs: list[tuple[int, int]]) -> None:
    a, b = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]

    def ranks(values: list[float]) -> list[float]:
        return [
            sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values
        ]

    found = rank_correlation(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(statistics.correlation(ranks(a), ranks(b)))


POINT = st.tuples(*[st.one_of(st.none(), st.integers(0, 6).map(float), st.just(math.nan))] * 2)


@given(st.lists(POINT, max_size=25), st.tuples(st.booleans(), st.booleans()))
def test_front_is_what_brute_force_finds(
    points: list[tuple[float | None, float | None]], larger: tuple[bool, bool]
) -> None:
    def is_better(a: float, b: float, axis: int) -> bool:
        return a > b if larger[axis] else a < b

    complete = {
        index: point for index, point in enumerate(points) if all(v is not None and math.isfinite(v) for v in point)
    }
    want = set()
    for index, point in complete.items():
        beaten = False
        for other in complete.values():
            no_worse = all(not is_better(point[axis], other[axis], axis) for axis in (0, 1))  # type: ignore[arg-type]
            better = any(is_better(other[axis], point[axis], axis) for axis in (0, 1))  # type: ignore[arg-type]
            beaten |= no_worse and better
        if not beaten:
            want.add(index)
    front = pareto_front(points, larger)
    assert set(front) == want
    first = [points[index][0] for index in front]
    assert first == sorted(first, reverse=larger[0])  # type: ignore[type-var]
