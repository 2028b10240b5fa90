"""Takes states from memory to the disk and the object store: a thread of the agent for each, one state after the other.

The threads are daemons and run below everything else: training comes first, and a disk that hangs keeps no one from
stopping the run. They hand their results to whoever polls for them, and neither record nor free anything themselves.
What is on the disk is uploaded from there, so that a slow store keeps neither memory nor the disk's saves waiting.
"""

import contextlib
import mmap
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from headway.agent.nodes.members import RemoteBuffer
from headway.agent.saving.restore_points import newest_on_disk
from headway.agent.saving.snapshots import MOST, SMALL_BYTES, SnapshotBuffers, StateSnapshot
from headway.agent.supervise.fault_injector import AgentFaultInjector
from headway.errors import StateError
from headway.recipe import Checkpoint as Rules
from headway.state import (
    OpenCheckpoint,
    SaveBuffer,
    ShardEntry,
    abandon,
    begin_checkpoint,
    commit,
    describe_shard,
    merge,
    open_checkpoint,
    prune,
    shard_name,
    write_shard,
)
from headway.state.address import store_url
from headway.state.read_checkpoint import check_file
from headway.state.tiers import Tier

__all__ = ["CheckpointWriter", "WriteResult"]

NICE = 10
RETRY_AFTER_S = 2.0


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
    """What else did not go well: the state is safe all the same."""
    over: bool = False
    """Whether the snapshot's memory is no longer needed."""
    finished: bool = False
    """Whether this was the last of something given to a thread."""


@dataclass(frozen=True)
class _Written:
    """What a tier has now, and what went wrong on the way."""

    shards: list[ShardEntry]
    warning: str | None


@dataclass(frozen=True)
class _Upload:
    """A snapshot for the store: its files, in memory or mapped from the disk."""

    snapshot: StateSnapshot
    shards: list[ShardEntry]
    files: list[memoryview]
    from_memory: bool


class CheckpointWriter:
    """The threads, what they are told and what they tell."""

    def __init__(
        self,
        folder: Path,
        rules: Rules,
        run: str,
        memory: SnapshotBuffers,
        injector: AgentFaultInjector,
        cores: int,
        identity: str = "",
        allowed: Callable[[], bool] = lambda: True,
        allowed_there: Callable[[], bool] = lambda: True,
    ) -> None:
        """`allowed` says whether this agent may commit on the disk, `allowed_there` whether in the store."""
        self._folder, self._rules, self._run, self._memory = folder, rules, run, memory
        self._injector, self._identity = injector, identity
        self.before_upload: Callable[[], object] = lambda: None
        """Called before a checkpoint is put into the store."""
        self._allowed, self._allowed_there = allowed, allowed_there
        # Machines and containers share folders and stores, and process ids do not tell them apart.
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._threads = max(1, min(4, cores // 4))
        self._jobs: SimpleQueue[StateSnapshot] = SimpleQueue()
        self._uploads: SimpleQueue[_Upload] = SimpleQueue()
        self._results: SimpleQueue[WriteResult] = SimpleQueue()
        self._given = self._handed_over = self._finished = 0
        self._waiting = deque[int]()
        """Sizes of what is being uploaded or waits for it."""
        self._checked = set[int]()
        self.trouble: str | None = None
        """Why the last state could not be written so far, while it is tried again."""
        for name, work in (("writer", self._write_all), ("uploader", self._upload_all)):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether everything given has come back."""
        return self._given + self._handed_over == self._finished

    def write(self, snapshot: StateSnapshot) -> None:
        """Have a whole snapshot written to the tiers it is for."""
        self._given += 1
        self._jobs.put(snapshot)

    def results(self) -> list[WriteResult]:
        """What has been done since the last call."""
        found = []
        while not self._results.empty():
            done = self._results.get()
            self._finished += done.finished
            found.append(done)
        return found

    def _write_all(self) -> None:
        _give_way()
        while True:
            snapshot = self._jobs.get()
            written: list[ShardEntry] | None = None
            if "disk" in snapshot.tiers or ("store" in snapshot.tiers and self._is_far(snapshot)):
                written = self._try(snapshot, "disk", lambda: self._to_disk(snapshot))  # noqa: B023  (run at once)
            if "store" in snapshot.tiers:
                self._hand_over(snapshot, written)
            else:
                self._results.put(WriteResult(snapshot, "memory", 0.0, over=True, finished=True))

    def _hand_over(self, snapshot: StateSnapshot, written: list[ShardEntry] | None) -> None:
        """Have a snapshot uploaded: from the disk, if it is there, else from memory, which then stays taken."""
        files = None if written is None else _mapped(self._folder, snapshot.step, written)
        size = sum(size for _, _, _, size in self._memory.files(snapshot))
        room = files is not None and len(self._waiting) < MOST and sum(self._waiting) + size <= SMALL_BYTES
        if self._waiting and not room and not snapshot.last:
            late = StateError("the upload before it is still under way", hint="upload less often, or a faster store")
            self._results.put(WriteResult(snapshot, "store", 0.0, error=late))
            self._results.put(WriteResult(snapshot, "memory", 0.0, over=True, finished=True))
            return
        if files is None:
            try:
                upload = _Upload(snapshot, self._describe(snapshot), self._files(snapshot), from_memory=True)
            except StateError as error:
                self._results.put(WriteResult(snapshot, "store", 0.0, error=error))
                self._results.put(WriteResult(snapshot, "memory", 0.0, over=True, finished=True))
                return
            self._waiting.append(size)
            self._uploads.put(upload)
            return
        self._waiting.append(size)
        self._handed_over += 1
        self._uploads.put(_Upload(snapshot, written or [], files, from_memory=False))
        self._results.put(WriteResult(snapshot, "memory", 0.0, over=True, finished=True))

    def _upload_all(self) -> None:
        _give_way()
        while True:
            job = self._uploads.get()
            self._try(job.snapshot, "store", lambda: self._to_store(job))  # noqa: B023  (run at once)
            self._waiting.popleft()
            self._results.put(WriteResult(job.snapshot, "memory", 0.0, over=job.from_memory, finished=True))

    def _try(self, snapshot: StateSnapshot, tier: Tier, write: Callable[[], "_Written"]) -> list[ShardEntry] | None:
        """Write to one tier; a run's last state is tried for a while, any other once. Returns what was written."""
        started = time.monotonic()
        while True:
            done, error = None, None
            try:
                done = write()
            except StateError as refused:
                error = refused
            except Exception as broken:  # a bug of ours: told like a refusal, so that training goes on
                error = StateError(f"{type(broken).__name__}: {broken}")
            seconds = time.monotonic() - started
            if error is None or not snapshot.last or seconds > self._rules.retry_s:
                break
            self.trouble = error.message
            time.sleep(min(RETRY_AFTER_S, max(0.05, self._rules.retry_s - seconds)))
        self.trouble = None
        if done is None:
            self._results.put(WriteResult(snapshot, tier, seconds, error=error))
            return None
        manifest = merge(snapshot.step, snapshot.all_facts, done.shards, snapshot.workers)
        self._results.put(WriteResult(snapshot, tier, seconds, manifest.bytes, manifest.digest, warning=done.warning))
        return done.shards

    def _to_disk(self, snapshot: StateSnapshot) -> "_Written":
        step, reach = snapshot.step, self._injector.reach
        needs = sum(size for _, _, _, size in self._memory.files(snapshot))
        save = begin_checkpoint(self._folder, step, needs, writer=self._name)
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
        commit(save, snapshot.all_facts, shards, snapshot.workers, self._allowed)
        reach("committed", step, snapshot.attempt)
        keep = self._rules
        return _Written(
            shards, _warning(lambda: prune(self._folder, keep.keep_last, keep.keep_every_steps, always=step))
        )

    def _write_files(self, snapshot: StateSnapshot, partial: Path) -> list[ShardEntry]:
        before, shards = self._sound(), list[ShardEntry]()
        far = [(rank, buffer) for rank in sorted(snapshot.buffers)
               if isinstance(buffer := self._memory.buffer(snapshot, rank), RemoteBuffer)]  # fmt: skip
        if far:
            return _write_far(far, snapshot.step, partial)
        for rank in sorted(snapshot.buffers):
            buffer = self._memory.buffer(snapshot, rank)
            assert isinstance(buffer, SaveBuffer)
            for part in buffer.plan.parts:
                shards.append(
                    write_shard(
                        partial,
                        shard_name(rank, part.still),
                        buffer.pieces(part),
                        memory=buffer.file(part),
                        before=before if part.still else None,
                        threads=self._threads,
                    )
                )
        return shards

    def _sound(self) -> OpenCheckpoint | None:
        """The newest checkpoint; its unchanging files may get second names, and are read once before, to be sure."""
        newest, _ = newest_on_disk(self._folder)
        if newest is None:
            return None
        before = open_checkpoint(Path(newest.address))
        for name in before.manifest.files:
            inode = Path(before.source.name(name)).stat().st_ino
            if not name.endswith("-still.safetensors") or inode in self._checked:
                continue
            try:
                check_file(before, name)
            except StateError:
                return None  # it is written anew
            self._checked.add(inode)
        return before

    def _to_store(self, job: "_Upload") -> "_Written":
        # Only runs that name a store need its library.
        from headway.state.object_store import open_store
        from headway.state.store_checkpoint import claim_prefix, prune_remote, upload

        rules, step, attempt = self._rules.store, job.snapshot.step, job.snapshot.attempt
        assert rules is not None, "no store is named"
        store = open_store(store_url(rules, self._run))
        self._injector.reach("upload", step, attempt)
        if self._identity and not claim_prefix(store, self._identity):
            raise StateError(
                f"{store_url(rules, self._run)} has checkpoints of another run of this name",
                hint="another checkpoint.store.url, or another --name",
            )
        if not self._allowed_there():
            raise StateError(f"step {step} was not uploaded: another agent leads the run", hint="nothing was changed")
        self.before_upload()
        files = list(zip(job.shards, job.files, strict=True))
        facts, workers = job.snapshot.all_facts, job.snapshot.workers
        upload(store, step, facts, files, workers, writer=self._name, allowed=self._allowed_there)
        self._injector.reach("uploaded", step, attempt)
        return _Written(
            job.shards,
            _warning(lambda: prune_remote(store, rules.keep_last, rules.keep_every_steps, always=step)),
        )

    def _is_far(self, snapshot: StateSnapshot) -> bool:
        """Whether some of it is in other nodes' memory: they write it to the disk, from where it is uploaded."""
        return any(isinstance(self._memory.buffer(snapshot, rank), RemoteBuffer) for rank in snapshot.buffers)

    def _here(self, snapshot: StateSnapshot) -> list[tuple[int, SaveBuffer]]:
        """The buffers of a snapshot; StateError where they are on other nodes."""
        found = [(rank, self._memory.buffer(snapshot, rank)) for rank in sorted(snapshot.buffers)]
        here = [(rank, buffer) for rank, buffer in found if isinstance(buffer, SaveBuffer)]
        if len(here) < len(found):
            raise StateError("what other nodes have in memory is uploaded from the disk, which did not get it")
        return here

    def _describe(self, snapshot: StateSnapshot) -> list[ShardEntry]:
        buffers = self._here(snapshot)
        return [
            describe_shard(shard_name(rank, part.still), buffer.pieces(part), self._threads)
            for rank, buffer in buffers
            for part in buffer.plan.parts
        ]

    def _files(self, snapshot: StateSnapshot) -> list[memoryview]:
        buffers = [buffer for _, buffer in self._here(snapshot)]
        return [buffer.file(part)[: part.image.bytes] for buffer in buffers for part in buffer.plan.parts]


def _write_far(buffers: Sequence[tuple[int, RemoteBuffer]], step: int, partial: Path) -> list[ShardEntry]:
    """Have all nodes write their files, at the same time."""
    parts = [(buffer, part) for _, buffer in buffers for part in buffer.plan.parts]
    with ThreadPoolExecutor(min(len(parts), 32), thread_name_prefix="far") as pool:
        return list(pool.map(lambda one: one[0].write(partial, one[1], step), parts))


def _give_way() -> None:
    """Let this thread run when nothing else wants to."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _mapped(folder: Path, step: int, shards: list[ShardEntry]) -> list[memoryview] | None:
    """The files of a checkpoint just written, readable even when it is pruned meanwhile; None if they are gone."""
    files = []
    try:
        for shard in shards:
            with (folder / f"step-{step:08d}" / shard.name).open("rb") as file:
                files.append(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except OSError:
        return None
    return files


def _warning(remove: Callable[[], object]) -> str | None:
    """Remove what need not be kept; if that fails the new state is safe all the same, and the next save tries."""
    try:
        remove()
    except StateError as error:
        return error.message
    return None


@contextlib.contextmanager
def explain_os_errors(failed: str) -> Iterator[None]:
    """What the disk refuses, as a sentence."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{failed}: {error.strerror or error}", hint="older checkpoints are untouched") from error
