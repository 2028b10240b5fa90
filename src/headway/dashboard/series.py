"""Series of metrics for plots: a few hundred points that show what thousands of steps did. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.track.metrics import Series

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plot:
    """One metric of several runs over common steps."""

    steps: Steps
    """In ascending order. Where there are more steps than buckets: two per bucket, its first and its middle."""
    lines: Mapping[str, Floats]
    """Per run a value at each of `steps`, NaN where there is none. Of a bucket its smallest and largest, in the order in
    which the metric went, so that a spike of one step is never lost."""
    means: Mapping[str, Floats] | None
    """Of each bucket; None where every step has a point of its own."""


def plot(runs: Mapping[str, Series], buckets: int, *, first: int | None = None, last: int | None = None) -> Plot:
    """Return a metric of several runs between two steps, in so many buckets at most."""
    cut = {name: _between(series, first, last) for name, series in runs.items()}
    steps = _union([series[0] for series in cut.values()])
    if steps.size <= 2 * buckets:
        return Plot(steps, {name: _placed(series, steps) for name, series in cut.items()}, None)
    edges = np.unique(np.linspace(steps[0], steps[-1] + 1, buckets + 1).astype(np.int64))
    starts, ends = edges[:-1], edges[1:]
    lines, means = {}, {}
    for name, (own_steps, values) in cut.items():
        lines[name], means[name] = _bucketed(own_steps, values, edges)
    return Plot(np.column_stack([starts, (starts + ends) // 2]).ravel(), lines, means)


def _between(series: Series, first: int | None, last: int | None) -> Series:
    """Cut a series, with one more step at each side, so that its line goes to the edge."""
    steps, values = series
    begin = 0 if first is None else max(int(np.searchsorted(steps, first)) - 1, 0)
    end = steps.size if last is None else int(np.searchsorted(steps, last, side="right")) + 1
    return steps[begin:end], values[begin:end]


def _union(parts: Sequence[Steps]) -> Steps:
    distinct: list[Steps] = []
    for part in parts:  # runs of one recipe mostly have the same steps: then nothing is to be sorted
        if not any(np.array_equal(part, other) for other in distinct[:4]):
            distinct.append(part)
    if not distinct:
        return np.empty(0, np.int64)
    return distinct[0] if len(distinct) == 1 else np.unique(np.concatenate(distinct))


def _placed(series: Series, steps: Steps) -> Floats:
    values = np.full(steps.size, np.nan)
    values[np.searchsorted(steps, series[0])] = series[1]
    return values


def _bucketed(steps: Steps, values: Floats, edges: Steps) -> tuple[Floats, Floats]:
    """Return two values and the mean of each bucket; NaN for buckets without values."""
    count = edges.size - 1
    pairs, means = np.full((count, 2), np.nan), np.full(count, np.nan)
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    begins = np.searchsorted(steps, edges[:-1])
    ends = np.searchsorted(steps, edges[1:])
    filled = np.flatnonzero(ends > begins)
    if not filled.size:
        return pairs.ravel(), means
    begins, ends = begins[filled], ends[filled]
    # Neighbouring buckets without a gap: each begins where the one before it ends, as reduceat wants it.
    lows, highs = np.minimum.reduceat(values, begins), np.maximum.reduceat(values, begins)
    sums = np.add.reduceat(values, begins)
    rises = values[ends - 1] >= values[begins]
    pairs[filled, 0] = np.where(rises, lows, highs)
    pairs[filled, 1] = np.where(rises, highs, lows)
    means[filled] = sums / (ends - begins)
    return pairs.ravel(), means


def rounded(values: Floats, digits: int = 6) -> list[float | None]:
    """Return values with so many significant digits, None for those that are not finite: as they are sent."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(values))))
        short = np.where(values == 0, 0.0, np.round(values * scale) / scale)
    usable = np.isfinite(scale) | (values == 0)
    out = np.where(usable, short, values)
    return [value if value - value == 0 else None for value in out.tolist()]
