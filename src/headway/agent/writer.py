"""Takes states from memory to the disk and the object store: one thread of the agent, one state after the other.

The thread is a daemon and runs below everything else: training comes first, and a disk that hangs keeps no one from
stopping the run. It hands its results to whoever polls for them; it neither records nor frees anything itself.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from headway.agent.inject import Injector
from headway.agent.memory import Memory, Snapshot
from headway.errors import StateError
from headway.recipe import Checkpoint as Rules
from headway.state import (
    Checkpoint,
    Shard,
    abandon,
    begin,
    commit,
    describe_shard,
    list_checkpoints,
    merge,
    open_checkpoint,
    prune,
    shard_name,
    write_shard,
)
from headway.state.address import store_url
from headway.state.restore import check_file
from headway.state.tiers import Tier

__all__ = ["Done", "Writer", "newest_whole"]

NICE = 10
RETRY_AFTER_S = 2.0


@dataclass(frozen=True)
class Done:
    """What became of a snapshot on one tier."""

    snapshot: Snapshot
    tier: Tier
    seconds: float
    bytes: int = 0
    digest: str = ""
    error: StateError | None = None
    warning: str | None = None
    """What else did not go well: the state is safe all the same."""
    over: bool = False
    """Whether the writer is through with the snapshot."""


class Writer:
    """The thread, what it is told and what it tells."""

    def __init__(self, folder: Path, rules: Rules, run: str, memory: Memory, injector: Injector, cores: int) -> None:
        self._folder, self._rules, self._run, self._memory = folder, rules, run, memory
        self._injector = injector
        self._threads = max(1, min(4, cores // 4))
        self._jobs: SimpleQueue[Snapshot] = SimpleQueue()
        self._results: SimpleQueue[Done] = SimpleQueue()
        self._given = self._finished = 0
        self._checked = set[int]()
        self._warning: str | None = None
        self._described: tuple[Snapshot | None, list[Shard]] = (None, [])
        self.trouble: str | None = None
        """Why the last state could not be written so far, while it is tried again."""
        threading.Thread(target=self._work, name="writer", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether everything given has come back."""
        return self._given == self._finished

    def write(self, snapshot: Snapshot) -> None:
        """Have a whole snapshot written to the tiers it is for."""
        self._given += 1
        self._jobs.put(snapshot)

    def results(self) -> list[Done]:
        """What has been done since the last call."""
        found = []
        while not self._results.empty():
            done = self._results.get()
            self._finished += done.over
            found.append(done)
        return found

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            snapshot = self._jobs.get()
            for tier in snapshot.tiers[1:]:
                self._try(snapshot, tier, self._to_disk if tier == "disk" else self._to_store)
            self._results.put(Done(snapshot, "memory", 0.0, over=True))

    def _try(self, snapshot: Snapshot, tier: Tier, write: Callable[[Snapshot], tuple[int, str]]) -> None:
        """Write to one tier; a run's last state is tried for a while, any other once."""
        started, self._warning = time.monotonic(), None
        while True:
            try:
                size, digest = write(snapshot)
                error = None
            except StateError as refused:
                size, digest, error = 0, "", refused
            except Exception as broken:  # a bug of ours: told like a refusal, so that training goes on
                size, digest, error = 0, "", StateError(f"{type(broken).__name__}: {broken}")
            seconds = time.monotonic() - started
            if error is None or not snapshot.last or seconds > self._rules.retry_s:
                break
            self.trouble = error.message
            time.sleep(min(RETRY_AFTER_S, max(0.05, self._rules.retry_s - seconds)))
        self.trouble = None
        self._results.put(Done(snapshot, tier, seconds, size, digest, error, self._warning))

    def _to_disk(self, snapshot: Snapshot) -> tuple[int, str]:
        step, reach = snapshot.step, self._injector.reach
        needs = sum(size for _, _, _, size in self._memory.files(snapshot))
        save = begin(self._folder, step, needs, writer=str(os.getpid()))
        try:
            with told(f"checkpoint of step {step} could not be written in {save.partial}"):
                reach("write", step, snapshot.attempt)
            shards = self._write_files(snapshot, save.partial)
            with told(f"checkpoint of step {step} could not be committed in {save.partial}"):
                reach("written", step, snapshot.attempt)
                reach("commit", step, snapshot.attempt)
        except BaseException:
            abandon(save)
            raise
        commit(save, snapshot.all_facts, shards, snapshot.workers)
        reach("committed", step, snapshot.attempt)
        self._prune(lambda: prune(self._folder, self._rules.keep_last, self._rules.keep_every_steps, always=step))
        self._described = (snapshot, shards)
        manifest = merge(step, snapshot.all_facts, shards, snapshot.workers)
        return manifest.bytes, manifest.digest

    def _prune(self, remove: Callable[[], object]) -> None:
        """Remove what need not be kept; if that fails the new state is safe all the same, and the next save tries."""
        try:
            remove()
        except StateError as error:
            self._warning = error.message

    def _write_files(self, snapshot: Snapshot, partial: Path) -> list[Shard]:
        before, shards = self._sound(newest_whole(self._folder)), []
        for rank in sorted(snapshot.buffers):
            buffer = self._memory.buffer(snapshot, rank)
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

    def _sound(self, before: Checkpoint | None) -> Checkpoint | None:
        """A checkpoint whose unchanging files may get second names: read once in an agent's life, to be sure."""
        if before is None:
            return None
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

    def _to_store(self, snapshot: Snapshot) -> tuple[int, str]:
        # Only runs that name a store need its library.
        from headway.state.remote import prune_remote, upload
        from headway.state.store import open_store

        rules, step, reach = self._rules.store, snapshot.step, self._injector.reach
        assert rules is not None, "no store is named"
        store = open_store(store_url(rules, self._run))
        reach("upload", step, snapshot.attempt)
        shards = self._shards(snapshot)
        upload(
            store,
            step,
            snapshot.all_facts,
            list(zip(shards, self._files(snapshot), strict=True)),
            snapshot.workers,
            writer=f"{os.getpid()}-{snapshot.attempt}",
        )
        reach("uploaded", step, snapshot.attempt)
        self._prune(lambda: prune_remote(store, rules.keep_last, rules.keep_every_steps, always=step))
        manifest = merge(step, snapshot.all_facts, shards, snapshot.workers)
        return manifest.bytes, manifest.digest

    def _shards(self, snapshot: Snapshot) -> list[Shard]:
        """What is known of each file: from having written it to the disk just now, else found out here."""
        described, shards = self._described
        if described is snapshot:
            return shards
        buffers = [(rank, self._memory.buffer(snapshot, rank)) for rank in sorted(snapshot.buffers)]
        return [
            describe_shard(shard_name(rank, part.still), buffer.pieces(part), self._threads)
            for rank, buffer in buffers
            for part in buffer.plan.parts
        ]

    def _files(self, snapshot: Snapshot) -> list[memoryview]:
        buffers = [self._memory.buffer(snapshot, rank) for rank in sorted(snapshot.buffers)]
        return [buffer.file(part)[: part.image.bytes] for buffer in buffers for part in buffer.plan.parts]


def newest_whole(folder: Path) -> Checkpoint | None:
    """The newest checkpoint whose manifest and files are as they should be at first sight."""
    for entry in reversed(list_checkpoints(folder)):
        with contextlib.suppress(StateError):
            return open_checkpoint(entry.path)
    return None


@contextlib.contextmanager
def told(failed: str) -> Iterator[None]:
    """What the disk refuses, as a sentence."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{failed}: {error.strerror or error}", hint="older checkpoints are untouched") from error
