"""Progress on standard error: bars and status lines on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headway.cli.text import columns

if TYPE_CHECKING:
    from rich.progress import Progress

EVERY_S = 10.0
"""Between lines where no terminal lets one overwrite the other."""
LONG_S = 2.0
"""Work that takes longer than this shows its progress."""


class Counting:
    """Counts finished items on standard error, if the work takes long."""

    def __init__(self, what: str) -> None:
        self._what, self._terminal = what, sys.stderr.isatty()
        self._next, self._shown = time.monotonic() + LONG_S, False

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._terminal:
            print(file=sys.stderr, flush=True)

    def show(self, done: int, number: int) -> None:
        """Show how many are done."""
        if time.monotonic() < self._next:
            return
        line = f"{self._what}: {done} of {number}"[: columns() - 1]
        before, after = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{before}{line}", end=after, file=sys.stderr, flush=True)
        self._next, self._shown = time.monotonic() + (0.1 if self._terminal else EVERY_S), True


def terminal_bars(*columns: str) -> "Progress":
    """Return bars that vanish at the end; a column is a text format, or the kind of one of rich's: Bar, Download."""
    from rich import progress  # takes 45 ms, and only terminals show bars
    from rich.console import Console

    kinds = [
        getattr(progress, f"{column}Column")() if column.isalpha() else progress.TextColumn(column)
        for column in columns
    ]
    return progress.Progress(*kinds, console=Console(stderr=True), transient=True,
                             disable=not sys.stderr.isatty())  # fmt: skip


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield what reports the work in progress: a line that is overwritten on a terminal, one line each elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(f"running {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console  # takes 30 ms, and only terminals show it

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(f"running {text}")
