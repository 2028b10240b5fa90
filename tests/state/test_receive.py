"""A file of a checkpoint that comes from another machine: the same file as if it was written here, or none."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headway.errors import DamagedState, StateError
from headway.state import (
    CheckpointFacts,
    PieceShape,
    SaveBuffer,
    ShardEntry,
    begin_checkpoint,
    commit,
    describe_shard,
    plan_buffer,
    verify_checkpoint,
    write_shard,
)
from headway.state.manifest import CHUNK_BYTES
from headway.state.read_checkpoint import open_checkpoint
from headway.state.receive import receive_shard

FACTS = CheckpointFacts(cursor=0, chain="", data_version="", recipe={}, mesh={})
ROWS = CHUNK_BYTES // 4 // 8 * 5 // 2 // 8 * 8  # two chunks and a half
SHAPES = [
    PieceShape("model/large", "float32", (ROWS, 8), (0, 0), (ROWS, 8)),
    PieceShape("model/none", "float32", (0, 3), (0, 0), (0, 3)),
    PieceShape("model/small", "bfloat16", (3,), (0,), (3,)),
]
NAME = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def buffer() -> SaveBuffer:
    buffer = SaveBuffer.make(plan_buffer(SHAPES, []))
    (part,) = buffer.plan.parts
    generator = np.random.default_rng(0)
    for shape in part.pieces:
        bits = buffer.bits(part, shape)
        bits[:] = generator.integers(0, np.iinfo(bits.dtype).max, bits.shape, bits.dtype)
    return buffer


def told(buffer: SaveBuffer) -> ShardEntry:
    (part,) = buffer.plan.parts
    return describe_shard(NAME, buffer.pieces(part))


def reads(buffer: SaveBuffer) -> Callable[[int, memoryview], None]:
    (part,) = buffer.plan.parts
    whole = buffer.file(part)[: part.layout.bytes]

    def read(begin: int, out: memoryview) -> None:
        out[:] = whole[begin : begin + len(out)]

    return read


def test_received_file_equals_a_locally_written_one(tmp_path: Path, buffer: SaveBuffer) -> None:
    (part,) = buffer.plan.parts
    first, other = begin_checkpoint(tmp_path / "one", 3), begin_checkpoint(tmp_path / "other", 3)
    written = write_shard(first.partial, NAME, buffer.pieces(part), memory=buffer.file(part))
    shard = told(buffer)
    sizes = list[int]()

    def read(begin: int, out: memoryview) -> None:
        sizes.append(len(out))
        reads(buffer)(begin, out)

    receive_shard(other.partial, shard, part, read)
    assert shard == written
    assert (other.partial / NAME).read_bytes() == (first.partial / NAME).read_bytes()
    assert max(sizes) <= CHUNK_BYTES
    assert (
        verify_checkpoint(commit(first, FACTS, [written], 1)).digest
        == verify_checkpoint(commit(other, FACTS, [shard], 1)).digest
    )


@pytest.mark.parametrize("at", [0, 500, CHUNK_BYTES + 1000, -1])
def test_a_byte_corrupted_in_transit_is_found_and_nothing_is_left(tmp_path: Path, buffer: SaveBuffer, at: int) -> None:
    (part,) = buffer.plan.parts
    place = at % part.layout.bytes

    def read(begin: int, out: memoryview) -> None:
        reads(buffer)(begin, out)
        if begin <= place < begin + len(out):
            out[place - begin] ^= 1

    with pytest.raises(StateError, match="was corrupted in transit"):
        receive_shard(tmp_path, told(buffer), part, read)
    assert list(tmp_path.iterdir()) == []


def test_a_lost_machine_leaves_nothing(tmp_path: Path, buffer: SaveBuffer) -> None:
    (part,) = buffer.plan.parts

    def read(begin: int, out: memoryview) -> None:
        if begin > CHUNK_BYTES:
            raise DamagedState("it is gone")
        reads(buffer)(begin, out)

    with pytest.raises(DamagedState, match="it is gone"):
        receive_shard(tmp_path, told(buffer), part, read)
    assert list(tmp_path.iterdir()) == []


def test_an_unplanned_file_is_not_written(tmp_path: Path, buffer: SaveBuffer) -> None:
    (part,) = buffer.plan.parts
    shard = told(buffer)
    other = SaveBuffer.make(plan_buffer(SHAPES[2:], []))
    larger = shard.model_copy(update={"file": shard.file.model_copy(update={"bytes": 2 * shard.file.bytes})})
    few = shard.tensors["model/large"]
    few = few.model_copy(update={"pieces": (few.pieces[0].model_copy(update={"xxh3": few.pieces[0].xxh3[:1]}),)})
    for wrong, why in (
        (told(other), "does not match what its worker planned"),
        (larger, "does not match what its worker planned"),
        (shard.model_copy(update={"tensors": shard.tensors | {"model/large": few}}), "checksums, not "),
    ):
        with pytest.raises(StateError, match=why):
            receive_shard(tmp_path, wrong, part, reads(buffer))
        assert list(tmp_path.iterdir()) == []


def test_an_unchanged_file_is_hard_linked(tmp_path: Path, buffer: SaveBuffer) -> None:
    (part,) = buffer.plan.parts
    first = begin_checkpoint(tmp_path, 1)
    receive_shard(first.partial, told(buffer), part, reads(buffer))
    before = open_checkpoint(commit(first, FACTS, [told(buffer)], 1))
    second = begin_checkpoint(tmp_path, 2)

    def nobody(begin: int, out: memoryview) -> None:
        raise AssertionError("it is here already")

    receive_shard(second.partial, told(buffer), part, nobody, before)
    assert (second.partial / NAME).stat().st_ino == (tmp_path / "step-00000001" / NAME).stat().st_ino
