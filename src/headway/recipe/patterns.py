"""Patterns over dotted names: `*` matches one part, `**` any number of parts."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from headway.errors import RecipeError

Pattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9_*]+(\.[A-Za-z0-9_*]+)*$")]
"""Parameter or layer names: `*` matches one part, or some letters of one; `**` any number of parts."""


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name; `*` next to letters matches the rest of that part."""
    regex = re.escape(pattern).replace(r"\*\*", r".+").replace(r"\*", r"[^.]+")
    return re.fullmatch(regex, name) is not None


def first_match(lists: Sequence[Iterable[str]], name: str) -> int | None:
    """Return the index of the first list with a pattern that matches a name."""
    matching = (i for i, patterns in enumerate(lists) if any(matches(pattern, name) for pattern in patterns))
    return next(matching, None)


def matched(key: str, patterns: Iterable[str], names: Sequence[str]) -> frozenset[str]:
    """Return the names that match; raise RecipeError, with similar names, for a pattern that matches none."""
    matched_names = set[str]()
    for pattern in patterns:
        names_of_pattern = {name for name in names if matches(pattern, name)}
        if not names_of_pattern:
            plain = {re.sub(r"\b\d+\b", "*", name) for name in names}
            near = difflib.get_close_matches(pattern, sorted(plain), n=3, cutoff=0.3)
            hint = f"did you mean {' or '.join(near)}?" if near else "headway checkpoint show RUN --tensors"
            raise RecipeError(f"{key}: no parameter of the model matches {pattern!r}", hint=hint)
        matched_names |= names_of_pattern
    return frozenset(matched_names)
