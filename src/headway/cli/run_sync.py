"""Brings the records of runs that train on other machines up to date from their object stores."""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from headway.errors import HeadwayError, RunError, UsageError
from headway.track import RunFolder, find_run, read_recipe, summarize
from headway.track.runs import RUN_NAME
from headway.track.store.index import index_file

_SYNC_EVERY_S, _STORE_TIMEOUT_S = 10.0, 10.0


def is_elsewhere(run: RunFolder) -> bool:
    """Whether a run was submitted to machines that do not share its folder here."""
    if not (run.path / "jobs.jsonl").exists():
        return False
    # Pydantic and the engines: `headway runs` of runs on this machine does without.
    from headway.cluster.engines.submissions import last_submission

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
    say_which(name, run)
    if summarize(run).state != "finished":
        RunSync(run).now()
    return run


def say_which(ref: str, run: RunFolder) -> None:
    """Say which run is meant by the beginning of a name: another one may have been."""
    if ref not in ("last", run.name) and not ref.endswith(f"/{run.name}"):
        print(f"note: {ref} is {run.name}", file=sys.stderr, flush=True)


def fetch_all(url: str, progress: Callable[[int, int], None]) -> Path:
    """Sync the records of all runs below an address of an object store into the user's cache; return their folder.

    A run that cannot be fetched is left as it was, with a note.
    """
    from headway.agent.remote.store_mirror import fetch_run
    from headway.state.object_store import open_store

    if "://" not in url:
        raise UsageError(f"{url} is no address of an object store", hint="for example s3://bucket/prefix")
    url = url.rstrip("/")
    root = index_file().parent / "stores" / xxhash.xxh3_64_hexdigest(url.encode())
    names = [name for name in open_store(url, patience_s=_STORE_TIMEOUT_S).folders() if RUN_NAME.fullmatch(name)]
    for done, name in enumerate(names):
        progress(done, len(names))
        try:
            fetch_run(f"{url}/{name}", root, _STORE_TIMEOUT_S)
        except HeadwayError as error:
            print(f"note: {name} was not fetched: {error.message}", file=sys.stderr, flush=True)
    return root
