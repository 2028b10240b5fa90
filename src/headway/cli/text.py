"""How verbs print: JSON for programs, short numbers for people."""

import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from headway.errors import plural as plural

_GROUPS = "agent|checkpoint|cluster|data|hardware|model|node|recipe|rl|runs|secrets|tenants|tokens|trace|users"
_COMMAND = re.compile(
    rf"`[^`]+`|\bheadway (?:(?:{_GROUPS}) )?[a-z]+(?: [a-z]+(?= --))?"
    r"(?: (?:--[\w-]+(?: [^\s,;(-][^\s,;]*)?|[a-z]*[^\sa-z,;(][^\s,;]*))*"
)
"""A command in a text, as far as it can be told from the words after it: options, their values, names and paths."""


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


def wrap_lines(text: str, label: str = "", indent: int = 2, width: int | None = None) -> list[str]:
    """Wrap a text at the width of the terminal, after a label, with a hanging indent. A command in it is copied as a
    whole, so it is not broken, even where it is longer than that."""
    lines = textwrap.wrap(
        _COMMAND.sub(lambda match: match[0].replace(" ", "\0"), text),
        width or columns(),
        initial_indent=label,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row under a line of headings, in columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in (head, *rows)]


def next_line(*commands: str) -> str:
    """Return `next: A, B`; one line per command where that does not fit the terminal, since none may be broken."""
    line = f"next: {', '.join(commands)}"
    return line if len(line) <= columns() else "next: " + "\n      ".join(commands)


def first_names(names: Sequence[str]) -> str:
    """Return the first three names and how many more there are."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more:,} more" if more > 0 else "")


def shortened(text: str, width: int) -> str:
    """Return a line of at most WIDTH characters, with dots for what was cut."""
    return text if len(text) <= width else text[: width - 3] + "..."


def printable(text: str) -> str:
    """Return a text from a file with spaces for whatever would control a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
