"""The points of a sweep: parse `--grid train.lr=1e-4,3e-4` into settings and run names. Pure functions of text."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from headway.errors import UsageError

MOST = 1000
"""Points of a sweep: Slurm's default limit for an array."""
LONGEST = 64
"""Characters of a run name."""
_EXAMPLE = "for example --grid train.lr=1e-4,3e-4"
_CLOSES = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class GridAxis:
    """A key of the recipe, and its values as written."""

    key: str
    values: tuple[str, ...]


def parse_grid(texts: Sequence[str], settings: Sequence[str] = ()) -> tuple[GridAxis, ...]:
    """Parse the axes of a grid, each `key=value,value`; `settings` are those that all points share."""
    if not texts:
        raise UsageError("nothing to sweep over", hint=_EXAMPLE)
    axes = tuple(map(_axis, texts))
    twice = [key for key, count in Counter(axis.key for axis in axes).items() if count > 1]
    if twice:
        raise UsageError(f"--grid {twice[0]} is given twice", hint=f"list all values in one: --grid {twice[0]}=A,B,C")
    shared = {text.partition("=")[0].strip() for text in settings}
    both = [axis.key for axis in axes if axis.key in shared]
    if both:
        raise UsageError(f"{both[0]} is set by --grid and by --set", hint="remove one of them")
    count = prod(len(axis.values) for axis in axes)
    if count > MOST:
        raise UsageError(f"the grid has {count:,} points, at most {MOST:,} are allowed", hint="split the sweep")
    return axes


def points(axes: Sequence[GridAxis]) -> list[dict[str, str]]:
    """All combinations of values, by key; the last axis changes fastest."""
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def short_keys(axes: Sequence[GridAxis]) -> dict[str, str]:
    """The name of each key in run names and tables: its last part, or all of it if two keys end alike."""
    names = {axis.key: axis.key.rpartition(".")[2] for axis in axes}
    uses = Counter(names.values())
    return {key: name if uses[name] == 1 else key for key, name in names.items()}


def point_names(sweep: str, axes: Sequence[GridAxis]) -> list[str]:
    """A run name per point, `sweep-lr_1e-4-seed_2`; numbered if such names would be too long or not unique."""
    short = short_keys(axes)
    names = [
        "-".join([sweep, *(f"{_plain(short[key])}_{_plain(value)}" for key, value in point.items())])
        for point in points(axes)
    ]
    if len(set(names)) == len(names) and max(map(len, names)) <= LONGEST:
        return names
    width = len(str(len(names) - 1))
    return [f"{sweep}-{number:0{width}d}" for number in range(len(names))]


def _plain(text: str) -> str:
    """Only characters that a folder name may hold."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text.strip("\"'[]{} ")).strip("_")


def _axis(text: str) -> GridAxis:
    key, equals, rest = text.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise UsageError(f"--grid {text}: expected key=value,value", hint=_EXAMPLE)
    values = tuple(part.strip() for part in _split(key, rest))
    if not all(values):
        what = "has no values" if not any(values) else "has an empty value"
        raise UsageError(f"--grid {key} {what}", hint=_EXAMPLE)
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise UsageError(f"--grid {key} has {twice[0]} twice", hint="each value is one run")
    return GridAxis(key, values)


def _split(key: str, text: str) -> list[str]:
    """Split at commas, except those inside lists, tables and quotes."""
    parts, closers, quote = [""], list[str](), ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _CLOSES:
            closers.append(_CLOSES[letter])
        elif letter in _CLOSES.values():
            if not closers or closers.pop() != letter:
                raise _unbalanced(key, text)
        elif letter == "," and not closers:
            parts.append("")
            continue
        parts[-1] += letter
    if closers or quote:
        raise _unbalanced(key, text)
    return parts


def _unbalanced(key: str, text: str) -> UsageError:
    return UsageError(
        f"--grid {key}={text}: unbalanced bracket or quote",
        hint=f"a list needs its own brackets: --grid '{key}=[1,2],[3,4]'",
    )
