"""Grids of parameters: every combination, of which the default suite runs a few and `make test-all` the rest."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

__all__ = ["thinned"]


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
