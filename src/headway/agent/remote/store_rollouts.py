"""Batches of rollouts in a run's object store: those that its checkpoints there need.

    rollouts/batch-<step>.jsonl                a finished batch, named after the first step that learns from it
    rollouts/batch-<step>.<share>.safetensors  log-probabilities of its answers by the weights of its beginning

A policy that resumes in the middle of a batch of several updates, or with staleness, goes on with answers that earlier
weights sampled. They are put before the checkpoint that needs them, which is not committed without, and deleted with
the last one that does. Finished batches never change: `rl/rollout_files.py` writes them.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from headway.agent.remote.bundle import fetch_file
from headway.errors import StateError
from headway.state.object_store import ObjectStore
from headway.state.store_checkpoint import list_remote
from headway.track import RunFolder

ROLLOUTS = "rollouts"
"""Of a run folder, and under the run's URL."""
_FILE = re.compile(rf"{ROLLOUTS}/batch-(\d{{8}})\.(?:jsonl|\d{{1,6}}\.safetensors)")

Stamps = dict[str, tuple[int, int]]
"""Size and modification time of files that are in the store."""


def needed_batches(step: int, recipe: Mapping[str, Any]) -> range:
    """Return the first steps of the batches that were sampled up to a step, and that later steps learn from."""
    rl = recipe.get("rl")
    if not rl or not step:
        return range(0)
    updates, ahead = int(rl["updates"]), int(rl["staleness"]) * int(rl["updates"])
    first = step + 1 - step % updates  # of the batch that the next step is in
    return range(first, min(step + ahead, int(recipe["train"]["steps"])) + 1, updates)


def upload_rollouts(store: ObjectStore, run: Path, recipe: Mapping[str, Any], step: int, known: Stamps) -> None:
    """Put the batches that the checkpoint of a step needs, but for files `known` to be there; raise StateError if one
    is missing here."""
    folder = run / ROLLOUTS
    if not folder.is_dir():
        return  # the first worker is on another machine, which shares no folder with this one
    for first in needed_batches(step, recipe):
        if not (folder / f"batch-{first:08d}.jsonl").is_file():
            raise StateError(
                f"step {step} was not uploaded: it needs the rollouts that begin with step {first}, and "
                f"{folder / f'batch-{first:08d}.jsonl'} is not there",
                hint="set rl.keep_rollouts higher",
            )
        for path in sorted(folder.glob(f"batch-{first:08d}.*")):
            name = f"{ROLLOUTS}/{path.name}"
            if _FILE.fullmatch(name):
                stat = path.stat()
                stamp = stat.st_size, stat.st_mtime_ns
                if known.get(name) != stamp:
                    store.put(name, memoryview(path.read_bytes()))
                    known[name] = stamp


def prune_rollouts(store: ObjectStore, recipe: Mapping[str, Any], known: Stamps) -> None:
    """Delete the batches that no checkpoint of a store needs."""
    if not recipe.get("rl"):
        return
    needed = {first for entry in list_remote(store) for first in needed_batches(entry.step, recipe)}
    stored = {item.key: int(match[1]) for item in store.list(ROLLOUTS) if (match := _FILE.fullmatch(item.key))}
    doomed = [key for key, first in stored.items() if first not in needed]
    for key in doomed:
        known.pop(key, None)
    store.delete(doomed)


def fetch_rollouts(
    store: ObjectStore, run: RunFolder, fetched: dict[str, list[object]], stamp: Callable[[Path], Iterable[int]]
) -> None:
    """Write the batches of a store into a run's folder, but for those `fetched` and unchanged since, by `stamp`."""
    for item in store.list(ROLLOUTS):
        path = run.path / item.key
        if not _FILE.fullmatch(item.key):
            continue
        if fetched.get(item.key) != [item.bytes, item.modified.isoformat(), *stamp(path)]:
            fetch_file(path, item.bytes, functools.partial(store.read, item.key))
            fetched[item.key] = [item.bytes, item.modified.isoformat(), *stamp(path)]
