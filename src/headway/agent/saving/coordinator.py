"""What the agent does about saves: hears the workers, has whole states written, frees memory, says what became of it.

    worker                                   agent
    pieces (what I hold)           ->
                                   <-        buffers (memory to save into, and which of it is free)
    filled (a step's state)        ->        all have: the state is whole; it is written if it is for more than memory
                                   <-        free (a buffer that may be filled again)
                                   <-        save (it is time for one, where the agent decides when)

Nothing here waits: the agent calls it whenever a line has something to say, and again and again.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from headway.agent.fd_store import FdStore
from headway.agent.nodes.members import RemoteChannel
from headway.agent.nodes.node_group import NodeGroup
from headway.agent.saving.snapshots import SnapshotBuffers, StateSnapshot, available_memory, count_buffers, plan_from
from headway.agent.saving.writer import CheckpointWriter, WriteResult
from headway.agent.supervise.fault_injector import AgentFaultInjector
from headway.errors import StateError
from headway.hardware.cluster import GPU_HOURS_BETWEEN_FAILURES
from headway.plan.goodput import save_interval
from headway.recipe import FaultPlan, Recipe
from headway.state import (
    BufferPlan,
    Channel,
    ChannelClosed,
    CheckpointEntry,
    CheckpointFacts,
    Message,
    list_checkpoints,
    shard_name,
)
from headway.track import Recorder, RunFolder, run_id

__all__ = ["SaveCoordinator"]

FIND_S = 10.0
"""How long nodes may take to call again after the agent that led them died."""
FIRST_GUESS_BYTES_S = 2e9
"""At which a state is copied to memory, until a save has shown it."""


class SaveCoordinator:
    """One run's saves on this machine, over all attempts of one agent."""

    def __init__(
        self,
        run: RunFolder,
        recipe: Recipe,
        faults: FaultPlan,
        kept: FdStore,
        team: NodeGroup | None = None,
        allowed_there: Callable[[], bool] | None = None,
    ) -> None:
        """`allowed_there` says whether a run on one machine may put anything into its store."""
        self._run, self._recipe, self._team = run, recipe, team
        self.memory = SnapshotBuffers(team)
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
            may_commit=(lambda: True) if team is None else team.right.holds,
            may_upload=allowed_there or ((lambda: True) if team is None else team.right.holds_in_store),
        )
        self._kept = kept
        self._lines: dict[int, Channel | RemoteChannel] = {}
        self._told: dict[int, dict[str, Any]] = {}
        self._plans: dict[int, BufferPlan] = {}
        self._snapshots: dict[int, StateSnapshot] = {}
        self._rhythm = _Rhythm(recipe)
        self.unsaved: StateError | None = None
        """Why the run's last state could not be made durable, if it could not."""
        self.not_uploaded: StateError | None = None
        """Why the last state is not in the object store."""

    def before_upload(self, do: Callable[[], object]) -> None:
        """Have something done before each checkpoint that is put into the store."""
        self._writer.before_upload = do

    # -- an attempt

    def start(self, attempt: int, workers: int, recorder: Recorder, recipe: Recipe) -> None:
        """A new attempt begins."""
        self._attempt, self._workers, self._recorder, self._recipe = attempt, workers, recorder, recipe
        self._lines, self._plans, self._told, self._snapshots, self._found_to = {}, {}, {}, {}, -1
        self._rhythm.start(workers)

    @contextlib.contextmanager
    def kept_files(self, wanted: bool) -> Iterator[tuple[list[int], list[tuple[str, int, int]]]]:
        """The newest whole state as files in memory: descriptors, and the name, place and size of each file."""
        snapshot = self.memory.restorable()
        if not wanted:
            yield [], []
            return
        assert snapshot is not None, "asked for only where there is one"
        manifest, begin, size = _in_memory(self.memory.manifest(snapshot))
        try:
            files = [("manifest.json", manifest, begin, size), *self.memory.files(snapshot)]
            yield [file[1] for file in files], [(name, begin, size) for name, _, begin, size in files]
        finally:
            os.close(manifest)

    def share(self, team: NodeGroup) -> None:
        """Have all nodes know of the newest whole state, and where each of its files lies."""
        snapshot = self.memory.restorable()
        assert snapshot is not None, "asked for only where there is one"
        files = [(name, size) for name, _, _, size in self.memory.files(snapshot)]
        team.share(snapshot.step, self.memory.manifest(snapshot), files)

    def listen(self, rank: int, line: Channel | RemoteChannel) -> None:
        """Hear a worker from now on."""
        self._lines[rank] = line

    @property
    def steady(self) -> bool:
        """Whether every worker of the attempt has memory to save into."""
        return len(self._plans) == self._workers and self.memory.plans() == self._plans

    def lines(self) -> list[Channel | RemoteChannel]:
        """The lines that may have something to say."""
        return list(self._lines.values())

    def hear(self) -> None:
        """Take in what workers and the writer have said; answer."""
        for rank, line in list(self._lines.items()):
            try:
                for message in line.receive():
                    self._take(rank, message)
            except ChannelClosed:
                del self._lines[rank]
        for done in self._writer.results():
            self._settle(done)
        if self._team is not None and (step := self._team.copies.replicated_step()) is not None:
            newest = self.memory.newest
            if newest is not None and newest.step == step:
                self.memory.replicated = newest
                self._keep_far("copied", newest, self._team)
                self._recorder.event("copied", step=step)
                self._free()
        if self.steady and self._rhythm.is_time(time.monotonic()):
            self._rhythm.asked()
            self._say(0, "save")

    def end(self) -> None:
        """The attempt's workers are gone."""
        self.hear()
        self._lines = {}
        self.memory.forget_unfinished()

    # -- what is left to do

    @property
    def busy(self) -> bool:
        """Whether anything is still being written."""
        return not self._writer.idle

    def finish(self, pulse: Callable[[], None], given_up: Callable[[], bool], poll_s: float) -> None:
        """Wait until everything is written, or nobody wants to any more; say why, where it has to be tried again."""
        told = None
        while self.busy and not given_up():
            time.sleep(poll_s)
            pulse()
            self.hear()
            if self._writer.trouble not in (None, told):
                told = self._writer.trouble
                self._recorder.event("retry", message=told)

    def rescue(self, durable: Sequence[CheckpointEntry]) -> None:
        """Have the newest state in memory written, if the disk has none so new."""
        snapshot = self.memory.restorable()
        newest = max((entry.step for entry in durable), default=-1)
        if snapshot is not None and len(snapshot.tiers) == 1 and snapshot.step > newest:
            self._writer.write(replace(snapshot, tiers=("memory", "disk")))

    def close(self) -> None:
        """Give the memory back."""
        self._kept.drop("buffers")
        if not self.busy:
            self.memory.drop()

    def take_over(self) -> None:
        """Go on with the memory of an agent that died: what is whole in it is kept, and written if it has to be.

        What that agent heard last is lost with it, so that the memory itself is asked.
        """
        if self._team is not None:
            self._find_again(self._team)
            return
        thing = self._kept.get("buffers")
        if thing is None:
            return
        self._told = {int(rank): told for rank, told in thing.fields["pieces"].items()}
        self._plans = {rank: plan_from(told) for rank, told in self._told.items()}
        self.memory.take_over(self._plans, thing.descriptors)
        durable = {entry.step for entry in list_checkpoints(self._run.checkpoints)}
        found = self.memory.contents()
        newest = max((key for key, buffers in found.items() if len(buffers) == len(self._plans)), default=(0, -1))
        for (attempt, step), buffers in found.items():
            comes = attempt == self._attempt and (attempt, step) > newest
            for rank, number in buffers.items():
                if len(buffers) == len(self._plans) or comes:
                    self._fill(rank, {"step": step, "buffer": number, "stall_s": 0.0}, write=step not in durable)
                else:
                    self._say(rank, "free", buffer=number, step=step, attempt=attempt)  # its rest will never come
        self._found_to = newest[1] if newest[0] == self._attempt else -1

    def _find_again(self, team: NodeGroup) -> None:
        """The newest state that lies with the nodes that have called again since another agent led them."""
        roster, pieces = self._kept.get("roster"), self._kept.get("pieces")
        team.wait_for((name for name in roster.fields["nodes"] if name != team.after) if roster else (), FIND_S)
        if pieces is None:
            return
        self._told = {int(rank): told for rank, told in pieces.fields["told"].items()}
        self._plans = {rank: plan_from(told) for rank, told in self._told.items()}
        names = [shard_name(rank, part.still) for rank, plan in self._plans.items() for part in plan.parts]
        known = [thing.fields for name in ("newest", "copied") if (thing := self._kept.get(name)) is not None]
        there = [fields for fields in known if team.has(names, fields["step"])]
        if not there or self._workers != len(self._plans):
            return
        state = max(there, key=lambda fields: fields["step"])
        team.find_again({int(rank): name for rank, name in state["homes"].items()})
        self.memory.make(self._plans, state["count"])
        durable = {entry.step for entry in list_checkpoints(self._run.checkpoints)}
        step, buffers = state["step"], {int(rank): number for rank, number in state["buffers"].items()}
        for rank, number in buffers.items():
            found = team.buffers[rank, number]
            found.note = state["notes"][str(rank)]
            if all(step in found.home.files.get(found.name(part), ()) for part in found.plan.parts):
                found.step = step  # else it is a copy that is there
        for rank, number in buffers.items():
            self._fill(rank, {"step": step, "buffer": number, "stall_s": 0.0}, write=step not in durable)

    def _keep_far(self, name: str, snapshot: StateSnapshot, team: NodeGroup) -> None:
        """What another agent needs to go on from a state that lies with the nodes."""
        self._kept.put(
            name,
            step=snapshot.step,
            buffers={str(rank): number for rank, number in snapshot.buffers.items()},
            notes={str(rank): self.memory.note(rank, number) for rank, number in snapshot.buffers.items()},
            homes={str(rank): team.place(rank).name for rank in snapshot.buffers},
            count=self.memory.buffers_each,
        )

    # -- messages

    def _take(self, rank: int, message: Message) -> None:
        match message.kind:
            case "pieces":
                self._told[rank] = message.fields
                self._plans[rank] = plan_from(message.fields)
                if len(self._plans) == self._workers:
                    self._give_buffers()
            case "filled":
                if message.fields["step"] > self._found_to:  # else it was found when this agent took over
                    self._fill(rank, message.fields)
            case "skipped":
                if rank == 0:
                    self._recorder.event("skipped", step=message.fields["step"])
                    self._rhythm.settled()

    def _give_buffers(self) -> None:
        size = sum(plan.bytes for plan in self._plans.values())
        try:
            free = available_memory() + self.memory.size if self._team is None else self._team.free_memory()
            count = count_buffers(size, free, self._recipe.checkpoint.memory_gb)
            self.memory.make(self._plans, count)
        except StateError as error:
            for rank in self._plans:
                self._say(rank, "refused", message=error.message, hint=error.hint)
            return
        if self._team is None:
            self._kept.put("buffers", self.memory.all_descriptors(), pieces=self._told)
        else:
            self._kept.put("pieces", told={str(rank): told for rank, told in self._told.items()})
        self._rhythm.guess(size / FIRST_GUESS_BYTES_S)
        self._recorder.event("memory", bytes=self.memory.size, buffers=self.memory.buffers_each)
        for rank in self._plans:
            self._say(rank, "buffers", self.memory.descriptors(rank), free=self.memory.free(rank))

    def _fill(self, rank: int, fields: dict[str, Any], write: bool = True) -> None:
        step, note = fields["step"], self.memory.note(rank, fields["buffer"])
        if self.memory.holds(rank, fields["buffer"], step):
            return  # found there already, when this agent took over
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
        self.memory.take(snapshot, rank, fields["buffer"])
        if snapshot.is_complete:
            del self._snapshots[step]
            self._complete(snapshot)

    def _complete(self, snapshot: StateSnapshot) -> None:
        self.memory.complete(snapshot)
        self._rhythm.saved(snapshot.stall_s, durable=len(snapshot.tiers) > 1)
        if (told := self._rhythm.news(time.monotonic())) is not None:
            self._recorder.event("rhythm", seconds=told, cost=snapshot.stall_s)
        self._recorder.event("kept", step=snapshot.step, seconds=snapshot.stall_s)
        if self._team is not None:
            self._keep_far("newest", snapshot, self._team)
            self._team.copies.replicate(snapshot.step, {rank: self._plans[rank] for rank in snapshot.buffers})
        if len(snapshot.tiers) > 1:
            self._writer.write(snapshot)
        else:
            self.memory.release(snapshot)
        self._free()

    def _settle(self, done: WriteResult) -> None:
        """Record what the writer has done, and give memory back."""
        step, tier = done.snapshot.step, done.tier
        if done.tier == "memory":
            if done.over:
                self.memory.release(done.snapshot)
                self._free()
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

    def _free(self) -> None:
        for rank, number, snapshot in self.memory.freed():
            self._say(rank, "free", buffer=number, step=snapshot.step, attempt=snapshot.attempt)

    def _say(self, rank: int, kind: str, descriptors: list[int] | None = None, **fields: Any) -> None:
        line = self._lines.get(rank)
        if line is not None:
            with contextlib.suppress(ChannelClosed):  # it has ended, and the zygote tells how
                line.send(kind, descriptors or [], **fields)


class _Rhythm:
    """When the agent asks for a save, where the recipe leaves that to it."""

    def __init__(self, recipe: Recipe) -> None:
        self._rules = recipe.checkpoint
        self._auto = recipe.checkpoint.every_steps == "auto"
        self._cost_s: float | None = None
        self._measured = False
        self._began = self._last = time.monotonic()
        self._failures = -1
        self._asking = False
        self._told: float | None = None

    def start(self, workers: int) -> None:
        """An attempt begins; every one after the first means a failure."""
        self._workers = workers
        self._failures += 1
        self._asking = False
        self._last = time.monotonic()

    def guess(self, seconds: float) -> None:
        """What a save may cost, as long as none has shown it."""
        if not self._measured:
            self._cost_s = seconds

    def saved(self, stall_s: float, durable: bool) -> None:
        """A save has been made, and cost the steps so much."""
        self._cost_s, self._measured = stall_s, True
        if durable:
            self.settled()

    def asked(self) -> None:
        """One has been asked for: once is enough until it is made or left out."""
        self._asking = True

    def settled(self) -> None:
        """One has been made, or could not be: the next comes an interval later."""
        self._asking, self._last = False, time.monotonic()

    def is_time(self, now: float) -> bool:
        """Whether a save is due."""
        return self._auto and self._cost_s is not None and not self._asking and now - self._last >= self._interval(now)

    def news(self, now: float) -> float | None:
        """The interval in seconds, when it has changed by half since it was last told."""
        if not self._auto:
            return None
        interval = self._interval(now)
        if self._told is not None and self._told / 1.5 < interval < self._told * 1.5:
            return None
        self._told = interval
        return interval

    def _interval(self, now: float) -> float:
        hours = self._rules.hours_between_failures or GPU_HOURS_BETWEEN_FAILURES
        return save_interval(self._cost_s or 0.0, self._workers, hours, self._failures, now - self._began)


def _in_memory(content: bytes) -> tuple[int, int, int]:
    """A descriptor of memory with this content, where it begins there, its size."""
    descriptor = os.memfd_create("headway-manifest", os.MFD_CLOEXEC)
    os.pwrite(descriptor, content, 0)
    return descriptor, 0, len(content)
