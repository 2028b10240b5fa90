"""Roofline charts of operations on a chip, as text or as an image.

The roof (Williams, Waterman and Patterson, CACM 52, 2009) is bandwidth times intensity (FLOPs per byte) up to the
ridge, the peak beyond. What an operation reaches of it is its minimum time over its time, which also works for
operations without FLOPs, which have no point on the chart.
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

T = 1e12
HEADS = ("FLOP/byte", "TFLOP/s", "of roof", "of time", "bound by")
MOST = 12  # points shown: more letters are hard to tell apart
ROWS = 16
MARGIN = 8  # columns left of the chart, for the labels of its rows
NARROWEST, WIDEST = 64, 80
COLOURS = {"memory": "#0072b2", "compute": "#d55e00"}  # safe for colour blindness; the shapes differ as well
MARKERS = {"memory": "o", "compute": "s"}
GAPS = (2, 10, 20, 32)  # between a marker and its letter; from the second on a thin line joins them
CLOSE = 9  # points (1/72 inch) between markers whose letters are grouped
INK, FAINT, GRID = "#333333", "#8a8a8a", "#e4e4e4"

Mark = tuple[str, float, float, float]  # letter, centre and radius, in points (1/72 inch)
Box = tuple[float, float, float, float]  # left, bottom, right, top, in points from the figure's corner


@dataclass(frozen=True)
class RooflinePoint:
    """An operation, or the sum of all of its kind in a step."""

    name: str
    flops: float
    bytes: float
    seconds: float
    """Predicted or measured."""


@dataclass(frozen=True)
class PlacedPoint:
    """A point relative to the roof."""

    point: RooflinePoint
    intensity: float
    """FLOPs per byte; infinite without bytes."""
    flops_s: float
    of_roof: float
    """Share of the roof at this intensity; over 1 if fewer bytes moved than counted."""
    of_time: float
    """Share of the seconds of all points."""
    bound: Literal["memory", "compute"]

    @property
    def drawable(self) -> bool:
        """Whether it can be drawn on logarithmic axes."""
        return self.flops_s > 0 and self.intensity < math.inf


def place(points: Sequence[RooflinePoint], peak_flops_s: float, bandwidth_bytes_s: float) -> list[PlacedPoint]:
    """Points that take time, longest first."""
    total_s = sum(point.seconds for point in points)
    if not total_s > 0:
        raise UsageError("no operation takes any time: the roofline is empty")
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
    """A text chart with a letter and a row per point, at most `width` and 80 columns wide.

    Letters are sorted by time, a for the longest; overlapping letters are placed side by side.
    """
    if width < NARROWEST:
        raise UsageError(f"a roofline does not fit in {width} columns", hint=f"use {NARROWEST} or more")
    width = min(width, WIDEST)
    placed = place(points, peak_flops_s, bandwidth_bytes_s)
    shown = placed[:MOST]
    lines = [*(_cut(line, width) for line in (title, _roof_line(peak_flops_s, bandwidth_bytes_s))), ""]
    lines += _chart(shown, peak_flops_s, bandwidth_bytes_s, width)
    lines += ["", *_legend(shown, width)]
    lines += [f"   {note}" for note in _notes(placed)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


@dataclass(frozen=True)
class _Frame:
    """The range of the axes."""

    left: float
    right: float
    low: float
    high: float

    def across(self, intensity: float) -> float:
        """Position from 0 at the left to 1 at the right."""
        return math.log(intensity / self.left) / math.log(self.right / self.left)

    def down(self, flops_s: float) -> float:
        """Position from 0 at the top to 1 at the bottom."""
        return math.log(self.high / flops_s) / math.log(self.high / self.low)


def _frame(placed: Sequence[PlacedPoint], peak: float, bandwidth: float) -> _Frame:
    """A frame for all points and the roof on both sides of the ridge."""
    drawn = [item for item in placed if item.drawable]
    ridge = peak / bandwidth
    left = min([ridge / 10, *(item.intensity / 2 for item in drawn)])
    right = max([ridge * 10, *(item.intensity * 2 for item in drawn)])
    low = min([left * bandwidth, *(item.flops_s / 2 for item in drawn)])
    high = max([peak * 1.5, *(item.flops_s * 1.2 for item in drawn)])
    return _Frame(left, right, low, high)


def _chart(placed: Sequence[PlacedPoint], peak: float, bandwidth: float, width: int) -> list[str]:
    frame = _frame(placed, peak, bandwidth)
    columns = width - MARGIN
    cells = [[" "] * columns for _ in range(ROWS)]
    for column in range(columns):
        intensity = frame.left * (frame.right / frame.left) ** (column / (columns - 1))
        height = frame.down(min(peak, bandwidth * intensity)) * (ROWS - 1)
        row = min(ROWS - 1, round(height))
        # Three characters at three heights in a row smooth gentle slopes.
        cells[row][column] = "'-."[min(2, int((height - row + 0.5) * 3))]
    for letter, item in _lettered(placed):
        if letter != "-":
            row = round(frame.down(item.flops_s) * (ROWS - 1))
            _put(cells[row], round(frame.across(item.intensity) * (columns - 1)), letter)
    marks = {round(frame.down(tick) * (ROWS - 1)): f"{tick / T:g}" for tick in _decades(frame.low, frame.high)}
    rows = [f"{marks.get(row, ''):>{MARGIN - 2}} |{''.join(line)}" for row, line in enumerate(cells)]
    return [f"{'TFLOP/s':>{MARGIN - 1}}", *rows, *_bottom(frame, columns)]


def _lettered(placed: Sequence[PlacedPoint]) -> list[tuple[str, PlacedPoint]]:
    """A letter per drawable point, a dash for the others."""
    letters = iter("abcdefghijkl")
    return [(next(letters) if item.drawable else "-", item) for item in placed]


def _put(row: list[str], column: int, letter: str) -> None:
    """Write the letter at the column, or the nearest free one."""
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
    for letter, item in _lettered(placed):
        lines.append(f"{letter}  {_cut(item.point.name, names):<{names}}{heads.format(*_figures(item))}")
    return lines


def _figures(item: PlacedPoint) -> tuple[str, ...]:
    """The cells under HEADS."""
    intensity = "-" if item.intensity == math.inf else _short(item.intensity)
    return (intensity, _short(item.flops_s / T), _percent(item.of_roof), _percent(item.of_time), item.bound)


def _short(number: float) -> str:
    """Three digits, without exponents for thousands."""
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
        [f"and {len(hidden)} smaller ones, {sum(item.of_time for item in hidden):.1%} of the time"] if hidden else []
    )
    if not all(item.drawable for item in shown):
        notes.append("-: no FLOPs or bytes, so not on the chart")
    return notes


def draw_roofline(
    points: Sequence[RooflinePoint], peak_flops_s: float, bandwidth_bytes_s: float, title: str, file: Path
) -> None:
    """Draw the chart to an .svg or .png file; marker areas are shares of the time. SVG output is deterministic."""
    if file.suffix not in (".svg", ".png"):
        raise UsageError(f"cannot draw a roofline to {file.name}", hint="use a file name that ends in .svg or .png")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("the matplotlib package is not installed", hint="pip install 'headway[plot]'") from error
    placed = place(points, peak_flops_s, bandwidth_bytes_s)
    shown = _lettered(placed[:MOST])
    drawn = [(letter, item) for letter, item in shown if item.drawable]
    table = 0.19 * (len(shown) + 3)  # inches
    with rc_context({"svg.hashsalt": "headway", "text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(8.5, 4.6 + table), dpi=150, layout="constrained")
        axes, below = figure.subplots(2, height_ratios=(4.6, table))
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
        _draw_roof(axes, _frame(placed[:MOST], peak_flops_s, bandwidth_bytes_s), peak_flops_s, bandwidth_bytes_s)
        _draw_points(axes, [item for _, item in drawn])
        _draw_table(below, shown, "; ".join(_notes(placed)))
        # Letters are placed by what they would cover, so the layout must be final.
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


def _area(item: PlacedPoint) -> float:
    """Marker area in square points, never too small to see."""
    return 20 + 900 * item.of_time


def _draw_points(axes: "Axes", placed: Sequence[PlacedPoint]) -> None:
    for bound, colour in COLOURS.items():
        group = [item for item in placed if item.bound == bound]
        at = [item.intensity for item in group], [item.flops_s / T for item in group]
        look: dict[str, Any] = {"marker": MARKERS[bound], "facecolor": colour + "80", "edgecolor": colour}
        axes.scatter(*at, s=[_area(item) for item in group], zorder=3, **look)
        axes.scatter([], [], s=50, label=f"bound by {bound}", **look)
    axes.legend(loc="lower right", title="area: share of the time", title_fontsize=8, fontsize=8, edgecolor=GRID)


def _write_roof(axes: "Axes", peak: float, bandwidth: float) -> list[Box]:
    """Label the roof; return the boxes that roof and labels cover."""
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
    """Small boxes along a polyline."""
    for (x0, y0), (x1, y1) in pairwise(corners):
        count = 1 + int(math.hypot(x1 - x0, y1 - y0) / 4)
        for part in range(count + 1):
            yield _around(x0 + (x1 - x0) * part / count, y0 + (y1 - y0) * part / count, 2, 2)


def _draw_table(axes: "Axes", shown: Sequence[tuple[str, PlacedPoint]], note: str) -> None:
    columns = (0.0, 0.03, 0.53, 0.65, 0.77, 0.89, 0.91)
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(len(shown) + 1.5, -0.5))
    rows: list[tuple[tuple[str, ...], str]] = [(("", "operation", *HEADS), FAINT)]
    rows += [((letter, _cut(item.point.name, 50), *_figures(item)), COLOURS[item.bound]) for letter, item in shown]
    rows += [(("", note), FAINT)]
    for height, (cells, colour) in enumerate(rows):
        for number, (x, text) in enumerate(zip(columns, cells, strict=False)):
            side: Literal["left", "right"] = "right" if 2 <= number <= 5 else "left"
            ink = colour if number in (0, 6) or colour == FAINT else INK
            weight = "bold" if number == 0 else "normal"
            axes.text(x, height, text, ha=side, va="center", fontsize=8, color=ink, fontweight=weight)


def _draw_letters(axes: "Axes", drawn: Sequence[tuple[str, PlacedPoint]], taken: list[Box]) -> None:
    """Place letters beside their points where they cover least, nearest first."""
    if not drawn:
        return
    spots = axes.transData.transform([(item.intensity, item.flops_s / T) for _, item in drawn]) / _pixels(axes)
    marks = [(letter, x, y, math.sqrt(_area(item)) / 2) for (letter, item), (x, y) in zip(drawn, spots, strict=True)]
    taken = taken + [_around(x, y, 2 * radius, 2 * radius) for _, x, y, radius in marks]
    legend = axes.get_legend()
    taken += [_extent(legend)] if legend else []
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "fontweight": "bold", "color": INK}
    look |= {"xycoords": "axes fraction", "textcoords": "offset points"}
    for group in _groups(marks):
        text = " ".join(letter for letter, *_ in group)
        x, y, radius = _middle(group)
        width, height = 6.0 * len(text), 8.0
        dx, dy, gap = _free_offset(x, y, radius, width, height, taken, _extent(axes))
        taken.append(_around(x + dx, y + dy, width, height))
        line = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.7, "shrinkA": 0, "shrinkB": radius}
        across, up = axes.transAxes.inverted().transform((x * _pixels(axes), y * _pixels(axes)))
        axes.annotate(text, (across, up), (dx, dy), arrowprops=line if gap > GAPS[0] else None, **look)


def _groups(marks: Sequence[Mark]) -> list[list[Mark]]:
    """Group marks that are too close for separate letters."""
    groups: list[list[Mark]] = []
    for mark in marks:
        near = [group for group in groups if math.dist(group[0][1:3], mark[1:3]) < CLOSE]
        if near:
            near[0].append(mark)
        else:
            groups.append([mark])
    return groups


def _middle(group: Sequence[Mark]) -> tuple[float, float, float]:
    """Centre and radius of a circle around a group of marks."""
    x, y = sum(mark[1] for mark in group) / len(group), sum(mark[2] for mark in group) / len(group)
    return x, y, max(math.dist((x, y), mark[1:3]) + mark[3] for mark in group)


def _free_offset(
    x: float, y: float, radius: float, width: float, height: float, taken: Sequence[Box], within: Box
) -> tuple[float, float, float]:
    """Offset from a marker's centre to its letters, and the gap between them."""

    def covered(offset: tuple[float, float, float]) -> float:
        box = _around(x + offset[0], y + offset[1], width, height)
        outside = width * height - _intersection(box, within)
        # Rounded, so that among equals the nearest wins, not the last bits.
        return round(sum(_intersection(box, other) for other in taken) + 10 * outside, 3)

    return min(_offsets(radius, width, height), key=covered)


def _offsets(radius: float, width: float, height: float) -> Iterator[tuple[float, float, float]]:
    for gap in GAPS:
        for angle in (0, 180, 270, 90, 315, 225, 45, 135):
            across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            yield across * (radius + gap + width / 2), up * (radius + gap + height / 2), gap


def _around(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _intersection(first: Box, second: Box) -> float:
    """Area of the intersection of two boxes."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(0.0, width) * max(0.0, height)


def _extent(artist: "Artist") -> Box:
    box = artist.get_window_extent()
    pixels = _pixels(artist)
    return box.x0 / pixels, box.y0 / pixels, box.x1 / pixels, box.y1 / pixels


def _pixels(artist: "Artist") -> float:
    """Pixels per point (1/72 inch)."""
    figure = artist.get_figure(root=True)
    assert figure, "the artist has a figure"
    return figure.dpi / 72
