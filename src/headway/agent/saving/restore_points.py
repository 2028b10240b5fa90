"""Finds the saved states a run can resume from, on disk and in its object store; skips those that look damaged.

Only manifests and sizes are checked. Workers find damage that only a full read shows; the agent then searches again
without that checkpoint.
"""

import contextlib
from collections.abc import Callable, Container, Sequence
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


class RestorePoint(NamedTuple):
    """A saved state and its address."""

    step: int
    address: str


def newest_on_disk(checkpoints: Path, damaged: Container[str] = ()) -> tuple[RestorePoint | None, list[str]]:
    """The newest checkpoint of a folder that looks intact, and what is wrong with newer ones."""
    points = [RestorePoint(entry.step, str(entry.path)) for entry in list_checkpoints(checkpoints)]
    return _newest_intact(points, damaged, lambda address: open_checkpoint(Path(address)))


def newest_in_store(
    run: RunFolder, rules: Store | None, damaged: Container[str] = ()
) -> tuple[RestorePoint | None, list[str]]:
    """The same for the run's object store; one that cannot be read yields None and the reason."""
    if rules is None:
        return None, []
    url = store_url(rules, run.name)
    try:
        if is_taken(run, rules):
            return None, [f"{url} has checkpoints of another run of this name; they are left alone"]
        points = [RestorePoint(step, address_in_store(url, step)) for step in sorted(_steps_at(url))]
    except HeadwayError as error:
        return None, [f"cannot read the object store: {error.message}"]
    return _newest_intact(points, damaged, open_address, " in the object store")


def _newest_intact(
    points: Sequence[RestorePoint], damaged: Container[str], check: Callable[[str], object], where: str = ""
) -> tuple[RestorePoint | None, list[str]]:
    notes = list[str]()
    for point in reversed(points):
        if point.address in damaged:
            continue
        try:
            check(point.address)
        except StateError as error:
            notes.append(f"skipped step {point.step}{where}: {error.message}")
        else:
            return point, notes
    return None, notes


def is_taken(run: RunFolder, rules: Store) -> bool:
    """Whether the run's prefix in its object store has checkpoints of another run."""
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import claim_prefix

    url = store_url(rules, run.name)
    return bool(_steps_at(url)) and not claim_prefix(open_store(url), run_id(run))


def need_store(recipe: Recipe, run: str) -> str:
    """URL of a run's checkpoints in its object store; raise RunError if the recipe has none."""
    if recipe.checkpoint.store is None:
        raise RunError(
            f"run {run} needs an object store: no folder is shared",
            hint='add [checkpoint.store] with a url to the recipe, for example url = "s3://bucket/prefix"',
            usage=True,
        )
    return store_url(recipe.checkpoint.store, run)


def _steps_at(url: str) -> list[int]:
    from headway.state.object_store import open_store
    from headway.state.store_checkpoint import list_remote

    return [entry.step for entry in list_remote(open_store(url))]


# -- restore options


@dataclass(frozen=True)
class RestoreChoice:
    """A recovery, and the address of the state that it loads; None if that is in memory or there is none."""

    recovery: Recovery
    address: str | None

    @property
    def judge(self) -> SpikeReference | None:
        """What to compare the step of a spike with."""
        if self.recovery.judge is None:
            return None
        step, usual, spread = self.recovery.judge
        return SpikeReference(step=step, usual=usual, spread=spread)

    @property
    def doubt(self) -> SuspectElement | None:
        """The element that differed between replicas."""
        if self.recovery.doubt is None:
            return None
        step, rank, tensor, index = self.recovery.doubt
        return SuspectElement(step=step, rank=rank, tensor=tensor, index=index)


@dataclass(frozen=True)
class RestoreOptions:
    """The states that a run can resume from."""

    states: RestorableSteps
    addresses: dict[Source, str | None]

    def take(self, recovery: Recovery) -> RestoreChoice:
        """The state that a recovery asks for."""
        return RestoreChoice(recovery, self.addresses.get(recovery.source))


def find_restore_options(
    run: RunFolder, recipe: Recipe, first: Attempt, failures: Sequence[Failure], memory_step: int | None
) -> RestoreOptions:
    """Find the newest states, without those known to be damaged; `first` is the attempt that a user started.

    The object store, which can be slow, is searched only if nothing nearer is intact.
    """
    damaged = {failure.place for failure in failures if failure.cause == "damaged"}
    disk, _ = newest_on_disk(run.checkpoints, damaged)
    search_store = failures[-1].cause == "damaged" or (disk is None and memory_step is None)
    store = newest_in_store(run, recipe.checkpoint.store, damaged)[0] if search_store else None
    start, origin = _start_of(first, damaged)
    states = RestorableSteps(
        memory=None if "memory" in damaged else memory_step,
        disk=None if disk is None else disk.step,
        store=None if store is None else store.step,
        start=start,
    )
    addresses: dict[Source, str | None] = {"start": origin}
    addresses |= {} if disk is None else {"disk": disk.address}
    return RestoreOptions(states, addresses | ({} if store is None else {"store": store.address}))


def _start_of(first: Attempt, damaged: Container[str | None]) -> tuple[int | None, str | None]:
    """Step and address of the state that a run started from; of an older one if that is damaged, None if all are."""
    if first.checkpoint not in damaged:
        return first.from_step, first.checkpoint
    for address in first.older:
        with contextlib.suppress(StateError):
            if address not in damaged:
                return open_address(address).manifest.step, address
    return None, None
