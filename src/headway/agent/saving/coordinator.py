"""Coordinates saves: collects what workers report, has complete states written, frees buffers, records the result.

    worker                                   agent
    pieces (what I hold)           ->
                                   <-        buffers (memory to save into, and which of it is free)
    filled (a step's state)        ->        all have: the state is complete, and written if it is for more than memory
                                   <-        free (a buffer that may be filled again)
                                   <-        save (one is due, where the agent decides when)

Nothing here waits: the agent calls `poll` whenever a channel has a message, and again and again.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from headway.agent.fd_store import FdStore
from headway.agent.saving.buffers import BufferHost, plan_from
from headway.agent.saving.snapshots import SnapshotBuffers, StateSnapshot, count_buffers
from headway.agent.saving.writer import CheckpointWriter, WriteResult
from headway.agent.supervise.fault_injector import AgentFaultInjector
from headway.agent.supervise.storage_monitor import FolderMonitor
from headway.errors import FolderGone, StateError
from headway.hardware.cluster import GPU_HOURS_BETWEEN_FAILURES
from headway.plan.goodput import save_interval
from headway.recipe import FaultPlan, Recipe
from headway.state import (
    BufferPlan,
    ChannelClosed,
    CheckpointEntry,
    CheckpointFacts,
    Message,
    MessageChannel,
    list_checkpoints,
)
from headway.state.tiers import tiers_at_end
from headway.track import Recorder, RunFolder, run_id
from headway.track.carried_records import CarriedRecord, CarriedRecords, carry_record, restore_records

RESTORE_EVERY_S = 1.0
FIRST_GUESS_BYTES_S = 2e9
"""At which a state is copied to memory, until a save has shown it."""


class SaveCoordinator:
    """One run's saves, over all attempts of one agent."""

    def __init__(
        self,
        run: RunFolder,
        recipe: Recipe,
        faults: FaultPlan,
        fd_store: FdStore,
        host: BufferHost,
        upload_refusal: Callable[[], str | None] | None = None,
        folder: FolderMonitor | None = None,
    ) -> None:
        """`upload_refusal` overrides the host's: a run on one machine may have a lease in its object store."""
        self._run, self._recipe, self._fd_store, self._host = run, recipe, fd_store, host
        self.memory = SnapshotBuffers(host)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        identity = run_id(run) if recipe.checkpoint.store else ""
        self._writer = CheckpointWriter(
            run.checkpoints,
            recipe.checkpoint,
            run.name,
            self.memory,
            AgentFaultInjector(faults, run.faults),
            cores,
            identity,
            commit_refusal=host.commit_refusal,
            upload_refusal=upload_refusal or host.upload_refusal,
            check_folder=(lambda: None) if folder is None else folder.check,
        )
        self._folder, self._owed = folder, False
        self._carried: CarriedRecords = {}
        """Records of processes that have ended, which could not be written yet."""
        self._next_restore = 0.0
        self._channels: dict[int, MessageChannel] = {}
        self._pieces: dict[int, dict[str, Any]] = {}
        self._plans: dict[int, BufferPlan] = {}
        self._snapshots: dict[int, StateSnapshot] = {}
        self._schedule = _SaveSchedule(recipe)
        self.unsaved: StateError | None = None
        """Why the run's last state could not be made durable, if it could not."""
        self.not_uploaded: StateError | None = None
        """Why the last state is not in the object store."""
        self.uploaded = False
        """Whether the last state is in the object store."""

    def before_upload(self, do: Callable[[], object]) -> None:
        """Call this before each checkpoint is uploaded."""
        self._writer.before_upload = do

    # -- an attempt

    def start(self, attempt: int, workers: int, recorder: Recorder, recipe: Recipe) -> None:
        """Begin a new attempt."""
        self._attempt, self._workers, self._recorder, self._recipe = attempt, workers, recorder, recipe
        self._channels, self._plans, self._pieces, self._snapshots = {}, {}, {}, {}
        self._recovered_step = -1
        self._schedule.start(workers)

    def expect_start(self) -> None:
        """The next attempt starts as planned, not after a failure."""
        self._schedule.expect_start()

    def listen(self, rank: int, channel: MessageChannel) -> None:
        """Poll a worker's channel from now on."""
        self._channels[rank] = channel

    @property
    def steady(self) -> bool:
        """Whether every worker of the attempt has buffers to save into."""
        return len(self._plans) == self._workers and self.memory.plans() == self._plans

    def channels(self) -> list[MessageChannel]:
        """The channels that may have messages."""
        return list(self._channels.values())

    def poll(self) -> None:
        """Process what workers and the writer have reported; answer."""
        for rank, channel in list(self._channels.items()):
            try:
                for message in channel.receive():
                    self._receive(rank, message)
            except ChannelClosed:
                del self._channels[rank]
        for result in self._writer.results():
            self._settle(result)
        if (step := self._host.replicated_step()) is not None:
            newest = self.memory.newest
            if newest is not None and newest.step == step:
                self.memory.replicated = newest
                self._store("copied", newest)
                self._recorder.event("copied", step=step)
                self._free()
        if self._carried and time.monotonic() >= self._next_restore and self._folder_works():
            self._next_restore = time.monotonic() + RESTORE_EVERY_S
            self._carried = restore_records(self._run, self._carried)
        if self._owed and not self.busy and self._folder_works():
            self._pay()
        if self.steady and self._schedule.is_due(time.monotonic()):
            self._schedule.requested()
            self._send(0, "save")

    def end(self) -> None:
        """The attempt's workers are gone; what they could not record is in the newest state that they saved."""
        self.poll()
        self._channels = {}
        if self.memory.newest is not None:
            self.restore_records({n: r for n, r in self.memory.newest.records.items() if not n.endswith("agent.jsonl")})
        self.memory.forget_unfinished()

    def restore_records(self, records: CarriedRecords) -> None:
        """Append records that a saved state carried to their files, as soon as that is possible."""
        self._carried |= records
        self._next_restore = 0.0

    # -- after it

    @property
    def busy(self) -> bool:
        """Whether anything is still being written."""
        return not self._writer.idle

    def finish(self, tick: Callable[[], None], given_up: Callable[[], bool], poll_s: float) -> None:
        """Wait until everything is written or the user gives up; record why a write is retried."""
        trouble = None
        while self.busy and not given_up():
            time.sleep(poll_s)
            tick()
            self.poll()
            if self._writer.trouble not in (None, trouble):
                trouble = self._writer.trouble
                self._recorder.event("retry", message=trouble, limit_s=self._writer.gives_up_after_s)
        self._next_restore = 0.0
        self.poll()

    def rescue(self, durable: Sequence[CheckpointEntry], upload: bool = False) -> None:
        """Write the newest state in memory, if the disk has none as new; `upload` it too if there is a store."""
        snapshot = self.memory.restorable()
        newest = max((entry.step for entry in durable), default=-1)
        if snapshot is not None and len(snapshot.tiers) == 1 and snapshot.step > newest:
            tiers = tiers_at_end(self._recipe.checkpoint) if upload else ("memory", "disk")
            self._writer.write(replace(snapshot, tiers=tiers, last=snapshot.last or upload))

    def _folder_works(self) -> bool:
        return self._folder is not None and self._folder.trouble() is None

    def _owe(self) -> None:
        """The folder is gone and a save to disk failed: the newest state stays in memory and is written later."""
        self._owed = self.memory.hold_newest = True

    def _pay(self) -> None:
        """The folder is back: write the newest state in memory, if the disk has none as new."""
        self._owed = self.memory.hold_newest = False
        snapshot = self.memory.restorable()
        newest = max((entry.step for entry in list_checkpoints(self._run.checkpoints)), default=-1)
        if snapshot is not None and snapshot.step > newest and self.memory.retain(snapshot):
            snapshot.tiers = ("memory", "disk")
            self._writer.write(snapshot)
        self._free()

    def close(self) -> None:
        """Give the memory back."""
        self._fd_store.drop("buffers")
        if not self.busy:
            self.memory.drop()

    def take_over(self) -> None:
        """Adopt the memory of an agent that died: complete states in it are kept, and written if they have to be.

        The last messages to that agent are lost with it, so the memory itself is read.
        """
        recovered = self._host.recover(self._attempt, self._workers)
        if recovered is None:
            return
        self._pieces = recovered.pieces
        self._plans = {rank: plan_from(fields) for rank, fields in recovered.pieces.items()}
        self.memory.adopt(recovered.buffers)
        durable = {entry.step for entry in list_checkpoints(self._run.checkpoints)}
        for rank, number, step in recovered.filled:
            self._fill(rank, {"step": step, "buffer": number, "stall_s": 0.0}, write=step not in durable)
        for rank, number, step, attempt in recovered.stale:
            self._send(rank, "free", buffer=number, step=step, attempt=attempt)
        self._recovered_step = recovered.newest_step

    def _store(self, name: str, snapshot: StateSnapshot) -> None:
        """Store what another agent needs to resume from a snapshot."""
        notes = {rank: self.memory.note(rank, number) for rank, number in snapshot.buffers.items()}
        self._host.store_snapshot(name, snapshot, notes, self.memory.buffers_each)

    # -- messages

    def _receive(self, rank: int, message: Message) -> None:
        match message.kind:
            case "pieces":
                self._pieces[rank] = message.fields
                self._plans[rank] = plan_from(message.fields)
                if len(self._plans) == self._workers:
                    self._give_buffers()
            case "filled":
                if message.fields["step"] > self._recovered_step:  # else it was known when this agent took over
                    self._fill(rank, message.fields)
            case "skipped":
                if rank == 0:
                    self._recorder.event("skipped", step=message.fields["step"])
                    self._schedule.settled()

    def _give_buffers(self) -> None:
        size = sum(plan.bytes for plan in self._plans.values())
        try:
            free = self._host.available_bytes(self.memory.size)
            count = count_buffers(size, free, self._recipe.checkpoint.memory_gb)
            self.memory.make(self._plans, count)
        except StateError as error:
            for rank in self._plans:
                self._send(rank, "refused", message=error.message, hint=error.hint)
            return
        self._host.store_buffers(self._pieces, self.memory.all_descriptors())
        self._schedule.guess(size / FIRST_GUESS_BYTES_S)
        self._recorder.event("memory", bytes=self.memory.size, buffers=self.memory.buffers_each)
        for rank in self._plans:
            self._send(rank, "buffers", self.memory.descriptors(rank), free=self.memory.free(rank))

    def _fill(self, rank: int, fields: dict[str, Any], write: bool = True) -> None:
        step, note = fields["step"], self.memory.note(rank, fields["buffer"])
        if self.memory.holds(rank, fields["buffer"], step):
            return  # known since this agent took over
        if step not in self._snapshots:
            facts = CheckpointFacts(
                cursor=note["cursor"],
                chain=note["chain"],
                data_version=self._recipe.data.version or "",
                recipe=self._recipe.model_dump(mode="json"),
                mesh=note["mesh"],
            )
            tiers = tuple(note["tiers"]) if write else ("memory",)
            self._snapshots[step] = StateSnapshot(step, note["attempt"], self._workers, tiers, facts, note["last"])
        snapshot = self._snapshots[step]
        snapshot.rng[str(rank)] = note["rng"]
        snapshot.stall_s = max(snapshot.stall_s, fields["stall_s"])
        snapshot.records |= {n: CarriedRecord.model_validate(r) for n, r in fields.get("records", {}).items()}
        self.memory.take(snapshot, rank, fields["buffer"])
        if snapshot.is_complete:
            del self._snapshots[step]
            self._complete(snapshot)

    def _complete(self, snapshot: StateSnapshot) -> None:
        snapshot.records |= self._carried | carry_record(self._recorder)
        snapshot.run = "" if self._folder is None else self._folder.run_id
        self.memory.complete(snapshot)
        self._schedule.saved(snapshot.stall_s, durable=len(snapshot.tiers) > 1)
        if (interval_s := self._schedule.changed_interval(time.monotonic())) is not None:
            self._recorder.event("rhythm", seconds=interval_s, cost=snapshot.stall_s)
        self._recorder.event("kept", step=snapshot.step, seconds=snapshot.stall_s)
        self._store("newest", snapshot)
        self._host.replicate(snapshot, {rank: self._plans[rank] for rank in snapshot.buffers})
        if len(snapshot.tiers) > 1:
            self._writer.write(snapshot)
        else:
            self.memory.release(snapshot)
        self._free()

    def _settle(self, done: WriteResult) -> None:
        """Record what the writer has done, and give memory back."""
        step, tier = done.snapshot.step, done.tier
        if tier == "memory":
            if done.over:
                self.memory.release(done.snapshot)
                self._free()
        elif isinstance(done.error, FolderGone) and not done.snapshot.last:
            self._owe()  # the storage reporter tells people, once
        elif done.error is not None:
            self._recorder.event("unsaved", step=step, tier=tier, message=done.error.message, hint=done.error.hint)
            if done.snapshot.last and tier == "disk":
                self.unsaved = done.error
            elif done.snapshot.last:
                self.not_uploaded = done.error
        else:
            if done.warning is not None:
                self._recorder.event("log", message=done.warning)
            kind = "checkpoint" if tier == "disk" else "upload"
            self._recorder.event(kind, step=step, digest=done.digest, bytes=done.bytes, seconds=done.seconds)
            if tier == "disk":
                self.unsaved = None
            elif done.snapshot.last:
                self.uploaded = True

    def _free(self) -> None:
        for rank, number, snapshot in self.memory.freed():
            self._send(rank, "free", buffer=number, step=snapshot.step, attempt=snapshot.attempt)

    def _send(self, rank: int, kind: str, descriptors: list[int] | None = None, **fields: Any) -> None:
        channel = self._channels.get(rank)
        if channel is not None:
            with contextlib.suppress(ChannelClosed):  # it has ended; the zygote reports how
                channel.send(kind, descriptors or [], **fields)


class _SaveSchedule:
    """When the agent asks for a save, where the recipe leaves that to it (`every_steps = "auto"`)."""

    def __init__(self, recipe: Recipe) -> None:
        self._rules = recipe.checkpoint
        self._auto = recipe.checkpoint.every_steps == "auto"
        self._cost_s: float | None = None
        self._measured = False
        self._began = self._last = time.monotonic()
        self._failures = -1
        self._pending = False
        self._reported_s: float | None = None

    def start(self, workers: int) -> None:
        """Begin an attempt; every one after the first means a failure."""
        self._workers = workers
        self._failures += 1
        self._pending = False
        self._last = time.monotonic()

    def expect_start(self) -> None:
        """The next start is none after a failure."""
        self._failures -= 1

    def guess(self, seconds: float) -> None:
        """Set what a save may cost until one has shown it."""
        if not self._measured:
            self._cost_s = seconds

    def saved(self, stall_s: float, durable: bool) -> None:
        """A save was made and stalled the steps for so long."""
        self._cost_s, self._measured = stall_s, True
        if durable:
            self.settled()

    def requested(self) -> None:
        """A save was requested: no other until it is made or skipped."""
        self._pending = True

    def settled(self) -> None:
        """A save was made or skipped: the next is due an interval later."""
        self._pending, self._last = False, time.monotonic()

    def is_due(self, now: float) -> bool:
        """Whether to request a save."""
        due = self._auto and self._cost_s is not None and not self._pending
        return due and now - self._last >= self._interval(now)

    def changed_interval(self, now: float) -> float | None:
        """The interval in seconds, if it has changed by half since it was last reported."""
        if not self._auto:
            return None
        interval = self._interval(now)
        if self._reported_s is not None and self._reported_s / 1.5 < interval < self._reported_s * 1.5:
            return None
        self._reported_s = interval
        return interval

    def _interval(self, now: float) -> float:
        hours = self._rules.hours_between_failures or GPU_HOURS_BETWEEN_FAILURES
        return save_interval(self._cost_s or 0.0, self._workers, hours, self._failures, now - self._began)
