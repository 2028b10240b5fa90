"""Which saved states a run could go on from: on its disk, in its object store. What looks damaged is passed over.

A look is at manifests and sizes. What only reading all of it would find, workers find, and the agent looks again
without that one.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headway.agent.attempt import Attempt
from headway.agent.supervise.recover import Failure, Recovery, RestorableSteps, Source
from headway.errors import HeadwayError, RunError, StateError
from headway.recipe import Recipe, SpikeReference, Store, SuspectElement
from headway.state import list_checkpoints, open_checkpoint
from headway.state.address import address_in_store, open_address, store_url
from headway.track import RunFolder, run_id

__all__ = [
    "RestoreChoice",
    "RestoreOptions",
    "RestorePoint",
    "is_taken",
    "need_store",
    "newest_in_store",
    "newest_on_disk",
    "ways",
]


class RestorePoint(NamedTuple):
    """A state that can be had."""

    step: int
    address: str


def newest_on_disk(checkpoints: Path, damaged: Container[str] = ()) -> tuple[RestorePoint | None, list[str]]:
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
        return RestorePoint(entry.step, str(entry.path)), found
    return None, found


def newest_in_store(
    run: RunFolder, rules: Store | None, damaged: Container[str] = ()
) -> tuple[RestorePoint | None, list[str]]:
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
        return RestorePoint(step, address), found
    return None, found


def is_taken(run: RunFolder, rules: Store) -> bool:
    """Whether the run's place in its object store has checkpoints of another run."""
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import claim_prefix

    url = store_url(rules, run.name)
    return bool(_steps_at(url)) and not claim_prefix(open_store(url), run_id(run))


def need_store(recipe: Recipe, run: str) -> str:
    """Where a run's checkpoints lie in its store; RunError for a recipe without one."""
    if recipe.checkpoint.store is None:
        raise RunError(
            f"run {run} has no object store, by which machines go that see no common folder",
            hint='the recipe needs [checkpoint.store] with a url, for example "s3://bucket/prefix"',
        )
    return store_url(recipe.checkpoint.store, run)


def _steps_at(url: str) -> list[int]:
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import list_remote

    return [entry.step for entry in list_remote(open_store(url))]


# -- for a way on


@dataclass(frozen=True)
class RestoreChoice:
    """A recovery, and the address of the state that it takes; None where that is in memory or nowhere."""

    recovery: Recovery
    address: str | None

    @property
    def judge(self) -> SpikeReference | None:
        """What to hold the doubtful step against."""
        if self.recovery.judge is None:
            return None
        step, usual, spread = self.recovery.judge
        return SpikeReference(step=step, usual=usual, spread=spread)

    @property
    def doubt(self) -> SuspectElement | None:
        """What differed between replicas."""
        if self.recovery.doubt is None:
            return None
        step, rank, tensor, index = self.recovery.doubt
        return SuspectElement(step=step, rank=rank, tensor=tensor, index=index)


@dataclass(frozen=True)
class RestoreOptions:
    """The states that a run could go on from."""

    states: RestorableSteps
    addresses: dict[Source, str | None]

    def take(self, recovery: Recovery) -> RestoreChoice:
        """The way that a recovery asks for."""
        return RestoreChoice(recovery, self.addresses.get(recovery.source))


def ways(
    run: RunFolder, recipe: Recipe, first: Attempt, failures: Sequence[Failure], memory_step: int | None
) -> RestoreOptions:
    """Look for states, without those that were found damaged; `first` is the attempt that somebody started.

    The object store is asked where nothing nearer is whole: that can take long.
    """
    damaged = {failure.place for failure in failures if failure.cause == "damaged"}
    disk, _ = newest_on_disk(run.checkpoints, damaged)
    asks_store = failures[-1].cause == "damaged" or (disk is None and memory_step is None)
    store = newest_in_store(run, recipe.checkpoint.store, damaged)[0] if asks_store else None
    states = RestorableSteps(
        memory=None if "memory" in damaged else memory_step,
        disk=None if disk is None else disk.step,
        store=None if store is None else store.step,
        start=None if first.checkpoint in damaged else first.from_step,
    )
    there: dict[Source, str | None] = {"start": first.checkpoint}
    there |= {} if disk is None else {"disk": disk.address}
    return RestoreOptions(states, there | ({} if store is None else {"store": store.address}))
