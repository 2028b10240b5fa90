"""The checkpoints that a command line names, and rows of facts about them: on disk and in object stores."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from headway.errors import HeadwayError, StateError, UsageError
from headway.state import OpenCheckpoint, find_checkpoint, list_checkpoints, open_checkpoint
from headway.state.address import address_in_store, is_in_store, split_address, store_url
from headway.state.manifest import CheckpointManifest, parse_manifest
from headway.state.object_store import open_store
from headway.state.store_checkpoint import StoreCheckpoint, list_remote
from headway.track import RunFolder, find_run, read_recipe, runs_root, split_ref

STORE_PATIENCE_S = 10.0
MANIFESTS_AT_A_TIME = 8


class NamedCheckpoint(NamedTuple):
    """A checkpoint that the command line names."""

    label: str
    step: int | None
    address: str
    """A folder, or an address in an object store."""


def find_named(ref: str, runs: Path | None) -> NamedCheckpoint:
    """Return the checkpoint of a run's step, a run's newest, or the one at a path."""
    if is_in_store(ref):
        return _checkpoints_at(ref)[-1]
    if "/" in ref:
        if not Path(ref).is_dir():
            raise UsageError(f"no folder {ref}", hint="give a run's name without a path: headway runs")
        return NamedCheckpoint(ref, None, ref)
    name, step = split_ref(runs_root(runs), ref)
    folder = find_run(runs_root(runs), name)
    if stored := _in_store(folder, step):
        return stored
    path = find_checkpoint(folder.checkpoints, step)
    found_step = next(entry.step for entry in list_checkpoints(folder.checkpoints) if entry.path == path)
    return NamedCheckpoint(f"step {found_step} of {folder.name}", found_step, str(path))


def find_all_named(ref: str, runs: Path | None) -> tuple[str, list[NamedCheckpoint]]:
    """Return a reference's name and its checkpoint, or all of the run's if it names no step."""
    if is_in_store(ref):
        return ref, _checkpoints_at(ref)
    if "/" in ref:
        return ref, [find_named(ref, runs)]
    name, step = split_ref(runs_root(runs), ref)
    folder = find_run(runs_root(runs), name)
    if stored := _in_store(folder, step):
        return folder.name, [stored]
    newest = find_checkpoint(folder.checkpoints, step)
    entries = [entry for entry in list_checkpoints(folder.checkpoints) if step is None or entry.path == newest]
    return folder.name, [NamedCheckpoint(f"step {entry.step}", entry.step, str(entry.path)) for entry in entries]


def _checkpoints_at(address: str) -> list[NamedCheckpoint]:
    """Return the checkpoints at an address in a store, oldest first: that of its step, or all of the run's."""
    url, step = split_address(address)
    if step is not None:
        return [NamedCheckpoint(address, step, address_in_store(url, step))]
    rows = rows_at(address)
    if not rows:
        raise nothing_at(url)
    return [NamedCheckpoint(f"step {row['step']}", row["step"], row["path"]) for row in rows]


def nothing_at(address: str) -> StateError:
    """Return the error for an address without a checkpoint."""
    hint = "the address is checkpoint.store.url and the run's name"
    return StateError(f"there is no checkpoint at {address}", hint=hint, usage=True)


def _in_store(folder: RunFolder, step: int | None) -> NamedCheckpoint | None:
    """Return a step, or the newest, from the store of a run whose disk does not have it."""
    here = [entry.step for entry in list_checkpoints(folder.checkpoints)]
    if (step is None and here) or step in here:
        return None
    rows = [row for row in rows_of_store(folder) if step in (None, row["step"]) and "damage" not in row]
    return (
        NamedCheckpoint(f"step {rows[-1]['step']} in the store", rows[-1]["step"], rows[-1]["path"]) if rows else None
    )


def run_of(checkpoint: NamedCheckpoint) -> RunFolder:
    """Return the run that a checkpoint is in."""
    return RunFolder(Path(checkpoint.address).resolve().parent.parent)


def rows_of_store(run: RunFolder) -> list[dict[str, Any]]:
    """Return rows of the run's object store; one row with the error if it cannot be read."""
    rules = read_recipe(run).checkpoint.store if run.recipe_file.exists() else None
    if rules is None:
        return []
    try:
        return rows_at(store_url(rules, run.name))
    except HeadwayError as error:
        return [{"step": -1, "tier": "store", "path": store_url(rules, run.name), "damage": error.message}]


def rows_at(address: str) -> list[dict[str, Any]]:
    """Return rows of a run's address in an object store, or of one step there, by its listing alone."""
    url, step = split_address(address)
    return [
        {
            "step": entry.step,
            "tier": "store",
            "path": address_in_store(url, entry.step),
            "bytes": entry.bytes,
            "saved": entry.saved.timestamp(),
        }
        for entry in list_remote(open_store(url, patience_s=STORE_PATIENCE_S))
        if step in (None, entry.step)
    ]


def with_facts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add workers, digest and so on from the manifests of stored checkpoints; a damaged one has its error."""

    def describe(row: dict[str, Any]) -> dict[str, Any]:
        if "damage" in row:
            return row
        try:
            url, step = split_address(row["path"])
            source = StoreCheckpoint(open_store(url, patience_s=STORE_PATIENCE_S), int(step or 0))
            return row | _facts(parse_manifest(source.manifest(), row["path"])) | {"bytes": row["bytes"]}
        except StateError as error:
            return row | {"damage": error.message}

    with ThreadPoolExecutor(MANIFESTS_AT_A_TIME, thread_name_prefix="manifests") as pool:
        return list(pool.map(describe, rows))


def rows_of_disk(run: RunFolder) -> list[dict[str, Any]]:
    """Return rows from manifests on disk; a damaged one has its error."""
    rows = []
    seen: set[tuple[int, int]] = set()
    for entry in list_checkpoints(run.checkpoints):
        row: dict[str, Any] = {"step": entry.step, "tier": "disk", "path": str(entry.path)}
        try:
            opened = open_checkpoint(entry.path)
            row |= _facts(opened.manifest) | {
                "saved": saved_at(entry.path),
                "shared_bytes": _shared(opened, entry.path, seen),
            }
        except StateError as error:
            row |= {"damage": error.message}
        rows.append(row)
    return rows


def _facts(manifest: CheckpointManifest) -> dict[str, Any]:
    return {
        "bytes": manifest.bytes,
        "tensors": len(manifest.tensors),
        "workers": manifest.workers,
        "cursor": manifest.cursor,
        "chain": manifest.chain,
        "digest": manifest.digest,
    }


def _shared(checkpoint: OpenCheckpoint, path: Path, seen: set[tuple[int, int]]) -> int:
    """Return the bytes of files hard-linked to a checkpoint seen before: they are on disk once."""
    shared = 0
    for name in checkpoint.manifest.files:
        status = (path / name).stat()
        shared += status.st_size if (status.st_dev, status.st_ino) in seen else 0
        seen.add((status.st_dev, status.st_ino))
    return shared


def saved_at(path: Path) -> float | None:
    """Return when a checkpoint was written, in Unix seconds."""
    manifest = path / "manifest.json"
    return manifest.stat().st_mtime if manifest.exists() else None
