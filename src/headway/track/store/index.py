"""The index: a row per run in an SQLite file of the user's cache, so that a thousand runs are listed at once.

A row is made again when its run's folder, records, recipe or labels are not those it was made from, by inode, sizes and
times; only whether a process holds the run's lock is asked every time. The file can be deleted at any moment: one that
is damaged is replaced, one that cannot be written is done without.
"""

import os
import secrets
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from headway.errors import HeadwayError
from headway.track.files import read_recipe
from headway.track.run_folder import RunFolder
from headway.track.run_lock import lock_holder
from headway.track.run_summary import RunSummary, summarize
from headway.track.store.compact import MetricStore
from headway.track.store.labels import parse_labels, read_labels
from headway.track.store.rows import RunRow, flatten
from headway.track.store.series import metric_statistics
from headway.track.store.view import MetricStats

FORMAT = 2
"""The format written, in the name of the file: versions of Headway that write different ones have one each."""
AT_A_TIME = 32
"""Runs whose metrics are read before they are stored."""

Progress = Callable[[int, int], None]
"""Called with how many of how many runs have been read."""


def index_file() -> Path:
    """Return the path of the user's index, in $HEADWAY_CACHE, else where the user's caches are."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HEADWAY_CACHE") or base / "headway") / f"runs-{FORMAT}.sqlite"


@dataclass(frozen=True)
class _Listed:
    """A run's folder as it is on disk now."""

    run: RunFolder
    stamp: str
    """Changes whenever anything that a row is made from does."""
    updated: float


class _Stored(NamedTuple):
    """A row of the index."""

    stamp: str
    row: dict[str, Any]
    stats_stamp: str
    stats: dict[str, Any]


def read_rows(
    root: Path,
    *,
    metrics: bool = False,
    only: Collection[str] | None = None,
    index: Path | None = None,
    progress: Progress = lambda _done, _all: None,
) -> list[RunRow]:
    """Return the row of every run in a folder (of `only` these names), most recently active first.

    `metrics` has the statistics of metrics in them. Runs that cannot be read, of a newer version say, are left out.
    """
    listed = [each for each in _list_folders(root) if only is None or each.run.name in only]
    listed.sort(key=lambda each: (each.updated, each.run.name), reverse=True)
    with closing(_Index(index or index_file())) as stored:
        known = stored.read(str(root.absolute()))
        rows = dict[str, _Stored | None]()
        for each in listed:
            now = known.get(each.run.name)
            rows[each.run.name] = now if now is not None and now.stamp == each.stamp else _read_folder(each, now)
        if metrics:
            _add_statistics(listed, rows, stored, root, progress)
        changed = {name: row for name, row in rows.items() if row is not None and row is not known.get(name)}
        gone = [name for name in known if name not in rows] if only is None else []
        stored.write(str(root.absolute()), changed, gone)
    return [row for each in listed if (row := _to_row(each, rows[each.run.name], metrics)) is not None]


def read_row(run: RunFolder, *, metrics: bool = False) -> RunRow:
    """Return a run's row, with the statistics of its metrics if they are asked for; past the index."""
    each = _list_folder(run.path)
    stored = None if each is None else _read_folder(each, None)
    row = None if each is None or stored is None else _to_row(each, stored, False)
    if row is None:
        summary = summarize(run)  # says what is wrong
        return RunRow(run, summary, read_labels(run), summary.started or 0.0, summary.started or 0.0)
    return replace(row, metrics=metric_statistics([run])[0]) if metrics else row


def _read_folder(each: _Listed, before: _Stored | None) -> _Stored | None:
    """Read what a row has from a run's folder; None if that cannot be read."""
    try:
        summary = summarize(each.run, locked=False)
    except (HeadwayError, OSError):
        return None
    try:
        recipe = dict(flatten(read_recipe(each.run).model_dump(mode="json")))
    except HeadwayError:
        recipe = {}
    waits = summary.attempts == 0 and summary.state == "interrupted" and (each.run.path / "jobs.jsonl").exists()
    summary = replace(summary, state="submitted") if waits else summary
    try:
        created = summary.started or each.run.path.stat().st_mtime
    except OSError:
        return None
    content = {"summary": asdict(summary), "labels": asdict(read_labels(each.run)), "created": created}
    stats = (before.stats_stamp, before.stats) if before is not None else ("", {})
    return _Stored(each.stamp, content | {"recipe": recipe}, *stats)


def _add_statistics(
    listed: Sequence[_Listed], rows: dict[str, _Stored | None], stored: "_Index", root: Path, progress: Progress
) -> None:
    """Read the statistics of runs whose are not known, and store them as they come: Ctrl-C loses little."""
    stale = [each for each in listed if (row := rows[each.run.name]) is not None and row.stats_stamp != each.stamp]
    store = MetricStore()
    for at in range(0, len(stale), AT_A_TIME):
        progress(at, len(stale))
        batch = stale[at : at + AT_A_TIME]
        tables = _statistics_of(batch, store)
        for each, table in zip(batch, tables, strict=True):
            row = rows[each.run.name]
            assert row is not None, "it is one of those that are not known"
            stats = {key: list(asdict(stats).values()) for key, stats in table.items()}
            rows[each.run.name] = row._replace(stats_stamp=each.stamp, stats=stats)
        stored.write(str(root.absolute()), {each.run.name: rows[each.run.name] for each in batch}, [])
    progress(len(stale), len(stale))


def _statistics_of(batch: Sequence[_Listed], store: MetricStore) -> list[dict[str, MetricStats]]:
    try:
        return metric_statistics([each.run for each in batch], store=store)
    except HeadwayError:  # of one of them, whose metrics are then missing
        return [{} for _ in batch] if len(batch) == 1 else [_statistics_of([each], store)[0] for each in batch]


def _to_row(each: _Listed, stored: _Stored | None, metrics: bool) -> RunRow | None:
    """Return a row as it is now; None if it cannot be read."""
    if stored is None:
        return None
    try:
        content = stored.row
        summary, labels = RunSummary(**content["summary"]), parse_labels(content["labels"])
        stats = {key: MetricStats(*values) for key, values in stored.stats.items()} if metrics else {}
        is_running = lock_holder(each.run) is not None
    except (TypeError, KeyError, OSError):
        return None
    summary = replace(summary, name=each.run.name, state="running" if is_running else summary.state)
    return RunRow(each.run, summary, labels, content["created"], each.updated, content["recipe"], stats)


# -- the folders


def _list_folders(root: Path) -> list[_Listed]:
    try:
        entries = [entry.path for entry in os.scandir(root)]
    except OSError:
        return []
    return [each for path in entries if (each := _list_folder(Path(path))) is not None]


def _list_folder(path: Path) -> _Listed | None:
    """Return what a run's folder is now; None if it is not one."""
    sizes, newest, names = 0, 0, 0
    try:
        with os.scandir(path / "events") as entries:
            for entry in entries:
                if entry.name.endswith(".jsonl"):
                    status = entry.stat()
                    sizes, newest, names = sizes + status.st_size, max(newest, status.st_mtime_ns), names + 1
        folder = path.stat()
    except OSError:
        return None
    marks = [_mark(f"{path}/{name}") for name in ("recipe.json", "labels.json", "jobs.jsonl", "evals")]
    stamp = f"{folder.st_dev}:{folder.st_ino}:{names}:{sizes}:{newest}:{':'.join(marks)}"
    return _Listed(RunFolder(path), stamp, (newest or folder.st_mtime_ns) / 1e9)


def _mark(path: str) -> str:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return "-"
    return f"{status.st_ino},{status.st_size},{status.st_mtime_ns}"


# -- the file


class _Index:
    """The SQLite file, or nothing where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = self._open() or self._open(afresh=True)

    def read(self, root: str) -> dict[str, _Stored]:
        """Return the rows of a folder of runs, by name."""
        if self._connection is None:
            return {}
        try:
            query = "SELECT name, stamp, row, stats_stamp, stats FROM runs WHERE root = ?"
            rows = self._connection.execute(query, (root,)).fetchall()
            return {name: _Stored(a, from_json(b), c, from_json(d)) for name, a, b, c, d in rows}
        except (sqlite3.Error, ValueError):
            self.close()
            self._connection = self._open(afresh=True)
            return {}

    def write(self, root: str, changed: "dict[str, _Stored] | dict[str, _Stored | None]", gone: Iterable[str]) -> None:
        """Replace some rows and delete others; a file that cannot be written stays as it is."""
        if self._connection is None:
            return
        rows = [
            (root, name, row.stamp, to_json(row.row), row.stats_stamp, to_json(row.stats))
            for name, row in changed.items()
            if row is not None
        ]
        with suppress(sqlite3.Error), self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._connection.executemany(
                "DELETE FROM runs WHERE root = ? AND name = ?", [(root, name) for name in gone]
            )

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _open(self, afresh: bool = False) -> sqlite3.Connection | None:
        """Open the file; None if it is damaged, or cannot be there."""
        connection = None
        try:
            if afresh:
                for suffix in ("", "-journal"):
                    Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            if not self._path.exists():
                self._create()
            connection = sqlite3.connect(self._path, timeout=2.0)
            connection.execute("PRAGMA synchronous = OFF")  # it can be made again at any time
            connection.execute("SELECT root, name, stamp, row, stats_stamp, stats FROM runs LIMIT 1").fetchone()
            return connection
        except (sqlite3.Error, OSError):
            if connection is not None:
                connection.close()
            return None

    def _create(self) -> None:
        """Make the file beside and link it to its name, so that no process opens half of it.

        Not with a write-ahead log: its shared memory is a mapped file, and whoever replaces a damaged index while
        another thread has it open would kill the process.
        """
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            with closing(sqlite3.connect(partial)) as connection:
                partial.chmod(0o600)
                connection.execute(
                    "CREATE TABLE runs (root TEXT, name TEXT, stamp TEXT, row BLOB, stats_stamp TEXT, stats BLOB, "
                    "PRIMARY KEY (root, name)) WITHOUT ROWID"
                )
                connection.commit()
            with suppress(FileExistsError):
                os.link(partial, self._path)
        finally:
            partial.unlink(missing_ok=True)
