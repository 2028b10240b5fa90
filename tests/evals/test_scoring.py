"""Exact match and math answers, against pairs whose verdict is plain to a person."""

import pytest

from headway.evals.scoring import exact_match, extracted, final_answer, math_match, math_value, scorer


@pytest.mark.parametrize(
    ("output", "reference"),
    [
        ("She makes 9 * 2 = $18 every day.\n#### 18", "... = <<9*2=18>>18 every day\n#### 18"),
        ("The answer is 18.", "#### 18"),
        ("So the answer is: $1,234.50 in total.", "1234.5"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("we get $\\boxed{\\dfrac{3}{4}}$.", "\\boxed{3/4}"),
        ("\\boxed{\\frac12}", "1/2"),
        ("\\boxed{x^{2}+1} is it", "\\boxed{x^{2} + 1}"),
        ("\\boxed{\\left(3, 4\\right)}", "(3,4)"),
        ("\\boxed{5 \\text{ apples}}", "5"),
        ("Answer: 50%", "50\\%"),
        ("Answer: 50 dollars.", "#### 50"),
        ("It fell by −7 degrees", "-7"),
        ("first 3, then 4, at last 5", "5"),
        ("#### 1 1/2", "1.5"),
        ("10{,}000 is \\boxed{10{,}000}", "10000"),
        ("The answer is \\sqrt{2}.", "\\sqrt{2}"),
        ("6/4", "3/2"),
        ("007", "7"),
        ("5-3 = 2", "2"),
    ],
)
def test_answers_of_the_same_value_match(output: str, reference: str) -> None:
    assert math_match(output, reference)


@pytest.mark.parametrize(
    ("output", "reference"),
    [
        ("18", "19"),
        ("#### 81", "#### 18"),
        ("The answer is 18, I think; no, the answer is 19.", "18"),
        ("\\boxed{x+5}", "5"),
        ("\\boxed{0.33}", "1/3"),
        ("-7", "7"),
        ("1234", "1,235"),
        ("", "0"),
        ("no idea", "4"),
        ("1/0", "1"),
        ("\\boxed{12", "1"),  # never closed: the last number counts
    ],
)
def test_other_answers_do_not(output: str, reference: str) -> None:
    assert not math_match(output, reference)


def test_the_last_of_several_answers_counts() -> None:
    assert final_answer("\\boxed{1} or rather \\boxed{2}") == "2"
    assert final_answer("#### 3\n#### 4\nmore 9") == "4"
    assert final_answer("x = 5-3") == "3"
    assert final_answer("nothing") is None


def test_an_absurdly_long_number_is_text() -> None:
    digits = "9" * 100_000
    assert math_value(digits) == digits


def test_every_answer_of_gsm8k_form_matches_itself_and_no_other() -> None:
    references = [f"so it is <<{n}*2={2 * n}>>{2 * n:,}\n#### {2 * n:,}" for n in range(490, 510)]
    for row, reference in enumerate(references):
        assert [math_match(f"The answer is {2 * n}.", reference) for n in range(490, 510)].index(True) == row


def test_exact_match_ignores_white_space_around_only() -> None:
    assert exact_match(" Paris\n", "Paris")
    assert not exact_match("Paris.", "Paris")
    assert not exact_match("paris", "Paris")
    assert exact_match("paris", "Paris", ignore_case=True)


def test_extracted_is_the_last_match() -> None:
    assert extracted("a=1 b=2", r"\w=(\d)") == "2"
    assert extracted("a=1 b=2", r"\w=\d") == "b=2"
    assert extracted("none", r"\d") == ""
    score = scorer("exact_match", extract=r"#### (\S+)")
    assert score("bla #### 4 bla", ["#### 4"])
    assert score("bla #### 4", ["4", "5"])
    assert not score("4", ["4"])
