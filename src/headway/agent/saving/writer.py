"""Writes snapshots from memory to disk and to the object store, with one background thread for each.

The threads are daemons with low priority: training comes first, and a disk that hangs keeps no one from stopping the
run. Callers poll for their results; the threads neither record nor free anything themselves. Uploads read from disk, so
a slow store blocks neither memory nor the next write.
"""

import contextlib
import mmap
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from headway.agent.saving.buffers import SnapshotBuffer
from headway.agent.saving.restore_points import newest_on_disk
from headway.agent.saving.snapshots import MOST, SMALL_BYTES, SnapshotBuffers, StateSnapshot
from headway.agent.supervise.fault_injector import AgentFaultInjector
from headway.errors import FolderGone, StateError
from headway.recipe import Checkpoint as Rules
from headway.state import (
    OpenCheckpoint,
    ShardEntry,
    abandon,
    begin_checkpoint,
    commit,
    describe_shard,
    merge,
    open_checkpoint,
    prune,
)
from headway.state.address import store_url
from headway.state.read_checkpoint import check_file
from headway.state.save_buffer import FilePlan
from headway.state.tiers import Tier

NICE = 10
RETRY_AFTER_S = 2.0

Written = tuple[list[ShardEntry], str | None]
"""What a tier has now, and a warning if pruning older checkpoints failed."""


@dataclass(frozen=True)
class WriteResult:
    """What became of a snapshot on one tier."""

    snapshot: StateSnapshot
    tier: Tier
    seconds: float
    bytes: int = 0
    digest: str = ""
    error: StateError | None = None
    warning: str | None = None
    """What else failed, although the state is safe."""
    over: bool = False
    """Whether the snapshot's memory is no longer needed."""
    finished: bool = False
    """Whether a thread is done with this snapshot."""


@dataclass(frozen=True)
class _Upload:
    """A snapshot for the store: its files, in memory or mapped from disk."""

    snapshot: StateSnapshot
    shards: list[ShardEntry]
    files: list[memoryview]
    from_memory: bool


class CheckpointWriter:
    """The writer and uploader threads, with their queues."""

    def __init__(
        self,
        folder: Path,
        rules: Rules,
        run: str,
        memory: SnapshotBuffers,
        injector: AgentFaultInjector,
        cores: int,
        identity: str = "",
        commit_refusal: Callable[[], str | None] = lambda: None,
        upload_refusal: Callable[[], str | None] = lambda: None,
        check_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """The refusals say why this agent may not commit, on disk and in the store, if it may not.

        `check_folder` raises FolderGone while the run's folder is not there.
        """
        self._folder, self._rules, self._run, self._memory = folder, rules, run, memory
        self._injector, self._identity = injector, identity
        self.before_upload: Callable[[], object] = lambda: None
        """Called before each upload of a checkpoint."""
        self._commit_refusal, self._upload_refusal = commit_refusal, upload_refusal
        self._check_folder = check_folder
        # Machines and containers share folders and stores: a process id alone is not unique.
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._threads = max(1, min(4, cores // 4))
        self._jobs: SimpleQueue[StateSnapshot] = SimpleQueue()
        self._uploads: SimpleQueue[_Upload] = SimpleQueue()
        self._results: SimpleQueue[WriteResult] = SimpleQueue()
        self._given = self._handed_over = self._finished = 0
        self._pending_bytes = deque[int]()
        """Sizes of queued and running uploads."""
        self._verified_inodes = set[int]()
        self._stored_rollouts = dict[str, tuple[int, int]]()
        """Files of rollouts that are in the object store."""
        self.trouble: str | None = None
        """Why the last state is not written yet, while it is retried."""
        self.gives_up_after_s = 0.0
        """How long it is retried."""
        for name, work in (("writer", self._write_all), ("uploader", self._upload_all)):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether all results have been returned."""
        return self._given + self._handed_over == self._finished

    def write(self, snapshot: StateSnapshot) -> None:
        """Queue a complete snapshot for its tiers."""
        self._given += 1
        self._jobs.put(snapshot)

    def results(self) -> list[WriteResult]:
        """Results since the last call."""
        results = []
        while not self._results.empty():
            result = self._results.get()
            self._finished += result.finished
            results.append(result)
        return results

    def _write_all(self) -> None:
        _lower_priority()
        while True:
            snapshot = self._jobs.get()
            shards: list[ShardEntry] | None = None
            if "disk" in snapshot.tiers or ("store" in snapshot.tiers and self._is_remote(snapshot)):
                shards = self._try(snapshot, "disk", lambda: self._to_disk(snapshot))  # noqa: B023  (run at once)
            if "store" in snapshot.tiers:
                self._queue_upload(snapshot, shards)
            else:
                self._release(snapshot)

    def _release(self, snapshot: StateSnapshot) -> None:
        """Report that a snapshot's memory is no longer needed."""
        self._results.put(WriteResult(snapshot, "memory", 0.0, over=True, finished=True))

    def _queue_upload(self, snapshot: StateSnapshot, shards: list[ShardEntry] | None) -> None:
        """Upload from disk if the snapshot is there, else from memory, which then stays in use."""
        files = None if shards is None else _map_files(self._folder, snapshot.step, shards)
        size = self._bytes(snapshot)
        pending = self._pending_bytes
        has_room = files is not None and len(pending) < MOST and sum(pending) + size <= SMALL_BYTES
        try:
            if pending and not has_room and not snapshot.last:
                raise StateError(
                    "the previous upload is still under way", hint="upload less often, or use a faster store"
                )
            if files is None:
                upload = self._upload_from_memory(snapshot)
            else:
                upload = _Upload(snapshot, shards or [], files, from_memory=False)
        except StateError as error:
            self._results.put(WriteResult(snapshot, "store", 0.0, error=error))
            self._release(snapshot)
            return
        pending.append(size)
        self._handed_over += not upload.from_memory
        self._uploads.put(upload)
        if not upload.from_memory:
            self._release(snapshot)

    def _upload_from_memory(self, snapshot: StateSnapshot) -> _Upload:
        shards, files = list[ShardEntry](), list[memoryview]()
        for rank in sorted(snapshot.buffers):
            buffer = self._memory.buffer(snapshot, rank)
            memory = buffer.local()
            if memory is None:
                raise StateError("snapshots of other nodes are uploaded from disk, and the write to disk failed")
            for part in buffer.plan.parts:
                shards.append(describe_shard(buffer.file_name(part), memory.pieces(part), self._threads))
                files.append(memory.file(part)[: part.layout.bytes])
        return _Upload(snapshot, shards, files, from_memory=True)

    def _upload_all(self) -> None:
        _lower_priority()
        while True:
            job = self._uploads.get()
            self._try(job.snapshot, "store", lambda: self._to_store(job))  # noqa: B023  (run at once)
            self._pending_bytes.popleft()
            self._results.put(WriteResult(job.snapshot, "memory", 0.0, over=job.from_memory, finished=True))

    def _try(self, snapshot: StateSnapshot, tier: Tier, write: Callable[[], Written]) -> list[ShardEntry] | None:
        """Write to one tier and return the shards; retry only a run's last state."""
        started = time.monotonic()
        while True:
            written, error = None, None
            try:
                written = write()
            except StateError as refused:
                error = self._cause(refused) if tier == "disk" else refused
            except Exception as bug:  # ours: reported like a write error, so that training continues
                error = StateError(f"{type(bug).__name__}: {bug}")
            seconds = time.monotonic() - started
            limit_s = self._rules.outage_s if isinstance(error, FolderGone) else self._rules.retry_s
            if error is None or not snapshot.last or seconds > limit_s:
                break
            self.trouble, self.gives_up_after_s = error.message, limit_s
            time.sleep(min(RETRY_AFTER_S, max(0.05, limit_s - seconds)))
        self.trouble = None
        if written is None:
            self._results.put(WriteResult(snapshot, tier, seconds, error=error))
            return None
        shards, warning = written
        manifest = merge(snapshot.step, snapshot.all_facts, shards, snapshot.workers)
        self._results.put(WriteResult(snapshot, tier, seconds, manifest.bytes, manifest.digest, warning=warning))
        return shards

    def _cause(self, error: StateError) -> StateError:
        """The reason that a write to disk failed: the folder may have vanished meanwhile."""
        try:
            self._check_folder()
        except FolderGone as gone:
            return gone
        return error

    def _to_disk(self, snapshot: StateSnapshot) -> Written:
        step, reach, rules = snapshot.step, self._injector.reach, self._rules
        self._check_folder()
        save = begin_checkpoint(self._folder, step, self._bytes(snapshot), writer=self._name)
        try:
            with explain_os_errors(f"checkpoint of step {step} could not be written in {save.partial}"):
                reach("write", step, snapshot.attempt)
            shards = self._write_files(snapshot, save.partial)
            with explain_os_errors(f"checkpoint of step {step} could not be committed in {save.partial}"):
                reach("written", step, snapshot.attempt)
                reach("commit", step, snapshot.attempt)
        except BaseException:
            abandon(save)
            raise
        commit(save, snapshot.all_facts, shards, snapshot.workers, self._refusal)
        reach("committed", step, snapshot.attempt)
        return shards, _warning(lambda: prune(self._folder, rules.keep_last, rules.keep_every_steps, always=step))

    def _refusal(self) -> str | None:
        self._check_folder()
        return self._commit_refusal()

    def _write_files(self, snapshot: StateSnapshot, partial: Path) -> list[ShardEntry]:
        before = self._verified_checkpoint()
        buffers = [self._memory.buffer(snapshot, rank) for rank in sorted(snapshot.buffers)]
        parts = [(buffer, part) for buffer in buffers for part in buffer.plan.parts]

        def write(pair: tuple[SnapshotBuffer, FilePlan]) -> ShardEntry:
            return pair[0].write(partial, pair[1], snapshot.step, before, self._threads)

        at_once = min(len(parts), buffers[0].writes_at_once)
        if at_once == 1:
            return [write(pair) for pair in parts]
        with ThreadPoolExecutor(at_once, thread_name_prefix="remote-write") as pool:
            return list(pool.map(write, parts))

    def _verified_checkpoint(self) -> OpenCheckpoint | None:
        """The newest checkpoint, whose frozen files may be hard-linked; each is read once before, to verify it."""
        newest, _ = newest_on_disk(self._folder)
        if newest is None:
            return None
        before = open_checkpoint(Path(newest.address))
        for name in before.manifest.files:
            inode = Path(before.source.name(name)).stat().st_ino
            if not name.endswith("-still.safetensors") or inode in self._verified_inodes:
                continue
            try:
                check_file(before, name)
            except StateError:
                return None  # it is written again
            self._verified_inodes.add(inode)
        return before

    def _to_store(self, job: _Upload) -> Written:
        # Only runs with a store need its library.
        from headway.agent.remote.store_rollouts import prune_rollouts, upload_rollouts
        from headway.state.object_store import open_store
        from headway.state.store_checkpoint import claim_prefix, prune_remote, upload

        rules, step, attempt = self._rules.store, job.snapshot.step, job.snapshot.attempt
        assert rules is not None, "no store is configured"
        store = open_store(store_url(rules, self._run))
        self._injector.reach("upload", step, attempt)
        if self._identity and not claim_prefix(store, self._identity):
            raise StateError(
                f"{store_url(rules, self._run)} has checkpoints of another run of this name",
                hint="choose another checkpoint.store.url, or another --name",
            )
        if (refused := self._upload_refusal()) is not None:
            raise StateError(f"step {step} was not uploaded: {refused}", hint="nothing was changed")
        self.before_upload()
        files = list(zip(job.shards, job.files, strict=True))
        facts, workers = job.snapshot.all_facts, job.snapshot.workers
        if facts.recipe.get("rl"):
            self._check_folder()  # else rollouts would seem to be on another machine
        upload_rollouts(store, self._folder.parent, facts.recipe, step, self._stored_rollouts)
        upload(store, step, facts, files, workers, writer=self._name, refusal=self._upload_refusal)
        self._injector.reach("uploaded", step, attempt)

        def prune() -> None:
            prune_remote(store, rules.keep_last, rules.keep_every_steps, always=step)
            prune_rollouts(store, facts.recipe, self._stored_rollouts)

        return job.shards, _warning(prune)

    def _is_remote(self, snapshot: StateSnapshot) -> bool:
        """Whether part of it is in other nodes' memory: they write it to disk, from where it is uploaded."""
        return any(self._memory.buffer(snapshot, rank).local() is None for rank in snapshot.buffers)

    def _bytes(self, snapshot: StateSnapshot) -> int:
        return sum(size for _, _, _, size in self._memory.files(snapshot))


def _lower_priority() -> None:
    """Let this thread run only when nothing else wants to."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _map_files(folder: Path, step: int, shards: list[ShardEntry]) -> list[memoryview] | None:
    """Map the files of a new checkpoint, so that they stay readable if it is pruned; None if they are gone."""
    files = []
    try:
        for shard in shards:
            with (folder / f"step-{step:08d}" / shard.name).open("rb") as file:
                files.append(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except OSError:
        return None
    return files


def _warning(remove: Callable[[], object]) -> str | None:
    """Prune old checkpoints; a failure is only a warning, since the new one is safe and the next save retries."""
    try:
        remove()
    except StateError as error:
        return error.message
    return None


@contextlib.contextmanager
def explain_os_errors(failed: str) -> Iterator[None]:
    """Raise StateError for an OSError in this block."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{failed}: {error.strerror or error}", hint="older checkpoints are untouched") from error
