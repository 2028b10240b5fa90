"""Snapshots served to other nodes: exact bytes, never of another step, only with the key."""

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
from headway.state.handshake import HandshakeFailed, connect
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
def server(tmp_path: Path) -> Iterator[SnapshotServer]:
    (tmp_path / "checkpoints").mkdir()
    with contextlib.closing(SnapshotServer("127.0.0.1", KEY, tmp_path / "checkpoints")) as server:
        server.buffers[0] = [filled(4), filled(5)]
        yield server


@pytest.fixture
def second(tmp_path: Path) -> Iterator[SnapshotServer]:
    with contextlib.closing(SnapshotServer("127.0.0.1", KEY, tmp_path / "checkpoints")) as server:
        yield server


def file_of(server: SnapshotServer, step: int) -> PeerFile:
    (part,) = server.buffers[0][0].plan.parts
    return PeerFile(server.host, server.port, shard_name(0), step, part.layout.bytes)


def content(server: SnapshotServer, step: int) -> bytes:
    (buffer,) = [buffer for buffer in server.buffers[0] if buffer.step == step]
    (part,) = buffer.plan.parts
    return bytes(buffer.file(part)[: part.layout.bytes])


def test_any_range_of_a_file_is_read_exactly(server: SnapshotServer) -> None:
    file, truth = file_of(server, 5), content(server, 5)
    with contextlib.closing(PeerReader(KEY)) as reader:
        source = MemoryCheckpoint({}, {file.name: file}, reader)
        assert source.size(file.name) == len(truth)
        for begin, end in ((0, len(truth)), (1, 7), (len(truth) - 3, len(truth)), (10, 10)):
            out = bytearray(end - begin)
            source.read(file.name, begin, memoryview(out))
            assert bytes(out) == truth[begin:end]


@pytest.mark.parametrize("step", [3, 6])
def test_missing_step_is_an_error(server: SnapshotServer, step: int) -> None:
    with pytest.raises(DamagedState, match=f"of step {step} is not here"):
        PeerReader(KEY).read(file_of(server, step), 0, memoryview(bytearray(8)))
    server.buffers[0][0].mark(9, 2**64 - 1)  # a worker begins to overwrite it
    with pytest.raises(DamagedState, match="of step 4 is not here"):
        PeerReader(KEY).read(file_of(server, 4), 0, memoryview(bytearray(8)))


def test_lost_node_is_an_error(server: SnapshotServer) -> None:
    file = file_of(server, 5)
    server.close()
    with pytest.raises(DamagedState, match="cannot be read"):
        PeerReader(KEY).read(file, 0, memoryview(bytearray(8)))


def test_reads_need_the_key(server: SnapshotServer) -> None:
    with pytest.raises((HandshakeFailed, OSError)):
        connect((server.host, server.port), "another key")
    with socket.create_connection((server.host, server.port)) as end:  # skips the handshake
        end.recv(32)
        request = {"kind": "read", "name": shard_name(0), "step": 5, "begin": 0, "size": 64}
        end.sendall(json.dumps(request).encode() + b"\n" + bytes(64))
        with contextlib.suppress(ConnectionError):  # it disconnects, at once or later
            assert end.recv(1 << 16) == b""


def test_copy_outlives_its_node_until_trimmed(server: SnapshotServer, second: SnapshotServer) -> None:
    truths = {step: content(server, step) for step in (4, 5)}
    with contextlib.closing(connect((second.host, second.port), KEY)) as end:
        for step in (4, 5):
            file = file_of(server, step)
            answer = peer_request(
                end, "copy", name=file.name, step=step, size=file.size, host=file.host, port=file.port
            )
            assert answer == {"bytes": file.size}
        server.close()
        for step, truth in truths.items():
            file = second.find(shard_name(0), step)
            assert file is not None
            assert os.pread(file[0], len(truth), file[1]) == bytes(file[2]) == truth
        assert peer_request(end, "trim", step=5) == {"copies": 1}
        assert second.find(shard_name(0), 4) is None
        assert second.steps() == {shard_name(0): [5]}
        assert "error" in peer_request(end, "copy", name="x", step=1, size=9, host="127.0.0.1", port=server.port)


def test_file_is_written_only_into_the_checkpoints_folder(server: SnapshotServer, tmp_path: Path) -> None:
    partial = tmp_path / "checkpoints" / "partial"
    partial.mkdir()
    with contextlib.closing(connect((server.host, server.port), KEY)) as end:
        answer = peer_request(end, "write", name=shard_name(0), step=5, folder=str(partial))
        assert answer["shard"]["name"] == shard_name(0)
        assert (partial / shard_name(0)).read_bytes() == content(server, 5)
        elsewhere = peer_request(end, "write", name=shard_name(0), step=5, folder=str(tmp_path))
        assert "is not in this run's checkpoints folder" in elsewhere["error"]
        gone = peer_request(end, "write", name=shard_name(0), step=7, folder=str(partial))
        assert "is no longer in this node's memory" in gone["error"]
        assert "error" in peer_request(end, "format-the-disk")


def test_node_without_the_run_folder_returns_its_stacks_as_text(tmp_path: Path) -> None:
    own = tmp_path / "own"
    with contextlib.closing(SnapshotServer("127.0.0.1", KEY, tmp_path, own)) as server:
        server.pids = {3: os.getpid()}
        with contextlib.closing(connect((server.host, server.port), KEY)) as end:
            answer = peer_request(end, "stacks", folder=str(tmp_path / "not-here"), attempt=2, native=False)
    assert Path(answer["path"]).parent == own
    assert answer["text"] == Path(answer["path"]).read_text()
    assert [stack["rank"] for stack in answer["seen"]] == [3]
    assert not (tmp_path / "not-here").exists()
