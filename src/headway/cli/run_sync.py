"""Brings the records of runs that train on other machines up to date from their object stores."""

import math
import sys
import time
from pathlib import Path

from headway.cluster.engines.submissions import last_submission
from headway.errors import HeadwayError, RunError
from headway.track import RunFolder, find_run, read_recipe, summarize

_SYNC_EVERY_S, _STORE_TIMEOUT_S = 10.0, 10.0


def is_elsewhere(run: RunFolder) -> bool:
    """Whether a run was submitted to machines that do not share its folder here."""
    if not (run.path / "jobs.jsonl").exists():
        return False
    try:
        job = last_submission(run.path)
    except RunError:  # `headway jobs` reports what is wrong with the file
        return False
    return job is not None and not job.request.shared


class RunSync:
    """Fetches what machines without a shared folder have put into the store of a submitted run."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._elsewhere, self._last = run, is_elsewhere(run), -math.inf

    def now(self, at_once: bool = False) -> None:
        """Fetch what is new; do nothing if that was done a moment ago, except `at_once`."""
        if not self._elsewhere or (not at_once and time.monotonic() < self._last + _SYNC_EVERY_S):
            return
        # headway.agent takes 0.35 s to import: `headway report` of a run on this machine does without.
        from headway.agent.remote.store_mirror import fetch_run
        from headway.agent.saving.restore_points import need_store

        try:
            fetch_run(need_store(read_recipe(self._run), self._run.name), self._run.path.parent, _STORE_TIMEOUT_S)
        except HeadwayError as error:
            print(f"note: the records here may be out of date: {error.message}", file=sys.stderr, flush=True)
        self._last = time.monotonic()


def find_up_to_date(root: Path, name: str) -> RunFolder:
    """Return the folder of a run, with what other machines have recorded so far."""
    run = find_run(root, name)
    if summarize(run).state != "finished":
        RunSync(run).now()
    return run
