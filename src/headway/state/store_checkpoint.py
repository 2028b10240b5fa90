"""Checkpoints in an object store: files first, then the manifest, created only if the step has none yet.

    step-00000060-<writer>/rank-00000.safetensors    files of one writer, under a unique prefix
    still/<content>.safetensors                      frozen tensors: uploaded once, shared by many checkpoints
    step-00000060.json                               the manifest: its creation commits the checkpoint
    run                                              the run that owns the prefix

A writer that finds a manifest has lost, and removes its own files. Pruning removes what dead writers left behind.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path

from headway.errors import DamagedState, StateError
from headway.state.durable import new_file
from headway.state.manifest import CheckpointFacts, CheckpointManifest, dump_manifest, parse_manifest
from headway.state.object_store import ObjectStore, StoredObject
from headway.state.read_checkpoint import open_checkpoint, verify_checkpoint
from headway.state.source import MANIFEST, CheckpointSource
from headway.state.write_checkpoint import (
    PartialCheckpoint,
    ShardEntry,
    abandon,
    begin_checkpoint,
    explain_write_errors,
    merge,
)
from headway.track import make_durable

GRACE = timedelta(hours=1)
"""How long files without a manifest count as an upload in progress."""

_STILL = "still"
OWNER = "run"
"""Key of the object that states which run owns the prefix."""
_MANIFEST_KEY = re.compile(r"step-(\d{8,})\.json")
_FILE_KEY = re.compile(r"(step-(\d{8,})-[A-Za-z0-9._-]+)/[^/]+")
_STILL_KEY = re.compile(rf"{_STILL}/[0-9a-f]{{32}}\.safetensors")
_WRITER = re.compile(r"[A-Za-z0-9._-]+")
_BUFFER_BYTES = 64 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total."""


@dataclass(frozen=True, order=True)
class StoreEntry:
    """A committed checkpoint in a store."""

    step: int
    key: str
    """Key of its manifest."""
    bytes: int
    """Size of its own files, without those that it shares with other steps."""
    saved: datetime
    """When it was committed, by the store's clock."""


class StoreCheckpoint(CheckpointSource):
    """A checkpoint in a store, read by ranges."""

    request_bytes = 32 << 20

    def __init__(self, store: ObjectStore, step: int) -> None:
        self.location = store.name(_step_name(step))
        self._store, self._step = store, step
        self._content: bytes | None = None
        ref = store.url
        self._hint = f"headway checkpoint ls {ref} lists all checkpoints"

    def manifest(self) -> bytes:
        """See CheckpointSource."""
        self._content = self._store.find(_manifest_key(self._step))
        if self._content is None:
            raise StateError(f"{self._store.url} has no checkpoint of step {self._step}", hint=self._hint, usage=True)
        return self._content

    def size(self, file: str) -> int:
        """See CheckpointSource."""
        key = self._key(file)
        if key not in self._sizes:
            raise DamagedState(f"{self.name(file)} does not exist", hint=self._hint)
        return self._sizes[key]

    def read(self, file: str, begin: int, out: memoryview) -> None:
        """See CheckpointSource."""
        self._store.read(self._key(file), begin, out)

    def name(self, file: str) -> str:
        """See CheckpointSource."""
        return self._store.name(_manifest_key(self._step) if file == MANIFEST else self._key(file))

    def _key(self, file: str) -> str:
        key = self._keys.get(file)
        if not isinstance(key, str):
            raise DamagedState(f"the manifest of {self.location} has no key for its file {file}", hint=self._hint)
        return key

    @cached_property
    def _keys(self) -> dict[str, str | None]:
        """Keys of the files; not validated, since `open_checkpoint` validates the manifest first."""
        files = json.loads(self._content or self.manifest())["files"]
        return {name: file.get("key") for name, file in files.items()}

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Sizes of all objects beside the files: a listing or two instead of a request per file."""
        return _sizes(self._store, (key for key in self._keys.values() if key))


def upload(
    store: ObjectStore,
    step: int,
    facts: CheckpointFacts,
    shards: Sequence[tuple[ShardEntry, memoryview]],
    workers: int,
    writer: str,
    on_progress: Progress | None = None,
    refusal: Callable[[], str | None] = lambda: None,
) -> str:
    """Upload a checkpoint's files and commit it, unless `refusal` then says why not; return its location.

    `writer` is unique to this process. A step that is already committed is accepted if it has the same state; raise
    StateError if it has another.
    """
    assert _WRITER.fullmatch(writer), f"{writer!r} cannot be part of a key"
    assert all(view.nbytes == shard.file.bytes for shard, view in shards), "a view is not its shard's file"
    files = [(_with_key(shard, step, writer), view) for shard, view in shards]
    manifest = merge(step, facts, [shard for shard, _ in files], workers)
    if store.find(_manifest_key(step)) is not None:
        return _same_state(store, manifest)
    with _removing(store, files):
        _put_all(store, files, on_progress)
        if (refused := refusal()) is not None:
            raise StateError(f"step {step} was not committed in {store.url}: {refused}")
    # No own file may be removed from here until the outcome is known: the manifest may have been created anyway.
    if store.create(_manifest_key(step), dump_manifest(manifest)):
        return store.name(_step_name(step))
    with _removing(store, files, always=True):
        return _same_state(store, manifest)


def claim_prefix(store: ObjectStore, identity: str) -> bool:
    """Claim a prefix for a run if it is free; return False if another run owns it."""
    return store.create(OWNER, identity.encode()) or store.get(OWNER).decode(errors="replace") == identity


def owner_of(store: ObjectStore) -> str | None:
    """Return the run that owns a prefix, or None if it is free."""
    content = store.find(OWNER)
    return None if content is None else content.decode(errors="replace")


def list_remote(store: ObjectStore) -> list[StoreEntry]:
    """Return all committed checkpoints of a store, oldest step first."""
    objects = store.list()
    own: dict[int, int] = {}
    for item in objects:
        if match := _FILE_KEY.fullmatch(item.key):
            own[int(match[2])] = own.get(int(match[2]), 0) + item.bytes
    manifests = [(int(match[1]), item) for item in objects if (match := _MANIFEST_KEY.fullmatch(item.key))]
    return sorted(StoreEntry(step, item.key, own.get(step, 0), item.modified) for step, item in manifests)


def prune_remote(store: ObjectStore, keep_last: int, keep_every_steps: int = 0, always: int | None = None) -> list[int]:
    """Remove all but the newest, multiples of `keep_every_steps`, and `always`; return the removed steps.

    Files in no manifest are removed too, once nothing has been uploaded beside them for an hour.
    """
    assert keep_last >= 1, "pruning would leave nothing"
    steps = [entry.step for entry in list_remote(store)]
    doomed = [
        step
        for step in steps[:-keep_last]
        if step != always and not (keep_every_steps and step % keep_every_steps == 0)
    ]
    freed = {key for step in doomed for key in _referenced(store, step) or ()}
    store.delete([_manifest_key(step) for step in doomed])
    objects = store.list()
    left = [int(match[1]) for item in objects if (match := _MANIFEST_KEY.fullmatch(item.key))]
    orphans = _orphans(objects, {step: _referenced(store, step) for step in left}, freed)
    # Frozen files are deleted last: until then, what was just freed can still be reassembled.
    store.delete([key for key in orphans if not _STILL_KEY.fullmatch(key)])
    store.delete([key for key in orphans if _STILL_KEY.fullmatch(key)])
    return doomed


def fetch(store: ObjectStore, step: int, folder: Path) -> Path:
    """Download a checkpoint into a folder of checkpoints: verified before it gets its name."""
    source = StoreCheckpoint(store, step)
    manifest = open_checkpoint(source).manifest
    path = folder / _step_name(step)
    if path.exists():
        raise StateError(f"{path} already exists", hint="use it, or remove it first", usage=True)
    with explain_write_errors(f"{folder} could not be created"):
        folder.mkdir(parents=True, exist_ok=True)
    save = begin_checkpoint(folder, step, manifest.bytes, writer=f"fetch-{os.getpid()}")
    try:
        with explain_write_errors(f"{path} could not be written"):
            _download(source, manifest, save.partial)
            _verify_copy(source, manifest, save)
            save.partial.rename(path)
            make_durable(folder)
    except BaseException:
        abandon(save)
        raise
    os.close(save.lock)
    return path


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _manifest_key(step: int) -> str:
    return f"{_step_name(step)}.json"


def _with_key(shard: ShardEntry, step: int, writer: str) -> ShardEntry:
    """Return a shard's entry with its file's key in the store."""
    frozen = shard.name.endswith(f"-{_STILL}.safetensors")
    key = f"{_STILL}/{_content_hash(shard)}.safetensors" if frozen else f"{_step_name(step)}-{writer}/{shard.name}"
    return shard.model_copy(update={"file": shard.file.model_copy(update={"key": key})})


def _content_hash(shard: ShardEntry) -> str:
    """Hash a file's content by the checksums of all its bytes, without reading them again."""
    pieces = sorted((piece.offset, piece.xxh3) for tensor in shard.tensors.values() for piece in tensor.pieces)
    text = json.dumps([shard.file.bytes, shard.file.header_xxh3, pieces])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _key(shard: ShardEntry) -> str:
    assert shard.file.key is not None, f"{shard.name} has no key in a store"
    return shard.file.key


def _sizes(store: ObjectStore, keys: Iterable[str]) -> dict[str, int]:
    """Return the sizes of all objects with the prefixes of these."""
    folders = {key.rpartition("/")[0] for key in keys}
    return {item.key: item.bytes for folder in sorted(folders) for item in store.list(folder)}


def _put_all(store: ObjectStore, files: Sequence[tuple[ShardEntry, memoryview]], on_progress: Progress | None) -> None:
    """Upload every file except frozen ones that exist; then check, and upload again what was removed meanwhile."""
    stored = _sizes(store, (_key(shard) for shard, _ in files if _STILL_KEY.fullmatch(_key(shard))))
    done, total = 0, sum(view.nbytes for _, view in files)
    for shard, view in files:
        if stored.get(_key(shard)) != view.nbytes:
            store.put(_key(shard), view)
        done += view.nbytes
        if on_progress is not None:
            on_progress(done, total)
    # Another writer's pruning may have removed a frozen file that no manifest referenced any longer.
    stored = _sizes(store, (_key(shard) for shard, _ in files))
    for shard, view in files:
        if stored.get(_key(shard)) != view.nbytes:
            store.put(_key(shard), view)


@contextlib.contextmanager
def _removing(
    store: ObjectStore, files: Sequence[tuple[ShardEntry, memoryview]], always: bool = False
) -> Iterator[None]:
    """Remove this writer's own files if the block fails, or always."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or always:
            own = [_key(shard) for shard, _ in files if not _STILL_KEY.fullmatch(_key(shard))]
            # A single attempt: if the store is down, a later pruning removes them.
            with contextlib.suppress(StateError):
                store.delete(own, patience_s=0)


def _same_state(store: ObjectStore, manifest: CheckpointManifest) -> str:
    """Return the location of the committed checkpoint of this step; raise StateError if its state differs."""
    committed = open_checkpoint(StoreCheckpoint(store, manifest.step))
    if committed.manifest.digest != manifest.digest:
        raise StateError(
            f"another writer has committed step {manifest.step} in {store.url} with a different state (digest "
            f"{committed.manifest.digest[:16]}, not {manifest.digest[:16]}); nothing was changed there",
            hint="give each run its own url; or this run reached that step before, with other data or settings",
        )
    return committed.location


def _referenced(store: ObjectStore, step: int) -> set[str] | None:
    """Return the keys in a checkpoint's manifest; None if it cannot be trusted."""
    content = store.find(_manifest_key(step))
    if content is None:
        return set()
    try:
        manifest = parse_manifest(content, store.name(_manifest_key(step)))
    except StateError:  # damaged, or written by a newer version
        return None
    return {file.key for file in manifest.files.values() if file.key}


def _orphans(objects: Sequence[StoredObject], references: dict[int, set[str] | None], freed: set[str]) -> list[str]:
    """Return the files that can be deleted: in no manifest, and freed just now or untouched for long.

    Ages are relative to the newest object, by the store's own clock. If a manifest cannot be read, the files of its
    step stay, and all frozen files.
    """
    used = set[str]().union(*(keys for keys in references.values() if keys))
    unknown = {step for step, keys in references.items() if keys is None}
    newest = max((item.modified for item in objects), default=datetime.min)
    touched: dict[str, datetime] = {}
    for item in objects:
        group = _group(item.key)
        touched[group] = max(touched.get(group, item.modified), item.modified)
    orphans = []
    for item in objects:
        file, frozen = _FILE_KEY.fullmatch(item.key), _STILL_KEY.fullmatch(item.key)
        needed = item.key in used or (int(file[2]) in unknown if file else bool(unknown))
        abandoned = item.key in freed or newest - touched[_group(item.key)] > GRACE
        if (file or frozen) and abandoned and not needed:
            orphans.append(item.key)
    return orphans


def _group(key: str) -> str:
    """Return what identifies one upload: its objects age together."""
    match = _FILE_KEY.fullmatch(key)
    return match[1] if match else key


def _download(source: StoreCheckpoint, manifest: CheckpointManifest, folder: Path) -> None:
    """Download all files durably, and write a manifest without keys."""
    for name, entry in manifest.files.items():
        buffer = memoryview(bytearray(min(entry.bytes, _BUFFER_BYTES)))
        with new_file(folder / name) as file:
            for begin in range(0, entry.bytes, _BUFFER_BYTES):
                part = buffer[: min(_BUFFER_BYTES, entry.bytes - begin)]
                source.read(name, begin, part)
                file.write(part)
    files = {name: entry.model_copy(update={"key": None}) for name, entry in manifest.files.items()}
    with new_file(folder / MANIFEST) as file:
        file.write(dump_manifest(manifest.model_copy(update={"files": files})))
    make_durable(folder)


def _verify_copy(source: StoreCheckpoint, manifest: CheckpointManifest, save: PartialCheckpoint) -> None:
    """Verify a download; errors name the objects in the store, since the copy is removed."""
    try:
        verify_checkpoint(save.partial)
    except DamagedState as error:
        message = error.message
        for name in manifest.files:
            message = message.replace(str(save.partial / name), source.name(name))
        raise DamagedState(message.replace(str(save.partial), source.location), hint=source._hint) from error
