"""The records of a sweep's runs, brought here from their object stores where machines see no common folder.

Who waits for a sweep asks at most every so often, and only for runs that have begun and of which more may have come. A
run whose job is over is asked for once after that; for those that have finished, `settled.json` in the sweep's folder
remembers it. Whoever else looks at the same time waits for its turn.
"""

import fcntl
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic_core import from_json

from headway.cluster.engines.engine import OVER
from headway.cluster.submit.runs import SubmittedRun
from headway.cluster.submit.store_runs import Progress, each
from headway.cluster.submit.sweeps import Sweep, folder_of_sweep
from headway.track import lock_holder, summarize, write_json

__all__ = ["SweepSync"]

EVERY_S = 15.0
"""Between two rounds of questions; agents put what is new there every minute, and at checkpoints."""
PATIENCE_S = 10.0
"""How long a store may take to answer, for somebody who waits to see a table."""
SETTLED = "settled.json"


class SweepSync:
    """Brings what runs of a sweep have recorded; of a sweep with a common folder nothing has to be brought."""

    def __init__(self, root: Path, sweep: Sweep, told: Progress = lambda *_: None) -> None:
        self._root, self._sweep, self._told = root.absolute(), sweep, told
        self._folder = folder_of_sweep(root, sweep.name)
        self._last, self._known = -math.inf, _settled(self._folder)
        self.trouble = ""
        """Why what is here may be old; nothing where it is not."""

    def sync(self, standings: Mapping[str, SubmittedRun | None], *, now: bool = False) -> None:
        """Bring what is new, unless that was done a moment ago and it need not be `now`. Jobs stood so before."""
        due = self._due(standings)
        if due and not now and time.monotonic() < self._last + EVERY_S:
            return
        self.trouble = self._bring(due, standings) if due else ""
        self._last = time.monotonic()

    def _bring(self, due: list[str], standings: Mapping[str, SubmittedRun | None]) -> str:
        from headway.agent.remote.store_mirror import fetch_run  # only runs that name a store need its library

        addresses = {point.run: point.address for point in self._sweep.points}
        try:
            with _alone(self._folder):
                went, wrong = each(lambda run: fetch_run(addresses[run], self._root, PATIENCE_S), due, self._told)
                self._know(went, standings)
        except OSError as error:
            return f"{self._folder} cannot be written: {error.strerror}"
        reason = next((error.message for error in wrong.values()), "")
        left = len(due) - len(went)
        return f"{left} of {len(due)} runs could not be brought from their stores: {reason}" if left else ""

    def _due(self, standings: Mapping[str, SubmittedRun | None]) -> list[str]:
        """Runs that may have recorded something since; those that this machine itself trains have it here."""
        found = list[str]()
        for point in self._sweep.points:
            one = standings[point.run]
            if not point.address or one is None or lock_holder(one.run) is not None:
                continue
            begun = one.status.starts > 0 or one.status.state not in ("waiting", "impossible")
            if begun and not (one.status.state in OVER and point.run in self._known):
                found.append(point.run)
        return found

    def _know(self, went: set[str], standings: Mapping[str, SubmittedRun | None]) -> None:
        """Nothing more will come of runs that were over before they were brought; nor ever of those that finished."""
        there = {run: one for run in went if (one := standings[run]) and one.status.state in OVER}
        self._known |= set(there)
        finished = {run for run, one in there.items() if summarize(one.run).state == "finished"}
        before = _settled(self._folder)
        if finished - before:
            write_json(self._folder / SETTLED, sorted(before | finished))


def _settled(folder: Path) -> set[str]:
    try:
        return {str(run) for run in from_json((folder / SETTLED).read_bytes())}
    except (OSError, ValueError, TypeError):
        return set()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One at a time: two who write the same files would get into each other's way."""
    file = os.open(folder / "bringing", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
