"""Checkpoints in an object store: files first, then the manifest, created only if the step has none yet.

    step-00000060-<writer>/rank-00000.safetensors    what one writer has put, under a name that no other has
    still/<content>.safetensors                      what does not change: put once, named by many checkpoints
    step-00000060.json                               the manifest: a step is a checkpoint once this is there
    run                                              which run all of it is of

The manifest is the commit. Who finds one there already has lost, and removes its own files. What a dead writer left
behind is removed by a later pruning.
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
from headway.state.manifest import CheckpointFacts, CheckpointManifest, dump_manifest, parse_manifest
from headway.state.object_store import ObjectStore, StoredObject
from headway.state.read_checkpoint import open_checkpoint, verify_checkpoint
from headway.state.source import MANIFEST, CheckpointSource
from headway.state.write_checkpoint import PartialCheckpoint, ShardEntry, abandon, begin_checkpoint, merge
from headway.track import make_durable

__all__ = [
    "OWNER",
    "StoreCheckpoint",
    "StoreEntry",
    "claim_prefix",
    "fetch",
    "list_remote",
    "owner_of",
    "prune_remote",
    "upload",
]

GRACE = timedelta(hours=1)
"""How long files without a manifest are taken for an upload that is under way."""

_STILL = "still"
OWNER = "run"
"""Which run all of it is of."""
_MANIFEST_KEY = re.compile(r"step-(\d{8,})\.json")
_FILE_KEY = re.compile(r"(step-(\d{8,})-[A-Za-z0-9._-]+)/[^/]+")
_STILL_KEY = re.compile(rf"{_STILL}/[0-9a-f]{{32}}\.safetensors")
_WRITER = re.compile(r"[A-Za-z0-9._-]+")
_BUFFER_BYTES = 64 << 20
_HINT = "headway checkpoint ls lists what there is"

Progress = Callable[[int, int], None]
"""Told how many bytes are done, and of how many."""


@dataclass(frozen=True, order=True)
class StoreEntry:
    """A checkpoint in a store."""

    step: int
    key: str
    """Of its manifest."""
    bytes: int
    """Size of its own files; what it shares with other steps is not counted."""
    saved: datetime
    """When it was committed, by the store's clock."""


class StoreCheckpoint(CheckpointSource):
    """A checkpoint in a store, read by ranges."""

    request_bytes = 32 << 20

    def __init__(self, store: ObjectStore, step: int) -> None:
        self.location = store.name(_step_name(step))
        self._store, self._step = store, step
        self._content: bytes | None = None

    def manifest(self) -> bytes:
        """See Source."""
        self._content = self._store.find(_manifest_key(self._step))
        if self._content is None:
            raise StateError(f"{self._store.url} has no checkpoint of step {self._step}", hint=_HINT)
        return self._content

    def size(self, file: str) -> int:
        """See Source."""
        key = self._key(file)
        if key not in self._sizes:
            raise DamagedState(f"{self.name(file)} is not there", hint=_HINT)
        return self._sizes[key]

    def read(self, file: str, begin: int, out: memoryview) -> None:
        """See Source."""
        self._store.read(self._key(file), begin, out)

    def name(self, file: str) -> str:
        """See Source."""
        return self._store.name(_manifest_key(self._step) if file == MANIFEST else self._key(file))

    def _key(self, file: str) -> str:
        key = self._keys.get(file)
        if not isinstance(key, str):
            raise DamagedState(f"{self.location} does not say where its file {file} is", hint=_HINT)
        return key

    @cached_property
    def _keys(self) -> dict[str, str | None]:
        """Where the files are: not checked, since whoever opens a checkpoint has its manifest checked first."""
        files = json.loads(self._content or self.manifest())["files"]
        return {name: file.get("key") for name, file in files.items()}

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """The sizes of all objects beside the files: a listing or two instead of a request a file."""
        return _sizes(self._store, (key for key in self._keys.values() if key))


def upload(
    store: ObjectStore,
    step: int,
    facts: CheckpointFacts,
    shards: Sequence[tuple[ShardEntry, memoryview]],
    workers: int,
    writer: str,
    on_progress: Progress | None = None,
    allowed: Callable[[], bool] = lambda: True,
) -> str:
    """Put a checkpoint's files into a store and commit it, if it is still `allowed` then; say where it is.

    `writer` is a name that no other process has. A step that is committed already is fine if it holds this very state;
    StateError if it holds another.
    """
    assert _WRITER.fullmatch(writer), f"{writer!r} cannot be part of a key"
    assert all(view.nbytes == shard.file.bytes for shard, view in shards), "a view is not its shard's file"
    files = [(_with_key(shard, step, writer), view) for shard, view in shards]
    manifest = merge(step, facts, [shard for shard, _ in files], workers)
    if store.find(_manifest_key(step)) is not None:
        return _same_state(store, manifest)
    with _removing(store, files):
        _put_all(store, files, on_progress)
        if not allowed():
            raise StateError(f"step {step} was not committed in {store.url}: another agent leads the run")
    # From here on nothing of ours may be removed while the answer is open: the manifest may be there all the same.
    if store.create(_manifest_key(step), dump_manifest(manifest)):
        return store.name(_step_name(step))
    with _removing(store, files, always=True):
        return _same_state(store, manifest)


def claim_prefix(store: ObjectStore, identity: str) -> bool:
    """Take a place for a run, if it is free; False if it is another run's."""
    return store.create(OWNER, identity.encode()) or store.get(OWNER).decode(errors="replace") == identity


def owner_of(store: ObjectStore) -> str | None:
    """The run that a place belongs to; None for one that is free."""
    content = store.find(OWNER)
    return None if content is None else content.decode(errors="replace")


def list_remote(store: ObjectStore) -> list[StoreEntry]:
    """Every committed checkpoint of a store, oldest step first."""
    objects = store.list()
    own: dict[int, int] = {}
    for item in objects:
        if match := _FILE_KEY.fullmatch(item.key):
            own[int(match[2])] = own.get(int(match[2]), 0) + item.bytes
    found = [(int(match[1]), item) for item in objects if (match := _MANIFEST_KEY.fullmatch(item.key))]
    return sorted(StoreEntry(step, item.key, own.get(step, 0), item.modified) for step, item in found)


def prune_remote(store: ObjectStore, keep_last: int, keep_every_steps: int = 0, always: int | None = None) -> list[int]:
    """Remove all but the newest, multiples of `keep_every_steps`, and `always`; say which steps went.

    Files that no manifest names go as well, once nothing has been put beside them for an hour.
    """
    assert keep_last >= 1, "pruning would leave nothing"
    steps = [entry.step for entry in list_remote(store)]
    doomed = [
        step
        for step in steps[:-keep_last]
        if step != always and not (keep_every_steps and step % keep_every_steps == 0)
    ]
    freed = {key for step in doomed for key in _named(store, step) or ()}
    store.delete([_manifest_key(step) for step in doomed])
    objects = store.list()
    left = [int(match[1]) for item in objects if (match := _MANIFEST_KEY.fullmatch(item.key))]
    loose = _loose(objects, {step: _named(store, step) for step in left}, freed)
    # A still file goes last: until then what was just freed could be put together again.
    store.delete([key for key in loose if not _STILL_KEY.fullmatch(key)])
    store.delete([key for key in loose if _STILL_KEY.fullmatch(key)])
    return doomed


def fetch(store: ObjectStore, step: int, folder: Path) -> Path:
    """Copy a checkpoint from a store into a folder of checkpoints: written beside, verified, then given its name."""
    source = StoreCheckpoint(store, step)
    manifest = open_checkpoint(source).manifest
    path = folder / _step_name(step)
    if path.exists():
        raise StateError(f"{path} is there already", hint="use it, or remove it first")
    save = begin_checkpoint(folder, step, manifest.bytes, writer=f"fetch-{os.getpid()}")
    try:
        _download(source, manifest, save.partial)
        _verify_copy(source, manifest, save)
        save.partial.rename(path)
        make_durable(folder)
    except OSError as error:
        abandon(save)
        raise StateError(f"{path} could not be written: {error.strerror or error}", hint="check the disk") from error
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
    """A shard whose file says where it lies in the store."""
    still = shard.name.endswith(f"-{_STILL}.safetensors")
    key = f"{_STILL}/{_content(shard)}.safetensors" if still else f"{_step_name(step)}-{writer}/{shard.name}"
    return shard.model_copy(update={"file": shard.file.model_copy(update={"key": key})})


def _content(shard: ShardEntry) -> str:
    """A name for a file's content, made of the checksums of all its bytes: no second look at the bytes is needed."""
    pieces = sorted((piece.offset, piece.xxh3) for tensor in shard.tensors.values() for piece in tensor.pieces)
    text = json.dumps([shard.file.bytes, shard.file.header_xxh3, pieces])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _key(shard: ShardEntry) -> str:
    assert shard.file.key is not None, f"{shard.name} has no place in a store"
    return shard.file.key


def _sizes(store: ObjectStore, keys: Iterable[str]) -> dict[str, int]:
    """The sizes of all objects that lie beside these."""
    folders = {key.rpartition("/")[0] for key in keys}
    return {item.key: item.bytes for folder in sorted(folders) for item in store.list(folder)}


def _put_all(store: ObjectStore, files: Sequence[tuple[ShardEntry, memoryview]], on_progress: Progress | None) -> None:
    """Put every file but the still ones that are there; then look, and put again what has gone meanwhile."""
    there = _sizes(store, (_key(shard) for shard, _ in files if _STILL_KEY.fullmatch(_key(shard))))
    done, total = 0, sum(view.nbytes for _, view in files)
    for shard, view in files:
        if there.get(_key(shard)) != view.nbytes:
            store.put(_key(shard), view)
        done += view.nbytes
        if on_progress is not None:
            on_progress(done, total)
    # Another writer's pruning may have removed a still file that no manifest named any longer.
    there = _sizes(store, (_key(shard) for shard, _ in files))
    for shard, view in files:
        if there.get(_key(shard)) != view.nbytes:
            store.put(_key(shard), view)


@contextlib.contextmanager
def _removing(
    store: ObjectStore, files: Sequence[tuple[ShardEntry, memoryview]], always: bool = False
) -> Iterator[None]:
    """Remove this writer's own files when what is done within fails, or in any case."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or always:
            own = [_key(shard) for shard, _ in files if not _STILL_KEY.fullmatch(_key(shard))]
            # One try: a store that is down keeps them, and a later pruning removes them.
            with contextlib.suppress(StateError):
                store.delete(own, patience_s=0)


def _same_state(store: ObjectStore, ours: CheckpointManifest) -> str:
    """Where the committed checkpoint of this step is; StateError if its state is not ours."""
    theirs = open_checkpoint(StoreCheckpoint(store, ours.step))
    if theirs.manifest.digest != ours.digest:
        raise StateError(
            f"another writer has committed step {ours.step} in {store.url}, with another state (digest "
            f"{theirs.manifest.digest[:16]}, ours {ours.digest[:16]}); nothing was changed there",
            hint="two runs may share this url: give each its own; or this run has been here before on another course",
        )
    return theirs.location


def _named(store: ObjectStore, step: int) -> set[str] | None:
    """The objects that a checkpoint consists of; None if its manifest cannot be trusted."""
    content = store.find(_manifest_key(step))
    if content is None:
        return set()
    try:
        manifest = parse_manifest(content, store.name(_manifest_key(step)))
    except StateError:  # damaged, or written by a newer version
        return None
    return {file.key for file in manifest.files.values() if file.key}


def _loose(objects: Sequence[StoredObject], named: dict[int, set[str] | None], freed: set[str]) -> list[str]:
    """The files that can go: named by no manifest, and either freed just now or left alone for long.

    By the store's own clock: "long ago" is long before the newest object. Where a manifest cannot be read, nobody
    knows what it names: the files of its step stay, and all still files.
    """
    kept = set[str]().union(*(keys for keys in named.values() if keys))
    unknown = {step for step, keys in named.items() if keys is None}
    newest = max((item.modified for item in objects), default=datetime.min)
    touched: dict[str, datetime] = {}
    for item in objects:
        group = _group(item.key)
        touched[group] = max(touched.get(group, item.modified), item.modified)
    loose = []
    for item in objects:
        file, still = _FILE_KEY.fullmatch(item.key), _STILL_KEY.fullmatch(item.key)
        safe = item.key in kept or (int(file[2]) in unknown if file else bool(unknown))
        abandoned = item.key in freed or newest - touched[_group(item.key)] > GRACE
        if (file or still) and abandoned and not safe:
            loose.append(item.key)
    return loose


def _group(key: str) -> str:
    """What is put by one upload, and so is left alone together."""
    match = _FILE_KEY.fullmatch(key)
    return match[1] if match else key


def _download(source: StoreCheckpoint, manifest: CheckpointManifest, folder: Path) -> None:
    """All files, durable, and a manifest without places in a store."""
    for name, entry in manifest.files.items():
        buffer = memoryview(bytearray(min(entry.bytes, _BUFFER_BYTES)))
        with (folder / name).open("xb") as file:
            for begin in range(0, entry.bytes, _BUFFER_BYTES):
                part = buffer[: min(_BUFFER_BYTES, entry.bytes - begin)]
                source.read(name, begin, part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
    files = {name: entry.model_copy(update={"key": None}) for name, entry in manifest.files.items()}
    with (folder / MANIFEST).open("xb") as file:
        file.write(dump_manifest(manifest.model_copy(update={"files": files})))
        file.flush()
        os.fsync(file.fileno())
    make_durable(folder)


def _verify_copy(source: StoreCheckpoint, manifest: CheckpointManifest, save: PartialCheckpoint) -> None:
    """Check what was fetched; what is wrong is told by its name in the store, since the copy goes."""
    try:
        verify_checkpoint(save.partial)
    except DamagedState as error:
        message = error.message
        for name in manifest.files:
            message = message.replace(str(save.partial / name), source.name(name))
        raise DamagedState(message.replace(str(save.partial), source.location), hint=_HINT) from error
