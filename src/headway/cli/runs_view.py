"""Tables of runs."""

import time
from collections.abc import Sequence

from headway.cli.text import columns, duration, printable
from headway.track.store import Name, RunRow, value_of
from headway.track.store.query import MOMENTS, Value

COLUMNS = {"run": 3, "state": 11, "step": 9, "loss": 7, "on": 6, "started": 11, "took": 8}
"""Columns, and how wide each is at least."""
DROPPED = ("started", "took", "on", "loss")
"""Columns that narrow terminals go without, in this order."""
LEFT = ("run", "state", "started")
DURATIONS = ("took", "age")


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
    on = "-" if summary.workers is None else f"{summary.workers} {summary.device}"
    return (summary.name, summary.state, _step(row), loss, on, _date(summary.started), duration(summary.seconds))


def _step(row: RunRow) -> str:
    total = "" if row.summary.total_steps is None else f"/{row.summary.total_steps}"
    return f"{row.summary.step}{total}"


def _date(wall: float | None) -> str:
    return "-" if wall is None else time.strftime("%m-%d %H:%M", time.localtime(wall))


def column_table(rows: Sequence[RunRow], names: Sequence[tuple[str, Name]], now: float) -> list[str]:
    """Return a table of the run, its state and the columns asked for; a narrow terminal goes without the state."""
    head = ["run", "state", *(text for text, _ in names)]
    table = [
        head,
        *(
            [row.folder.name, row.summary.state, *(_shown(name, value_of(row, name, now)) for _, name in names)]
            for row in rows
        ),
    ]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    if sum(widths) + 2 * len(widths) - 2 > columns(200):
        table, widths = [[row[0], *row[2:]] for row in table], [widths[0], *widths[2:]]
    left = {0, *([1] if len(widths) > len(names) + 1 else [])}
    return [
        "  ".join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in table
    ]


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
