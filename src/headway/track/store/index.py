"""Rows of all runs in a folder."""

from collections.abc import Collection
from pathlib import Path

from headway.errors import HeadwayError
from headway.track.files import read_recipe
from headway.track.metrics import read_metrics
from headway.track.runs import RunFolder, list_runs, summarize
from headway.track.store.labels import read_labels
from headway.track.store.pyramid import statistics
from headway.track.store.rows import RunRow, flatten


def read_rows(root: Path, *, metrics: bool = False, only: Collection[str] | None = None) -> list[RunRow]:
    """Return the row of every run in a folder (of `only` these names), most recently active first."""
    runs = [run for run in list_runs(root) if only is None or run.name in only]
    return [read_row(run, metrics=metrics) for run in runs]


def read_row(run: RunFolder, *, metrics: bool = False) -> RunRow:
    """Return a run's row, with the statistics of its metrics if they are asked for."""
    summary = summarize(run)
    try:
        recipe = dict(flatten(read_recipe(run).model_dump(mode="json")))
    except HeadwayError:
        recipe = {}
    times = [path.stat().st_mtime for path in run.events.glob("*.jsonl")]
    created = summary.started or run.path.stat().st_mtime
    stats = {key: statistics(*series) for key, series in read_metrics(run).items()} if metrics else {}
    return RunRow(run, summary, read_labels(run), created, max(times, default=created), recipe, stats)
