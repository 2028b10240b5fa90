"""Errors in words: pydantic's mistakes in plain ones, and lines that fit the terminal."""

from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from headway.cli import main
from headway.errors import what_is_wrong

MESSAGE = "recipes/a-long-name-of-a-recipe.toml: train.batch = 7: a batch of 7 does not divide among 4 well-fed workers"


class Inner(BaseModel):
    key: int = 1


class Everything(BaseModel):
    several: tuple[int, ...] = ()
    table: dict[str, int] = {}
    inner: Inner = Inner()
    whole: int = 1
    real: float = 1.0
    yes: bool = True
    text: str = ""
    small: int = Field(1, lt=10)
    even: int = 2

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("Halves are not counted")
        return value


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("several", 3, "this is no list"),
        ("table", 3, "this is no table"),
        ("inner", 3, "this is no table"),
        ("whole", "many", "this is no whole number"),
        ("whole", [], "this is no whole number"),
        ("whole", 1.5, "this is no whole number"),
        ("real", "half", "this is no number"),
        ("real", [], "this is no number"),
        ("yes", "perhaps", "this is neither true nor false"),
        ("yes", [], "this is neither true nor false"),
        ("text", 3, "this is no text"),
        ("small", 10, "input should be less than 10"),
        ("even", 3, "Halves are not counted"),
    ],
)
def test_pydantic_errors_are_in_plain_words(key: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Everything(**{key: value})
    (mistake,) = caught.value.errors()
    assert what_is_wrong(mistake) == said


@pytest.mark.parametrize(("columns", "width"), [(10, 40), (40, 40), (64, 64), (200, 200)])
def test_errors_wrap_at_the_terminal_width(monkeypatch: pytest.MonkeyPatch, columns: int, width: int) -> None:
    """Below 40 columns it is the terminal that breaks lines."""
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = main._wrap("error: ", MESSAGE).split("\n")
    assert [line[:7] for line in lines] == ["error: ", *["       "] * (len(lines) - 1)]
    rows = [line[7:].split(" ") for line in lines]
    assert [word for row in rows for word in row] == MESSAGE.split(" ")
    for line, row, after in zip(lines, rows, [*rows[1:], None], strict=True):
        assert len(line) <= width or len(row) == 1
        assert after is None or len(f"{line} {after[0]}") > width


def test_a_word_wider_than_the_terminal_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that was broken cannot be copied."""
    monkeypatch.setenv("COLUMNS", "40")
    path = "a-folder/" * 6
    assert main._wrap("hint:  ", f"see {path} now") == f"hint:  see\n       {path}\n       now"
