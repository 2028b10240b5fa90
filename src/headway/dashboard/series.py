"""Series of metrics for plots: a few hundred points that show what thousands of steps did. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

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


def packed(plots: Mapping[str, Plot], pending: Sequence[str]) -> bytes:
    """Return plots as they are sent: a document, then the numbers that it counts, in little-endian order.

    4 bytes: the length of the document, which is JSON padded to a multiple of 8: `pending`, the runs whose lines are
    not there yet, and `plots` by metric, each with the names of its `runs`, the number of its `steps`, whether it has
    `means`, and the bytes per `value`. Then for each plot its steps, 8 bytes each; a line per run; the means of each
    run; all padded to a multiple of 8. Gaps are NaN.
    """
    documents, parts = dict[str, Any](), list[bytes]()
    for key, plot in plots.items():
        columns = [*plot.lines.values(), *([] if plot.means is None else plot.means.values())]
        dtype = "<f4" if all(map(_fits_single, columns)) else "<f8"
        documents[key] = {
            "runs": list(plot.lines),
            "steps": len(plot.steps),
            "means": plot.means is not None,
            "value": int(dtype[-1]),
        }
        numbers = [plot.steps.astype("<f8"), *(column.astype(dtype) for column in columns)]
        parts.append(_padded(b"".join(array.tobytes() for array in numbers)))
    document = to_json({"pending": list(pending), "plots": documents})
    document += b" " * (-(4 + len(document)) % 8)
    return b"".join([len(document).to_bytes(4, "little"), document, *parts])


def _fits_single(values: Floats) -> bool:
    """Whether 4 bytes keep six digits of all numbers."""
    size = np.abs(values[np.isfinite(values) & (values != 0)])
    return not size.size or bool(size.min() > 1e-37 and size.max() < 1e37)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 8)
