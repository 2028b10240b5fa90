"""Store and query: downsampled metrics of many runs, an index of all runs, queries over them, labels.

rows = select_runs(root, "loss < 3 and train.lr > 1e-3", sort=["-mfu"])         the runs, as RunRow
views = read_series([row.folder for row in rows], "loss", points=1000)          SeriesView: NumPy arrays
metric_keys(run)        read_row(run, metrics=True)        read_labels(run)
"""

from headway.track.store.compact import MetricStore
from headway.track.store.index import read_row, read_rows
from headway.track.store.labels import Labels, change_note, change_tags, read_labels, write_labels
from headway.track.store.listing import filter_rows, known_keys, parse_sort, select_runs, sort_rows, value_of
from headway.track.store.query import Name, Query, parse_name, parse_query
from headway.track.store.rows import RunRow
from headway.track.store.series import metric_keys, metric_statistics, read_series
from headway.track.store.view import MetricStats, SeriesView

__all__ = [
    "Labels",
    "MetricStats",
    "MetricStore",
    "Name",
    "Query",
    "RunRow",
    "SeriesView",
    "change_note",
    "change_tags",
    "filter_rows",
    "known_keys",
    "metric_keys",
    "metric_statistics",
    "parse_name",
    "parse_query",
    "parse_sort",
    "read_labels",
    "read_row",
    "read_rows",
    "read_series",
    "select_runs",
    "sort_rows",
    "value_of",
    "write_labels",
]
