"""The `math` reward: 1 if the answer is that of the reference, as tasks of evaluation decide it."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from headway.errors import DataError
from headway.evals.scoring import final_answer, marked_answer, math_value
from headway.rl.rewards.answer import Answer


def math_reward(
    answer: Answer,
    *,
    field: Annotated[str, Field(min_length=1)] = "answer",
    marked: bool = False,
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0,
) -> float:
    r"""Return 1.0 if the final answer equals the reference, or one of a list of references.

    `marked` accepts no mere last number: the answer is boxed, after `####`, or after "answer is". Two numbers are equal
    if they differ by at most `tolerance` times the reference.
    """
    given = marked_answer(answer.text) if marked else final_answer(answer.text)
    references = answer.field(field)
    texts = [_as_text(value, field) for value in (references if isinstance(references, list) else [references])]
    if given is None:
        return 0.0
    value = math_value(given)
    return float(any(_is_equal(value, math_value(marked_answer(text) or text), tolerance) for text in texts))


def _is_equal(value: Fraction | str, reference: Fraction | str, tolerance: float) -> bool:
    if isinstance(value, str) or isinstance(reference, str):
        return value == reference
    return abs(value - reference) <= Fraction(tolerance) * abs(reference)


def _as_text(value: object, field: str) -> str:
    # A bool is an int to Python, and no answer of arithmetic; an empty text is what an empty box would equal.
    wrong = isinstance(value, bool) or not isinstance(value, str | int | float) or value == ""
    if wrong or (isinstance(value, float) and not math.isfinite(value)):
        raise DataError(f"field {field!r} is {value!r}", hint="a number, a text, or a list of them")
    return format(Decimal(str(value)), "f") if isinstance(value, float) else str(value)
