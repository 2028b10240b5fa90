"""Saves while the run's folder is away: a worker and an agent in one process, and folders that are really renamed."""

import contextlib
import threading

import numpy as np
import pytest

from eventually import eventually
from headway.agent.fd_store import FdStore
from headway.agent.nodes.lease import ANOTHER_LEADS, LeaderLease, LeaseRecord, take_lease
from headway.agent.saving import writer as writer_module
from headway.agent.saving.buffers import LocalMemory
from headway.agent.saving.coordinator import SaveCoordinator
from headway.agent.supervise.storage_monitor import FolderMonitor
from headway.errors import StateError
from headway.recipe import FaultPlan
from headway.recipe.load import parse_recipe
from headway.state import (
    Channel,
    CheckpointFacts,
    PieceShape,
    SaveBuffer,
    begin_checkpoint,
    commit,
    list_checkpoints,
    open_checkpoint,
    plan_buffer,
    read_box,
    verify_checkpoint,
)
from headway.track import create_run
from headway.track.folder_identity import open_identity

PIECE = PieceShape("w", "int32", (4,), (0,), (4,))
PLAN = plan_buffer([PIECE], [])
FACTS = CheckpointFacts(cursor=3, chain="c", data_version="v")


class Recorded:
    """Stands for the agent's recorder, which can write everything."""

    def unwritten(self):
        return None

    def __init__(self):
        self.events = []

    def event(self, kind, **fields):
        self.events.append((kind, fields))

    def kinds(self):
        return [kind for kind, _ in self.events if kind in ("checkpoint", "unsaved", "retry")]


class Saving:
    """One worker's side of saves, and the agent's."""

    def __init__(self, run, buffers, outage_s=600.0):
        self.run, self.recorder = run, Recorded()
        rules = {"memory_gb": (buffers + 0.5) * PLAN.bytes / 1e9, "retry_s": 0, "outage_s": outage_s}
        recipe = parse_recipe({"model": {}, "data": {"path": "x"}, "checkpoint": rules}, {}, "test")
        self.folder = FolderMonitor(run, open_identity(run), lambda: True)
        host = LocalMemory(FdStore())
        self.agent = SaveCoordinator(run, recipe, FaultPlan(), FdStore(), host, folder=self.folder)
        self.agent.start(1, 1, self.recorder, recipe)
        self.line, self.theirs = Channel.pair()
        self.agent.listen(0, self.theirs)
        row = [PIECE.name, PIECE.dtype, PIECE.shape, PIECE.start, PIECE.local_shape]
        self.line.send("pieces", trained=[row], still=[])
        self.agent.poll()
        self.buffers, self.free = [], set()
        self.hear()
        assert len(self.buffers) == buffers

    def close(self):
        for buffer in self.buffers:
            buffer.close()
        self.line.close()
        self.theirs.close()
        self.agent.close()

    def hear(self):
        self.agent.poll()
        for message in self.line.receive():
            if message.kind == "buffers":
                self.buffers = [SaveBuffer(PLAN, descriptor) for descriptor in message.descriptors]
                self.free = set(message.fields["free"])
            elif message.kind == "free":
                self.free.add(message.fields["buffer"])

    def save(self, step, tiers=("memory", "disk"), last=False):
        """Save a step as workers do; False where no buffer is free, so that they skip it."""
        self.hear()
        if not self.free:
            return False
        number = min(self.free)
        self.free.remove(number)
        note = {"attempt": 1, "cursor": 10 * step, "chain": "c", "tiers": tiers, "last": last, "rng": "", "mesh": {}}
        self.buffers[number].write_note(note)
        self.buffers[number].bits(PLAN.parts[0], PIECE)[...] = step
        self.buffers[number].mark(step, step)
        self.line.send("filled", buffer=number, step=step, stall_s=0.0)
        self.settle()
        return True

    def settle(self):
        """Until nothing is being written and all of it is recorded."""

        def settled():
            self.hear()
            return not self.agent.busy

        self.hear()
        eventually(settled, poll_s=0.001)
        self.hear()

    def steps(self):
        """Steps on disk, each verified and with its own bytes."""
        entries = list_checkpoints(self.run.checkpoints)
        for entry in entries:
            verify_checkpoint(entry.path)
            assert np.array_equal(read_box(open_checkpoint(entry.path), "w", (0,), (4,)), np.full(4, entry.step, "<u4"))
        return [entry.step for entry in entries]


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path, "r", "r")


@pytest.fixture
def start(run):
    """Starts saving in the run, with so many buffers."""
    with contextlib.ExitStack() as stack:
        yield lambda *options: stack.enter_context(contextlib.closing(Saving(run, *options)))


@pytest.mark.parametrize("bare", [False, True])
def test_newest_state_is_committed_when_the_folder_is_back(run, start, bare):
    saving = start(3)
    assert saving.save(1)
    away = run.path.rename(run.path.with_name("away"))
    if bare:
        run.path.mkdir()
    assert saving.save(2)
    assert saving.save(3, tiers=("memory",))  # newer than what was due for the disk
    assert list(run.path.iterdir()) == [] if bare else not run.path.exists()
    assert saving.recorder.kinds() == ["checkpoint"]  # the storage reporter tells people of the rest, once
    if bare:
        run.path.rmdir()
    away.rename(run.path)
    saving.folder.look()
    saving.settle()
    assert saving.steps() == [1, 3]
    assert saving.save(4)
    assert saving.steps() == [3, 4]  # keep_last = 2


def test_only_buffer_keeps_its_state_while_the_folder_is_away(run, start):
    """Later saves are skipped rather than overwrite the one state that there is."""
    saving = start(1)
    away = run.path.rename(run.path.with_name("away"))
    assert saving.save(2)
    assert not saving.save(3)
    away.rename(run.path)
    saving.folder.look()
    saving.settle()
    assert saving.steps() == [2]
    assert saving.save(4)
    assert saving.steps() == [2, 4]


def test_last_state_waits_for_the_folder(run, start, monkeypatch):
    """However short `retry_s` is, which is for disks that fail."""
    monkeypatch.setattr(writer_module, "RETRY_AFTER_S", 0.02)
    saving = start(2)
    away = run.path.rename(run.path.with_name("away"))
    thread = threading.Thread(target=lambda: saving.save(9, last=True))
    thread.start()
    assert "is gone" in eventually(lambda: saving.agent._writer.trouble)
    away.rename(run.path)
    thread.join()
    assert (saving.steps(), saving.agent.unsaved) == ([9], None)


def test_last_state_is_given_up_after_the_outage(run, start):
    saving = start(2, 0.0)
    run.path.rename(run.path.with_name("away"))
    assert saving.save(9, last=True)
    assert "is gone" in saving.agent.unsaved.message
    assert not run.path.exists()


def test_nobody_is_said_to_lead_when_the_lease_cannot_be_read(tmp_path):
    run = create_run(tmp_path, "r", "r")
    lease = LeaderLease(run.leases, "a", "h", 1)
    lease.begin()
    save = begin_checkpoint(run.checkpoints, 5)
    away = run.leases.rename(tmp_path / "away")
    with pytest.raises(StateError, match="its leader lease is gone"):
        commit(save, FACTS, [], 1, lease.refusal)
    run.leases.write_text("in the way")
    assert "cannot be read" in lease.refusal()
    run.leases.unlink()
    away.rename(run.leases)
    assert lease.refusal() is None
    take_lease(run.leases, LeaseRecord(2, "b", "h", 2))
    assert lease.refusal() == ANOTHER_LEADS
