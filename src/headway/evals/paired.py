"""Whether two models differ on the same questions: a paired sign-flip (permutation) test.

If the models were equal, each question's difference could as well have the other sign. The p-value is the share of all
2^questions ways to choose signs whose sum is at least as far from 0 as the observed one. Scores of a few outputs are
multiples of 1/n, so the sums are whole numbers and their distribution is computed exactly; with one output per
question this is McNemar's exact test. Differences of any other numbers (log-likelihoods) are drawn 20,000 times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from headway.evals.intervals import Z, clustered_variance

LEVEL = 0.05
DRAWS = 20_000
MOST_WORK = 1 << 31
"""Additions of an exact distribution; beyond them signs are drawn."""


@dataclass(frozen=True)
class PairedTest:
    """The outcome of a test."""

    difference: float
    """Mean of second minus first."""
    low: float | None
    """95 % interval of the difference by its clustered standard error; None for fewer than two questions."""
    high: float | None
    p_value: float
    method: str

    @property
    def significant(self) -> bool:
        """Whether the difference is significant at 5 %."""
        return self.p_value < LEVEL


def compare_shares(first: Sequence[float], second: Sequence[float], samples: tuple[int, int] = (1, 1)) -> PairedTest:
    """Compare scores of the same questions, each a mean of so many outputs that were right or wrong."""
    unit = math.lcm(*samples)
    differences = [b - a for a, b in zip(first, second, strict=True)]
    whole = [round(difference * unit) for difference in differences]
    reach = sum(map(abs, whole))
    exact = all(math.isclose(number / unit, d, abs_tol=1e-9) for number, d in zip(whole, differences, strict=True))
    if exact and len(whole) * (2 * reach + 1) <= MOST_WORK:
        method = "McNemar's exact test" if unit == 1 else "exact paired sign-flip test"
        return _tested(differences, _exact_p(whole), method)
    return _tested(differences, _drawn_p(differences), f"paired sign-flip test of {DRAWS:,} draws")


def compare_totals(first: Sequence[float], second: Sequence[float], counts: Sequence[float]) -> PairedTest:
    """Compare sums over the same documents, such as log-likelihoods, per count of all, such as bytes."""
    mean_count = fmean(counts)
    differences = [(b - a) / mean_count for a, b in zip(first, second, strict=True)]
    return _tested(differences, _drawn_p(differences), f"paired sign-flip test of {DRAWS:,} draws")


def _tested(differences: Sequence[float], p_value: float, method: str) -> PairedTest:
    mean, variance = fmean(differences), clustered_variance(differences)
    low, high = (None, None) if math.isinf(variance) else _around(mean, math.sqrt(variance))
    return PairedTest(mean, low, high, p_value, method)


def _around(mean: float, error: float) -> tuple[float, float]:
    return mean - Z * error, mean + Z * error


def _exact_p(differences: Sequence[int]) -> float:
    """Return the share of sign choices with a sum at least as far from 0 as that of the differences."""
    sizes = [abs(number) for number in differences if number]
    reach = sum(sizes)
    chances = np.zeros(2 * reach + 1)  # of sums from -reach to reach
    chances[reach] = 1.0
    for size in sizes:
        flipped = np.zeros_like(chances)
        flipped[size:] += chances[: len(chances) - size]
        flipped[: len(chances) - size] += chances[size:]
        chances = flipped / 2
    far = abs(sum(differences))
    sums = np.abs(np.arange(-reach, reach + 1))
    return min(1.0, float(chances[sums >= far].sum()))


def _drawn_p(differences: Sequence[float], draws: int = DRAWS, seed: int = 0) -> float:
    """Estimate the same by drawing signs; never 0, since the observed signs are one of the draws."""
    values = np.array([value for value in differences if value != 0.0])
    if not values.size:
        return 1.0
    generator, far, reached = np.random.default_rng(seed), abs(values.sum()), 0
    rows = max(1, (1 << 22) // values.size)
    for start in range(0, draws, rows):
        signs = generator.integers(0, 2, (min(rows, draws - start), values.size), dtype=np.int8) * 2 - 1
        reached += int((np.abs(signs @ values) >= far * (1 - 1e-12)).sum())
    return (reached + 1) / (draws + 1)
