"""A node's memory, served to others: the very bytes, never those of another step, to nobody without the key."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headway.agent.nodes.snapshot_server import SnapshotServer
from headway.errors import DamagedState
from headway.state import PieceShape, SaveBuffer, plan_buffer, shard_name
from headway.state.handshake import HandshakeFailed, call
from headway.state.peer_read import PeerFile, PeerReader, peer_request
from headway.state.save_buffer import MemoryCheckpoint

KEY = "a key"
SHAPES = [PieceShape("model/w", "float32", (8, 5), (0, 0), (8, 5)), PieceShape("model/b", "float32", (3,), (0,), (3,))]


def filled(step: int) -> SaveBuffer:
    buffer = SaveBuffer.make(plan_buffer(SHAPES, []))
    (part,) = buffer.plan.parts
    generator = np.random.default_rng(step)
    for shape in part.pieces:
        buffer.bits(part, shape)[:] = generator.integers(0, 2**32, shape.local_shape, np.uint32)
    buffer.mark(step, step)
    return buffer


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[SnapshotServer]:
    (tmp_path / "checkpoints").mkdir()
    with contextlib.closing(SnapshotServer("127.0.0.1", KEY, tmp_path / "checkpoints")) as shelf:
        shelf.buffers[0] = [filled(4), filled(5)]
        yield shelf


@pytest.fixture
def second(tmp_path: Path) -> Iterator[SnapshotServer]:
    with contextlib.closing(SnapshotServer("127.0.0.1", KEY, tmp_path / "checkpoints")) as shelf:
        yield shelf


def file_of(shelf: SnapshotServer, step: int) -> PeerFile:
    (part,) = shelf.buffers[0][0].plan.parts
    return PeerFile(shelf.host, shelf.port, shard_name(0), step, part.image.bytes)


def content(shelf: SnapshotServer, step: int) -> bytes:
    (buffer,) = [one for one in shelf.buffers[0] if one.step == step]
    (part,) = buffer.plan.parts
    return bytes(buffer.file(part)[: part.image.bytes])


def test_any_range_of_a_file_is_read_as_it_is(shelf: SnapshotServer) -> None:
    file, truth = file_of(shelf, 5), content(shelf, 5)
    with contextlib.closing(PeerReader(KEY)) as far:
        source = MemoryCheckpoint({}, {file.name: file}, far)
        assert source.size(file.name) == len(truth)
        for begin, end in ((0, len(truth)), (1, 7), (len(truth) - 3, len(truth)), (10, 10)):
            out = bytearray(end - begin)
            source.read(file.name, begin, memoryview(out))
            assert bytes(out) == truth[begin:end]


@pytest.mark.parametrize("step", [3, 6])
def test_a_step_that_is_not_there_is_not_made_up(shelf: SnapshotServer, step: int) -> None:
    with pytest.raises(DamagedState, match=f"of step {step} is not here"):
        PeerReader(KEY).read(file_of(shelf, step), 0, memoryview(bytearray(8)))
    shelf.buffers[0][0].mark(9, 2**64 - 1)  # a worker begins to write over it
    with pytest.raises(DamagedState, match="of step 4 is not here"):
        PeerReader(KEY).read(file_of(shelf, 4), 0, memoryview(bytearray(8)))


def test_a_node_that_is_gone_is_told(shelf: SnapshotServer) -> None:
    file = file_of(shelf, 5)
    shelf.close()
    with pytest.raises(DamagedState, match="cannot be read"):
        PeerReader(KEY).read(file, 0, memoryview(bytearray(8)))


def test_nobody_reads_without_the_key(shelf: SnapshotServer) -> None:
    with pytest.raises((HandshakeFailed, OSError)):
        call((shelf.host, shelf.port), "another key")
    with socket.create_connection((shelf.host, shelf.port)) as end:  # one that skips the greeting
        end.recv(32)
        asked = {"kind": "read", "name": shard_name(0), "step": 5, "begin": 0, "size": 64}
        end.sendall(json.dumps(asked).encode() + b"\n" + bytes(64))
        with contextlib.suppress(ConnectionError):  # it hangs up, at once or after a word
            assert end.recv(1 << 16) == b""


def test_a_copy_outlives_its_node_until_a_newer_one_is_whole(shelf: SnapshotServer, second: SnapshotServer) -> None:
    truths = {step: content(shelf, step) for step in (4, 5)}
    with contextlib.closing(call((second.host, second.port), KEY)) as end:
        for step in (4, 5):
            file = file_of(shelf, step)
            told = peer_request(end, "copy", name=file.name, step=step, size=file.size, host=file.host, port=file.port)
            assert told == {"bytes": file.size}
        shelf.close()
        for step, truth in truths.items():
            found = second.find(shard_name(0), step)
            assert found is not None
            assert os.pread(found[0], len(truth), found[1]) == bytes(found[2]) == truth
        assert peer_request(end, "trim", step=5) == {"copies": 1}
        assert second.find(shard_name(0), 4) is None
        assert second.steps() == {shard_name(0): [5]}
        assert "error" in peer_request(end, "copy", name="x", step=1, size=9, host="127.0.0.1", port=shelf.port)


def test_a_file_is_written_where_it_is_told_and_nowhere_else(shelf: SnapshotServer, tmp_path: Path) -> None:
    partial = tmp_path / "checkpoints" / "partial"
    partial.mkdir()
    with contextlib.closing(call((shelf.host, shelf.port), KEY)) as end:
        told = peer_request(end, "write", name=shard_name(0), step=5, folder=str(partial))
        assert told["shard"]["name"] == shard_name(0)
        assert (partial / shard_name(0)).read_bytes() == content(shelf, 5)
        elsewhere = peer_request(end, "write", name=shard_name(0), step=5, folder=str(tmp_path))
        assert "is no part of this run's checkpoints" in elsewhere["error"]
        gone = peer_request(end, "write", name=shard_name(0), step=7, folder=str(partial))
        assert "is not in this node's memory any more" in gone["error"]
        assert "error" in peer_request(end, "format-the-disk")


def test_a_node_that_does_not_see_the_folder_tells_its_stacks_in_words(tmp_path: Path) -> None:
    own = tmp_path / "own"
    with contextlib.closing(SnapshotServer("127.0.0.1", KEY, tmp_path, own)) as shelf:
        shelf.pids = {3: os.getpid()}
        with contextlib.closing(call((shelf.host, shelf.port), KEY)) as end:
            told = peer_request(end, "stacks", folder=str(tmp_path / "not-here"), attempt=2, native=False)
    assert Path(told["path"]).parent == own
    assert told["text"] == Path(told["path"]).read_text()
    assert [one["rank"] for one in told["seen"]] == [3]
    assert not (tmp_path / "not-here").exists()
