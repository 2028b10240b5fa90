"""Lists runs: filtered by a query, sorted by any key, with the values of any key."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from headway.track.store.index import Progress, read_rows
from headway.track.store.query import (
    RECIPE,
    Lookup,
    Name,
    Query,
    Value,
    near_names,
    parse_name,
    parse_query,
    syntax_error,
)
from headway.track.store.rows import RunRow

FIELDS: Mapping[str, Callable[[RunRow, float], Value]] = {
    "name": lambda row, _: row.folder.name,
    "run": lambda row, _: row.folder.name,
    "state": lambda row, _: row.summary.state,
    "step": lambda row, _: row.summary.step,
    "steps": lambda row, _: row.summary.total_steps,
    "attempts": lambda row, _: row.summary.attempts,
    "workers": lambda row, _: row.summary.workers,
    "device": lambda row, _: row.summary.device or None,
    "reason": lambda row, _: row.summary.reason or None,
    "took": lambda row, _: row.summary.seconds,
    "created": lambda row, _: row.created,
    "started": lambda row, _: row.summary.started,
    "updated": lambda row, _: row.updated,
    "age": lambda row, now: max(0.0, now - row.created),
    "tags": lambda row, _: row.labels.tags,
    "note": lambda row, _: row.labels.note or None,
    "archived": lambda row, _: row.labels.archived,
}
"""What a key stands for besides the recipe's keys and metrics: name and run are the same; took and age are seconds."""


def value_of(row: RunRow, name: Name, now: float) -> Value:
    """Return what a name stands for in a run; None for nothing."""
    key, aggregate = name
    if not aggregate:
        if key in FIELDS:
            return FIELDS[key](row, now)
        if (recipe_key := key.removeprefix(RECIPE)) in row.recipe:
            return _plain(row.recipe[recipe_key])
    stats = row.metrics.get(key)
    if stats is None:
        return row.summary.loss if key == "loss" and aggregate in ("", "last") else None
    match aggregate:
        case "min":
            return stats.minimum
        case "max":
            return stats.maximum
        case "mean":
            return stats.mean
    return stats.last


def _plain(value: Any) -> Value:
    """Return a value of a recipe as one that a query compares."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return tuple(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def needs_metrics(names: Iterable[Name], rows: Sequence[RunRow]) -> bool:
    """Whether some name can only be a metric, or one other than the last loss, which rows have anyway."""
    keys = {key for row in rows for key in row.recipe}
    return any(
        name.aggregate not in ("", "last")
        or not (name.key in FIELDS or name.key.removeprefix(RECIPE) in keys or name.key == "loss")
        for name in names
    )


def known_keys(rows: Iterable[RunRow]) -> list[str]:
    """Return every key that a query over some runs may name: fields, keys of recipes, metrics."""
    keys = dict.fromkeys(FIELDS)
    rows = list(rows)
    keys |= dict.fromkeys(key for row in rows for key in row.metrics)
    keys |= dict.fromkeys(key for row in rows for key in row.recipe)
    return [*keys, *(["loss"] if "loss" not in keys else [])]


def check_names(names: Iterable[Name], rows: Sequence[RunRow]) -> None:
    """Raise UsageError for a name that no run has."""
    known = set(known_keys(rows))
    for name in names:
        if rows and name.key.removeprefix(RECIPE) not in known:
            raise syntax_error(name.text, 0, f"no run has a key {name.key!r}", near_names(name.key, known))


def filter_rows(rows: Sequence[RunRow], query: Query, now: float) -> list[RunRow]:
    """Return the runs that satisfy a query; raise UsageError for a key that none has, or a text instead of a number."""
    lookups = [lookup_in(row, now) for row in rows]
    if rows:
        query.check_names(set(known_keys(rows)))
        query.check_values(lookups)
    return [row for row, lookup in zip(rows, lookups, strict=True) if query.matches(lookup)]


def lookup_in(row: RunRow, now: float) -> Lookup:
    """Return what looks up names in a run."""
    return lambda name: value_of(row, name, now)


def parse_sort(text: str) -> tuple[Name, bool]:
    """Parse a key to sort by, and whether from large to small: `-mfu`, `min(loss)`."""
    descending = text.startswith("-")
    return parse_name(text.removeprefix("-")), descending


def sort_rows(rows: Sequence[RunRow], keys: Sequence[tuple[Name, bool]], now: float) -> list[RunRow]:
    """Return runs sorted by keys, the first one first; runs without a value come last either way."""
    result = list(rows)
    for name, descending in reversed(keys):
        values = {id(row): value_of(row, name, now) for row in result}
        present = [row for row in result if not _is_missing(values[id(row)])]
        absent = [row for row in result if _is_missing(values[id(row)])]
        result = sorted(present, key=lambda row: _order(values[id(row)]), reverse=descending) + absent
    return result


def _is_missing(value: Value) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _order(value: Value) -> tuple[int, Any]:
    """Return what makes values of different kinds comparable: numbers before texts."""
    if isinstance(value, int | float):
        return 0, value
    return 1, ", ".join(value) if isinstance(value, tuple) else str(value)


def select_runs(
    root: Path,
    where: str | Query = "",
    *,
    sort: Sequence[str] = (),
    archived: bool | Literal["only"] = False,
    columns: Sequence[Name] = (),
    metrics: bool = False,
    now: float | None = None,
    progress: Progress = lambda _done, _all: None,
) -> list[RunRow]:
    """Return the runs in a folder that satisfy a query, most recently active first unless sorted by keys such as -mfu.

    Archived runs are left out unless asked for. Statistics of metrics are read where the query, the order or the
    columns that will be shown need them, or with `metrics`.
    """
    query = parse_query(where) if isinstance(where, str) else where
    keys = [parse_sort(text) for text in sort]
    names = [*query.names(), *(name for name, _ in keys), *columns]
    rows = [row for row in read_rows(root) if archived or not row.labels.archived]
    rows = [row for row in rows if row.labels.archived] if archived == "only" else rows
    if metrics or needs_metrics(names, rows):
        rows = read_rows(root, metrics=True, only={row.folder.name for row in rows}, progress=progress)
    moment = time.time() if now is None else now
    check_names((*(name for name, _ in keys), *columns), rows)
    return sort_rows(filter_rows(rows, query, moment), keys, moment)
