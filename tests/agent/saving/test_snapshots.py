import base64
import os
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.agent.fd_store import FdStore
from headway.agent.saving.buffers import LocalMemory, plan_from
from headway.agent.saving.coordinator import SaveCoordinator
from headway.agent.saving.snapshots import SnapshotBuffers, StateSnapshot, count_buffers
from headway.errors import StateError
from headway.recipe import FaultPlan
from headway.recipe.load import parse_recipe
from headway.state import (
    Channel,
    CheckpointFacts,
    MemoryCheckpoint,
    PieceShape,
    SaveBuffer,
    map_files,
    open_checkpoint,
    plan_buffer,
    read_box,
)
from headway.track import RunFolder
from thinned import examples

FACTS = CheckpointFacts(cursor=3, chain="c", data_version="v", mesh={"shard": 2})
NEVER = 2**64 - 1
PLAN = plan_buffer([PieceShape("w", "float32", (4,), (0,), (4,))], [])


# -- how many


@pytest.mark.parametrize(
    ("state_mb", "free_gb", "bound_gb", "want"),
    [
        (1, 100, None, 8),  # as many as are any use
        (32, 100, None, 8),  # 8 x 32 = 256 MB
        (60, 100, None, 4),
        (100, 100, None, 2),
        (1_000, 100, None, 2),
        (25_000, 100, None, 2),  # two states in half of what is free
        (25_001, 100, None, 1),
        (90_000, 100, None, 1),
        (50, 0.4, None, 4),  # half of what is free, though a small state
        (50, 0.15, None, 1),
        (1_000, 100, 1.0, 1),
        (1_000, 100, 1.999, 1),
        (1_000, 100, 2.0, 2),
        (1_000, 100, 7.5, 7),
        (1_000, 100, 50.0, 8),
        (1, 100, 0.003, 3),
    ],
)
def test_number_of_buffers(state_mb, free_gb, bound_gb, want):
    assert count_buffers(state_mb * 1_000_000, int(free_gb * 1e9), bound_gb) == want


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(4096, 10**13), st.floats(1e-6, 1e4))
def test_memory_bound_holds_or_the_needed_one_is_named(state_bytes, bound_gb):
    free_bytes = 10**15
    if state_bytes <= bound_gb * 1e9:
        count = count_buffers(state_bytes, free_bytes, bound_gb)
        assert 1 <= count <= 8
        assert count * state_bytes <= bound_gb * 1e9
        return
    with pytest.raises(StateError, match=r"checkpoint\.memory_gb is") as refused:
        count_buffers(state_bytes, free_bytes, bound_gb)
    allowed = float(re.fullmatch(r"set checkpoint\.memory_gb = (\S+) or more", refused.value.hint)[1])
    assert count_buffers(state_bytes, free_bytes, allowed) >= 1


# -- which are free


class Bookkeeping(RuleBasedStateMachine):
    """Workers that save, die and restart, and a slow writer, against a simple model.

    The account has, for each step, the buffers that it lies in and who still needs it.
    """

    @initialize(workers=st.integers(1, 3), buffers=st.integers(1, 4))
    def start(self, workers, buffers):
        self.workers, self.count = workers, buffers
        self.memory = SnapshotBuffers(LocalMemory(FdStore()))
        self.memory.make(dict.fromkeys(range(workers), PLAN), buffers)
        self.step = 0
        self.filling = None  # the snapshot that some workers have filled, and the others will
        self.unwritten = []  # snapshots that are whole, oldest first
        self.lies = {}  # step -> {rank: buffer}
        self.newest = None  # step
        self.touched = False  # whether a worker has begun to write over the newest
        self.free = {rank: set(self.memory.free(rank)) for rank in range(workers)}
        assert self.free == {rank: set(range(buffers)) for rank in range(workers)}

    def teardown(self):
        if not hasattr(self, "memory"):
            return
        while self.unwritten:
            self.writer_is_done()
        self.all_die()
        held = self.lies[self.newest] if self.count >= 2 and self.newest is not None else {}
        for rank in range(self.workers):
            assert set(range(self.count)) - self.free[rank] == ({held[rank]} if held else set())
        self.memory.drop()
        assert self.memory.size == 0

    def collect_freed(self):
        """Each buffer is freed once, with its former content, and only if nothing needs it."""
        for rank, number, snapshot in self.memory.freed():
            assert number not in self.free[rank]
            assert self.lies[snapshot.step][rank] == number
            self.free[rank].add(number)

    @rule(durable=st.booleans(), wide=st.booleans())
    @precondition(lambda self: self.filling is None and all(self.free.values()))
    def save(self, durable, wide):
        self.step += 1
        tiers = ("memory", "disk") if durable else ("memory",)
        self.filling = StateSnapshot(self.step, 1, self.workers, tiers, FACTS)
        self.lies[self.step] = {}
        if wide:
            while self.filling is not None:
                self.fill(max)

    @rule(choose=st.sampled_from([min, max]))
    @precondition(lambda self: self.filling is not None)
    def fill(self, choose):
        snapshot = self.filling
        rank = choose(rank for rank in range(self.workers) if rank not in snapshot.buffers)
        number = choose(self.free[rank])
        self.free[rank].remove(number)
        if self.newest is not None and self.lies[self.newest].get(rank) == number:
            self.touched = True
        buffer = self.memory._buffers[rank][number].local()
        buffer.mark(snapshot.step, NEVER)
        buffer.mark(snapshot.step, snapshot.step)
        self.lies[snapshot.step][rank] = number
        self.memory.take(snapshot, rank, number)
        if snapshot.is_complete:
            self.filling, self.newest, self.touched = None, snapshot.step, False
            self.memory.complete(snapshot)
            if len(snapshot.tiers) > 1:
                self.unwritten.append(snapshot)
            else:
                self.memory.release(snapshot)
            self.collect_freed()

    @rule()
    @precondition(lambda self: self.unwritten)
    def writer_is_done(self):
        self.memory.release(self.unwritten.pop(0))
        self.collect_freed()

    @rule()
    def all_die(self):
        self.filling = None
        self.memory.forget_unfinished()
        self.free = {rank: set(self.memory.free(rank)) for rank in range(self.workers)}

    @rule()
    def come_back_alike(self):
        self.all_die()
        self.memory.make(dict.fromkeys(range(self.workers), PLAN), self.count)

    @invariant()
    def nothing_that_counts_is_free(self):
        if not hasattr(self, "memory"):
            return
        needed = [snapshot.step for snapshot in self.unwritten]
        if self.filling is not None:
            needed.append(self.filling.step)
        if self.count >= 2 and self.newest is not None:
            needed.append(self.newest)
        for step in needed:
            for rank, number in self.lies[step].items():
                assert number not in self.free[rank]
                assert number not in self.memory.free(rank)

    @invariant()
    def everything_else_is_free(self):
        if not hasattr(self, "memory"):
            return
        for rank in range(self.workers):
            assert set(self.memory.free(rank)) == self.free[rank]

    @invariant()
    def the_newest_can_be_restored(self):
        if not hasattr(self, "memory"):
            return
        restorable = self.memory.restorable()
        assert (None if restorable is None else restorable.step) == (None if self.touched else self.newest)


Bookkeeping.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)
TestBookkeeping = Bookkeeping.TestCase


def test_slow_writer_leaves_no_buffer_free():
    memory = SnapshotBuffers(LocalMemory(FdStore()))
    memory.make({0: PLAN}, 3)
    snapshots = [StateSnapshot(step, 1, 1, ("memory", "disk"), FACTS) for step in (1, 2, 3)]
    for number, snapshot in enumerate(snapshots):
        memory.take(snapshot, 0, number)
        memory.complete(snapshot)
        assert memory.freed() == []
    assert memory.free(0) == []
    memory.release(snapshots[0])
    assert memory.freed() == [(0, 0, snapshots[0])]
    assert memory.freed() == []
    memory.release(snapshots[2])  # the newest stays
    assert memory.freed() == []
    memory.release(snapshots[1])
    assert memory.freed() == [(0, 1, snapshots[1])]
    memory.drop()


def test_new_snapshot_is_not_mistaken_for_a_freed_one():
    """Python reuses the identity of freed objects; only two snapshots are ever alive here."""
    memory = SnapshotBuffers(LocalMemory(FdStore()))
    memory.make({0: PLAN}, 3)
    for step in range(1, 100, 2):
        pair = [StateSnapshot(step + i, 1, 1, ("memory", "disk"), FACTS) for i in range(2)]
        for snapshot in pair:
            memory.take(snapshot, 0, memory.free(0)[0])
            memory.complete(snapshot)
        freed = memory.freed()
        assert not {snapshot.buffers[0] for snapshot in pair} & {number for _, number, _ in freed}
        for snapshot in pair:
            memory.release(snapshot)
        memory.freed()
        del pair, snapshot
    memory.drop()


def test_buffers_are_reused_if_they_fit():
    memory = SnapshotBuffers(LocalMemory(FdStore()))
    memory.make({0: PLAN, 1: PLAN}, 2)
    first = memory.descriptors(0) + memory.descriptors(1)
    assert (len(set(first)), memory.buffers_each, memory.size) == (4, 2, 4 * PLAN.bytes)
    memory.make({0: PLAN, 1: PLAN}, 2)
    assert memory.descriptors(0) + memory.descriptors(1) == first
    other = plan_buffer([PieceShape("w", "float32", (9000,), (0,), (9000,))], [])
    memory.make({0: other}, 1)
    assert (memory.buffers_each, memory.size, memory.newest) == (1, other.bytes, None)
    assert os.fstat(memory.descriptors(0)[0]).st_size == other.bytes
    memory.drop()


# -- what is in them


def told_pieces():
    """As two workers report it in JSON: rows 0-1 and 2-5 of w; the first has a frozen tensor too."""
    return [
        {"trained": [["w", "float32", [6, 2], [0, 0], [2, 2]]], "still": [["f", "bfloat16", [3], [0], [3]]]},
        {"trained": [["w", "float32", [6, 2], [2, 0], [4, 2]], ["n", "int64", [], [], []]], "still": []},
    ]


def test_restart_reads_what_the_workers_saved():
    truth = {
        "w": np.arange(12, dtype="<u4").reshape(6, 2),
        "n": np.array(77, "<u8"),
        "f": np.array([1, 2, 3], "<u2"),
    }
    plans = dict(enumerate(map(plan_from, told_pieces())))
    assert plans[0] == plan_buffer(
        [PieceShape("w", "float32", (6, 2), (0, 0), (2, 2))], [PieceShape("f", "bfloat16", (3,), (0,), (3,))]
    )
    memory = SnapshotBuffers(LocalMemory(FdStore()))
    memory.make(plans, 2)
    snapshot = StateSnapshot(5, 1, 2, ("memory",), FACTS, rng={"0": "AA==", "1": "AQ=="})
    for rank, number in ((1, 1), (0, 0)):
        assert not snapshot.is_complete
        memory.take(snapshot, rank, number)
        buffer = memory.buffer(snapshot, rank).local()
        for part in buffer.plan.parts:
            for piece in part.pieces:
                buffer.bits(part, piece)[...] = truth[piece.name][piece.box.slices((0,) * len(piece.shape))]
        buffer.mark(5, 5)
    memory.complete(snapshot)
    assert memory.restorable() is snapshot

    files = memory.files(snapshot)
    names = ["rank-00000.safetensors", "rank-00000-still.safetensors", "rank-00001.safetensors"]
    assert [name for name, _, _, _ in files] == names
    mapped = map_files([os.dup(fd) for _, fd, _, _ in files], [(name, begin, size) for name, _, begin, size in files])
    manifest = memory.manifest(snapshot)
    checkpoint = open_checkpoint(MemoryCheckpoint(mapped | {"manifest.json": memoryview(manifest)}))
    for name, array in truth.items():
        assert np.array_equal(read_box(checkpoint, name, (0,) * array.ndim, array.shape), array)
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.cursor, manifest.chain, manifest.workers, manifest.mesh) == (
        5,
        3,
        "c",
        2,
        {"shard": 2},
    )
    assert manifest.rng == {"0": "AA==", "1": "AQ=="}

    memory.buffer(snapshot, 1).local().mark(6, NEVER)  # a worker begins to write over it
    assert memory.restorable() is None
    memory.drop()


# -- an agent that dies, over and over


class FakeWorker:
    """A worker's side of saves (train/save.py) without a model; its tensor encodes attempt and step."""

    def __init__(self, rank, workers):
        self.line, self.theirs = Channel.pair()
        self.piece = PieceShape("w", "int32", (2 * workers,), (2 * rank,), (2,))
        self.plan = plan_buffer([self.piece], [])
        self.buffers, self.free, self.steps, self.unsent = [], set(), {}, []
        piece = [self.piece.name, self.piece.dtype, self.piece.shape, self.piece.start, self.piece.local_shape]
        self.line.send("pieces", trained=[piece], still=[])

    def hear(self):
        for message in self.line.receive():
            if message.kind == "buffers":
                self.buffers = [SaveBuffer(self.plan, descriptor) for descriptor in message.descriptors]
                self.free = set(message.fields["free"])
            elif message.kind == "free" and self.is_of(**message.fields):
                self.free.add(message.fields["buffer"])

    def is_of(self, buffer, step, attempt):
        """Whether the freed state is the one in the buffer: a new agent may free what was there before."""
        return buffer not in self.steps or self.steps[buffer] == (attempt, step)

    def fill(self, attempt, step):
        number = min(self.free)
        self.free.remove(number)
        buffer = self.buffers[number]
        buffer.mark(step, NEVER)
        rng = base64.b64encode(bytes([attempt, step])).decode()
        tiers = ["memory"]
        note = {
            "cursor": 10 * step,
            "chain": f"{attempt}-{step}",
            "tiers": tiers,
            "last": False,
            "rng": rng,
            "mesh": {},
        }
        buffer.write_note(note | {"attempt": attempt})
        self.steps[number] = attempt, step
        buffer.bits(self.plan.parts[0], self.piece)[...] = (attempt, step)
        buffer.mark(step, step)
        self.unsent.append({"buffer": number, "step": step, "stall_s": 0.0})

    def deliver(self, count=None):
        for _ in range(len(self.unsent) if count is None else count):
            self.line.send("filled", **self.unsent.pop(0))

    def close(self):
        for buffer in self.buffers:
            buffer.close()
        self.line.close()
        self.theirs.close()


class NoWriter:
    """No state here is for other tiers than memory."""

    idle, trouble = True, None

    def __init__(self, *_, **__):
        pass

    def results(self):
        return []

    def write(self, _):
        raise AssertionError("a state for memory alone")


class FakeRecorder:
    """Stands for the agent's recorder."""

    def unwritten(self):
        return None

    def __init__(self):
        self.kept = []

    def event(self, kind, **fields):
        if kind == "kept":
            self.kept.append(fields["step"])


class Succession(RuleBasedStateMachine):
    """Workers that save and die, and agents that die, at any moment; each death loses the messages received.

    Workers save the same steps, and begin one when all have finished the last and have room. The agent receives a
    worker's message at once or, if it died before, the next agent does. The reference is the list of states that all
    workers have filled.
    """

    @initialize(workers=st.integers(1, 3), buffers=st.integers(2, 4))
    def begin(self, workers, buffers):
        size = workers * plan_buffer([PieceShape("w", "int32", (2 * workers,), (0,), (2,))], []).bytes
        self.recipe = parse_recipe(
            {"model": {}, "data": {"path": "x"}, "checkpoint": {"memory_gb": (buffers + 0.5) * size / 1e9}}, {}, "test"
        )
        self.workers, self.count = workers, buffers
        self.kept, self.attempt, self.step = FdStore(), 0, 0
        self.done, self.filling = [], []
        self.fakes = []
        self.agent = self.new_agent()
        self.attempt_begins()

    def new_agent(self):
        self.recorder = FakeRecorder()
        with mock.patch("headway.agent.saving.coordinator.CheckpointWriter", NoWriter):
            return SaveCoordinator(
                RunFolder(Path("/nowhere")), self.recipe, FaultPlan(), self.kept, LocalMemory(self.kept)
            )

    def attempt_begins(self):
        self.attempt += 1
        for fake in self.fakes:
            fake.close()
        self.agent.start(self.attempt, self.workers, self.recorder, self.recipe)
        self.fakes = [FakeWorker(rank, self.workers) for rank in range(self.workers)]
        for rank, fake in enumerate(self.fakes):
            self.agent.listen(rank, fake.theirs)
        self.all_is_heard()
        assert [len(fake.buffers) for fake in self.fakes] == [self.count] * self.workers

    def all_is_heard(self):
        for fake in self.fakes:
            fake.deliver()
        self.agent.poll()
        for fake in self.fakes:
            fake.hear()

    @rule()
    @precondition(lambda self: not self.filling)
    def save(self):
        for fake in self.fakes:
            fake.hear()
        if all(fake.free for fake in self.fakes):
            self.step += 1
            self.filling = list(range(self.workers))

    @rule(data=st.data(), received=st.booleans())
    @precondition(lambda self: self.filling)
    def fill(self, data, received):
        rank = data.draw(st.sampled_from(self.filling))
        self.filling.remove(rank)
        self.fakes[rank].fill(self.attempt, self.step)
        if not self.filling:
            self.done.append((self.attempt, self.step))
        if received:
            self.fakes[rank].deliver()
            self.agent.poll()

    @rule(rank=st.integers(0, 2))
    def one_is_heard(self, rank):
        fake = self.fakes[rank % self.workers]
        fake.deliver(min(1, len(fake.unsent)))
        self.agent.poll()

    @rule(live=st.booleans())
    def agent_dies(self, live):
        """And the workers with it, unless they were stored."""
        self.agent = self.new_agent()
        self.agent.start(self.attempt, self.workers, self.recorder, self.recipe)
        if live:
            for rank, fake in enumerate(self.fakes):
                self.agent.listen(rank, fake.theirs)
        self.agent.take_over()
        if not live:
            self.agent.end()
            self.is_the_newest()
            self.filling = []
            self.step = self.done[-1][1] if self.done else 0
            self.attempt_begins()

    @rule()
    def workers_die(self):
        for fake in self.fakes:
            fake.deliver()
        self.agent.end()
        self.is_the_newest()
        self.filling = []
        self.step = self.done[-1][1] if self.done else 0
        self.attempt_begins()

    @rule()
    def all_calms_down(self):
        """Everything but the newest state is free for the next."""
        while self.filling:
            self.fakes[self.filling[0]].fill(self.attempt, self.step)
            if not self.filling[1:]:
                self.done.append((self.attempt, self.step))
            self.filling.pop(0)
        self.all_is_heard()
        self.all_is_heard()
        self.is_the_newest()
        for rank, fake in enumerate(self.fakes):
            snapshot = self.agent.memory.restorable()
            stays = set() if snapshot is None else {snapshot.buffers[rank]}
            assert fake.free == set(range(self.count)) - stays

    def is_the_newest(self):
        """What a restart would find: the last state that all have filled, all parts of it of the same attempt."""
        snapshot = self.agent.memory.restorable()
        if not self.done:
            assert snapshot is None
            return
        attempt, step = self.done[-1]
        assert self.agent.memory.step == snapshot.step == step
        for rank in range(self.workers):
            buffer = self.agent.memory.buffer(snapshot, rank).local()
            (part,) = buffer.plan.parts
            assert list(buffer.bits(part, part.pieces[0])) == [attempt, step]
            assert base64.b64decode(snapshot.rng[str(rank)]) == bytes([attempt, step])
        facts = snapshot.all_facts
        assert (facts.cursor, facts.chain) == (10 * step, f"{attempt}-{step}")

    @invariant()
    def it_never_goes_back(self):
        if hasattr(self, "notebook"):
            assert self.recorder.kept == sorted(self.recorder.kept)

    def teardown(self):
        if not hasattr(self, "fakes"):
            return
        try:
            self.all_calms_down()
        finally:
            for fake in self.fakes:
                fake.close()
            self.agent.memory.drop()
            self.fakes = self.agent = None  # what is mapped has descriptors


Succession.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestSuccession = Succession.TestCase


def assert_never_back(workers, buffers, *actions):
    """Run one sequence of actions; no action may make the restorable state older."""
    succession = Succession()
    succession.begin(workers=workers, buffers=buffers)
    try:
        for action in actions:
            action(succession)
            succession.it_never_goes_back()
    finally:
        succession.teardown()


def saved(received):
    """All workers save a step; the agent receives some of the messages."""

    def action(succession):
        succession.save()
        assert succession.filling, "there must be room"
        for rank in list(succession.filling):
            succession.filling.remove(rank)
            succession.fakes[rank].fill(succession.attempt, succession.step)
            if rank in received:
                succession.fakes[rank].deliver()
                succession.agent.poll()
        succession.done.append((succession.attempt, succession.step))

    return action


@pytest.mark.parametrize("received", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("states", [1, 2, 3])
def test_messages_received_by_a_dead_agent_make_no_difference(received, states):
    """Whatever is unread in the channels when the next agent starts."""
    first = [saved((0, 1)), *[saved(received)] * states]
    again = [Succession.all_calms_down, saved((0, 1)), saved((0, 1)), Succession.all_calms_down]
    assert_never_back(2, 4, *first, lambda succession: succession.agent_dies(live=True), *again)
    assert_never_back(2, 4, *first, lambda succession: succession.agent_dies(live=True), Succession.workers_die, *again)
    assert_never_back(2, 4, *first, lambda succession: succession.agent_dies(live=False), *again)


def filled(rank, received):
    """One worker fills its part of a save."""

    def action(succession):
        if not succession.filling:
            succession.save()
        succession.filling.remove(rank)
        succession.fakes[rank].fill(succession.attempt, succession.step)
        if not succession.filling:
            succession.done.append((succession.attempt, succession.step))
        if received:
            succession.fakes[rank].deliver()
            succession.agent.poll()

    return action


@pytest.mark.parametrize("received", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_incomplete_state_is_completed_under_the_next_agent(first, received):
    dies, calm = lambda succession: succession.agent_dies(live=True), Succession.all_calms_down
    actions = [saved((0, 1)), filled(first, received[0]), dies, filled(1 - first, received[1])]
    assert_never_back(2, 2, *actions, calm, saved((0, 1)), calm, saved((0, 1)), calm)
    assert_never_back(2, 2, *actions, dies, calm, saved((0, 1)), calm)
    assert_never_back(2, 2, *actions, Succession.workers_die, saved((0, 1)), calm)


def test_state_of_an_earlier_attempt_is_not_mistaken():
    """Half a state that the next attempt's workers save again, and an agent that dies before or after."""

    dies, calm = lambda succession: succession.agent_dies(live=True), Succession.all_calms_down
    for rank, other in ((0, 1), (1, 0)):
        begin = [saved((0, 1)), filled(rank, True), Succession.workers_die]
        assert_never_back(2, 4, *begin, dies, filled(other, True), calm, saved((0, 1)), calm)
        assert_never_back(2, 4, *begin, filled(other, True), dies, calm, saved((0, 1)), calm)
        assert_never_back(2, 4, *begin, saved((other,)), dies, calm, saved((0, 1)), calm)


def test_two_buffers_suffice_for_repeated_restarts():
    steps = [saved((0,)), Succession.all_calms_down]
    assert_never_back(1, 2, *[action for _ in range(4) for action in (*steps, *steps, Succession.workers_die)])
