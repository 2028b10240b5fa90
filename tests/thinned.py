"""Grids of parameters: every combination, of which the default suite runs a few and `make test-all` the rest."""

import os
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

__all__ = ["examples", "thinned"]


def examples(count: int) -> int:
    """How many random examples a property is tried with: `count` by default, four times as many in `make test-all`."""
    return count * (4 if "HEADWAY_TEST_ALL" in os.environ else 1)


def thinned(*values: Iterable[Any]) -> list[Any]:
    """Every combination, for `parametrize`: all are slow but as many as the longest parameter has values.

    These hold every value of every parameter, and as many different pairs as fit.
    """
    lists = [list(each) for each in values]
    kept = {
        tuple((number + place * (number // len(each))) % len(each) for place, each in enumerate(lists))
        for number in range(max(map(len, lists)))
    }
    cases = []
    for numbers in product(*(range(len(each)) for each in lists)):
        marks = () if numbers in kept else (pytest.mark.slow,)
        cases.append(pytest.param(*(each[i] for each, i in zip(lists, numbers, strict=True)), marks=marks))
    return cases
