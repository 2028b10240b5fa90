"""The `countdown` reward: an arithmetic expression of given numbers, each used once, that makes the target."""

import ast
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from headway.errors import DataError
from headway.rl.rewards.answer import Answer

MOST_CHARACTERS = 500
"""Of an expression; longer ones are wrong, whatever they say."""

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
# ASCII digits on purpose: those of other scripts are digits to re and int, and none to people's expressions.
_EXPRESSION = re.compile(r"[0-9+\-*/(). \t]+")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_SPELLINGS = {"×": "*", "·": "*", "÷": "/", "−": "-", "\\times": "*", "\\cdot": "*", "\\div": "/"}
_SPELLINGS |= dict.fromkeys(("$", "`", "\\(", "\\)", "\\left", "\\right"), " ")


def countdown_reward(answer: Answer, *, partial: Annotated[float, Field(ge=0, le=1)] = 0.0) -> float:
    """Return 1.0 if the last expression uses each of the row's `numbers` (or `nums`) once and makes its `target`.

    One that uses them but makes another number is worth `partial`.
    """
    given = _fractions(answer.field("numbers" if "numbers" in answer.fields else "nums"), "numbers")
    (target,) = _fractions([answer.field("target")], "target")
    expression = last_expression(answer.text)
    if expression is None or sorted(map(Fraction, _NUMBER.findall(expression))) != sorted(given):
        return 0.0
    value = value_of(expression)
    return 0.0 if value is None else 1.0 if value == target else partial


def last_expression(text: str) -> str | None:
    """Return the last expression of a text: inside the last <answer>, if there is one, and left or right of a `=`."""
    tagged = _TAGGED.findall(text)
    text = tagged[-1] if tagged else text
    for spelling, sign in _SPELLINGS.items():
        text = text.replace(spelling, sign)
    runs = [run.strip().rstrip(".").strip() for run in _EXPRESSION.findall(text)]
    numbers = [run for run in runs if _NUMBER.search(run)]
    expressions = [run for run in numbers if not _NUMBER.fullmatch(run)]
    candidates = expressions or numbers
    return candidates[-1] if candidates else None


def value_of(expression: str) -> Fraction | None:
    """Return the exact value of an expression of + - * / and parentheses; None if it is none, or divides by zero."""
    if len(expression) > MOST_CHARACTERS:
        return None
    try:
        return _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    """Return a node's value. Numbers have the digits they are written with and there are no powers: it stays small."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _evaluate(left) - _evaluate(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _evaluate(left) * _evaluate(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _evaluate(left) / _evaluate(right)
    raise ValueError(type(node).__name__)


def _fractions(values: Any, field: str) -> Sequence[Fraction]:
    if isinstance(values, list) and values and all(type(value) in (int, float) for value in values):
        try:
            return [Fraction(str(value)) for value in values]
        except ValueError:  # NaN and infinity
            pass
    raise DataError(f"field {field!r} is {values!r}", hint="numbers = [3, 5, 8], target = 24")
