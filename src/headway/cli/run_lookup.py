"""A run by its name, or by its address in an object store, which has its folder made here or brought up to date."""

import math
import os
import stat
import sys
import tempfile
import time
from pathlib import Path

from headway.errors import HeadwayError, RunError, StateError
from headway.state.address import is_in_store
from headway.track import RunFolder, find_run, read_recipe, runs_root, summarize

__all__ = ["RunSync", "find_up_to_date", "folder_of", "is_elsewhere", "own_folder_of", "own_root"]

_BRING_S, _PATIENCE_S = 10.0, 10.0
"""Between looks into a run's store, and how long that may take to answer."""


def folder_of(run: str, runs: Path | None, *, alone: bool = False) -> tuple[RunFolder, bool]:
    """The folder of a run, and whether it came from its store, which then has to be kept up with it.

    Whoever goes on `alone` asks the store even for a folder that is here: machines elsewhere may have gone on with it.
    """
    if not is_in_store(run):
        folder = find_run(runs_root(runs), run)
        url = _led_by_store(folder) if alone else None
        if url is None:
            return folder, False
        run, runs = url, folder.path.parent
    from headway.agent.remote.store_mirror import fetch_run  # only runs that name a store need its library

    return fetch_run(run, runs_root(runs)), True


def _led_by_store(folder: RunFolder) -> str | None:
    """The address of a run that has been led by leases in its store: other machines may know more of it than this."""
    store = read_recipe(folder).checkpoint.store
    if store is None:
        return None
    from headway.agent.nodes.store_lease import lease_in_store
    from headway.state.address import store_url

    url = store_url(store, folder.name)
    try:
        return None if lease_in_store(url, patience_s=5.0) is None else url
    except StateError:
        return None  # a store that does not answer keeps nobody from going on with what is here


def own_folder_of(url: str, runs: Path | None) -> RunFolder:
    """The folder of a run on a machine that an engine has started, from its store."""
    from headway.agent.remote.store_mirror import fetch_run, remove_stale_folder

    root = own_root(runs)
    if runs is None and not os.environ.get("HEADWAY_RUNS"):
        remove_stale_folder(url, root)
    return fetch_run(url, root)


def own_root(runs: Path | None) -> Path:
    """Where a machine that an engine has started has folders of its own: as stated, else below $TMPDIR, where nobody
    else may read or write."""
    if runs is not None or os.environ.get("HEADWAY_RUNS"):
        return runs_root(runs)
    root = Path(tempfile.gettempdir()) / f"headway-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
    except OSError as error:
        raise RunError(f"{root} cannot be made: {error.strerror}", hint="another place with --runs") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunError(f"{root} is not a folder of yours alone", hint="another place with --runs")
    return root / "runs"


def is_elsewhere(run: RunFolder) -> bool:
    """Whether a run was submitted to machines that do not see its folder here."""
    if not (run.path / "jobs.jsonl").exists():
        return False
    from headway.cluster.engines.submissions import last_submission

    try:
        job = last_submission(run.path)
    except RunError:  # it says nothing, and `headway jobs` what is wrong with it
        return False
    return job is not None and not job.request.shared


class RunSync:
    """What machines that see no common folder have put into the store of a run that was submitted."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._away, self._last = run, is_elsewhere(run), -math.inf

    def now(self, at_once: bool = False) -> None:
        """Bring what is new, unless that was done a moment ago and need not be again `at_once`."""
        if not self._away or (not at_once and time.monotonic() < self._last + _BRING_S):
            return
        from headway.agent.remote.store_mirror import fetch_run
        from headway.agent.saving.restore_points import need_store

        try:
            fetch_run(need_store(read_recipe(self._run), self._run.name), self._run.path.parent, _PATIENCE_S)
        except HeadwayError as error:
            print(f"note: what is here may be old: {error.message}", file=sys.stderr, flush=True)
        self._last = time.monotonic()


def find_up_to_date(root: Path, name: str) -> RunFolder:
    """The folder of a run, with what machines elsewhere have recorded of it until now."""
    run = find_run(root, name)
    if summarize(run).state != "finished":
        RunSync(run).now()
    return run
