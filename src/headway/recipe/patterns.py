"""Patterns over dotted names: `*` stands for any one part, `**` for any number of them."""

import difflib
import re
from collections.abc import Iterable, Sequence

from headway.errors import RecipeError

__all__ = ["first_match", "matched", "matches"]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is of a name; `*` beside letters stands for the rest of that part."""
    regex = re.escape(pattern).replace(r"\*\*", r".+").replace(r"\*", r"[^.]+")
    return re.fullmatch(regex, name) is not None


def first_match(lists: Sequence[Iterable[str]], name: str) -> int | None:
    """Which of several lists of patterns is the first to have one of a name."""
    found = (i for i, patterns in enumerate(lists) if any(matches(pattern, name) for pattern in patterns))
    return next(found, None)


def matched(key: str, patterns: Iterable[str], names: Sequence[str]) -> frozenset[str]:
    """The names that patterns are of; RecipeError, with the nearest there are, for one that is of none."""
    found = set[str]()
    for pattern in patterns:
        of = {name for name in names if matches(pattern, name)}
        if not of:
            plain = {re.sub(r"\b\d+\b", "*", name) for name in names}
            near = difflib.get_close_matches(pattern, sorted(plain), n=3, cutoff=0.3)
            hint = f"the nearest there are: {', '.join(near)}" if near else "headway checkpoint show RUN --tensors"
            raise RecipeError(f"{key} has {pattern}, and the model has no parameter of such a name", hint=hint)
        found |= of
    return frozenset(found)
