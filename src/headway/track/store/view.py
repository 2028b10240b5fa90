"""What a downsampled series is; pure, and NumPy only when it is made."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class SeriesView:
    """A metric over a run's history, in buckets of neighbouring steps; empty where the run has no such metric.

    Each bucket keeps its smallest and largest value, so that a spike of one step shows at every width. Values that were
    not finite are left out of all three; a bucket with no other values has NaN.
    """

    run: str
    """The run's name."""
    key: str
    width: int
    """Steps per bucket. 1: every step is there, and minimum, maximum and mean are its value."""
    steps: "npt.NDArray[np.int64]"
    """The first recorded step of each bucket, ascending."""
    minimum: "npt.NDArray[np.float64]"
    maximum: "npt.NDArray[np.float64]"
    mean: "npt.NDArray[np.float64]"
    count: "npt.NDArray[np.int64]"
    """Finite values in each bucket."""


@dataclass(frozen=True)
class MetricStats:
    """A metric over a run's history in five numbers; None where no value was finite."""

    last: float | None
    """The value at the last step that has one; None if that was not finite."""
    minimum: float | None
    maximum: float | None
    mean: float | None
    count: int
    """Finite values."""
