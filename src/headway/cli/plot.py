"""Lines over steps as characters: braille dots where the terminal has them, else plain ASCII; and as a picture file."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.errors import UsageError
from headway.track.store import SeriesView

MARKS = "ox+*#@%&"
"""Of lines in plain characters, and beside their names."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a braille character, by row and column."""
HEIGHT, LABEL = 14, 9
"""Lines of a plot, and characters left of it."""


def has_braille() -> bool:
    """Whether standard output takes braille characters."""
    try:
        "⣿".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def draw(views: Sequence[SeriesView], width: int, *, ascii_only: bool, height: int = HEIGHT) -> list[str]:
    """Return the lines of a plot with axes; each line of it goes from its buckets' minima to their maxima."""
    drawn = [view for view in views if _finite(view)]
    if not drawn:
        return ["nothing to plot: no finite value"]
    low = min(float(value) for view in drawn for value in _finite(view, "minimum"))
    high = max(float(value) for view in drawn for value in _finite(view, "maximum"))
    first, last = (f(int(view.steps[at]) for view in drawn) for f, at in ((min, 0), (max, -1)))
    if low == high:
        low, high = low - abs(low) / 2 - (low == 0), high + abs(high) / 2 + (high == 0)
    columns = max(10, width - LABEL - 2)
    per = (1, 1) if ascii_only else (2, 4)
    grids = [_rasterize(view, first, last, low, high, columns * per[0], height * per[1]) for view in drawn]
    body = _ascii_rows(grids, columns, height) if ascii_only else _braille_rows(grids, columns, height)
    corner, edge = ("+", "|") if ascii_only else ("└", "│")
    lines = [f"{_axis(row, height, low, high):>{LABEL}} {edge}{text}".rstrip() for row, text in enumerate(body)]
    lines.append(f"{'':{LABEL}} {corner}{('-' if ascii_only else '─') * columns}")
    left, right = f"step {first:,}", f"{last:,}"
    lines.append(f"{'':{LABEL + 2}}{left}{right:>{max(len(right) + 1, columns - len(left))}}")
    return lines


def _finite(view: SeriesView, which: str = "mean") -> list[float]:
    return [value for value in getattr(view, which).tolist() if math.isfinite(value)]


def _axis(row: int, height: int, low: float, high: float) -> str:
    """Return the value of a row, for the top, the middle and the bottom one."""
    if row not in (0, height // 2, height - 1):
        return ""
    return f"{high - (high - low) * row / (height - 1):.4g}"[:LABEL]


def _rasterize(
    view: SeriesView, first: int, last: int, low: float, high: float, columns: int, rows: int
) -> dict[int, tuple[int, int]]:
    """Return the dots of a line: by column, its lowest and highest row from the top."""
    import numpy as np

    known = np.isfinite(view.minimum) & np.isfinite(view.maximum)
    places = np.rint((view.steps[known] - first) / max(1, last - first) * (columns - 1)).astype(np.int64)
    tops, bottoms = (
        np.rint((high - values[known]) / (high - low) * (rows - 1)).astype(np.int64)
        for values in (view.maximum, view.minimum)
    )
    begins = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]])) if len(places) else places
    spans = zip(np.minimum.reduceat(tops, begins).tolist(), np.maximum.reduceat(bottoms, begins).tolist(), strict=True)
    return dict(zip(places[begins].tolist(), spans, strict=True))


def _ascii_rows(grids: Sequence[dict[int, tuple[int, int]]], columns: int, height: int) -> list[str]:
    cells = [[" "] * columns for _ in range(height)]
    for number, grid in reversed(list(enumerate(grids))):
        for column, (top, bottom) in grid.items():
            for row in range(top, bottom + 1):
                cells[row][column] = MARKS[number % len(MARKS)]
    return ["".join(row) for row in cells]


def _braille_rows(grids: Sequence[dict[int, tuple[int, int]]], columns: int, height: int) -> list[str]:
    bits = [[0] * columns for _ in range(height)]
    for grid in grids:
        for column, (top, bottom) in grid.items():
            for row in range(top, bottom + 1):
                bits[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in bits]


def save_picture(views: Sequence[SeriesView], key: str, path: Path) -> None:
    """Write a plot as PNG, SVG or PDF: means as lines, and the range of each bucket as a band."""
    figure, axes = new_axes(path)
    from matplotlib.ticker import MaxNLocator

    for view in views:
        (line,) = axes.plot(view.steps, view.mean, linewidth=1.2, label=view.run)
        if view.width > 1:
            axes.fill_between(view.steps, view.minimum, view.maximum, color=line.get_color(), alpha=0.35, linewidth=0.8)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 2.5
    axes.set_ylabel(key)
    if len(views) > 1:
        axes.legend(frameon=False, fontsize="small", ncols=1 if len(views) <= 12 else 3)
    save_figure(figure, path)


def new_axes(path: Path) -> tuple[Any, Any]:
    """Return a figure that can be written to a path, and its axes; raise UsageError if it cannot be."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"cannot plot into {path}", hint="the name ends in .png, .svg or .pdf")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("the matplotlib package is not installed", hint="pip install 'headway[plot]'") from error
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="choose another file") from error
