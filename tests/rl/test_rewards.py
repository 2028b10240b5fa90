"""The shipped rewards, by tables of answers: right, wrong, and written to deceive."""

import json
import random
import re
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DataError, HeadwayError, RecipeError
from headway.recipe.rl import Rl
from headway.rl.check import check_rewards
from headway.rl.rewards import REWARDS, Answer, load_reward
from headway.rl.rewards.countdown import countdown_reward, value_of
from headway.rl.rewards.json_format import has_shape, json_reward
from headway.rl.rewards.math_answer import math_reward
from headway.rl.rewards.regex import regex_reward
from headway.rl.scorer_process import score


def answer(text: str, **fields: Any) -> Answer:
    return Answer(text, "", fields, 1, "stop")


# -- math


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("So she has 3 + 4 = 7 apples.", 7),
        ("So she has 3 + 4 = 7 apples.", "#### 7"),
        ("#### 1,234", "1234"),
        ("The answer is $18.50.", 18.5),
        ("The answer is 5 dollars.", "$5"),
        (r"\boxed{\frac{1}{2}}", 0.5),
        (r"\boxed{\dfrac{1}{2}}", "1/2"),
        (r"\boxed{1\frac{1}{2}} is wrong, \boxed{3/2}", 1.5),
        (r"\boxed{50\%}", "50%"),
        (r"\boxed{12\text{ cm}}", 12),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{\left(1, 2\right)}", "(1,2)"),
        ("The answer is −3", -3),
        ("Answer: .5", 0.5),
        ("x = 0.000000001", 1e-9),
        ("The answer is 2.", ["1", "2"]),
        ("It is 7 or 8? No: 9", "9"),
    ],
)
def test_right_answers_of_mathematics(text: str, reference: Any) -> None:
    assert math_reward(answer(text, answer=reference)) == 1.0


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("", 7),
        ("no number at all", 7),
        ("1 2 3 4 5 6 7 8", 7),
        (r"\boxed{6, 7, 8}", 7),
        (r"\boxed{7} or rather \boxed{8}", 7),
        (r"\boxed{}", 7),
        (r"\boxed{7", 8),
        (r"\boxed{9**9**9}", 9),
        (r"\boxed{7+0}", 7),
        (r"\boxed{NaN}", 7),
        (r"\boxed{inf}", 7),
        (r"\boxed{1/0}", 7),
        (r"\boxed{7e0}", 7),
        (r"\boxed{" + "9" * 5000 + "}", 9),
        ("{" * 5000 + "7" + "}" * 5000 + " 8", 7),
        ("\\frac{" * 5000, 7),
        ("answer is " * 5000, 7),
        ("#### seven", 7),
        ("#### 7\n#### 8", 7),
        ("⑦ ７ VII", 8),
    ],
)
def test_wrong_and_deceiving_answers_of_mathematics(text: str, reference: Any) -> None:
    assert math_reward(answer(text, answer=reference)) == 0.0


def test_options_of_math() -> None:
    assert math_reward(answer("7", answer=7), marked=True) == 0.0
    assert math_reward(answer("#### 7", answer=7), marked=True) == 1.0
    assert math_reward(answer("3.14", answer=3.14159)) == 0.0
    assert math_reward(answer("3.14", answer=3.14159), tolerance=0.01) == 1.0
    assert math_reward(answer("-3.14", answer=3.14159), tolerance=0.01) == 0.0
    assert math_reward(answer("7", result="7"), field="result") == 1.0


@pytest.mark.parametrize("reference", [None, True, "", {"a": 1}, [[1]], float("nan")])
def test_a_row_without_a_usable_reference_is_an_error(reference: Any) -> None:
    with pytest.raises(DataError, match="field 'answer' is"):
        math_reward(answer("7", answer=reference))


def test_a_missing_field_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(DataError, match="no field 'answer'") as raised:
        math_reward(answer("7", answers="7"))
    assert raised.value.hint is not None
    assert raised.value.hint == "did you mean answers?  (headway data show lists them)"


def test_a_field_of_another_name_is_not_suggested_for_a_missing_one() -> None:
    with pytest.raises(DataError) as raised:
        answer("7", target=1).field("tests")
    assert raised.value.hint == "one of target"


def test_an_error_of_a_reward_is_one_sentence_without_doubled_parentheses() -> None:
    (failed,) = score([(math_reward, {})], [0], answer("7", answers="7"))
    assert failed["error"] == (
        "the prompt's row has no field 'answer'; did you mean answers?  (headway data show lists them)"
    )


PIECES = st.sampled_from(
    [
        *"0123456789.,/-+$%{}()^ \n",
        "\\boxed{",
        "\\frac{",
        "\\text{",
        "####",
        "answer is",
        "٣",
        "²",
        "−",
        "e9",
        "**",
        "NaN",
    ]
)


@given(st.fractions(max_denominator=1000), st.sampled_from(["#### {}", r"\boxed{{{}}}", "The answer is {}.", "so {}"]))
@settings(max_examples=50)
def test_every_fraction_equals_itself_and_no_other(value: Fraction, frame: str) -> None:
    text = frame.format(value)
    assert math_reward(answer(text, answer=str(value))) == 1.0
    assert math_reward(answer(text, answer=str(value + 1))) == 0.0


@given(st.lists(PIECES, max_size=20).map("".join))
@settings(max_examples=50)
def test_any_text_has_a_score_in_mathematics(text: str) -> None:
    assert math_reward(answer(text, answer="7")) in (0.0, 1.0)
    assert math_reward(answer("7", answer=text or "7")) in (0.0, 1.0)


# -- countdown


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("(3 + 5) * 2", 1.0),
        ("Let me see.\n<answer>(3 + 5) * 2</answer>", 1.0),
        ("<answer>(3 + 5) * 2 = 16</answer>", 1.0),
        ("<answer>16 = (3 + 5) * 2</answer>", 1.0),
        ("<answer>2 × (3+5)</answer> and more", 1.0),
        (r"<answer>\(2 \times \left(3+5\right)\)</answer>", 1.0),
        (r"So $2 \times (3+5)$.", 1.0),
        ("First 3+5=8, then (3+5)*2.", 1.0),
        ("<answer>5*3+2</answer> <answer>(3+5)*2</answer>", 1.0),
        ("<answer>(3+5)*2</answer> <answer>5*3+2</answer>", 0.1),
        ("<answer>(3+5)*2, 5*3+2</answer>", 0.1),
        ("<answer><answer>(3+5)*2</answer>", 1.0),
        ("3 * 5 + 2", 0.1),
        ("5 / (3 - 2)", 0.1),
        ("2 / (3 - 3) + 5", 0.0),
        ("16", 0.0),
        ("<answer>16</answer>", 0.0),
        ("8 * 2", 0.0),
        ("(3 + 5) * 2 + 2 - 2", 0.0),
        ("(3 + 5) * 2 * 1", 0.0),
        ("35 * 2", 0.0),
        ("2 ** 3 + 5 + 3", 0.0),
        ("(3+5)2", 0.0),
        ("3+5)*2", 0.0),
        ("9**9**9", 0.0),
        ("9**9**9 * 3 * 5 * 2", 0.0),
        ("2 ** (3 + 5)", 0.0),
        ("2 // 3 + 5", 0.0),
        ("٣ + 5 * 2", 0.0),
        ("(３ + 5) * 2", 0.0),
        ("__import__('os').system('x')", 0.0),
        ("(" * 300 + "3+5" + ")" * 300 + "*2", 0.0),
        ("(" * 100_000 + "3+5*2" + ")" * 100_000, 0.0),
        ("-" * 100_000 + "3+5*2", 0.0),
        ("<answer>" * 10_000, 0.0),
        ("nan", 0.0),
        ("inf + 3 + 5 + 2", 0.0),
        ("", 0.0),
    ],
)  # fmt: skip
def test_expressions(text: str, score: float) -> None:
    assert countdown_reward(answer(text, nums=[3, 5, 2], target=16), partial=0.1) == score
    assert countdown_reward(answer(text, numbers=[2, 3, 5], target=16.0)) == float(score == 1.0)


def test_numbers_are_compared_exactly() -> None:
    assert countdown_reward(answer("1/3 + 2/3", numbers=[1, 2, 3, 3], target=1)) == 1.0
    assert countdown_reward(answer("0.1 + 0.2", numbers=[0.1, 0.2], target=0.3)) == 1.0
    assert countdown_reward(answer("7", numbers=[7], target=7)) == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"numbers": [], "target": 3}, {"numbers": [1, "2"], "target": 3}, {"numbers": [True, 2], "target": 3},
        {"numbers": 3, "target": 3}, {"numbers": [1, 2], "target": None}, {"numbers": [1, float("nan")], "target": 3},
        {"target": 3}, {"nums": [1, 2]},
    ],
)  # fmt: skip
def test_rows_that_are_no_countdown_are_errors(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="field"):
        countdown_reward(answer("1 + 2", **fields))


@given(st.integers(0, 2**32), st.integers(1, 6))
@settings(max_examples=50)
def test_an_expression_built_at_random_makes_its_value(seed: int, count: int) -> None:
    """Against Python's own arithmetic with fractions for numbers."""
    rng = random.Random(seed)
    numbers = [rng.randint(1, 99) for _ in range(count)]
    parts = [str(number) for number in numbers]
    while len(parts) > 1:
        first, second = parts.pop(rng.randrange(len(parts))), parts.pop(rng.randrange(len(parts)))
        parts.append(f"({first} {rng.choice('+-*/')} {second})")
    try:
        target = eval(re.sub(r"(\d+)", r"Fraction(\1)", parts[0]))
    except ZeroDivisionError:
        assert value_of(parts[0]) is None
        return
    assert value_of(parts[0]) == target
    fields = {"numbers": rng.sample(numbers, count), "target": 0}
    assert countdown_reward(answer(parts[0], **fields), partial=0.5) == (1.0 if target == 0 else 0.5)


@given(st.text(alphabet="0123456789+-*/(). =\n_a²٣", max_size=60))
@settings(max_examples=50)
def test_any_text_has_a_score_as_an_expression(text: str) -> None:
    assert countdown_reward(answer(text, numbers=[1, 2], target=3), partial=0.5) in (0.0, 0.5, 1.0)


# -- json

PERSON = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["a", 1]}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"name": "x", "age": 3}', 1.0),
        ('```json\n{"name": "x"}\n```', 1.0),
        ('```\n{"name": "x"}\n```\n', 1.0),
        ('Here it is: {"name": "x"}', 0.0),
        ('{"name": "x"} {"name": "y"}', 0.0),
        ('{"age": 3}', 0.5),
        ('{"name": "x", "age": 3.5}', 0.5),
        ('{"name": "x", "age": true}', 0.5),
        ('{"name": "x", "kind": true}', 0.5),
        ('{"name": "x", "kind": "a"}', 1.0),
        ('{"name": "x", "more": 1}', 0.5),
        ("[]", 0.5),
        ("7", 0.5),
        ("NaN", 0.0),
        ('{"name": "x", "age": -Infinity}', 0.0),
        ("{'name': 'x'}", 0.0),
        ("[" * 100_000, 0.0),
        ("[" * 100_000 + "]" * 100_000, 0.0),
        ("1" * 10_000, 0.0),
        ("1e999999999", 0.5),
        ("", 0.0),
    ],
)  # fmt: skip
def test_json(text: str, score: float) -> None:
    assert json_reward(answer(text), shape=PERSON, partial=0.5) == score
    assert json_reward(answer(text)) == float(score > 0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | st.sampled_from(["a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
SHAPES = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"]),
            "enum": st.lists(st.none() | st.booleans() | st.integers(-1, 1) | st.sampled_from(["a"]), max_size=3),
            "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
            "additionalProperties": st.booleans(),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 2),
        },
    ),
    lambda inner: st.builds(
        lambda shape, items, properties: {**shape, "items": items, "properties": properties},
        inner,
        inner,
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    ),
    max_leaves=4,
)


@given(VALUES, SHAPES)
@settings(max_examples=50)
def test_shapes_are_those_of_json_schema(value: Any, shape: dict[str, Any]) -> None:
    value = json.loads(json.dumps(value))
    assert has_shape(value, shape) == jsonschema.Draft202012Validator(shape).is_valid(value)


# -- regex


def test_patterns() -> None:
    assert regex_reward(answer("<think>a\nb</think> 7"), pattern=r"<think>.*</think>\s*\d+", dot_all=True) == 1.0
    assert regex_reward(answer("<think>a</think> 7 or 8"), pattern=r"<think>.*</think>\s*\d+") == 0.0
    assert regex_reward(answer("x 7 y"), pattern=r"\d") == 0.0
    assert regex_reward(answer("x 7 y"), pattern=r"\d", search=True) == 1.0
    assert regex_reward(answer("YES"), pattern="yes", ignore_case=True) == 1.0


# -- names and arguments


def test_every_shipped_reward_can_be_loaded_and_has_a_description() -> None:
    for name in REWARDS:
        assert load_reward(name).__doc__


@pytest.mark.parametrize(
    ("term", "message", "hint"),
    [
        ({"name": "maths"}, "'maths', which is no reward", "math"),
        ({"name": "math", "args": {"marks": True}}, "math takes no 'marks'", "marked"),
        ({"name": "math", "args": {"tolerance": 2}}, "tolerance = 2: ", None),
        ({"name": "math", "args": {"marked": "yes"}}, "neither true nor false", None),
        ({"name": "math", "args": {"tolerance": True}}, "no number", None),
        ({"name": "regex"}, "no 'pattern', which regex needs", "search"),
        ({"name": "regex", "args": {"pattern": "("}}, "no regular expression", None),
        ({"name": "json", "args": {"shape": {"pattern": "a"}}}, "keyword 'pattern' is not supported", None),
        ({"name": "json", "args": {"shape": {"items": {"type": "text"}}}}, "no type 'text'", None),
        ({"name": "no_such_module:reward"}, "there is no module no_such_module", "install"),
        ({"name": "headway.rl.rewards.regex:regex_rewart"}, "has no regex_rewart", None),
    ],
)  # fmt: skip
def test_wrong_terms_are_found_before_a_run(term: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        check_rewards(Rl(rewards=[term]).rewards)
    assert hint is None or hint in str(raised.value.hint)


def test_right_terms_are_accepted() -> None:
    terms = [
        {"name": "math", "args": {"marked": True, "tolerance": 0}},
        {"name": "countdown", "args": {"partial": 0.1}},
        {"name": "json", "args": {"shape": PERSON, "partial": 1}},
        {"name": "regex", "args": {"pattern": "a|b"}},
        "headway.rl.rewards.regex:regex_reward",
    ]
    check_rewards(Rl(rewards=terms).rewards)


def test_a_name_that_is_no_function_is_refused() -> None:
    with pytest.raises(HeadwayError, match="no function but dict"):
        load_reward("headway.rl.rewards.names:REWARDS")
