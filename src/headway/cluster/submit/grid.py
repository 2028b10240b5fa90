"""The points of a sweep: `--grid train.lr=1e-4,3e-4` to settings and names. Pure functions of text."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from headway.errors import UsageError

__all__ = ["MOST", "GridAxis", "parse_grid", "point_names", "points", "short_keys"]

MOST = 1000
"""Points of one sweep: as many as Slurm takes for an array where nobody has said more."""
LONGEST = 64
"""Of a run's name."""
_EXAMPLE = "for example --grid train.lr=1e-4,3e-4"
_CLOSES = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class GridAxis:
    """A key of the recipe, and the values that it takes in turn, as they were written."""

    key: str
    values: tuple[str, ...]


def parse_grid(texts: Sequence[str], settings: Sequence[str] = ()) -> tuple[GridAxis, ...]:
    """The axes of a grid, each `key=value,value`; `settings` are those that all points share."""
    if not texts:
        raise UsageError("nothing to sweep over", hint=_EXAMPLE)
    axes = tuple(map(_axis, texts))
    twice = [key for key, count in Counter(axis.key for axis in axes).items() if count > 1]
    if twice:
        raise UsageError(f"--grid {twice[0]} is there twice", hint=f"all values in one: --grid {twice[0]}=A,B,C")
    shared = {text.partition("=")[0].strip() for text in settings}
    both = [axis.key for axis in axes if axis.key in shared]
    if both:
        raise UsageError(f"{both[0]} is set by --grid and by --set", hint="leave one of them out")
    count = prod(len(axis.values) for axis in axes)
    if count > MOST:
        raise UsageError(f"the grid has {count:,} points, and {MOST:,} are the most", hint="several smaller sweeps")
    return axes


def points(axes: Sequence[GridAxis]) -> list[dict[str, str]]:
    """All combinations of values, by key; the last axis changes fastest."""
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def short_keys(axes: Sequence[GridAxis]) -> dict[str, str]:
    """What each key is called in names and tables: its last part, or all of it where two end alike."""
    last = {axis.key: axis.key.rpartition(".")[2] for axis in axes}
    often = Counter(last.values())
    return {key: name if often[name] == 1 else key for key, name in last.items()}


def point_names(sweep: str, axes: Sequence[GridAxis]) -> list[str]:
    """A run's name for each point, `sweep-lr_1e-4-seed_2`; by number where those would be too long, or not differ."""
    short = short_keys(axes)
    made = [
        "-".join([sweep, *(f"{_plain(short[key])}_{_plain(value)}" for key, value in point.items())])
        for point in points(axes)
    ]
    if len(set(made)) == len(made) and max(map(len, made)) <= LONGEST:
        return made
    width = len(str(len(made) - 1))
    return [f"{sweep}-{number:0{width}d}" for number in range(len(made))]


def _plain(text: str) -> str:
    """Only what a folder's name may hold."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text.strip("\"'[]{} ")).strip("_")


def _axis(text: str) -> GridAxis:
    key, equals, rest = text.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise UsageError(f"--grid {text}: not of the form key=value,value", hint=_EXAMPLE)
    values = tuple(part.strip() for part in _split(key, rest))
    if not all(values):
        what = "has no values" if not any(values) else "has a value that is empty"
        raise UsageError(f"--grid {key} {what}", hint=_EXAMPLE)
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise UsageError(f"--grid {key} has {twice[0]} twice", hint="each value makes one run")
    return GridAxis(key, values)


def _split(key: str, text: str) -> list[str]:
    """Values at the commas between them; those inside of lists, tables and quotes are a value's own."""
    parts, open_, quote = [""], list[str](), ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _CLOSES:
            open_.append(_CLOSES[letter])
        elif letter in _CLOSES.values():
            if not open_ or open_.pop() != letter:
                raise _unbalanced(key, text)
        elif letter == "," and not open_:
            parts.append("")
            continue
        parts[-1] += letter
    if open_ or quote:
        raise _unbalanced(key, text)
    return parts


def _unbalanced(key: str, text: str) -> UsageError:
    return UsageError(
        f"--grid {key}={text}: a bracket or quote has no partner",
        hint=f"a value that is a list has brackets of its own: --grid '{key}=[1,2],[3,4]'",
    )
