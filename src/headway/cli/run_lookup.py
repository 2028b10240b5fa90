"""Finds the folder of a run by its name, or fetches it from the run's address in an object store."""

import os
import stat
import tempfile
from pathlib import Path

from headway.agent.nodes.store_lease import lease_in_store
from headway.agent.remote.store_mirror import fetch_run, remove_stale_folder
from headway.errors import RunError, StateError, UsageError
from headway.state.address import is_in_store, split_address, store_url
from headway.track import RunFolder, find_run, read_recipe, runs_root


def folder_of(run: str, runs: Path | None, *, alone: bool = False) -> tuple[RunFolder, bool]:
    """Return the folder of a run, and whether it came from the run's store, which is then to be kept up to date.

    A caller that resumes the run `alone` asks the store even if the folder is here: other machines may be further on.
    """
    if is_in_store(run) and (parts := split_address(run))[1] is not None:
        raise UsageError(f"{run} is a checkpoint, not a run", hint=f"the run's address is {parts[0]}")
    if not is_in_store(run):
        folder = find_run(runs_root(runs), run)
        url = _address_with_lease(folder) if alone else None
        if url is None:
            return folder, False
        run, runs = url, folder.path.parent
    return fetch_run(run, runs_root(runs)), True


def _address_with_lease(folder: RunFolder) -> str | None:
    """Return the address of a run that has a leader lease in its store: other machines may be further on."""
    store = read_recipe(folder).checkpoint.store
    if store is None:
        return None
    url = store_url(store, folder.name)
    try:
        return None if lease_in_store(url, patience_s=5.0) is None else url
    except StateError:
        return None  # a store that does not answer must not keep a run from resuming with what is here


def own_folder_of(url: str, runs: Path | None) -> RunFolder:
    """Fetch the folder of a run onto a machine that an engine has started."""
    root = own_root(runs)
    if runs is None and not os.environ.get("HEADWAY_RUNS"):
        remove_stale_folder(url, root)
    return fetch_run(url, root)


def own_root(runs: Path | None) -> Path:
    """Return where a machine that an engine has started holds runs: as given, else a private folder in $TMPDIR."""
    if runs is not None or os.environ.get("HEADWAY_RUNS"):
        return runs_root(runs)
    root = Path(tempfile.gettempdir()) / f"headway-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise RunError(f"cannot create {root}: {error.strerror}", hint="choose another folder with --runs") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RunError(f"{root} is not private to this user", hint="choose another folder with --runs")
    return root / "runs"
