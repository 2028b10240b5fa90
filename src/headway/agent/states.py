"""Which saved states a run could go on from: on its disk, in its object store. What looks damaged is passed over.

A look is at manifests and sizes. What only reading all of it would find, workers find, and the agent looks again
without that one.
"""

from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from headway.errors import HeadwayError, StateError
from headway.recipe import Store
from headway.state import list_checkpoints, open_checkpoint
from headway.state.address import address_in_store, open_address, store_url
from headway.track import RunFolder, run_id

__all__ = ["Saved", "is_taken", "newest_in_store", "newest_on_disk"]


class Saved(NamedTuple):
    """A state that can be had."""

    step: int
    address: str


def newest_on_disk(checkpoints: Path, damaged: Container[str] = ()) -> tuple[Saved | None, list[str]]:
    """The newest checkpoint of a folder that looks whole, and what is wrong with newer ones."""
    found = list[str]()
    for entry in reversed(list_checkpoints(checkpoints)):
        if str(entry.path) in damaged:
            continue
        try:
            open_checkpoint(entry.path)
        except StateError as error:
            found.append(f"step {entry.step} is passed over: {error.message}")
            continue
        return Saved(entry.step, str(entry.path)), found
    return None, found


def newest_in_store(
    run: RunFolder, rules: Store | None, damaged: Container[str] = ()
) -> tuple[Saved | None, list[str]]:
    """The same of the run's object store; one that cannot be asked has nothing to offer, and says why."""
    if rules is None:
        return None, []
    url, found = store_url(rules, run.name), list[str]()
    try:
        if is_taken(run, rules):
            return None, [f"{url} has checkpoints of another run of this name, which are left alone"]
        steps = _steps_at(url)
    except HeadwayError as error:
        return None, [f"the object store cannot be asked: {error.message}"]
    for step in sorted(steps, reverse=True):
        address = address_in_store(url, step)
        if address in damaged:
            continue
        try:
            open_address(address)
        except StateError as error:
            found.append(f"step {step} in the object store is passed over: {error.message}")
            continue
        return Saved(step, address), found
    return None, found


def is_taken(run: RunFolder, rules: Store) -> bool:
    """Whether the run's place in its object store has checkpoints of another run."""
    from headway.state.remote import claim
    from headway.state.store import open_store

    url = store_url(rules, run.name)
    return bool(_steps_at(url)) and not claim(open_store(url), run_id(run))


def _steps_at(url: str) -> list[int]:
    from headway.state.remote import list_remote
    from headway.state.store import open_store

    return [entry.step for entry in list_remote(open_store(url))]
