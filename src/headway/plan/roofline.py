"""Where operations stand under a chip's roofline: as text, or drawn to a file.

The roof is what a chip can do at best (Williams, Waterman and Patterson, CACM 52, 2009): bandwidth times intensity
(FLOPs for each byte moved) up to the ridge, the peak beyond. What an operation reaches of it is the time it must take
at least over the time it takes, which holds as well for one that only moves bytes and so has no place on the chart.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["PlacedPoint", "RooflinePoint", "draw_roofline", "place", "text_roofline"]

T = 1e12
HEADS = ("FLOP/byte", "TFLOP/s", "of roof", "of time", "bound by")
MOST = 12  # points shown: more letters than that nobody can tell apart
ROWS = 16
MARGIN = 8  # columns left of the chart, for the labels of its rows
NARROWEST, WIDEST = 64, 80
COLOURS = {"memory": "#0072b2", "compute": "#d55e00"}  # told apart by the colour-blind; the shapes differ as well
MARKERS = {"memory": "o", "compute": "s"}
GAPS = (2, 10, 20, 32)  # between a marker and its letter; from the second on a thin line joins them
CLOSE = 9  # printer's points between markers whose letters stand together
INK, FAINT, GRID = "#333333", "#8a8a8a", "#e4e4e4"

Mark = tuple[str, float, float, float]  # letter, centre and radius, in printer's points
Box = tuple[float, float, float, float]  # left, bottom, right, top: printer's points from the figure's corner


@dataclass(frozen=True)
class RooflinePoint:
    """An operation, or all of its kind in a step: FLOPs, bytes and seconds are then sums."""

    name: str
    flops: float
    bytes: float
    seconds: float
    """That the plan predicts, or that were measured."""


@dataclass(frozen=True)
class PlacedPoint:
    """A point and what the roof makes of it."""

    point: RooflinePoint
    intensity: float
    """FLOPs for each byte; infinite where none moves."""
    flops_s: float
    of_roof: float
    """Share of what the chip could do at this intensity; over 1 when fewer bytes moved than were counted."""
    of_time: float
    """Share of all points' seconds."""
    bound: Literal["memory", "compute"]

    @property
    def drawable(self) -> bool:
        """Whether it has a place on logarithmic axes."""
        return self.flops_s > 0 and self.intensity < math.inf


def place(points: Sequence[RooflinePoint], peak_flops_s: float, bandwidth_bytes_s: float) -> list[PlacedPoint]:
    """Points that take time, the longest first."""
    total_s = sum(point.seconds for point in points)
    if not total_s > 0:
        raise UsageError("no operation takes any time: there is nothing to place under the roof")
    placed = []
    for point in sorted(points, key=lambda point: -point.seconds):
        if not point.seconds > 0:
            continue
        memory_s, compute_s = point.bytes / bandwidth_bytes_s, point.flops / peak_flops_s
        placed.append(
            PlacedPoint(
                point,
                intensity=point.flops / point.bytes if point.bytes else math.inf,
                flops_s=point.flops / point.seconds,
                of_roof=max(memory_s, compute_s) / point.seconds,
                of_time=point.seconds / total_s,
                bound="memory" if memory_s >= compute_s else "compute",
            )
        )
    return placed


def text_roofline(
    points: Sequence[RooflinePoint], peak_flops_s: float, bandwidth_bytes_s: float, title: str, width: int = 78
) -> str:
    """A chart of letters under the roof, and a line for each: at most `width` columns, and 80.

    Letters go by time, a for the longest. One whose place is taken stands beside it.
    """
    if width < NARROWEST:
        raise UsageError(f"a roofline does not fit into {width} columns", hint=f"{NARROWEST} or more")
    width = min(width, WIDEST)
    placed = place(points, peak_flops_s, bandwidth_bytes_s)
    shown = placed[:MOST]
    lines = [_cut(title, width), _roof_line(peak_flops_s, bandwidth_bytes_s), ""]
    lines += _chart(shown, peak_flops_s, bandwidth_bytes_s, width)
    lines += ["", *_legend(shown, width)]
    lines += [f"   {note}" for note in _notes(placed)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


@dataclass(frozen=True)
class _Frame:
    """What the axes span."""

    left: float
    right: float
    low: float
    high: float

    def across(self, intensity: float) -> float:
        """Place from 0 at the left to 1 at the right."""
        return math.log(intensity / self.left) / math.log(self.right / self.left)

    def down(self, flops_s: float) -> float:
        """Place from 0 at the top to 1 at the bottom."""
        return math.log(self.high / flops_s) / math.log(self.high / self.low)


def _frame(placed: Sequence[PlacedPoint], peak: float, bandwidth: float) -> _Frame:
    """Room for all points, the ridge, and a stretch of the roof on either side of it."""
    drawn = [placed_point for placed_point in placed if placed_point.drawable]
    ridge = peak / bandwidth
    left = min([ridge / 10, *(placed_point.intensity / 2 for placed_point in drawn)])
    right = max([ridge * 10, *(placed_point.intensity * 2 for placed_point in drawn)])
    low = min([left * bandwidth, *(placed_point.flops_s / 2 for placed_point in drawn)])
    high = max([peak * 1.5, *(placed_point.flops_s * 1.2 for placed_point in drawn)])
    return _Frame(left, right, low, high)


def _chart(placed: Sequence[PlacedPoint], peak: float, bandwidth: float, width: int) -> list[str]:
    frame = _frame(placed, peak, bandwidth)
    columns = width - MARGIN
    cells = [[" "] * columns for _ in range(ROWS)]
    for column in range(columns):
        intensity = frame.left * (frame.right / frame.left) ** (column / (columns - 1))
        height = frame.down(min(peak, bandwidth * intensity)) * (ROWS - 1)
        row = min(ROWS - 1, round(height))
        # Three characters stand at three heights in their row, so that a gentle slope has no stairs.
        cells[row][column] = "'-."[min(2, int((height - row + 0.5) * 3))]
    for letter, placed_point in _lettered(placed):
        if letter != "-":
            row = round(frame.down(placed_point.flops_s) * (ROWS - 1))
            _put(cells[row], round(frame.across(placed_point.intensity) * (columns - 1)), letter)
    marks = {round(frame.down(tick) * (ROWS - 1)): f"{tick / T:g}" for tick in _decades(frame.low, frame.high)}
    rows = [f"{marks.get(row, ''):>{MARGIN - 2}} |{''.join(line)}" for row, line in enumerate(cells)]
    return [f"{'TFLOP/s':>{MARGIN - 1}}", *rows, *_bottom(frame, columns)]


def _lettered(placed: Sequence[PlacedPoint]) -> list[tuple[str, PlacedPoint]]:
    """A letter for each in the chart, a dash for one without a place there."""
    letters = iter("abcdefghijkl")
    return [(next(letters) if placed_point.drawable else "-", placed_point) for placed_point in placed]


def _put(row: list[str], column: int, letter: str) -> None:
    """At the column, or at the nearest one without a letter."""
    free = [near for near in range(len(row)) if not row[near].isalpha()]
    row[min(free, key=lambda near: abs(near - column))] = letter


def _bottom(frame: _Frame, columns: int) -> list[str]:
    axis, labels = ["-"] * columns, [" "] * (columns + MARGIN)
    for tick in _decades(frame.left, frame.right):
        column = round(frame.across(tick) * (columns - 1))
        axis[column] = "+"
        text = f"{tick:g}"
        start = min(column - len(text) // 2, columns - len(text))
        labels[MARGIN + start : MARGIN + start + len(text)] = text
    return [" " * (MARGIN - 1) + "+" + "".join(axis), "".join(labels), f"{'FLOP/byte':>{columns + MARGIN}}"]


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def _legend(placed: Sequence[PlacedPoint], width: int) -> list[str]:
    names = width - 3 - 47
    heads = "{:>10}{:>9}{:>9}{:>9}  {:<8}"
    lines = [f"   {'operation':<{names}}{heads.format(*HEADS)}"]
    for letter, placed_point in _lettered(placed):
        lines.append(
            f"{letter}  {_cut(placed_point.point.name, names):<{names}}{heads.format(*_figures(placed_point))}"
        )
    return lines


def _figures(placed_point: PlacedPoint) -> tuple[str, ...]:
    """What stands under HEADS."""
    intensity = "-" if placed_point.intensity == math.inf else _short(placed_point.intensity)
    return (
        intensity,
        _short(placed_point.flops_s / T),
        _percent(placed_point.of_roof),
        _percent(placed_point.of_time),
        placed_point.bound,
    )


def _short(number: float) -> str:
    """Three digits, and no exponent for thousands."""
    return f"{number:,.0f}" if 100 <= number < 999_999 else f"{number:.3g}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 9.99 else ">999%"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _roof_line(peak: float, bandwidth: float) -> str:
    ridge = _short(peak / bandwidth)
    return f"roof: {bandwidth / T:.3g} TB/s up to {ridge} FLOP/byte, {_short(peak / T)} TFLOP/s beyond"


def _notes(placed: Sequence[PlacedPoint]) -> list[str]:
    shown, hidden = placed[:MOST], placed[MOST:]
    notes = (
        [f"and {len(hidden)} smaller ones, {sum(placed_point.of_time for placed_point in hidden):.1%} of the time"]
        if hidden
        else []
    )
    if not all(placed_point.drawable for placed_point in shown):
        notes.append("-: without FLOPs or bytes there is no place on the chart")
    return notes


def draw_roofline(
    points: Sequence[RooflinePoint], peak_flops_s: float, bandwidth_bytes_s: float, title: str, file: Path
) -> None:
    """The chart as an .svg or .png file: an area for each point's share of the time. Equal input gives equal SVG."""
    if file.suffix not in (".svg", ".png"):
        raise UsageError(f"a roofline cannot be drawn to {file.name}", hint="name a file that ends in .svg or .png")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("the matplotlib package is not installed", hint="pip install 'headway[plot]'") from error
    placed = place(points, peak_flops_s, bandwidth_bytes_s)
    shown = _lettered(placed[:MOST])
    drawn = [(letter, placed_point) for letter, placed_point in shown if placed_point.drawable]
    table = 0.19 * (len(shown) + 3)  # inches
    with rc_context({"svg.hashsalt": "headway", "text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(8.5, 4.6 + table), dpi=150, layout="constrained")
        axes, below = figure.subplots(2, height_ratios=(4.6, table))
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
        _draw_roof(axes, _frame(placed[:MOST], peak_flops_s, bandwidth_bytes_s), peak_flops_s, bandwidth_bytes_s)
        _draw_points(axes, [placed_point for _, placed_point in drawn])
        _draw_table(below, shown, "; ".join(_notes(placed)))
        # Letters are placed by what they would cover, so the axes must stay where they are from here on.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        _draw_letters(axes, drawn, _write_roof(axes, peak_flops_s, bandwidth_bytes_s))
        try:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
        except OSError as error:
            raise UsageError(f"{file}: cannot be written: {error.strerror or error}") from None


def _draw_roof(axes: "Axes", frame: _Frame, peak: float, bandwidth: float) -> None:
    from matplotlib.ticker import FuncFormatter

    ridge = peak / bandwidth
    corners = ([frame.left, ridge, frame.right], [frame.left * bandwidth / T, peak / T, peak / T])
    axes.set(xscale="log", yscale="log", xlim=(frame.left, frame.right), ylim=(frame.low / T, frame.high / T))
    axes.set(xlabel="intensity (FLOP/byte)", ylabel="TFLOP/s")
    axes.grid(which="major", color=GRID, linewidth=0.8)
    axes.grid(which="minor", color=GRID, linewidth=0.3)
    axes.set_axisbelow(True)
    axes.plot([ridge, ridge], [frame.low / T, peak / T], color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.plot(*corners, color=INK, linewidth=1.8, solid_joinstyle="round")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _area(placed_point: PlacedPoint) -> float:
    """Of the marker, in square points; never so small that nobody sees it."""
    return 20 + 900 * placed_point.of_time


def _draw_points(axes: "Axes", placed: Sequence[PlacedPoint]) -> None:
    for bound, colour in COLOURS.items():
        group = [placed_point for placed_point in placed if placed_point.bound == bound]
        at = [placed_point.intensity for placed_point in group], [placed_point.flops_s / T for placed_point in group]
        look: dict[str, Any] = {"marker": MARKERS[bound], "facecolor": colour + "80", "edgecolor": colour}
        axes.scatter(*at, s=[_area(placed_point) for placed_point in group], zorder=3, **look)
        axes.scatter([], [], s=50, label=f"bound by {bound}", **look)
    axes.legend(loc="lower right", title="area: share of the time", title_fontsize=8, fontsize=8, edgecolor=GRID)


def _write_roof(axes: "Axes", peak: float, bandwidth: float) -> list[Box]:
    """Figures along the roof; returns what roof and figures cover."""
    (left, right), ridge = axes.get_xlim(), peak / bandwidth
    ends = [(left, left * bandwidth / T), (ridge, peak / T), (right, peak / T)]
    corners = [(x, y) for x, y in axes.transData.transform(ends) / _pixels(axes)]
    (x0, y0), (x1, y1), _ = corners
    steep = math.degrees(math.atan2(y1 - y0, x1 - x0))
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": INK, "rotation_mode": "anchor"}
    slope = axes.annotate(f"{bandwidth / T:.3g} TB/s", ends[0], (8, 12), rotation=steep, **look)
    flat = axes.annotate(f"{_short(peak / T)} TFLOP/s", ends[1], (6, 5), **look)
    return [*_along(corners), _extent(slope), _extent(flat)]


def _along(corners: Sequence[tuple[float, float]]) -> Iterator[Box]:
    """Small boxes on a line of several pieces."""
    for (x0, y0), (x1, y1) in pairwise(corners):
        count = 1 + int(math.hypot(x1 - x0, y1 - y0) / 4)
        for part in range(count + 1):
            yield _around(x0 + (x1 - x0) * part / count, y0 + (y1 - y0) * part / count, 2, 2)


def _draw_table(axes: "Axes", shown: Sequence[tuple[str, PlacedPoint]], note: str) -> None:
    columns = (0.0, 0.03, 0.53, 0.65, 0.77, 0.89, 0.91)
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(len(shown) + 1.5, -0.5))
    rows: list[tuple[tuple[str, ...], str]] = [(("", "operation", *HEADS), FAINT)]
    rows += [
        ((letter, _cut(placed_point.point.name, 50), *_figures(placed_point)), COLOURS[placed_point.bound])
        for letter, placed_point in shown
    ]
    rows += [(("", note), FAINT)]
    for height, (cells, colour) in enumerate(rows):
        for number, (x, text) in enumerate(zip(columns, cells, strict=False)):
            side: Literal["left", "right"] = "right" if 2 <= number <= 5 else "left"
            ink = colour if number in (0, 6) or colour == FAINT else INK
            weight = "bold" if number == 0 else "normal"
            axes.text(x, height, text, ha=side, va="center", fontsize=8, color=ink, fontweight=weight)


def _draw_letters(axes: "Axes", drawn: Sequence[tuple[str, PlacedPoint]], taken: list[Box]) -> None:
    """Beside the points: each at the nearest place where it covers nothing, or else least."""
    if not drawn:
        return
    spots = axes.transData.transform(
        [(placed_point.intensity, placed_point.flops_s / T) for _, placed_point in drawn]
    ) / _pixels(axes)
    marks = [
        (letter, x, y, math.sqrt(_area(placed_point)) / 2)
        for (letter, placed_point), (x, y) in zip(drawn, spots, strict=True)
    ]
    taken = taken + [_around(x, y, 2 * radius, 2 * radius) for _, x, y, radius in marks]
    legend = axes.get_legend()
    taken += [_extent(legend)] if legend else []
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "fontweight": "bold", "color": INK}
    look |= {"xycoords": "axes fraction", "textcoords": "offset points"}
    for group in _groups(marks):
        text = " ".join(letter for letter, *_ in group)
        x, y, radius = _middle(group)
        width, height = 6.0 * len(text), 8.0
        dx, dy, gap = _free_place(x, y, radius, width, height, taken, _extent(axes))
        taken.append(_around(x + dx, y + dy, width, height))
        line = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.7, "shrinkA": 0, "shrinkB": radius}
        across, up = axes.transAxes.inverted().transform((x * _pixels(axes), y * _pixels(axes)))
        axes.annotate(text, (across, up), (dx, dy), arrowprops=line if gap > GAPS[0] else None, **look)


def _groups(marks: Sequence[Mark]) -> list[list[Mark]]:
    """Marks with those that lie too close for letters of their own."""
    groups: list[list[Mark]] = []
    for mark in marks:
        near = [group for group in groups if math.dist(group[0][1:3], mark[1:3]) < CLOSE]
        if near:
            near[0].append(mark)
        else:
            groups.append([mark])
    return groups


def _middle(group: Sequence[Mark]) -> tuple[float, float, float]:
    """Centre of a group of marks, and a radius that holds all of them."""
    x, y = sum(mark[1] for mark in group) / len(group), sum(mark[2] for mark in group) / len(group)
    return x, y, max(math.dist((x, y), mark[1:3]) + mark[3] for mark in group)


def _free_place(
    x: float, y: float, radius: float, width: float, height: float, taken: Sequence[Box], within: Box
) -> tuple[float, float, float]:
    """From a marker's centre to that of its letters, and the gap between them."""

    def covered(offset: tuple[float, float, float]) -> float:
        box = _around(x + offset[0], y + offset[1], width, height)
        outside = width * height - _common(box, within)
        # Rounded, since the nearest of the places that cover nothing must win, and not the last bits.
        return round(sum(_common(box, other) for other in taken) + 10 * outside, 3)

    return min(_places(radius, width, height), key=covered)


def _places(radius: float, width: float, height: float) -> Iterator[tuple[float, float, float]]:
    for gap in GAPS:
        for angle in (0, 180, 270, 90, 315, 225, 45, 135):
            across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            yield across * (radius + gap + width / 2), up * (radius + gap + height / 2), gap


def _around(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _common(first: Box, second: Box) -> float:
    """The area that two boxes share."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(0.0, width) * max(0.0, height)


def _extent(artist: "Artist") -> Box:
    box = artist.get_window_extent()
    pixels = _pixels(artist)
    return box.x0 / pixels, box.y0 / pixels, box.x1 / pixels, box.y1 / pixels


def _pixels(artist: "Artist") -> float:
    """In a printer's point."""
    figure = artist.get_figure(root=True)
    assert figure, "it was drawn"
    return figure.dpi / 72
