"""Runs in their object stores, for machines without a shared folder: uploaded, deleted, looked up.

<url of a store>/
  <run>/...                            a run, as its agents fetch it (agent/remote/store_mirror.py)
  .sweeps/<sweep>-<token>.json         the runs of a sweep, by array index: written last, and no task trains before

A few threads talk to the stores, whatever the number of runs. A store that fails for all of the first runs is given up.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from headway.agent.saving.restore_points import need_store
from headway.errors import HeadwayError, RunError, StateError, UsageError, plural
from headway.recipe import Recipe
from headway.track import RunFolder, read_recipe, run_id

if TYPE_CHECKING:
    from headway.state.object_store import ObjectStore

IN_FLIGHT = 8
"""Runs that are uploaded, deleted or fetched at a time."""
PATIENCE_S = 120.0
"""How long an array task that starts at once waits for its sweep to be committed."""
POLL_S = 1.0
SOON_S = 10.0
"""How long a store may take to clean up: otherwise the next sweep does it."""
FORMAT = 1
_SWEEP_ADDRESS = re.compile(r"([a-z][a-z0-9]*://.+)/(\.sweeps/[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{8})")

Progress = Callable[[int, int], None]
"""Called with the number of runs done, and of all runs."""


def for_each(
    act: Callable[[str], object], names: Iterable[str], progress: Progress, strict: bool = False
) -> tuple[set[str], dict[str, HeadwayError]]:
    """Act on many names, a few at a time, and return those that succeeded and the errors of those that failed. Give up
    on the others if none of the first succeeds; with `strict`, at the first failure."""
    names, succeeded, failed = list(names), set[str](), dict[str, HeadwayError]()
    give_up = threading.Event()

    def attempt(name: str) -> None:
        if give_up.is_set():
            return
        try:
            act(name)
            succeeded.add(name)
        except HeadwayError as error:
            failed[name] = error
            if strict or (len(failed) >= IN_FLIGHT and not succeeded):
                give_up.set()

    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="stores") as pool:
        try:
            for task in as_completed([pool.submit(attempt, name) for name in names]):
                task.result()
                progress(len(succeeded), len(names))
        except BaseException:
            give_up.set()
            raise
    return succeeded, failed


# -- runs


def check_store(url: str) -> None:
    """Raise StateError if the store of an address does not answer."""
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import owner_of

    owner_of(open_store(url, patience_s=SOON_S))


def upload_run(run: RunFolder) -> None:
    """Upload the small files of a new run, whose address must be unused. A failure may leave some of them."""
    from headway.agent.remote.store_mirror import put_folder  # only runs with a store need its library
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import claim_prefix

    url = need_store(read_recipe(run), run.name)
    store = open_store(url)
    if not claim_prefix(store, run_id(run)):
        raise RunError(f"{url} has checkpoints of another run of this name", hint="choose another --name", usage=True)
    put_folder(run, store)


def delete_run(url: str, identity: str) -> None:
    """Delete everything of a run at its address, unless that belongs to another run."""
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import OWNER, owner_of

    store = open_store(url, patience_s=SOON_S)
    if owner_of(store) == identity:
        store.delete([item.key for item in store.list() if item.key != OWNER])
        store.delete([OWNER])  # last: if we die before, the rest can still be attributed


def upload_runs(runs: Sequence[RunFolder], progress: Progress) -> None:
    """Upload many new runs; raise the error of the first that fails."""
    by_path = {str(run.path): run for run in runs}
    _, failed = for_each(lambda path: upload_run(by_path[path]), by_path, progress, strict=True)
    for error in failed.values():
        raise error


def delete_runs(stored: Mapping[str, str]) -> None:
    """Delete runs, given as identities by address; StateError if some may be left."""
    deleted, failed = for_each(lambda url: delete_run(url, stored[url]), stored, lambda *_: None)
    if len(deleted) < len(stored):
        reason = next((error.message for error in failed.values()), "the store does not answer")
        raise StateError(f"{plural(len(stored) - len(deleted), 'run')} left in their stores: {reason}")


# -- sweeps


def sweep_address(recipe: Recipe, name: str, token: str) -> str:
    """Where array tasks find their runs: in the store of the first run."""
    return need_store(recipe, f".sweeps/{name}-{token}")


def commit(address: str, runs: Sequence[str]) -> None:
    """Publish the addresses of a sweep's runs: from now on its tasks train."""
    store, key = _open(address)
    if not store.create(key, json.dumps({"format": FORMAT, "runs": list(runs)}).encode()):
        raise RunError(f"{address} is taken by another sweep", hint="choose another --name", usage=True)


def is_committed(address: str) -> bool:
    """Whether a sweep is committed; StateError if its store does not answer."""
    store, key = _open(address, patience_s=SOON_S)
    return store.find(key) is not None


def revoke(address: str) -> None:
    """Keep tasks of a sweep from starting to train."""
    store, key = _open(address, patience_s=SOON_S)
    store.delete([key])


def run_of_array_task(address: str) -> str:
    """The address of the run that this array task trains, if `address` is that of a sweep; else `address` itself. Waits
    for the sweep to be committed: its creator may have died before."""
    if not _SWEEP_ADDRESS.fullmatch(address):
        return address
    index = os.environ.get("HEADWAY_ARRAY_INDEX", "")
    if not index.isdecimal():
        raise UsageError(
            f"{address} is a sweep, and HEADWAY_ARRAY_INDEX does not say which of its runs to train",
            hint="engines set it per array task; --run also takes the address of a single run",
        )
    (store, key), deadline = _open(address), time.monotonic() + PATIENCE_S
    while (content := store.find(key)) is None:
        if time.monotonic() > deadline:
            raise RunError(f"{address} was never committed: nothing to train", hint="submit it with headway sweep")
        time.sleep(POLL_S)
    try:
        return str(json.loads(content)["runs"][int(index)])
    except (ValueError, TypeError, KeyError, IndexError):
        raise RunError(f"{store.name(key)} has no run {index}", hint="submit the sweep again") from None


def _open(address: str, **options: float) -> "tuple[ObjectStore, str]":
    """The store of a sweep's address, and the key there."""
    from headway.state.object_store import open_store

    match = _SWEEP_ADDRESS.fullmatch(address)
    assert match, f"{address} is not the address of a sweep"
    return open_store(match[1], **options), f"{match[2]}.json"
