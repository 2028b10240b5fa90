"""Series of metrics for plots: a few hundred points that show what thousands of steps did. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.track.store import SeriesView

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plot:
    """One metric of several runs over common steps."""

    steps: Steps
    """In ascending order. Of buckets wider than a step: two per bucket, its beginning and its middle."""
    lines: dict[str, Floats]
    """Per run a value at each of `steps`, NaN where there is none. Of a bucket its smallest and its largest, in the
    order in which the metric went, so that a spike of one step is never lost."""
    means: dict[str, Floats] | None
    """Of each bucket; None where every step has a point of its own."""


def overlay(views: Sequence[SeriesView]) -> Plot:
    """Return series of several runs over common steps; those of runs without values are left out."""
    filled = {view.run: view for view in views if view.steps.size}
    width = max((view.width for view in filled.values()), default=1)
    if width == 1:
        steps = _union([view.steps for view in filled.values()])
        return Plot(steps, {name: _placed(view.steps, view.mean, steps) for name, view in filled.items()}, None)
    # A view of narrower buckets, of a shorter run, joins them to those of the others.
    buckets = _union([np.unique(view.steps // width) for view in filled.values()])
    starts = np.maximum(buckets * width, min(int(view.steps[0]) for view in filled.values()))
    steps = np.column_stack([starts, np.maximum(starts, buckets * width + width // 2)]).ravel()
    lines, means = {}, {}
    for name, view in filled.items():
        lines[name], means[name] = _bucketed(view, width, buckets)
    return Plot(steps, lines, means)


def _union(parts: Sequence[Steps]) -> Steps:
    distinct: list[Steps] = []
    for part in parts:  # runs of one recipe mostly have the same steps: then nothing is to be sorted
        if not any(np.array_equal(part, other) for other in distinct[:4]):
            distinct.append(part)
    if not distinct:
        return np.empty(0, np.int64)
    return distinct[0] if len(distinct) == 1 else np.unique(np.concatenate(distinct))


def _placed(own: Steps, values: Floats, steps: Steps) -> Floats:
    if own is steps:
        return values
    placed = np.full(steps.size, np.nan)
    placed[np.searchsorted(steps, own)] = values
    return placed


def _bucketed(view: SeriesView, width: int, buckets: Steps) -> tuple[Floats, Floats]:
    """Return two values and the mean of each bucket; NaN for buckets without values."""
    owner = view.steps // width
    begins = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
    lows, highs = np.fmin.reduceat(view.minimum, begins), np.fmax.reduceat(view.maximum, begins)
    counts = np.add.reduceat(view.count, begins)
    sums = np.add.reduceat(np.where(view.count > 0, view.mean, 0.0) * view.count, begins)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, sums / counts, np.nan)
    before = np.concatenate([[means[0]], means[:-1]])
    rises = ~(means < before)
    pairs = np.full((buckets.size, 2), np.nan)
    places = np.searchsorted(buckets, owner[begins])
    pairs[places, 0] = np.where(rises, lows, highs)
    pairs[places, 1] = np.where(rises, highs, lows)
    return pairs.ravel(), _placed(owner[begins], means, buckets)


def rounded(values: Floats, digits: int = 6) -> list[float | None]:
    """Return values with so many significant digits, None for those that are not finite: as they are sent."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(values))))
        short = np.round(values * scale) / scale
    usable = np.isfinite(scale) & np.isfinite(short) & (scale != 0)
    out = np.where(usable, short, values)
    return [value if value - value == 0 else None for value in out.tolist()]
