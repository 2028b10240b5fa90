"""HTML for notebooks: tables and a small plot, without a script, a link or a style sheet; every text is escaped."""

import html
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 480, 120


def escape(value: object) -> str:
    """Return a value as text in HTML; control characters become a visible mark."""
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(value))
    return html.escape(text, quote=True)


def table(head: Sequence[object], rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """Return a table; numbers are aligned to the right."""
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    text = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{text}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def plot(steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64], title: str) -> str:
    """Return a line as SVG; of many steps, the smallest and largest value of each pixel column."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if not len(values):
        return f"<p>{escape(title)}: no values</p>"
    low, high = float(values.min()), float(values.max())
    span_x, span_y = max(int(steps[-1] - steps[0]), 1), (high - low) or 1.0
    columns = ((steps - steps[0]) * (WIDTH - 1) // span_x).astype(np.int64)
    points = []
    for column in np.unique(columns):
        here = values[columns == column]
        for value in dict.fromkeys((float(here.min()), float(here.max()))):
            points.append(f"{column},{(high - value) / span_y * (HEIGHT - 1):.1f}")
    label = f"{title}: {number(values[0])} at step {steps[0]:,}, {number(values[-1])} at step {steps[-1]:,}"
    return (
        f'<figure><svg viewBox="0 -2 {WIDTH} {HEIGHT + 4}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f'<polyline fill="none" stroke="currentColor" points="{" ".join(points)}"/></svg>'
        f"<figcaption>{escape(label)}</figcaption></figure>"
    )


def number(value: object) -> str:
    """Return a number with four digits; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td style="text-align:right">{escape(number(value))}</td>'
    return f"<td>{escape('' if value is None else value)}</td>"
