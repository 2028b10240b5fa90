"""Intervals against published values, simulation and brute force."""

import itertools
import math
import random

import numpy as np
import pytest

from headway.evals.intervals import pass_at_k, ratio_interval, share_interval, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes / trials, trials) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(1 - successes / trials, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_one_sample_per_question_is_wilson() -> None:
    for right in range(12):
        scores = [1.0] * right + [0.0] * (11 - right)
        assert share_interval(scores) == pytest.approx(wilson(right / 11, 11))


def test_clustered_interval_covers_95_percent_where_a_plain_one_does_not() -> None:
    """Questions are easy or hard, and 8 outputs of each share that: counting outputs would be far too sure."""
    draw, trials, questions, samples = np.random.default_rng(0), 2000, 60, 8
    covered = plain = 0
    for _ in range(trials):
        means = draw.binomial(samples, draw.beta(0.4, 0.6, questions)) / samples
        low, high = share_interval(means.tolist(), samples)
        covered += low <= 0.4 <= high
        low, high = wilson(float(means.mean()), questions * samples)
        plain += low <= 0.4 <= high
    assert 0.93 <= covered / trials <= 0.97
    assert plain / trials < 0.75


def test_interval_stays_in_range_and_is_never_a_point() -> None:
    for means in ([0.0] * 5, [1.0] * 5, [0.5] * 5, [0.0, 1.0], [0.25]):
        low, high = share_interval(means, 4)
        assert 0 <= low < high <= 1
        assert low <= sum(means) / len(means) <= high


@pytest.mark.parametrize("samples", [1, 3, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_output(samples: int) -> None:
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        outputs = [True] * correct + [False] * (samples - correct)
        subsets = list(itertools.combinations(outputs, k))
        assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_ratio_interval_is_that_of_a_bootstrap_over_documents() -> None:
    draw = random.Random(1)
    counts = [draw.randint(5, 200) for _ in range(150)]
    totals = [count * draw.uniform(1.5, 3.5) for count in counts]
    generator, ratios = np.random.default_rng(2), []
    for _ in range(4000):
        chosen = generator.integers(0, len(counts), len(counts))
        ratios.append(sum(totals[place] for place in chosen) / sum(counts[place] for place in chosen))
    interval = ratio_interval(totals, counts)
    assert interval is not None
    low, high = np.quantile(ratios, [0.025, 0.975])
    assert interval == pytest.approx((low, high), abs=0.15 * (high - low))
    assert ratio_interval([3.0], [2.0]) is None


def test_ratio_interval_of_equal_documents_is_a_point() -> None:
    assert ratio_interval([2.0, 4.0], [1, 2]) == pytest.approx((2.0, 2.0))
    assert math.isfinite(sum(ratio_interval([0.0, 0.0], [1, 2]) or ()))
