"""Runs as Python objects: state, metrics and the account of time, read from the run's folder each time."""

import importlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from headway.api import html
from headway.errors import UsageError, WorkerError
from headway.recipe import Recipe
from headway.track import (
    Ledger,
    RunFolder,
    RunSummary,
    account,
    largest_overhead,
    lock_holder,
    metric_names,
    read_metric,
    read_recipe,
    read_run,
    runs_root,
    summarize,
)
from headway.track.runs import find_set_aside
from headway.track.store import select_runs

POLL_S = 0.2
COLUMNS = ("name", "state", "step", "steps", "loss")


@dataclass(frozen=True)
class Metric:
    """A metric over a run's history; `steps, values = metric` unpacks it."""

    run: str
    key: str
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return iter((self.steps, self.values))

    def __len__(self) -> int:
        return len(self.steps)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.values, dtype=dtype, copy=copy)

    def to_pandas(self) -> Any:
        """Return a pandas Series by step."""
        pandas = _pandas()
        return pandas.Series(self.values, index=pandas.Index(self.steps, name="step"), name=self.key)

    def __repr__(self) -> str:
        last = f", {self.values[-1]:.4g} at step {self.steps[-1]:,}" if len(self) else ""
        return f"Metric({self.key} of {self.run}, {len(self):,} steps{last})"

    def _repr_html_(self) -> str:
        return html.plot(self.steps, self.values, f"{self.run} {self.key}")


@dataclass(frozen=True)
class Report:
    """Where the time of a run went: device-seconds by account, which sum to the allocation."""

    run: str
    state: str
    step: int
    ledger: Ledger

    @property
    def seconds(self) -> dict[str, float]:
        """Device-seconds by account."""
        return {name: ns / 1e9 for name, ns in self.ledger.accounts.items()}

    @property
    def total_s(self) -> float:
        """Device-seconds allocated."""
        return self.ledger.total_ns / 1e9

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization; None if the device's peak is unknown."""
        return self.ledger.mfu

    @property
    def incidents(self) -> list[str]:
        """What went wrong, in order."""
        return [incident.text for incident in self.ledger.incidents]

    @property
    def advice(self) -> str | None:
        """The largest overhead, and what to try."""
        overhead = largest_overhead(self.ledger)
        return None if overhead is None else f"{overhead.account}, {overhead.seconds:.1f} s: {overhead.advice}"

    def __repr__(self) -> str:
        rows = [f"  {name:<20}{seconds:>12,.1f} s {self.ledger.share(name):>7.1%}" for name, seconds in self._rows()]
        return "\n".join([f"{self.run}: {self.state} at step {self.step:,}", *rows])

    def _rows(self) -> list[tuple[str, float]]:
        return [(name, seconds) for name, seconds in self.seconds.items() if seconds]

    def _repr_html_(self) -> str:
        rows = [(name, seconds, f"{self.ledger.share(name):.1%}") for name, seconds in self._rows()]
        caption = f"{self.run}: {self.state} at step {self.step:,}"
        advice = f"<p>{html.escape(self.advice)}</p>" if self.advice else ""
        return html.table(("account", "device-seconds", "share"), rows, caption) + advice


@dataclass(frozen=True)
class Run:
    """A run in its folder."""

    folder: Path

    @property
    def name(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def summary(self) -> RunSummary:
        """State, step, loss, attempts and times, as of now."""
        return summarize(self._files)

    @property
    def state(self) -> str:
        """submitted, running, finished, stopped, failed or interrupted."""
        return self.summary.state

    @property
    def recipe(self) -> Recipe:
        """Its resolved recipe."""
        return read_recipe(self._files)

    @property
    def keys(self) -> list[str]:
        """The names of its metrics."""
        return metric_names(self._files)

    def metrics(self, key: str = "loss") -> Metric:
        """Return a metric by step, as NumPy arrays."""
        return Metric(self.name, key, *read_metric(self._files, key))

    def report(self) -> Report:
        """Return where every device-second went."""
        summary = self.summary
        return Report(self.name, summary.state, summary.step, account(read_run(self._files)))

    def wait(self, timeout_s: float | None = None) -> "Run":
        """Wait until the run ends; raise WorkerError if it failed, TimeoutError if it still runs after a time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while lock_holder(self._files) is not None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} still runs after {timeout_s:g} s, at step {self.summary.step:,}")
            time.sleep(POLL_S)
        run = self if self.folder.exists() else self._set_aside()
        summary = run.summary
        if summary.state in ("failed", "interrupted"):
            what = summary.reason or f"was interrupted at step {summary.step:,}"
            raise WorkerError(f"{self.name}: {what}", hint=run._files.command("logs"))
        return run

    def _set_aside(self) -> "Run":
        aside = find_set_aside(self.folder.parent, self.name)
        return self if aside is None else Run(aside.path)

    @property
    def _files(self) -> RunFolder:
        return RunFolder(self.folder)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        summary = self.summary
        return f"Run({self.name}, {summary.state} at step {summary.step:,})"

    def _repr_html_(self) -> str:
        return html.table(COLUMNS, [_row(self.summary)])


@dataclass(frozen=True)
class Runs(Sequence[Run]):
    """Runs that a query chose, newest first unless sorted."""

    chosen: tuple[Run, ...]

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> "Runs": ...

    def __getitem__(self, index: int | slice) -> "Run | Runs":
        return Runs(self.chosen[index]) if isinstance(index, slice) else self.chosen[index]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame, a row per run."""
        return _pandas().DataFrame([_row(run.summary) for run in self.chosen], columns=list(COLUMNS))

    def __repr__(self) -> str:
        return f"Runs({', '.join(run.name for run in self.chosen)})"

    def _repr_html_(self) -> str:
        return html.table(COLUMNS, [_row(run.summary) for run in self.chosen])


def runs(where: str | None = None, *, sort: str | Sequence[str] = (), runs: str | Path | None = None) -> Runs:
    """Return the runs that satisfy a query such as `loss < 3 and train.lr > 1e-3`, all by default.

    `sort` is a key or several, descending with a minus: `-mfu`. `runs` is the folder of runs, as --runs.
    """
    root = runs_root(None if runs is None else Path(runs))
    rows = select_runs(root, where or "", sort=[sort] if isinstance(sort, str) else list(sort))
    return Runs(tuple(Run(row.folder.path) for row in rows))


def _row(summary: RunSummary) -> tuple[object, ...]:
    return summary.name, summary.state, summary.step, summary.total_steps, summary.loss


def _pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise UsageError("pandas is not installed", hint="pip install pandas, or use the NumPy arrays") from None
