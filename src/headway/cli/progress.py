"""Progress on standard error: bars and status lines on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def terminal_bars(*columns: str) -> "Progress":
    """Return bars that vanish at the end; a column is a text format, or the kind of one of rich's: Bar, Download."""
    from rich import progress  # takes 45 ms, and only terminals show bars
    from rich.console import Console

    kinds = [
        getattr(progress, f"{column}Column")() if column.isalpha() else progress.TextColumn(column)
        for column in columns
    ]
    return progress.Progress(*kinds, console=Console(stderr=True), transient=True)


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield what reports the work in progress: a line that is overwritten on a terminal, one line each elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(f"running {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console  # takes 30 ms, and only terminals show it

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(f"running {text}")
