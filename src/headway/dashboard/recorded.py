"""Recorded runs, as the pages ask for them: found by name, summarized, with their metrics. All reading passes here."""

import math
import re
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

from headway.dashboard.cached import Cache, Signature, files_signature, signature_of
from headway.errors import RunError, plural
from headway.track import (
    FAILED,
    Event,
    Ledger,
    Record,
    RunFolder,
    RunSummary,
    account,
    list_runs,
    read_ends,
    read_run,
    summarize,
)
from headway.track.insights import PreviousRun
from headway.track.store import MetricStore, SeriesView, metric_keys, read_labels, read_series, select_runs
from headway.track.store.previous import find_previous

T = TypeVar("T")

PATIENCE_S = 1.0
"""How long an answer may wait for records that no process has compacted yet."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,80}")
_PATTERN = re.compile(r"[A-Za-z0-9._*?-]+")
_DETAILS = ("loss", "grad_norm", "lr", "reward")


class RecordedRuns:
    """The runs of one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = Cache()
        self._store, self._reading = MetricStore(), threading.Lock()  # the store is for one thread at a time

    def find(self, name: str) -> RunFolder:
        """Return the folder of a run by its exact name, which has no separators and does not begin with a dot."""
        set_aside = name.startswith(f"{FAILED}/")
        own = name.removeprefix(f"{FAILED}/")
        run = RunFolder((self.root / FAILED if set_aside else self.root) / own)
        if _NAME.fullmatch(own) and run.events.is_dir():
            return run
        raise RunError(f"no run {name!r} in {self.root}", hint="it may have been renamed or deleted", usage=True)

    def folders(self) -> list[tuple[RunFolder, str]]:
        """Return all runs with the names that pages use: those that failed before their first step come last."""
        runs = [(run, run.name) for run in list_runs(self.root)]
        return runs + [(run, f"{FAILED}/{run.name}") for run in list_runs(self.root / FAILED)]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per run, most recently active first; one that cannot be read says so."""
        return [self._row(run, key) for run, key in self.folders()]

    def select(self, where: str) -> list[dict[str, Any]]:
        """Return the rows of runs that satisfy a query, or whose name matches a pattern such as demo-*."""
        rows = self.rows()
        if not where:
            return rows
        if _PATTERN.fullmatch(where):
            pattern = where if any(letter in where for letter in "*?") else f"*{where}*"
            return [row for row in rows if fnmatchcase(row["name"], pattern)]
        kept = {row.folder.name for row in select_runs(self.root, where, archived=True)}
        return [row for row in rows if row["name"] in kept]

    def row(self, name: str) -> dict[str, Any]:
        """Return the row of one run."""
        return self._row(self.find(name), name)

    def _row(self, run: RunFolder, key: str) -> dict[str, Any]:
        try:
            row = self.cache.get((key, "row"), signature_of(run), lambda: row_of(run, key))
        except (RunError, OSError, ValueError) as error:
            return {"name": key, "state": "unreadable", "step": 0, "problem": str(error), "archived": False}
        labels = read_labels(run)
        return row | {"tags": labels.tags, "note": labels.note, "archived": labels.archived}

    def records(self, run: RunFolder) -> list[Record]:
        """Return everything that a run recorded."""
        return read_run(run)

    def ledger(self, run: RunFolder) -> tuple[Ledger, list[Record]]:
        """Return a run's ledger, and the records without steps: those of long runs would fill the memory."""
        records = self.records(run)
        return account(records), records

    def previous(self, run: RunFolder) -> PreviousRun | None:
        """Return the run that a run's speed is compared with; looked for again when runs come or go."""
        names = tuple(sorted(each.name for each in list_runs(run.path.parent)))
        return self.cache.get((run.path, "previous"), names, lambda: find_previous(run))

    def prepare(self, names: Sequence[str]) -> list[str]:
        """Compact what is new of some runs, for about a second; return those whose metrics would still take long.

        The lines of others can be drawn meanwhile. Nothing goes on in the background: a closed page costs nothing.
        """
        wanted = set(names)
        folders = {run.path: (run, name) for run, name in self.folders() if name in wanted}
        with self._reading:
            left = self._store.compact_some([run for run, _ in folders.values()], PATIENCE_S)
        return [folders[run.path][1] for run in left]

    def series(
        self, names: Sequence[str], key: str, points: int, first: int | None = None, last: int | None = None
    ) -> list[SeriesView]:
        """Return a metric of several runs in at most so many points each; runs that are gone are left out."""
        folders = {name: run for run, name in self.folders() if name in set(names)}
        question = (key, points, first, last)
        signatures = {
            (folders[name].path, question): self._signature(folders[name]) for name in names if name in folders
        }
        by_path = {run.path: name for name, run in folders.items()}

        def read(missing: Sequence[tuple[Path, Any]]) -> dict[tuple[Path, Any], SeriesView]:
            runs = [RunFolder(path) for path, _ in missing]
            with self._reading:
                views = read_series(runs, key, points=points, first=first, last=last, store=self._store)
            return dict(zip(missing, views, strict=True))

        views = self.cache.get_many(signatures, read)
        return [replace(view, run=by_path[path]) for (path, _), view in views.items()]

    def metric_names(self, run: RunFolder) -> list[str]:
        """Return the names of a run's metrics."""

        def read() -> list[str]:
            with self._reading:
                return metric_keys(run, store=self._store)

        return self.cache.get((run.path, "names"), self._signature(run), read)

    def unless_changed(self, run: RunFolder, what: str, compute: Callable[[], T]) -> T:
        """Return something about a run, computed again once it has recorded more."""
        return self.cache.get((run.path, what), self._signature(run), compute)

    def _signature(self, run: RunFolder) -> Signature:
        return (*files_signature(run.events, "*.jsonl"), *files_signature(run.evals, "*.json"))


def row_of(run: RunFolder, key: str) -> dict[str, Any]:
    """Return what the list of runs shows of a run."""
    summary = summarize(run)
    if summary.attempts == 0 and summary.state == "interrupted" and (run.path / "jobs.jsonl").exists():
        summary = replace(summary, state="submitted")
    events = _leader_events(run)
    steps = [event for event in events if event["kind"] == "step"]
    last = steps[-1] if steps else {}
    facts = next((event for event in reversed(events) if event["kind"] == "facts"), {})
    recipe = read_json(run.recipe_file)
    row = asdict(summary) | {"name": key, "recipe": recipe.get("name"), "objective": _section(recipe, "objective")}
    row |= {name: _number(last.get(name)) for name in _DETAILS if name in last}
    row |= {"loss": _number(summary.loss), "active": _active(run), "data_version": _section(recipe, "data", "version")}
    return row | _speed(steps, facts, summary)


def _leader_events(run: RunFolder) -> list[Event]:
    paths = sorted(run.events.glob("*-rank-0.jsonl"))
    return read_ends(paths[-1]).events if paths else []


def _speed(steps: Sequence[Event], facts: Event, summary: RunSummary) -> dict[str, Any]:
    """Return the speed of the last steps, and how long the rest takes."""
    recent = [event for event in steps[-32:] if isinstance(event.get("compute"), int)]
    if not recent:
        return {"step_s": None, "tokens_per_s": None, "mfu": None, "eta_s": None}
    times = [(event["compute"] + (event.get("data") or 0)) / 1e9 for event in recent]
    step_s = statistics.median(times)
    tokens = _number(recent[-1].get("tokens"))
    rate = tokens / step_s if tokens and step_s else None
    flops, peak = _number(facts.get("flops_per_token")), _number(facts.get("peak_flops"))
    mfu = rate * flops / (peak * (summary.workers or 1)) if rate and flops and peak else None
    left = None if summary.total_steps is None else max(0, summary.total_steps - summary.step) * step_s
    return {
        "step_s": step_s,
        "tokens_per_s": rate,
        "mfu": mfu if mfu is not None and mfu <= 1 else None,
        "eta_s": left if summary.state == "running" else None,
    }


def _active(run: RunFolder) -> float | None:
    times = [entry[1] for entry in files_signature(run.events, "*.jsonl")]
    return max(times) / 1e9 if times else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file; empty if it is missing or damaged."""
    try:
        value = from_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _section(recipe: dict[str, Any], section: str, key: str = "kind") -> str | None:
    value = recipe.get(section)
    return value.get(key) if isinstance(value, dict) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def unreadable_lines(records: Sequence[Record]) -> list[str]:
    """Return a sentence per record with lines that cannot be read."""
    return [
        f"{plural(record.skipped, 'unreadable line')} in attempt {record.header.attempt}'s {record.header.process}; "
        "figures use the readable lines"
        for record in records
        if record.skipped
    ]
