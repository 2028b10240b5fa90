"""Queries against an evaluation by Python's own operators, and their mistakes."""

import math
import time
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import UsageError
from headway.track.store.query import Name, parse_name, parse_query
from thinned import examples

KEYS = ("loss", "train.lr", "state", "tags", "ratio/clip", "odd key", "not")

numbers = st.one_of(st.integers(-3, 3), st.sampled_from([0.5, -1e-3, 2.5e3, 3.0]))
words = st.sampled_from(["finished", "running", "demo-1", "a b", "it's", "x*", "", "True"])
values = st.one_of(numbers, words, st.booleans())
tables = st.fixed_dictionaries(
    {},
    optional={key: st.one_of(values, st.just(math.nan), st.none()) for key in KEYS if key != "tags"}
    | {"tags": st.lists(words, max_size=3).map(tuple)},
)


def key_text(key: str) -> str:
    return key if key not in ("odd key", "not") else f"`{key}`"


def value_text(value: object) -> str:
    if isinstance(value, str):
        quote = '"' if "'" in value else "'"
        return f"{quote}{value}{quote}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def same_kind(a: object, b: object) -> bool:
    """Truth, number and text are three kinds."""
    kinds = [bool if isinstance(v, bool) else float if isinstance(v, int | float) else type(v) for v in (a, b)]
    return kinds[0] is kinds[1]


def equal(value: object, other: object) -> bool:
    return other in value if isinstance(value, tuple) else same_kind(value, other) and value == other


def texts(value: object) -> list[str]:
    return list(value) if isinstance(value, tuple) else [value] if isinstance(value, str) else []


def present(table: dict, key: str) -> object:
    value = table.get(key)
    return None if isinstance(value, float) and math.isnan(value) else value


@st.composite
def comparisons(draw):
    key, kind = draw(st.sampled_from(KEYS)), draw(st.sampled_from(["order", "equal", "in", "text"]))
    if kind == "order":
        operator, value = draw(st.sampled_from(["<", "<=", ">", ">="])), draw(st.one_of(numbers, words))

        def holds(table):
            own = present(table, key)
            if own is None or isinstance(own, bool | tuple) or not same_kind(own, value):
                return False
            return {"<": own < value, "<=": own <= value, ">": own > value, ">=": own >= value}[operator]

        return f"{key_text(key)} {operator} {value_text(value)}", holds
    if kind == "equal":
        operator, value = draw(st.sampled_from(["=", "==", "!="])), draw(values)

        def holds(table):
            own = present(table, key)
            return own is not None and equal(own, value) == (operator != "!=")

        return f"{key_text(key)}{operator}{value_text(value)}", holds
    if kind == "in":
        some, negated = draw(st.lists(values, min_size=1, max_size=3)), draw(st.booleans())

        def holds(table):
            own = present(table, key)
            return own is not None and any(equal(own, value) for value in some) != negated

        listed = ", ".join(map(value_text, some))
        return f"{key_text(key)} {'not ' if negated else ''}in ({listed})", holds
    operator, pattern = draw(st.sampled_from(["contains", "glob"])), draw(st.sampled_from(["fin", "demo*", "?*", "B"]))

    def holds(table):
        lower = [text.lower() for text in texts(present(table, key))]
        if operator == "glob":
            return any(fnmatchcase(text, pattern.lower()) for text in lower)
        return any(pattern.lower() in text for text in lower)

    return f"{key_text(key)} {operator} '{pattern}'", holds


def combined(parts):
    def both(pair):
        (a, f), (b, g) = pair
        return st.sampled_from(
            [
                (f"({a}) and ({b})", lambda table: f(table) and g(table)),
                (f"{a} OR ({b})", lambda table: f(table) or g(table)),
                (f"not ({a})", lambda table: not f(table)),
            ]
        )

    return st.tuples(comparisons(), parts).flatmap(both)


@given(st.recursive(comparisons(), combined, max_leaves=5), st.lists(tables, min_size=1, max_size=4))
@settings(max_examples=examples(40), deadline=None)
def test_queries_match_pythons_own_operators(query, rows):
    text, holds = query
    parsed = parse_query(text)
    for table in rows:
        assert parsed.matches(lambda name, table=table: table.get(name.key)) == holds(table), (text, table)


@given(st.text(alphabet="ab<>=!()'\"`,.1e- \nandortinßé\x00", max_size=30))
@settings(max_examples=examples(50), deadline=None)
def test_any_text_is_a_query_or_a_usage_error_with_a_column(text):
    error = None
    try:
        parse_query(text).matches(lambda _: 1.0)
    except UsageError as caught:
        error = caught
    if error is not None:
        first, shown, pointer = error.message.split("\n")
        column = int(first.rpartition("at column ")[2].split()[0])
        assert 1 <= column <= len(text) + 1
        assert pointer.strip() == "^"
        assert error.hint
        assert len(shown) < 80


def test_and_binds_tighter_than_or_and_not_tightest():
    table = {"a": 1, "b": 2, "c": 3}

    def matches(text: str) -> bool:
        return parse_query(text).matches(lambda name: table.get(name.key))

    assert matches("a = 1 or b = 0 and c = 0")
    assert not matches("(a = 1 or b = 0) and c = 0")
    assert matches("not a = 2 and c = 3")
    assert not matches("not (a = 2 or c = 3)")
    assert matches("missing = none and a != none")
    assert not matches("missing != 3"), "what is not there satisfies no comparison"
    assert matches("")


def test_durations_and_dates():
    assert parse_query("age < 2d").matches(lambda _: 86_400.0)
    assert not parse_query("took > 1.5h").matches(lambda _: 5400.0)
    noon = time.mktime((2026, 11, 19, 12, 0, 0, 0, 0, -1))
    assert parse_query("created >= 2026-11-19").matches(lambda _: noon)
    assert not parse_query("created >= 2026-11-19T12:01").matches(lambda _: noon)
    assert parse_query("created > '2026-11-19 11:59'").matches(lambda _: noon)


@pytest.mark.parametrize(
    ("text", "message", "column", "hint"),
    [
        ("loss <", "the query ends where a value after < should be", 7, "a number"),
        ("loss < 3 and", "the query ends where a key such as loss or train.lr should be", 13, "headway runs --help"),
        ("(loss < 3", "the query ends before the ) of column 1", 10, "add )"),
        ("loss < 3)", "unexpected ')'", 9, "there is no ( for it"),
        ("loss 3", "'3' is no comparison", 6, "one of = !="),
        ("loss < 3 state = x", "unexpected 'state'", 10, "join comparisons with and, or"),
        ("median(loss) < 3", "no function 'median'", 1, "one of last, min, max, mean"),
        ("3 < loss", "'3' is no key", 1, "a key such as loss"),
        ("name = 'demo", "a quote that is not closed", 8, "end it with another '"),
        ("loss in 3", "in needs a list", 9, "for example in (1, 2)"),
        ("not " * 200 + "a = 1", "too many nested parentheses", 401, "at most 100"),
    ],
)
def test_mistakes_name_their_column(text, message, column, hint):
    with pytest.raises(UsageError) as caught:
        parse_query(text)
    assert caught.value.message.startswith(f"{message} at column {column} of the query\n")
    assert hint in (caught.value.hint or "")


def test_unknown_keys_suggest_near_ones():
    query = parse_query("lr > 1")
    with pytest.raises(UsageError, match="no run has a key 'lr'") as caught:
        query.check_names({"train.lr", "loss"})
    assert caught.value.hint == "did you mean train.lr?"
    parse_query("min(loss) < 3").check_names({"loss"})


def test_names():
    assert parse_name("min(eval_loss)") == Name("eval_loss", "min")
    assert parse_name("`odd key`").text == "`odd key`"
    for wrong in ("", "a b", "min(", "min()", "<", "foo(a)"):
        with pytest.raises(UsageError):
            parse_name(wrong)
