"""Buckets of neighbouring steps, each with its extremes: built level by level, combined to any width. Pure.

Level 0 is every step; a bucket of level k has up to FAN ** k steps, and begins at a multiple of that. Whoever wants
wider buckets combines those of the widest level that is narrow enough.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from headway.track.store.view import MetricStats, SeriesView

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FAN = 16
"""Buckets of a level that make one of the next."""
LEVELS = 3
"""Levels that are stored: 16, 256 and 4,096 steps. Wider buckets are combined from the last one."""

_Ints: TypeAlias = "npt.NDArray[np.int64]"
_Floats: TypeAlias = "npt.NDArray[np.float64]"


@dataclass(frozen=True)
class Buckets:
    """Buckets in ascending order of their steps."""

    steps: _Ints
    """The first recorded step of each."""
    minimum: _Floats
    maximum: _Floats
    mean: _Floats
    """NaN, as the extremes are, where no value was finite."""
    count: _Ints
    """Finite values."""


def single_steps(steps: _Ints, values: _Floats) -> Buckets:
    """Return a bucket per step; steps ascend."""
    import numpy as np

    values = np.where(np.isfinite(values), values, np.nan)
    return Buckets(steps, values, values, values, (~np.isnan(values)).astype(np.int64))


def combine(buckets: Buckets, width: int) -> Buckets:
    """Return wider buckets, which begin at multiples of a width; steps ascend, and may repeat across inputs."""
    import numpy as np

    if not len(buckets.steps):
        return buckets
    owner = buckets.steps // width
    starts = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
    count = np.add.reduceat(buckets.count, starts)
    total = np.add.reduceat(np.where(buckets.count > 0, buckets.mean, 0.0) * buckets.count, starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(count > 0, total / count, np.nan)
    minimum, maximum = np.fmin.reduceat(buckets.minimum, starts), np.fmax.reduceat(buckets.maximum, starts)
    # The mean of equal numbers may round to just outside of them.
    return Buckets(buckets.steps[starts], minimum, maximum, np.clip(mean, minimum, maximum), count)


def concatenate(parts: list[Buckets]) -> Buckets:
    """Return buckets of several parts, in the order of their steps."""
    import numpy as np

    parts = [part for part in parts if len(part.steps)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.empty(0)
        return Buckets(np.empty(0, np.int64), none, none, none, np.empty(0, np.int64))
    joined = Buckets(
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.minimum for part in parts]),
        np.concatenate([part.maximum for part in parts]),
        np.concatenate([part.mean for part in parts]),
        np.concatenate([part.count for part in parts]),
    )
    ascending = (joined.steps[1:] >= joined.steps[:-1]).all()
    return joined if ascending else take(joined, np.argsort(joined.steps, kind="stable"))


def take(buckets: Buckets, chosen: "npt.NDArray[Any] | slice") -> Buckets:
    """Return some of the buckets, by a range or by their indices."""
    return Buckets(
        buckets.steps[chosen],
        buckets.minimum[chosen],
        buckets.maximum[chosen],
        buckets.mean[chosen],
        buckets.count[chosen],
    )


def bucket_width(span: int, points: int | None) -> int:
    """Return how many steps a bucket must have for a span of steps to fit into so many buckets."""
    if points is None or span <= points:
        return 1
    assert points > 1, "a span may touch two buckets of any width"
    width = -(-span // (points - 1))  # one bucket more may be cut by either end of the span
    unit = level_below(width)
    return -(-width // unit) * unit


def level_below(width: int) -> int:
    """Return the width of the widest stored level whose buckets are no wider."""
    unit = 1
    while unit * FAN <= min(width, FAN**LEVELS):
        unit *= FAN
    return unit


def to_view(run: str, key: str, buckets: Buckets, points: int | None, width: int = 1) -> SeriesView:
    """Return buckets of a width in at most so many points; steps ascend."""
    steps = buckets.steps
    wanted = bucket_width(int(steps[-1] - steps[0]) + 1, points) if len(steps) else 1
    if wanted > width:
        width, buckets = wanted, combine(buckets, wanted)
    return SeriesView(run, key, width, buckets.steps, buckets.minimum, buckets.maximum, buckets.mean, buckets.count)


def statistics(steps: _Ints, values: _Floats) -> MetricStats:
    """Return a series in five numbers; steps ascend."""
    import numpy as np

    finite = values[np.isfinite(values)]
    last = float(values[-1]) if len(steps) and np.isfinite(values[-1]) else None
    if not len(finite):
        return MetricStats(last, None, None, None, 0)
    return MetricStats(last, float(finite.min()), float(finite.max()), float(finite.mean()), len(finite))
