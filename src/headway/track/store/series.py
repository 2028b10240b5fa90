"""Metrics of many runs, downsampled."""

from collections.abc import Sequence

from headway.track.metrics import metric_names, read_metrics
from headway.track.runs import RunFolder
from headway.track.store.pyramid import single_steps, to_view
from headway.track.store.view import SeriesView


def read_series(
    runs: Sequence[RunFolder], key: str, *, first: int | None = None, last: int | None = None, points: int | None = None
) -> list[SeriesView]:
    """Return one metric of some runs, one view per run in their order, empty where a run has none.

    From step `first` to `last`, both included (default: all), in at most `points` buckets per run (by default
    one per step).
    """
    import numpy as np

    views = []
    for run in runs:
        steps, values = read_metrics(run, [key]).get(key, (np.empty(0, np.int64), np.empty(0)))
        kept = np.ones(len(steps), bool)
        kept &= steps >= first if first is not None else True
        kept &= steps <= last if last is not None else True
        views.append(to_view(run.name, key, single_steps(steps[kept], values[kept]), points))
    return views


def metric_keys(run: RunFolder) -> list[str]:
    """Return the names of a run's metrics, in the order in which they were first recorded."""
    return metric_names(run)
