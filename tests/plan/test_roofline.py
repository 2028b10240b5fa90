"""Rooflines against numbers worked out by hand, and against their own axes."""

import math
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.errors import UsageError
from headway.plan.roofline import RooflinePoint, draw_roofline, place, text_roofline
from thinned import examples

# A chip with round numbers: 100 TFLOP/s, 1 TB/s, so that the ridge is at 100 FLOP/byte.
PEAK, BANDWIDTH = 100e12, 1e12

ON_SLOPE = RooflinePoint("on the slope", flops=1e13, bytes=1e12, seconds=1.0)  # 10 FLOP/byte, 10 TFLOP/s: the roof
ON_TOP = RooflinePoint("on the flat", flops=1e14, bytes=1e11, seconds=1.0)  # 1,000 FLOP/byte, 100 TFLOP/s: the roof
BELOW = RooflinePoint("below", flops=1e13, bytes=1e10, seconds=1.0)  # 1,000 FLOP/byte, 10 TFLOP/s: a tenth of it


class Chart:
    """A text chart, parsed by its axes."""

    def __init__(self, text: str) -> None:
        lines = text.splitlines()
        top = lines.index("TFLOP/s") + 1
        bottom = next(number for number, line in enumerate(lines) if line.startswith("       +"))
        self.rows = lines[top:bottom]
        self.axis, self.labels = lines[bottom], lines[bottom + 1]

    def where(self, letter: str) -> tuple[int, int]:
        """Row and column of a letter."""
        return next((row, line.index(letter)) for row, line in enumerate(self.rows) if letter in line)

    def row(self, tflops: str) -> int:
        """Row with a label."""
        return next(row for row, line in enumerate(self.rows) if line[:7].strip() == tflops)

    def column(self, intensity: str) -> int:
        """Column of the tick above a label."""
        words = self.labels.split()
        ticks = [column for column, mark in enumerate(self.axis) if mark == "+"][1:]
        return ticks[words.index(intensity)]

    def roof_row(self, column: int) -> int:
        """Row of the roof's character in a column without letters."""
        return next(row for row, line in enumerate(self.rows) if line.ljust(80)[column] in ".-'")


def test_points_are_drawn_at_their_coordinates() -> None:
    chart = Chart(text_roofline([ON_SLOPE, BELOW], PEAK, BANDWIDTH, "two"))
    assert chart.where("a") == (chart.row("10"), chart.column("10"))
    assert chart.where("b") == (chart.row("10"), chart.column("1000"))


def test_points_on_the_roof_are_drawn_on_it() -> None:
    chart = Chart(text_roofline([ON_SLOPE, ON_TOP], PEAK, BANDWIDTH, "two"))
    row, column = chart.where("a")
    # The slope rises by less than a row per column, so that the roof's neighbours are above and below by one at most.
    assert row - 1 <= chart.roof_row(column + 1) <= row <= chart.roof_row(column - 1) <= row + 1
    row, column = chart.where("b")
    assert chart.roof_row(column - 1) == chart.roof_row(column + 1) == row == chart.row("100")


def test_the_roof_bends_at_the_ridge() -> None:
    chart = Chart(text_roofline([BELOW], PEAK, BANDWIDTH, "one"))
    ridge = chart.column("100")
    assert {chart.roof_row(column) for column in range(ridge, ridge + 20)} == {chart.row("100")}
    assert chart.roof_row(chart.column("10")) == chart.row("10")


def test_overlapping_letters_are_placed_side_by_side() -> None:
    chart = Chart(text_roofline([BELOW, BELOW, BELOW], PEAK, BANDWIDTH, "three"))
    assert {chart.where(letter)[0] for letter in "abc"} == {chart.row("10")}
    columns = sorted(chart.where(letter)[1] for letter in "abc")
    assert columns == list(range(columns[0], columns[0] + 3))
    assert chart.column("1000") in columns


def test_legend_by_hand() -> None:
    product = RooflinePoint("product", flops=6e12, bytes=2e10, seconds=0.08)  # 300 FLOP/byte; 75 of 100 TFLOP/s
    norm = RooflinePoint("norm", flops=1e10, bytes=5e9, seconds=0.01)  # 2 FLOP/byte; 1 of 2 TFLOP/s
    copy = RooflinePoint("copy", flops=0, bytes=8e9, seconds=0.01)  # 0.8 of 1 TB/s
    lines = text_roofline([copy, norm, product], PEAK, BANDWIDTH, "by hand").splitlines()
    rows = [line.split() for line in lines if "%" in line]
    assert rows == [
        ["a", "product", "300", "75", "75.0%", "80.0%", "compute"],
        ["-", "copy", "0", "0", "80.0%", "10.0%", "memory"],
        ["b", "norm", "2", "1", "50.0%", "10.0%", "memory"],
    ]
    assert lines[:2] == ["by hand", "roof: 1 TB/s up to 100 FLOP/byte, 100 TFLOP/s beyond"]
    assert lines[-1].strip().startswith("-:")


def test_operations_that_take_no_time_are_left_out() -> None:
    (only,) = place([RooflinePoint("nothing", 0, 0, 0), BELOW], PEAK, BANDWIDTH)
    assert (only.point, only.of_time, only.of_roof) == (BELOW, 1, pytest.approx(0.1))


def test_small_operations_are_summed() -> None:
    # 1 + 2 + ... + 15 = 120 seconds, of which the three shortest take 6.
    points = [RooflinePoint(f"number {seconds}", 1e12 * seconds, 1e10 * seconds, seconds) for seconds in range(1, 16)]
    text = text_roofline(points, PEAK, BANDWIDTH, "many")
    assert "and 3 smaller ones, 5.0% of the time" in text
    assert "number 4 " in text
    assert "number 3 " not in text


amounts = st.floats(1e3, 1e18) | st.just(0.0)
some_points = st.builds(
    RooflinePoint, st.text("abc xyz", min_size=1, max_size=90), amounts, amounts, st.floats(1e-6, 10)
)


@example([RooflinePoint("a", 0.0, 1000.0, 1e-06)], 64, 1.211e15, 1.205e9)  # a long line of the roof
@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(some_points, min_size=1, max_size=20), st.integers(64, 200), st.floats(1e10, 1e16), st.floats(1e9, 1e14)
)
def test_lines_fit_the_requested_width(points: list[RooflinePoint], width: int, peak: float, bandwidth: float) -> None:
    text = text_roofline(points, peak, bandwidth, "a title that is longer than the chart is wide " * 4, width)
    assert max(map(len, text.splitlines())) <= min(width, 80)
    assert text.isascii()
    assert sum(point.of_time for point in place(points, peak, bandwidth)) == pytest.approx(1)


def corners(path: ElementTree.Element) -> list[tuple[float, float]]:
    """All points of an SVG path, those that steer its curves included."""
    numbers = [float(number) for number in re.findall(r"-?[0-9.]+", path.get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def centre(marker: ElementTree.Element) -> tuple[float, float]:
    """Of a path, or of the use of one."""
    if marker.get("x"):
        return float(marker.get("x", "")), float(marker.get("y", ""))
    across, down = zip(*corners(marker), strict=True)
    return (min(across) + max(across)) / 2, (min(down) + max(down)) / 2


def distance(point: tuple[float, float], start: tuple[float, float], end: tuple[float, float]) -> float:
    """Of a point from a piece of a line."""
    along = (end[0] - start[0], end[1] - start[1])
    share = ((point[0] - start[0]) * along[0] + (point[1] - start[1]) * along[1]) / (along[0] ** 2 + along[1] ** 2)
    share = min(1, max(0, share))
    return math.dist(point, (start[0] + share * along[0], start[1] + share * along[1]))


def test_a_drawing_has_its_points_on_the_roof(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "roof.svg"
    draw_roofline([ON_SLOPE, ON_TOP, BELOW], PEAK, BANDWIDTH, "three", file)
    root = ElementTree.parse(file).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    # What is clipped belongs to the chart and not to its legend.
    clipped = [*root.findall(".//{*}path[@clip-path]"), *root.findall(".//{*}g[@clip-path]/{*}use")]
    (roof,) = [corners(path) for path in clipped if "stroke: #333333" in path.get("style", "")]
    markers = [centre(marker) for marker in clipped if "fill-opacity" in marker.get("style", "")]
    assert (len(roof), len(markers)) == (3, 3)
    gaps = sorted(min(distance(marker, *roof[:2]), distance(marker, *roof[1:])) for marker in markers)
    assert gaps[:2] == pytest.approx([0, 0], abs=0.1)
    # The third is a tenth of the roof: as far below it as the slope rises between two ticks.
    (slope,) = [marker for marker in markers if marker[0] < roof[1][0]]
    assert gaps[2] == pytest.approx(slope[1] - roof[1][1], abs=0.1)


@pytest.mark.slow
def test_equal_input_gives_equal_drawings(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        draw_roofline(
            [ON_SLOPE, ON_TOP, BELOW, RooflinePoint("copy", 0, 1e9, 0.1)],
            PEAK,
            BANDWIDTH,
            "cost in $ and $",
            tmp_path / name,
        )
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize("points", [[ON_SLOPE, BELOW], [RooflinePoint("copy", 0, 1e9, 0.1)]])
def test_png_output_is_a_png(points: list[RooflinePoint], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_roofline(points, PEAK, BANDWIDTH, "a picture", tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"cannot draw a roofline to roof\.pdf") as caught:
        draw_roofline([BELOW], PEAK, BANDWIDTH, "no", tmp_path / "roof.pdf")
    assert caught.value.hint
    with pytest.raises(UsageError, match="roofline is empty"):
        text_roofline([], PEAK, BANDWIDTH, "no")
    with pytest.raises(UsageError, match="does not fit in 40 columns"):
        text_roofline([BELOW], PEAK, BANDWIDTH, "no", width=40)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        draw_roofline([BELOW], PEAK, BANDWIDTH, "no", tmp_path / "roof.svg")
    assert "headway[plot]" in (caught.value.hint or "")


def test_unwritable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        draw_roofline([RooflinePoint("x", 1e12, 1e9, 1e-3)], 1e15, 3e12, "title", tmp_path / "none" / "a.svg")
