"""Fetches the records of a sweep's runs from their object stores, for machines without a shared folder.

Stores are queried at most every EVERY_S seconds, and only for runs that have started and may have new records. A run
whose job is over is fetched once more; `settled.json` in the sweep's folder lists those that finished. A lock keeps two
processes from fetching at the same time.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path

from pydantic_core import from_json

from headway.cluster.engines.engine import OVER
from headway.cluster.submit.runs import SubmittedRun
from headway.cluster.submit.store_runs import Progress, for_each
from headway.cluster.submit.sweeps import Sweep, folder_of_sweep
from headway.cluster.submit.unsubmitted_sweeps import exclusive_lock
from headway.errors import plural
from headway.track import lock_holder, summarize, write_json

EVERY_S = 15.0
"""Between two rounds of queries; agents upload new records every minute and at checkpoints."""
PATIENCE_S = 10.0
"""How long a store may take to answer while somebody waits for a table."""
SETTLED = "settled.json"


class SweepSync:
    """Fetches what the runs of a sweep have recorded; nothing for a sweep with a shared folder."""

    def __init__(self, root: Path, sweep: Sweep, progress: Progress = lambda *_: None) -> None:
        self._root, self._sweep, self._progress = root.absolute(), sweep, progress
        self._folder = folder_of_sweep(root, sweep.name)
        self._last_sync, self._settled = -math.inf, _read_settled(self._folder)
        self.trouble = ""
        """Why the local records may be outdated; empty if they are not."""

    def sync(self, runs: Mapping[str, SubmittedRun | None], *, now: bool = False) -> None:
        """Fetch what is new, unless that was done a moment ago and it need not be `now`. `runs` must be older."""
        due = self._due(runs)
        if due and not now and time.monotonic() < self._last_sync + EVERY_S:
            return
        self.trouble = self._fetch(due, runs) if due else ""
        self._last_sync = time.monotonic()

    def _fetch(self, due: list[str], runs: Mapping[str, SubmittedRun | None]) -> str:
        from headway.agent.remote.store_mirror import fetch_run  # only runs with a store need its library

        addresses = {point.run: point.address for point in self._sweep.points}
        try:
            with exclusive_lock(self._folder / "bringing"):
                fetched, failed = for_each(
                    lambda run: fetch_run(addresses[run], self._root, PATIENCE_S), due, self._progress
                )
                self._settle(fetched, runs)
        except OSError as error:
            return f"cannot write {self._folder}: {error.strerror}"
        reason, left = next((error.message for error in failed.values()), ""), len(due) - len(fetched)
        return f"could not fetch {left} of {plural(len(due), 'run')} from their stores: {reason}" if left else ""

    def _due(self, runs: Mapping[str, SubmittedRun | None]) -> list[str]:
        """Runs that may have new records; those that this machine trains have them here."""
        due = list[str]()
        for point in self._sweep.points:
            submitted = runs[point.run]
            if not point.address or submitted is None or lock_holder(submitted.run) is not None:
                continue
            status = submitted.status
            has_started = status.starts > 0 or status.state not in ("waiting", "impossible")
            if has_started and not (status.state in OVER and point.run in self._settled):
                due.append(point.run)
        return due

    def _settle(self, fetched: set[str], runs: Mapping[str, SubmittedRun | None]) -> None:
        """Do not fetch again runs that were over before they were fetched; those that finished, never."""
        over = {name: run for name in fetched if (run := runs[name]) and run.status.state in OVER}
        self._settled |= set(over)
        finished = {name for name, run in over.items() if summarize(run.run).state == "finished"}
        before = _read_settled(self._folder)
        if finished - before:
            write_json(self._folder / SETTLED, sorted(before | finished))


def _read_settled(folder: Path) -> set[str]:
    try:
        return {str(run) for run in from_json((folder / SETTLED).read_bytes())}
    except (OSError, ValueError, TypeError):
        return set()
