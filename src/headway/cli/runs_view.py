"""Tables of runs."""

import time
from collections.abc import Sequence

from headway.cli.text import columns, duration, printable, shortened
from headway.track.store import Name, RunRow, value_of
from headway.track.store.query import MOMENTS, Value

COLUMNS = {"run": 3, "state": 11, "step": 9, "loss": 7, "on": 6, "started": 11, "took": 8}
"""Columns, and how wide each is at least."""
DROPPED = ("started", "took", "on", "loss")
"""Columns that narrow terminals go without, in this order."""
LEFT = ("run", "state", "started")
DURATIONS = ("took", "age")
LEAST_NAME = 16
"""Characters of a run's name that always show."""


def run_table(rows: Sequence[RunRow]) -> list[str]:
    """Return the usual table of runs."""
    names = tuple(COLUMNS)
    cells = [names, *(_cells(row) for row in rows)]
    widths = [max(least, *(len(row[i]) for row in cells)) for i, least in enumerate(COLUMNS.values())]
    shown = list(range(len(COLUMNS)))
    for name in DROPPED:  # as a narrow terminal has no room for all
        if sum(widths[i] + 2 for i in shown) - 2 > columns(200):
            shown.remove(names.index(name))
    sides = ["<" if name in LEFT else ">" for name in names]
    return ["  ".join(f"{row[i]:{sides[i]}{widths[i]}}" for i in shown).rstrip() for row in cells]


def _cells(row: RunRow) -> tuple[str, ...]:
    summary = row.summary
    loss = "-" if summary.loss is None else f"{summary.loss:.4f}"
    if summary.reward is not None:  # of a policy, whose loss is about 0 however good it is
        loss = f"reward {summary.reward:.3f}"
    on = "-" if summary.workers is None else f"{summary.workers} {summary.device}"
    return (summary.name, summary.state, _step(row), loss, on, _date(summary.started), duration(summary.seconds))


def _step(row: RunRow) -> str:
    total = "" if row.summary.total_steps is None else f"/{row.summary.total_steps}"
    return f"{row.summary.step}{total}"


def _date(wall: float | None) -> str:
    return "-" if wall is None else time.strftime("%m-%d %H:%M", time.localtime(wall))


def column_table(rows: Sequence[RunRow], names: Sequence[tuple[str, Name]], now: float) -> list[str]:
    """Return a table of the run, its state and the columns asked for.

    A narrow terminal goes without the state, then with shortened names, then has a line per column.
    """
    head = ["run", "state", *(text for text, _ in names)]
    table = [
        head,
        *(
            [row.folder.name, row.summary.state, *(_shown(name, value_of(row, name, now)) for _, name in names)]
            for row in rows
        ),
    ]
    room = columns(200)
    if _width(table) > room:
        table = [[row[0], *row[2:]] for row in table]
    over = _width(table) - room
    if over > 0:  # long names are cut, as far as they can still be told apart
        longest = max(LEAST_NAME, max(len(row[0]) for row in table) - over)
        table = [[shortened(row[0], longest), *row[1:]] for row in table]
    if _width(table) > room:
        return [line for row in table[1:] for line in _block(table[0], row)]
    widths = _widths(table)
    left = {0, *([1] if len(widths) > len(names) + 1 else [])}
    return [
        "  ".join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in table
    ]


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in table) for i in range(len(table[0]))]


def _width(table: Sequence[Sequence[str]]) -> int:
    return sum(_widths(table)) + 2 * len(table[0]) - 2


def _block(head: Sequence[str], row: Sequence[str]) -> list[str]:
    """Return a row as lines, where there are more columns than fit."""
    width = max(len(name) for name in head)
    pairs = zip(head[1:], row[1:], strict=True)
    return [row[0], *(shortened(f"  {name:{width}}  {cell}", columns()) for name, cell in pairs)]


def _shown(name: Name, value: Value) -> str:
    """Return a value for a table."""
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ",".join(value) or "-"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.key in MOMENTS:
            return _date(value)
        if name.key in DURATIONS:
            return duration(value)
        return f"{value:.5g}" if isinstance(value, float) else str(value)
    return str(value).lower() if isinstance(value, bool) else printable(str(value)[:40])
