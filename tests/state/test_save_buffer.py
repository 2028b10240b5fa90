import base64
import errno
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from headway.errors import StateError
from headway.state import (
    CheckpointFacts,
    MemoryCheckpoint,
    PieceShape,
    SaveBuffer,
    begin_checkpoint,
    commit,
    describe_shard,
    dump_manifest,
    map_files,
    merge,
    open_checkpoint,
    plan_buffer,
    read_box,
    shard_name,
    verify_checkpoint,
    write_shard,
)
from headway.state.safetensors_file import DTYPES

FACTS = CheckpointFacts(cursor=0, chain="", data_version="v")
NEVER = 2**64 - 1

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork, where threads were started


def shape(name, dtype="float32", whole=(4, 3), start=None, local=None):
    return PieceShape(name, dtype, whole, start or (0,) * len(whole), whole if local is None else local)


TRAINED = [
    shape("w", "float32", (1000, 3), (200, 0), (500, 3)),
    shape("scalar", "float64", ()),
    shape("empty", "int16", (0, 3)),
    shape("bytes", "uint8", (5,)),
    shape("half", "float16", (3, 7)),
]
STILL = [shape("frozen", "int32", (1025,))]


def truth(piece):
    """What a worker has of a piece: a function of its name."""
    size = DTYPES[piece.dtype][1]
    count = int(np.prod(piece.local_shape))
    bits = np.random.default_rng(len(piece.name)).integers(0, 256, count * size, np.uint8)
    return bits.view(f"<u{size}").reshape(piece.local_shape)


def fill(buffer, step):
    """What a worker does: the marks, the copy, the marks."""
    buffer.mark(step, NEVER)
    for part in buffer.plan.parts:
        for piece in part.pieces:
            buffer.bits(part, piece)[...] = truth(piece)
    buffer.mark(step, step)


def in_child(work, *args):
    """Run something in another process, to its end; its exit status."""
    process = multiprocessing.get_context("fork").Process(target=work, args=args)
    process.start()
    process.join(30)
    return process.exitcode


def test_files_are_page_aligned_and_followed_by_the_marks():
    plan = plan_buffer(TRAINED, STILL)
    trained, still = plan.parts
    assert (trained.frozen, still.frozen) == (False, True)
    assert (trained.begin, trained.begin % 4096, still.begin % 4096, plan.marks % 4096) == (0, 0, 0, 0)
    assert trained.layout.bytes <= still.begin < trained.layout.bytes + 4096
    assert still.begin + still.layout.bytes <= plan.marks < still.begin + still.layout.bytes + 4096
    assert (plan.bytes - plan.marks) % 4096 == 0
    assert plan == plan_buffer(TRAINED, STILL)  # both sides plan it alone
    assert [part.frozen for part in plan_buffer(TRAINED, []).parts] == [False]
    assert [part.frozen for part in plan_buffer([], STILL).parts] == [True]
    assert (plan_buffer([], []).marks, plan_buffer([], []).bytes) == (0, plan.bytes - plan.marks)


def worker_notes(descriptor, step, note):
    buffer = SaveBuffer(plan_buffer(TRAINED, STILL), descriptor)
    buffer.mark(step, NEVER)
    buffer.write_note(note)
    buffer.mark(step, step)


@pytest.mark.parametrize("rng_bytes", [0, 5056, 5056 + 16, 30_000], ids=lambda size: f"random state of {size} B")
def test_notes_of_another_process_are_read_back(rng_bytes):
    """5,056 bytes is what torch's CPU generator has. Neither files nor marks are touched; a shorter one replaces it."""
    rng = base64.b64encode(np.random.default_rng(1).bytes(rng_bytes)).decode()
    note = {"cursor": 2**53 - 1, "chain": "ab" * 32, "tiers": ["memory", "disk"], "last": True, "rng": rng, "é": None}
    buffer = SaveBuffer.make(plan_buffer(TRAINED, STILL))
    fill(buffer, 6)
    for step, stored_note in ((7, note), (8, {"cursor": 1})):
        assert in_child(worker_notes, buffer.descriptor, step, stored_note) == 0
        assert (buffer.step, buffer.read_note()) == (step, stored_note)
        for part in buffer.plan.parts:
            for piece in part.pieces:
                assert np.array_equal(buffer.bits(part, piece), truth(piece))
    buffer.close()


def test_a_note_that_does_not_fit_is_refused_before_it_is_written():
    buffer = SaveBuffer.make(plan_buffer([], []))
    buffer.write_note({"a": 1})
    with pytest.raises(AssertionError, match="does not fit"):
        buffer.write_note({"a": "x" * buffer.plan.bytes})
    assert buffer.read_note() == {"a": 1}
    buffer.close()


def worker_fills(descriptor, step):
    fill(SaveBuffer(plan_buffer(TRAINED, STILL), descriptor), step)


def test_buffers_filled_by_another_process_become_safetensors_files(tmp_path):
    plan = plan_buffer(TRAINED, STILL)
    buffer = SaveBuffer.make(plan)
    assert not buffer.holds(7)
    assert in_child(worker_fills, buffer.descriptor, 7) == 0
    assert buffer.holds(7)
    assert not buffer.holds(6)
    begun = begin_checkpoint(tmp_path, 7)
    shards = [
        write_shard(begun.partial, shard_name(0, part.frozen), buffer.pieces(part), memory=buffer.file(part))
        for part in plan.parts
    ]
    for part, shard in zip(plan.parts, shards, strict=True):
        path = begun.partial / shard.name
        assert path.stat().st_size == part.layout.bytes == shard.file.bytes
        tensors = safetensors.numpy.load_file(path)
        assert tensors.keys() == {piece.name for piece in part.pieces}
        for piece in part.pieces:
            assert tensors[piece.name].dtype == piece.dtype
            assert tensors[piece.name].shape == piece.local_shape
            assert tensors[piece.name].tobytes() == truth(piece).tobytes()
        assert shard == describe_shard(shard.name, [piece.filled(truth(piece)) for piece in part.pieces])
        # and the same file as from the tensors one by one
        write_shard(tmp_path, shard.name, [piece.filled(truth(piece)) for piece in part.pieces])
        assert (tmp_path / shard.name).read_bytes() == path.read_bytes()
    buffer.close()


def worker_dies(descriptor, step, at):
    buffer = SaveBuffer(plan_buffer(TRAINED, STILL), descriptor)
    if at == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.mark(step, NEVER)
    for part in buffer.plan.parts:
        for number, piece in enumerate(part.pieces):
            if (at, number) == ("copying", 2):
                os.kill(os.getpid(), signal.SIGKILL)
            buffer.bits(part, piece)[...] = truth(piece)
    if at == "marking":
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.mark(step, step)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("before", [None, 3, 7])
@pytest.mark.parametrize("at", ["before", "copying", "marking", "after"])
def test_a_killed_worker_leaves_no_partial_state_marked_complete(at, before):
    """Whatever was in the buffer before: nothing, another step, or the same one of an earlier attempt."""
    buffer = SaveBuffer.make(plan_buffer(TRAINED, STILL))
    if before is not None:
        assert in_child(worker_fills, buffer.descriptor, before) == 0
    assert in_child(worker_dies, buffer.descriptor, 7, at) == -signal.SIGKILL
    touched = at in ("copying", "marking")
    assert buffer.holds(7) == (at == "after" or (before == 7 and not touched))
    assert buffer.holds(3) == (before == 3 and at == "before")
    assert buffer.step == (7 if at == "after" else before if not touched else None)
    buffer.close()


def test_memory_is_read_back_as_a_checkpoint():
    """Two workers' buffers, mapped from their descriptors as a restarted worker does."""
    halves = [
        plan_buffer([shape("w", whole=(6, 4), start=(0, 0), local=(2, 4))], STILL),
        plan_buffer([shape("w", whole=(6, 4), start=(2, 0), local=(4, 4)), shape("n", "int64", ())], []),
    ]
    whole = np.arange(24, dtype="<u4").reshape(6, 4)
    files, descriptors, shards = [], [], []
    for rank, plan in enumerate(halves):
        buffer = SaveBuffer.make(plan)
        for part in plan.parts:
            for piece in part.pieces:
                bits = whole[piece.box.slices((0, 0))] if piece.name == "w" else truth(piece)
                buffer.bits(part, piece)[...] = bits
            name = shard_name(rank, part.frozen)
            files.append((name, part.begin, part.layout.bytes))
            descriptors.append(os.dup(buffer.descriptor))
            shards.append(describe_shard(name, buffer.pieces(part)))
        buffer.close()
    mapped = map_files(descriptors, files)
    manifest = merge(9, FACTS, shards, workers=2)
    for checked in (manifest, manifest.model_copy(update={"chunk_bytes": 0})):
        checkpoint = open_checkpoint(MemoryCheckpoint(mapped | {"manifest.json": memoryview(dump_manifest(checked))}))
        assert checkpoint.manifest.step == 9
        assert np.array_equal(read_box(checkpoint, "w", (0, 0), (6, 4)), whole)
        assert np.array_equal(read_box(checkpoint, "w", (1, 1), (4, 2)), whole[1:5, 1:3])
        assert np.array_equal(read_box(checkpoint, "frozen", (0,), (1025,)), truth(STILL[0]))
        assert read_box(checkpoint, "n", (), ()) == truth(shape("n", "int64", ()))
        assert checkpoint.location == "the agent's memory"
    verify_checkpoint(MemoryCheckpoint(mapped | {"manifest.json": memoryview(dump_manifest(manifest))}))


def test_memory_that_a_reader_maps_cannot_be_changed_by_it():
    buffer = SaveBuffer.make(plan_buffer(TRAINED, []))
    mapped = map_files([os.dup(buffer.descriptor)], [("rank-00000.safetensors", 0, buffer.plan.parts[0].layout.bytes)])
    assert mapped["rank-00000.safetensors"].readonly
    assert bytes(mapped["rank-00000.safetensors"]) == bytes(buffer.memory[: buffer.plan.parts[0].layout.bytes])
    buffer.close()


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOSPC])
def test_failed_allocation_is_a_clear_error(monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StateError, match=r"cannot allocate 4\.0 GB of memory for a saved state") as refused:
        SaveBuffer.make(plan_buffer([shape("w", whole=(10**9,))], []))
    assert "checkpoint.memory_gb" in refused.value.hint
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_disk_that_fills_up_in_the_middle_leaves_no_file(tmp_path, monkeypatch):
    plan = plan_buffer([shape("w", whole=(3 << 20,))], [])  # 12 MiB: several writes
    buffer = SaveBuffer.make(plan)
    real, calls = os.write, []

    def fills_up(descriptor, data):
        calls.append(len(data))
        if len(calls) == 1:
            return real(descriptor, data)
        if len(calls) == 2:
            return real(descriptor, data[:4096])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    begun = begin_checkpoint(tmp_path, 1)
    (part,) = plan.parts
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fills_up)
        with pytest.raises(StateError, match=r"rank-00000\.safetensors could not be written in .*: No space left"):
            write_shard(begun.partial, shard_name(0), buffer.pieces(part), memory=buffer.file(part))
    assert len(calls) == 3
    assert list(begun.partial.iterdir()) == []
    shard = write_shard(begun.partial, shard_name(0), buffer.pieces(part), memory=buffer.file(part))
    verify_checkpoint(commit(begun, FACTS, [shard], workers=1))
    buffer.close()


def test_an_unchanged_frozen_file_in_memory_is_linked(tmp_path):
    plan = plan_buffer([], STILL)
    buffer = SaveBuffer.make(plan)
    fill(buffer, 1)
    (part,) = plan.parts
    paths = []
    for step in (1, 2, 3):
        if step == 3:
            buffer.bits(part, STILL[0])[1024] ^= 1
        begun = begin_checkpoint(tmp_path, step)
        shard = write_shard(
            begun.partial,
            shard_name(0, frozen=True),
            buffer.pieces(part),
            memory=buffer.file(part),
            before=open_checkpoint(paths[-1]) if paths else None,
        )
        paths.append(commit(begun, FACTS, [shard], workers=1))
        verify_checkpoint(paths[-1])
    inodes = [(path / shard_name(0, frozen=True)).stat().st_ino for path in paths]
    assert inodes[0] == inodes[1] != inodes[2]
    buffer.close()
