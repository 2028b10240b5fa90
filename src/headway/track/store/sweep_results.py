"""What many runs of one recipe tell: which keys matter to a result, and which runs nothing beats. Pure.

Importance of a key is the share of the variance of a result between runs that the key's values explain (epsilon squared
of a one-way analysis of variance): 1 if runs with the same value have the same result, about 0 for a key without
effect, also where each value has few runs. It is of one key at a time: what two keys do only together is in neither.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BINS = 4
"""Ranges that a number is cut into where nearly each run has its own, as in a random search."""


@dataclass(frozen=True)
class KeyImportance:
    """How much a result depends on one key of the recipe."""

    key: str
    share: float | None
    """Of the variance between runs; None where each run has a value of its own, or all have the same result."""
    correlation: float | None
    """Rank correlation with a key that is a number: 1 if more gives more, -1 if more gives less."""
    best: Any
    """The value whose runs have the best mean; of ranges, the range."""
    best_mean: float
    values: int


def varied_keys(recipes: Sequence[Mapping[str, Any]], neutral: Sequence[str] = ("name",)) -> list[str]:
    """Return the keys that are not the same in all recipes."""
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key not in neutral)
    return [key for key in keys if len({_frozen(recipe.get(key)) for recipe in recipes}) > 1]


def importances(
    recipes: Sequence[Mapping[str, Any]], results: Sequence[float], *, larger: bool = False
) -> list[KeyImportance]:
    """Return the importance of each key that varies, the most important first; `larger` results are better or worse."""
    kept = [(recipe, value) for recipe, value in zip(recipes, results, strict=True) if math.isfinite(value)]
    recipes, results = [recipe for recipe, _ in kept], [value for _, value in kept]
    rows = [_importance(key, recipes, results, larger) for key in varied_keys(recipes)]
    return sorted(rows, key=lambda row: (row.share is None, -(row.share or 0.0), row.key))


def _importance(
    key: str, recipes: Sequence[Mapping[str, Any]], results: Sequence[float], larger: bool
) -> KeyImportance:
    values: list[Any] = [recipe.get(key) for recipe in recipes]
    labels = _ranges(values) if _is_scattered(values) else values
    groups: dict[Any, list[float]] = {}
    shown: dict[Any, Any] = {}
    for label, result in zip(labels, results, strict=True):
        groups.setdefault(_frozen(label), []).append(result)
        shown.setdefault(_frozen(label), label)
    means = {label: sum(group) / len(group) for label, group in groups.items()}
    best = (max if larger else min)(means, key=lambda label: means[label])
    numbers = [float(value) for value in values if _is_number(value)]
    correlation = rank_correlation(numbers, results) if len(numbers) == len(values) else None
    return KeyImportance(key, _explained(list(groups.values())), correlation, shown[best], means[best], len(groups))


def _explained(groups: Sequence[Sequence[float]]) -> float | None:
    """Return epsilon squared of groups of results, at least 0."""
    everything = [value for group in groups for value in group]
    count, mean = len(everything), sum(everything) / len(everything)
    total = sum((value - mean) ** 2 for value in everything)
    inside = sum((value - sum(group) / len(group)) ** 2 for group in groups for value in group)
    if not total or count == len(groups):
        return None
    noise = inside / (count - len(groups))
    return max(0.0, (total - inside - (len(groups) - 1) * noise) / total)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's correlation; None where one of both is constant."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) - 1) / 2
    both = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    size = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return both / size if size else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value in ascending order from 0; equal values share the mean of theirs."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [sum(places[value]) / len(places[value]) for value in values]


def _is_scattered(values: Sequence[Any]) -> bool:
    return all(map(_is_number, values)) and len(set(values)) > max(BINS, len(values) // 2)


def _ranges(values: Sequence[Any]) -> list[str]:
    """Return the range of each number, of about as many runs each."""
    owners = [min(BINS - 1, int(rank * BINS / len(values))) for rank in _ranks(values)]
    bounds: dict[int, list[float]] = {}
    for value, owner in zip(values, owners, strict=True):
        bounds.setdefault(owner, []).append(value)
    return [f"{min(bounds[owner]):.4g} to {max(bounds[owner]):.4g}" for owner in owners]


def pareto_front(points: Sequence[Sequence[float | None]], larger: Sequence[bool]) -> list[int]:
    """Return the indices of the points that no other one beats, sorted by the first number, best first.

    One beats another if it is as good in every number, and better in one. Points without all numbers are left out.
    """
    signed = dict(_signed(points, larger))
    front = [
        index
        for index, point in signed.items()
        if not any(
            other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in signed.values()
        )
    ]
    return sorted(front, key=lambda index: signed[index])


def _signed(
    points: Sequence[Sequence[float | None]], larger: Sequence[bool]
) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Yield complete points with signs such that less is better."""
    for index, point in enumerate(points):
        numbers = [value for value in point if value is not None and math.isfinite(value)]
        if len(numbers) == len(larger):
            yield index, tuple(-value if high else value for value, high in zip(numbers, larger, strict=True))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _frozen(value: Any) -> Any:
    """Return a value of a recipe as a key of a dict: 1 and 1.0 are the same, 1 and True are not."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return value if _is_number(value) else (type(value).__name__, value)
