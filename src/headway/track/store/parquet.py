"""Segments as Parquet: a wide file of every step, and beside it a file of wider and wider buckets.

    0001-rank-0.0-2512345.parquet           step, and a column per metric; empty where a step has no value, NaN where
                                            the value was not finite
    0001-rank-0.0-2512345.levels.parquet    key, level, step, minimum, maximum, mean, count

The numbers in a name are the range of bytes of the record. Files are written beside, made durable and renamed, and
never change afterwards. Each holds a document, `headway`, that says what it was made from.
"""

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash
from pydantic_core import from_json, to_json

from headway.track.files import make_durable
from headway.track.metrics import Series
from headway.track.store.pyramid import FAN, LEVELS, Buckets, combine, single_steps
from headway.track.store.segments import KeyRange, SegmentData, range_of
from headway.track.store.view import MetricStats

if TYPE_CHECKING:
    import duckdb

FORMAT = 1
"""The format written; files of any other are made again."""
LEVELS_FROM = 4096
"""Steps from which a segment has a file of levels: fewer are combined as fast as they are read."""
MEMORY = "256MB"
"""What DuckDB may use; the columns read come on top."""
_OPTIONS = "FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2"


class SegmentFacts(NamedTuple):
    """What a Parquet file says about its segment."""

    start: int
    end: int
    probe: str
    """Hash of the last bytes of the range: whether the record is still the one that was read."""
    keys: Mapping[str, KeyRange]
    columns: Mapping[str, str]
    """The column of each key: names in Parquet files are often read without regard to case."""
    resumed: int | None
    facts: Mapping[str, float | None]
    levels: bool


def open_database() -> "duckdb.DuckDBPyConnection":
    """Return a database in memory, for reading and writing Parquet."""
    import duckdb

    database = duckdb.connect(config={"memory_limit": MEMORY, "threads": min(4, os.cpu_count() or 1)})
    # Without this, it would look for settings and extensions in the user's home and on the network.
    database.execute("SET autoinstall_known_extensions = false; SET autoload_known_extensions = false")
    return database


def segment_path(folder: Path, record: str, start: int, end: int, *, levels: bool = False) -> Path:
    """Return the path of a segment of a record (its name without suffix)."""
    return folder / f"{record}.{start}-{end}{'.levels' if levels else ''}.parquet"


def write_segment(
    database: "duckdb.DuckDBPyConnection",
    path: Path,
    levels_path: Path,
    data: SegmentData,
    span: range,
    probe: str,
) -> SegmentFacts:
    """Write the two files of a span of bytes; the first one, which is what readers look for, last."""
    keys = {key: range_of(*series) for key, series in data.series.items()}
    has_levels = max((key.points for key in keys.values()), default=0) >= LEVELS_FROM
    facts = SegmentFacts(span.start, span.stop, probe, keys, _columns(keys), data.resumed, data.facts, has_levels)
    if has_levels:
        with _written_beside(levels_path) as partial:
            _write_levels(database, partial, data.series)
    with _written_beside(path) as partial:
        _write_steps(database, partial, data.series, facts)
    return facts


@contextlib.contextmanager
def _written_beside(path: Path) -> Iterator[Path]:
    """Yield a path to write; rename it to `path` once it is durable. Nothing is left of it on failure."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        make_durable(partial)
        partial.replace(path)
        make_durable(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _columns(keys: Mapping[str, Any]) -> dict[str, str]:
    columns, taken = dict[str, str](), {"step"}
    for key in keys:
        column, number = key, 1
        while column.lower() in taken:
            number += 1
            column = f"{key}~{number}"
        taken.add(column.lower())
        columns[key] = column
    return columns


def _write_steps(
    database: "duckdb.DuckDBPyConnection", path: Path, series: Mapping[str, Series], facts: SegmentFacts
) -> None:
    import numpy as np

    different = {steps.tobytes(): steps for steps, _ in series.values()}  # mostly every step has every metric
    every = list(different.values())
    steps = every[0] if len(every) == 1 else np.unique(np.concatenate([np.empty(0, np.int64), *every]))
    rows: dict[str, Any] = {"s": steps}
    selected = ["s AS step"]
    for number, (key, (own, values)) in enumerate(series.items()):
        value = f"v{number}"
        # DuckDB takes a NaN in an array for NULL, which is to mean that the step has no value.
        if len(own) < len(steps):
            at = np.searchsorted(steps, own)
            present, all_values = np.zeros(len(steps), bool), np.zeros(len(steps))
            present[at], all_values[at] = True, values
            rows[f"p{number}"], rows[value] = present, all_values
        else:
            rows[value] = values
        expression = f"coalesce({value}, 'nan'::DOUBLE)" if np.isnan(values).any() else value
        if f"p{number}" in rows:
            expression = f"CASE WHEN p{number} THEN {expression} END"
        selected.append(f"{expression} AS {_identifier(facts.columns[key])}")
    document = facts._asdict() | {"format": FORMAT, "keys": {key: asdict(value) for key, value in facts.keys.items()}}
    _copy(database, f"SELECT {', '.join(selected)} FROM segment_rows", rows, path, document)


def _write_levels(database: "duckdb.DuckDBPyConnection", path: Path, series: Mapping[str, Series]) -> None:
    """Write the levels of each metric, one after the other, so that one of them is a few neighbouring row groups."""
    import numpy as np

    names, parts = list(series), list[tuple[int, int, Buckets]]()
    for number, (steps, values) in enumerate(series.values()):
        buckets = single_steps(steps, values)
        for level in range(1, LEVELS + 1):
            buckets = combine(buckets, FAN**level)
            parts.append((number, level, buckets))
    columns = {
        "k": np.concatenate([np.full(len(buckets.steps), number, np.int32) for number, _, buckets in parts]),
        "level": np.concatenate([np.full(len(buckets.steps), level, np.int8) for _, level, buckets in parts]),
    }
    for name in ("steps", "minimum", "maximum", "mean", "count"):
        columns[name] = np.concatenate([getattr(buckets, name) for _, _, buckets in parts])
    listed = ", ".join(_text(name) for name in names)
    query = (
        f'SELECT ([{listed}])[k + 1] AS key, level, steps AS step, minimum, maximum, mean, "count" FROM segment_rows'
    )
    _copy(database, query, columns, path, {"format": FORMAT}, "ROW_GROUP_SIZE 8192")


def _copy(
    database: "duckdb.DuckDBPyConnection",
    query: str,
    rows: Mapping[str, Any],
    path: Path,
    document: Mapping[str, Any],
    more: str = "",
) -> None:
    note = _text(to_json(document, inf_nan_mode="null").decode())
    options = ", ".join([_OPTIONS, f"KV_METADATA {{headway: {note}}}", *([more] if more else [])])
    database.register("segment_rows", rows)
    try:
        database.execute(f"COPY ({query}) TO {_text(str(path))} ({options})")
    finally:
        database.unregister("segment_rows")


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


# -- reading


def pattern_of(path: Path) -> str:
    """Return the pattern that matches one path only: DuckDB takes paths for patterns."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in str(path))


def read_facts(database: "duckdb.DuckDBPyConnection", paths: Sequence[Path]) -> dict[Path, SegmentFacts]:
    """Return what files say about their segments; those that are damaged or of another format are left out."""
    import duckdb

    query = "SELECT file_name, value FROM parquet_kv_metadata(?) WHERE key = 'headway'"
    try:
        rows = database.execute(query, [[pattern_of(path) for path in paths]]).fetchall() if paths else []
    except duckdb.Error:
        if len(paths) == 1:
            return {}
        return {path: facts for each in paths for path, facts in read_facts(database, [each]).items()}
    parsed = ((Path(name), _parse_facts(value)) for name, value in rows)
    return {path: facts for path, facts in parsed if facts is not None}


def _parse_facts(value: bytes) -> SegmentFacts | None:
    try:
        document = from_json(value)
        if document.pop("format") != FORMAT:
            return None
        keys = {
            key: KeyRange(**fields | {"stats": MetricStats(**fields["stats"])})
            for key, fields in document.pop("keys").items()
        }
        return SegmentFacts(keys=keys, **document)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_steps(database: "duckdb.DuckDBPyConnection", paths: Sequence[Path], column: str) -> list[Series]:
    """Return a column of each file, all of which have it: its steps and values."""

    name = _identifier(column)
    query = f"SELECT file_index AS i, step AS s, {name} AS v FROM {_files(paths)} WHERE {name} IS NOT NULL"
    table = database.execute(query, [[pattern_of(path) for path in paths]]).fetchnumpy()
    owner, steps, values = (_filled(table[key]) for key in ("i", "s", "v"))
    return [(steps[part], values[part]) for part in _split(owner, len(paths))]


def read_levels(database: "duckdb.DuckDBPyConnection", paths: Sequence[Path], key: str, level: int) -> list[Buckets]:
    """Return the buckets of a level of a metric in each file of levels."""

    query = 'SELECT file_index AS i, step, minimum, maximum, mean, "count" '
    query += f"FROM {_files(paths)} WHERE key = ? AND level = ?"
    table = database.execute(query, [[pattern_of(path) for path in paths], key, level]).fetchnumpy()
    columns = [_filled(table[name]) for name in ("step", "minimum", "maximum", "mean", "count")]
    parts = _split(_filled(table["i"]), len(paths))
    return [Buckets(*(column[part] for column in columns)) for part in parts]


def _files(paths: Sequence[Path]) -> str:
    by_name = ", union_by_name = true" if len(paths) > 1 else ""
    return f"read_parquet(?, hive_partitioning = false{by_name})"


def _filled(column: Any) -> Any:
    """Return a column without a mask: NULL, which only numbers that are not finite are, as NaN."""
    import numpy as np

    return np.ma.filled(column, np.nan) if np.ma.isMaskedArray(column) else column


def _split(owner: Any, number: int) -> list[Any]:
    """Return where the rows of each file are."""
    import numpy as np

    if (owner[1:] < owner[:-1]).any():
        return [np.flatnonzero(owner == index) for index in range(number)]
    bounds = np.searchsorted(owner, np.arange(number + 1, dtype=owner.dtype))
    return [slice(int(begin), int(end)) for begin, end in itertools.pairwise(bounds)]


def probe_of(data: bytes) -> str:
    """Return the hash of the last bytes of a range."""
    return xxhash.xxh3_64_hexdigest(data)
