"""Runs in their object stores, for machines that see no common folder: put there, taken back, brought here.

<url of a store>/
  <run>/...                            a run as its agents have it from there (agent/remote/store_mirror.py)
  .sweeps/<sweep>-<token>.json         the runs of a sweep, one for each copy of an array: put last, and no copy trains
                                       before it is there

Stores are asked by a few threads at a time, whatever the number of runs. One that answers nobody is soon left alone.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from headway.agent.saving.restore_points import need_store
from headway.errors import HeadwayError, RunError, StateError, UsageError
from headway.recipe import Recipe
from headway.track import RunFolder, read_recipe, run_id

__all__ = [
    "Progress",
    "ask",
    "commit",
    "delete_run",
    "each",
    "is_committed",
    "place_of_sweep",
    "put_runs",
    "revoke",
    "run_of_copy",
    "take_away",
    "upload_run",
]

IN_FLIGHT = 8
"""Runs that are put, taken away or brought at a time."""
PATIENCE_S = 120.0
"""How long a copy that starts at once waits for its sweep to be whole."""
LOOK_S = 1.0
SOON_S = 10.0
"""How long a store may take that only has to be tidied up: whoever comes next does it otherwise."""
FORMAT = 1
_PLACE = re.compile(r"([a-z][a-z0-9]*://.+)/(\.sweeps/[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{8})")

Progress = Callable[[int, int], None]
"""Told how many are done, and of how many."""


def each(
    act: Callable[[str], object], names: Iterable[str], told: Progress, strict: bool = False
) -> tuple[set[str], dict[str, HeadwayError]]:
    """Act on many, a few at a time: with which it went well, and what went wrong with which. The others were not tried,
    for none went well at first; or for the first that failed, where that is one too many."""
    names, went, wrong, enough = list(names), set[str](), dict[str, HeadwayError](), threading.Event()

    def one(name: str) -> None:
        if enough.is_set():
            return
        try:
            act(name)
            went.add(name)
        except HeadwayError as error:
            wrong[name] = error
            if strict or (len(wrong) >= IN_FLIGHT and not went):
                enough.set()

    with ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="stores") as pool:
        try:
            for task in as_completed([pool.submit(one, name) for name in names]):
                task.result()
                told(len(went), len(names))
        except BaseException:
            enough.set()
            raise
    return went, wrong


# -- runs


def ask(url: str) -> None:
    """See that the store of an address answers; StateError if not."""
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import owner_of

    owner_of(open_store(url, patience_s=SOON_S))


def upload_run(run: RunFolder) -> None:
    """Have a new run's small files in its store, where its place must be free. What fails may leave some of them."""
    from headway.agent.remote.store_mirror import put_folder  # only runs that name a store need its library
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import claim_prefix

    url = need_store(read_recipe(run), run.name)
    store = open_store(url)
    if not claim_prefix(store, run_id(run)):
        raise RunError(f"{url} has checkpoints of another run of this name", hint="another --name")
    put_folder(run, store)


def delete_run(url: str, identity: str) -> None:
    """Take away all that a run has at its address; what is another's stays."""
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import OWNER, owner_of

    store = open_store(url, patience_s=SOON_S)
    if owner_of(store) == identity:
        store.delete([item.key for item in store.list() if item.key != OWNER])
        store.delete([OWNER])  # the last: whoever dies in between leaves what can be known again


def put_runs(runs: Sequence[RunFolder], told: Progress) -> None:
    """Have many new runs in their stores; whatever is wrong with the first that fails is raised."""
    named = {str(run.path): run for run in runs}
    _, wrong = each(lambda name: upload_run(named[name]), named, told, strict=True)
    for error in wrong.values():
        raise error


def take_away(stored: Mapping[str, str]) -> None:
    """Take away runs by their addresses and identities; StateError if some may be left."""
    went, wrong = each(lambda url: delete_run(url, stored[url]), stored, lambda *_: None)
    if len(went) < len(stored):
        reason = next((error.message for error in wrong.values()), "the store does not answer")
        raise StateError(f"{len(stored) - len(went)} runs are left in their stores: {reason}")


# -- sweeps


def place_of_sweep(recipe: Recipe, name: str, token: str) -> str:
    """Where copies of a sweep find their runs; the store is that of its first run."""
    return need_store(recipe, f".sweeps/{name}-{token}")


def commit(place: str, runs: Sequence[str]) -> None:
    """Say that a sweep is whole, and which runs it has, by their addresses: from now on copies train."""
    from headway.state.object_store import open_store

    base, key = _parts(place)
    if not open_store(base).create(key, json.dumps({"format": FORMAT, "runs": list(runs)}).encode()):
        raise RunError(f"{place} is taken by another sweep", hint="another --name")


def is_committed(place: str) -> bool:
    """Whether a sweep is whole; StateError where its store does not say."""
    from headway.state.object_store import open_store

    base, key = _parts(place)
    return open_store(base, patience_s=SOON_S).find(key) is not None


def revoke(place: str) -> None:
    """Have no copy of a sweep begin any more."""
    from headway.state.object_store import open_store

    base, key = _parts(place)
    open_store(base, patience_s=SOON_S).delete([key])


def run_of_copy(address: str) -> str:
    """The address of the run that this copy of an array is to train, where `address` is the place of a sweep; any other
    one as it is. Nothing is trained for a sweep that nobody knows of, for its maker may have died before the end."""
    if not _PLACE.fullmatch(address):
        return address
    index = os.environ.get("HEADWAY_ARRAY_INDEX", "")
    if not index.isdecimal():
        raise UsageError(
            f"{address} is a sweep, and HEADWAY_ARRAY_INDEX does not say which of its runs is meant",
            hint="engines say it to each copy; --run takes the address of one run too",
        )
    from headway.state.object_store import open_store

    base, key = _parts(address)
    store, deadline = open_store(base), time.monotonic() + PATIENCE_S
    while (content := store.find(key)) is None:
        if time.monotonic() > deadline:
            raise RunError(f"{address} was never submitted whole: nothing is trained", hint="headway sweep does it")
        time.sleep(LOOK_S)
    try:
        return str(json.loads(content)["runs"][int(index)])
    except (ValueError, TypeError, KeyError, IndexError):
        raise RunError(f"{store.name(key)} knows of no run {index}", hint="submit the sweep again") from None


def _parts(place: str) -> tuple[str, str]:
    """The url of the store, and the key there."""
    match = _PLACE.fullmatch(place)
    assert match, f"{place} is no place of a sweep"
    return match[1], f"{match[2]}.json"
