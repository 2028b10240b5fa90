"""Queries over runs: `loss < 3 and train.lr > 1e-3`. A grammar of our own, parsed and evaluated here; never SQL. Pure.

    query       = and { "or" and }
    and         = not { "and" not }
    not         = "not" not | "(" query ")" | comparison
    comparison  = name ( "=" | "==" | "!=" | "<" | "<=" | ">" | ">=" ) value
                | name [ "not" ] "in" "(" value { "," value } ")"
                | name [ "not" ] ( "contains" | "glob" ) string
    name        = key | ( "last" | "min" | "max" | "mean" ) "(" key ")"
    key         = letters, digits and _ . / @ -, or any text between backticks
    value       = number | duration | date | string | bare word | "true" | "false" | "none"

A key is a field of the run (state, step, tags, created ...), a key of its recipe, or a metric, whose last value counts
unless a function says otherwise. A run that has no such value, or one that is not finite, satisfies no comparison with
it, `!=` and `not in` included; only `= none` and `!= none` ask for that. Numbers compare with numbers and texts with
texts; anything else is not equal, and neither less nor more. `tags = x` asks whether x is one of the tags.
"""

import difflib
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias, final

from headway.errors import UsageError

Value: TypeAlias = bool | int | float | str | tuple[str, ...] | None
"""What a name stands for in one run; None for nothing."""
Lookup: TypeAlias = Callable[["Name"], Value]
"""Returns the value of a name in one run."""

Aggregate: TypeAlias = Literal["", "last", "min", "max", "mean"]
FUNCTIONS = ("last", "min", "max", "mean")
MOMENTS = {"created", "started", "updated"}
"""Keys that are Unix seconds, which a query compares with dates."""
RECIPE = "recipe."
"""Prefix for a key of the recipe that has the name of a field: recipe.name."""
KEYWORDS = {"and", "or", "not", "in", "contains", "glob"}
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
"""Seconds of what may stand after a number: 90m, 2d."""
MOST_CHARACTERS, DEEPEST = 10_000, 100

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<quoted>`[^`]*`)
    | (?P<string>'[^']*'|"[^"]*")
    | (?P<symbol><=|>=|==|!=|<>|[=<>(),])
    | (?P<word>[^\s'"`=<>!(),]+)
    )""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_DURATION = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([smhdw])")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?")
_KEY = re.compile(r"[A-Za-z_][\w./@%-]*")


class Name(NamedTuple):
    """A key in a query, and which of a metric's values is meant; empty for the last one."""

    key: str
    aggregate: Aggregate = ""

    @property
    def text(self) -> str:
        """It as it is written."""
        key = self.key if _KEY.fullmatch(self.key) and self.key not in KEYWORDS else f"`{self.key}`"
        return f"{self.aggregate}({key})" if self.aggregate else key


class Clause(ABC):
    """A part of a query."""

    @abstractmethod
    def matches(self, lookup: Lookup) -> bool:
        """Whether a run satisfies it."""

    @abstractmethod
    def conditions(self) -> Iterator["Condition"]:
        """Yield the comparisons in it."""


@final
@dataclass(frozen=True)
class Condition(Clause):
    """A name, an operator and one or more values."""

    name: Name
    operator: str
    values: tuple[Value, ...]
    column: int

    def matches(self, lookup: Lookup) -> bool:
        """Whether a run satisfies it."""
        return compare(lookup(self.name), self.operator, self.values)

    def conditions(self) -> Iterator["Condition"]:
        """Yield it."""
        yield self


@final
@dataclass(frozen=True)
class Combination(Clause):
    """`and` or `or` of several parts, or `not` of one."""

    operator: Literal["and", "or", "not"]
    parts: tuple[Clause, ...]

    def matches(self, lookup: Lookup) -> bool:
        """Whether a run satisfies it."""
        if self.operator == "not":
            return not self.parts[0].matches(lookup)
        results = (part.matches(lookup) for part in self.parts)
        return all(results) if self.operator == "and" else any(results)

    def conditions(self) -> Iterator["Condition"]:
        """Yield the comparisons in its parts."""
        for part in self.parts:
            yield from part.conditions()


@dataclass(frozen=True)
class Query:
    """A parsed query."""

    text: str
    root: Clause | None
    """None for an empty query, which every run satisfies."""

    def matches(self, lookup: Lookup) -> bool:
        """Whether a run satisfies it."""
        return self.root is None or self.root.matches(lookup)

    def names(self) -> list[Name]:
        """Return the names in it, each once."""
        return list(dict.fromkeys(part.name for part in (() if self.root is None else self.root.conditions())))

    def check_names(self, known: Collection[str]) -> None:
        """Raise UsageError at the first key that no run has."""
        for part in () if self.root is None else self.root.conditions():
            key = part.name.key
            if key.removeprefix(RECIPE) not in known:
                raise syntax_error(self.text, part.column, f"no run has a key {key!r}", near_names(key, known))

    def check_values(self, lookups: Sequence[Lookup]) -> None:
        """Raise UsageError where a text is compared by order with what is a number in every run that has it."""
        for part in () if self.root is None else self.root.conditions():
            value = part.values[0]
            if part.operator not in _ORDERS or not isinstance(value, str):
                continue
            kinds = {_kind(known) for lookup in lookups if (known := lookup(part.name)) is not None}
            if kinds == {"number"}:
                hint = "a number; with a unit for times: 90s, 30m, 2h, 3d, 1w; or a date: 2026-11-01"
                raise syntax_error(self.text, part.column, f"{part.name.text} is a number, {value!r} is not", hint)


def near_names(key: str, known: Collection[str]) -> str:
    """Return a hint for an unknown key: the nearest ones, those whose last part is the same first."""
    endings = [other for other in known if other.rpartition(".")[2] == key.rpartition(".")[2]]
    near = (endings or difflib.get_close_matches(key, list(known), n=3, cutoff=0.6))[:3]
    return f"did you mean {' or '.join(near)}?" if near else "`headway runs --keys` lists the keys of these runs"


def syntax_error(text: str, column: int, problem: str, hint: str) -> UsageError:
    """Return the error for a query, with a line that points at the column."""
    shown, at = _window(text, column)
    return UsageError(f"{problem} at column {column + 1} of the query\n  {shown}\n  {' ' * at}^", hint=hint)


def _window(text: str, column: int, width: int = 56) -> tuple[str, int]:
    """Return the part of a long query around a column, on one line, and where the column is in it."""
    flat = "".join(character if character.isprintable() else " " for character in text)
    start = max(0, min(column - width // 2, len(flat) - width))
    return flat[start : start + width], column - start


# -- evaluation


def compare(value: Value, operator: str, others: tuple[Value, ...]) -> bool:
    """Return whether a value and what it is compared with satisfy an operator."""
    if isinstance(value, float) and not math.isfinite(value):
        value = None
    if operator in ("=", "!=") and others[0] is None:
        return (value is None) == (operator == "=")
    if value is None:
        return False
    match operator:
        case "=" | "in":
            return any(_equal(value, other) for other in others)
        case "!=" | "not in":
            return not any(_equal(value, other) for other in others)
        case "contains" | "glob":
            return any(_has(item, operator, str(others[0])) for item in _texts(value))
        case "not contains" | "not glob":
            return not compare(value, operator.removeprefix("not "), others)
    return _ordered(value, operator, others[0])


def _equal(value: Value, other: Value) -> bool:
    if isinstance(value, tuple):
        return other in value
    return _kind(value) == _kind(other) and value == other


def _ordered(value: Value, operator: str, other: Value) -> bool:
    if _kind(value) != _kind(other) or _kind(value) not in ("number", "text"):
        return False
    return _ORDERS[operator](value, other)


_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _kind(value: Value) -> str:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "other"


def _texts(value: Value) -> tuple[str, ...]:
    if isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, str) else ()


def _has(text: str, operator: str, pattern: str) -> bool:
    if operator == "glob":
        return fnmatchcase(text.casefold(), pattern.casefold())
    return pattern.casefold() in text.casefold()


# -- parsing


class _Token(NamedTuple):
    kind: str
    text: str
    column: int


def parse_query(text: str) -> Query:
    """Parse a query; raise UsageError with the column and a hint if it is not one."""
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"the query has {len(text):,} characters, more than {MOST_CHARACTERS:,}")
    tokens = list(_tokens(text))
    if not tokens:
        return Query(text, None)
    return Query(text, _Parser(text, tokens).parse())


def parse_name(text: str) -> Name:
    """Parse one name, such as loss, train.lr or min(eval_loss)."""
    tokens = list(_tokens(text))
    if not tokens:
        raise UsageError("an empty key", hint="for example loss, train.lr or min(eval_loss)")
    parser = _Parser(text, tokens)
    name, _ = parser.name()
    parser.end()
    return name


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            column = at + len(text[at:]) - len(text[at:].lstrip())
            quote = text[column]
            if quote in "'\"`":
                raise syntax_error(text, column, "a quote that is not closed", f"end it with another {quote}")
            raise syntax_error(text, column, f"unexpected {quote!r}", "compare with = != < <= > >= in contains glob")
        kind = match.lastgroup or ""
        yield _Token(kind, match[kind], match.start(kind))
        at = match.end()


@final
class _Parser:
    """Recursive descent over the tokens of a query."""

    def __init__(self, text: str, tokens: list[_Token]) -> None:
        self._text, self._tokens, self._at, self._depth = text, tokens, 0, 0

    def parse(self) -> Clause:
        """Return the whole query."""
        node = self._any("or", self._and)
        self.end()
        return node

    def end(self) -> None:
        """Raise unless everything was consumed."""
        if (token := self._peek()) is not None:
            hint = "join comparisons with and, or" if token.text != ")" else "there is no ( for it"
            raise self._error(token, f"unexpected {token.text!r}", hint)

    def name(self) -> tuple[Name, int]:
        """Return a key or a function of one, and its column."""
        token = self._next("a key such as loss or train.lr")
        function, after = token.text.lower(), self._peek()
        if token.kind == "word" and after is not None and after.text == "(" and function not in KEYWORDS:
            if function not in FUNCTIONS:
                raise self._error(token, f"no function {token.text!r}", f"one of {', '.join(FUNCTIONS)}")
            self._take("(")
            key = self._key(self._next("a metric"))
            self._close(token)
            return Name(key, function), token.column  # type: ignore[arg-type]
        return Name(self._key(token)), token.column

    def _any(self, word: Literal["and", "or"], part: Callable[[], Clause]) -> Clause:
        parts = [part()]
        while self._take(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Combination(word, tuple(parts))

    def _and(self) -> Clause:
        return self._any("and", self._not)

    def _not(self) -> Clause:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._error(self._peek(), "too many nested parentheses", f"at most {DEEPEST}")
        try:
            if self._take("not"):
                return Combination("not", (self._not(),))
            opening = self._peek()
            if opening is not None and self._take("("):
                node = self._any("or", self._and)
                self._close(opening)
                return node
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Clause:
        name, column = self.name()
        token = self._next(f"a comparison after {name.text}", "such as < 3, = finished, in (1, 2), contains 'x'")
        word = token.text.lower() if token.kind == "word" else token.text
        operator = {"==": "=", "<>": "!=", "not": "not"}.get(word, word)
        if operator == "not":
            token = self._next("in, contains or glob")
            operator = f"not {token.text.lower()}"
        if token.kind == "string" or operator.removeprefix("not ") not in _OPERATORS or operator == "not =":
            hint = "= != < <= > >= in contains glob"
            raise self._error(token, f"{token.text!r} is no comparison", f"one of {hint}")
        read = moment if name.key in MOMENTS else _as_it_is
        if operator.endswith("in"):
            return Condition(name, operator, tuple(map(read, self._list())), column)
        value = read(self._value(self._next(f"a value after {token.text}", "a number, a word, or a text in quotes")))
        if operator.endswith(("contains", "glob")):
            value = value if isinstance(value, str) else self._tokens[self._at - 1].text
        return Condition(name, operator, (value,), column)

    def _list(self) -> tuple[Value, ...]:
        opening = self._peek()
        if opening is None or not self._take("("):
            raise self._error(opening, "in needs a list", "for example in (1, 2)")
        values = [self._value(self._next("a value"))]
        while self._take(","):
            values.append(self._value(self._next("a value")))
        self._close(opening)
        return tuple(values)

    def _value(self, token: _Token) -> Value:
        if token.kind == "string":
            return token.text[1:-1]
        if token.kind != "word":
            raise self._error(token, f"{token.text!r} is no value", "a number, a word, or a text in quotes")
        return parse_value(token.text)

    def _key(self, token: _Token) -> str:
        if token.kind == "quoted" and len(token.text) > 2:
            return token.text[1:-1]
        if token.kind != "word" or token.text.lower() in KEYWORDS or not _KEY.fullmatch(token.text):
            hint = "a key such as loss or train.lr stands first; `...` quotes unusual ones"
            raise self._error(token, f"{token.text!r} is no key", hint)
        return token.text

    def _close(self, opening: _Token) -> None:
        if not self._take(")"):
            token = self._peek()
            what = "the query ends" if token is None else f"unexpected {token.text!r}"
            raise self._error(token, f"{what} before the ) of column {opening.column + 1}", "add )")

    def _take(self, text: str) -> bool:
        token = self._peek()
        if token is None or token.kind in ("string", "quoted") or token.text.lower() != text:
            return False
        self._at += 1
        return True

    def _peek(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self, wanted: str, hint: str = "see `headway runs --help`") -> _Token:
        token = self._peek()
        if token is None:
            raise self._error(None, f"the query ends where {wanted} should be", hint)
        self._at += 1
        return token

    def _error(self, token: _Token | None, problem: str, hint: str) -> UsageError:
        column = len(self._text.rstrip()) if token is None else token.column
        return syntax_error(self._text, column, problem, hint)


_OPERATORS = {"=", "!=", "<", "<=", ">", ">=", "in", "contains", "glob"}


def parse_value(word: str) -> Value:
    """Return what a bare word stands for: a number, seconds, a moment in Unix seconds, a truth, nothing, or a text."""
    lower = word.lower()
    if lower in ("true", "false"):
        return lower == "true"
    if lower in ("none", "null"):
        return None
    if _NUMBER.fullmatch(word):
        number = float(word)
        return int(word) if re.fullmatch(r"[+-]?\d{1,18}", word) else number
    if (duration := _DURATION.fullmatch(word)) is not None:
        return float(duration[1]) * UNITS_S[duration[2]]
    return word


def moment(value: Value) -> Value:
    """Return a date as Unix seconds of local time; any other value as it is."""
    if not isinstance(value, str) or not _DATE.fullmatch(value):
        return value
    text = value.replace(" ", "T")
    form = {10: "%Y-%m-%d", 16: "%Y-%m-%dT%H:%M"}.get(len(text), "%Y-%m-%dT%H:%M:%S")
    try:
        return time.mktime(time.strptime(text, form))
    except (ValueError, OverflowError):
        return value


def _as_it_is(value: Value) -> Value:
    return value
