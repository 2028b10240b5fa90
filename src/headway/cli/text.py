"""How verbs print: JSON for programs, short numbers for people."""

import shutil
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json


def columns(widest: int = 80) -> int:
    """Return how wide text may be: the terminal's width, at most `widest`, which is also the width of a pipe."""
    return max(40, min(widest, shutil.get_terminal_size((widest, 24)).columns))


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    print(to_json(value, indent=2, inf_nan_mode="null").decode())


def count(number: float) -> str:
    """Return a count with about three digits: 812, 12.3k, 4.56M, 7.0B."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.3g}" if number % 1 else f"{number:.0f}"


def duration(seconds: float) -> str:
    """Return hh:mm:ss, with days in front if there are any."""
    total = int(seconds)
    days, rest = divmod(total, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


def short_seconds(seconds: float) -> str:
    """Return seconds with three digits: 0.0927 s, 1.23 s, 52.4 s."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:#.3g} s"


def byte_size(number: float) -> str:
    """Return bytes with four digits: 992 B, 1.985 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"


def plural(number: int, noun: str) -> str:
    """Return `1 file` or `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_names(names: Sequence[str]) -> str:
    """Return the first three names and how many more there are."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more:,} more" if more > 0 else "")


def shortened(text: str, width: int) -> str:
    """Return a line of at most WIDTH characters, with dots for what was cut."""
    return text if len(text) <= width else text[: width - 3] + "..."
