"""The paired test against enumeration of all signs and binomial tables; comparisons of rows."""

import itertools
import math
import random
from typing import Any

import pytest

from headway.errors import UsageError
from headway.evals.compare import compare_rows
from headway.evals.paired import _drawn_p, compare_shares, compare_totals


def enumerated(differences: list[float]) -> float:
    """The share of all sign choices with a sum at least as far from 0."""
    far = abs(sum(differences)) - 1e-9
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True))
            for signs in itertools.product((1, -1), repeat=len(differences))]  # fmt: skip
    return sum(abs(value) >= far for value in sums) / len(sums)


def test_one_output_per_question_is_mcnemar_s_exact_test() -> None:
    for only_first, only_second in ((10, 2), (0, 6), (3, 3), (0, 0), (1, 0)):
        first = [1.0] * only_first + [0.0] * only_second + [1.0] * 7
        second = [0.0] * only_first + [1.0] * only_second + [1.0] * 7
        few, discordant = min(only_first, only_second), only_first + only_second
        tail = sum(math.comb(discordant, k) for k in range(few + 1)) / 2**discordant
        test = compare_shares(first, second)
        assert test.p_value == pytest.approx(min(1.0, 2 * tail))
        assert test.method == "McNemar's exact test"
        assert test.significant == (test.p_value < 0.05)


def test_sampled_scores_are_compared_exactly() -> None:
    draw = random.Random(0)
    for _ in range(20):
        count = draw.randint(1, 9)
        first = [draw.randint(0, 4) / 4 for _ in range(count)]
        second = [draw.randint(0, 6) / 6 for _ in range(count)]
        test = compare_shares(first, second, (4, 6))
        expected = enumerated([b - a for a, b in zip(first, second, strict=True)])
        assert test.p_value == pytest.approx(expected)


def test_drawn_p_value_is_near_the_exact_one_and_never_zero() -> None:
    draw = random.Random(3)
    for shift in (0.0, 0.4, 2.0):
        differences = [draw.gauss(shift, 1) for _ in range(12)]
        assert _drawn_p(differences) == pytest.approx(enumerated(differences), abs=0.01)
    assert 0 < _drawn_p([5.0] * 40) < 1e-4
    assert _drawn_p([0.0, 0.0]) == 1.0


def test_equal_models_differ_significantly_at_most_5_times_in_100() -> None:
    draw, wrong = random.Random(5), 0
    for _ in range(400):
        chances = [draw.random() for _ in range(40)]
        first, second = ([float(draw.random() < chance) for chance in chances] for _ in range(2))
        wrong += compare_shares(first, second).significant
    assert wrong <= 32  # 20 expected of an exact test at its level; discrete ones stay below


def rows(scores: list[float], prompt: str = "p") -> list[dict[str, Any]]:
    return [{"index": i, "id": f"q{i}", "prompt": prompt, "scores": {"acc": s}} for i, s in enumerate(scores)]


def test_sentence_says_which_is_better_and_whether_it_is_significant() -> None:
    (comparison,) = compare_rows("t", rows([0.0] * 9 + [1.0]), rows([1.0] * 10))
    assert comparison.sentence("a", "b") == (
        "b is better than a, significant at 5 % (100.0 % against 10.0 %; p=0.0039, McNemar's exact test, 10 questions)."
    )
    (comparison,) = compare_rows("t", rows([1.0] * 10), rows([1.0] * 9 + [0.0]))
    assert "a and b do not differ significantly at 5 % (100.0 % and 90.0 %; p=1" in comparison.sentence("a", "b")


def test_less_is_better_of_bits_per_byte() -> None:
    def texts(nats: float) -> list[dict[str, Any]]:
        return [{"index": i, "id": f"q{i}", "prompt": "", "logprob": -nats * 10 * math.log(2), "bytes": 10}
                for i in range(12)]  # fmt: skip

    (comparison,) = compare_rows("t", texts(1.5), texts(2.5))
    assert (comparison.first, comparison.second) == pytest.approx((1.5, 2.5))
    assert comparison.test.difference == pytest.approx(1.0)
    assert comparison.sentence("a", "b").startswith("a is better than b, significant")


def test_difference_of_totals_is_per_count_of_all() -> None:
    test = compare_totals([10.0, 30.0], [20.0, 50.0], [10, 20])
    assert test.difference == pytest.approx((70 - 40) / 30)


def test_only_the_same_questions_are_compared() -> None:
    (comparison,) = compare_rows("t", rows([1.0] * 5), rows([1.0] * 3, prompt="other"))
    assert comparison.questions == 3
    assert not comparison.same_prompts
    changed = [row | {"id": "other"} for row in rows([1.0] * 3)]
    with pytest.raises(UsageError, match="question 0 of t is not the same on both sides"):
        compare_rows("t", rows([1.0] * 3), changed)
    with pytest.raises(UsageError, match="no question of t was answered by both"):
        compare_rows("t", rows([1.0]), [row | {"index": 7} for row in rows([1.0])])
