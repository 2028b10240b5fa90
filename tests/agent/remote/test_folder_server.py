"""The folder server and its clients over real connections; no request reaches a file that is not meant for it."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headway.agent.remote.bundle import bundle_names, bundle_path, growing_path
from headway.agent.remote.folder_server import PIECE_BYTES, RunFolderServer
from headway.agent.remote.forwarder import RecordForwarder
from headway.agent.remote.join import RemoteRun, _lock_file, _lock_folder, join_run, parse_address, reads_leader_disk
from headway.cli.main import main
from headway.errors import DamagedState, DataError, RunError, StateError, UsageError
from headway.recipe import Assignment
from headway.recipe.load import parse_recipe
from headway.state import CheckpointFacts, Piece, begin_checkpoint, commit, verify_checkpoint, write_shard
from headway.state.handshake import KEY_VARIABLE, connect, key_from_env, server_handshake
from headway.state.peer_read import PeerCheckpoint, PeerFile, PeerReader, peer_request
from headway.state.signed_stream import SignedStream
from headway.track import RunFolder, create_run

KEY = "a key of the tests, and long enough"
FACTS = CheckpointFacts(cursor=0, chain="", data_version="", recipe={}, mesh={})
BAD = (
    "../outside", "/etc/passwd", "events/../../x", "events/0001-agent.jsonl", "logs/0001-agent.log", "key", "lock",
    "leases/000001.json", "checkpoints/step-00000001/manifest.json", "events/0001-rank-0.jsonl/x", "", "recipe.json\n",
    "faults/../key", "logs/.0001-rank-0.log", "initial/../key", "huggingface/a/b/c/d/e",
)  # fmt: skip


class Listener:
    """Serves clients that have the key, as a leader does."""

    def __init__(self, server: RunFolderServer) -> None:
        self._server, self._listener = server, socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.clients = list[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.clients.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.closing(client), contextlib.suppress(Exception):
            stream = server_handshake(client, KEY)
            self._server.serve(stream, json.loads(stream.readline()))

    def cut(self) -> None:
        """Break every connection."""
        for client in self.clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = create_run(tmp_path / "there", "r", "r")
    run.recipe_file.write_text("{}")
    run.tokenizer_file.write_bytes(os.urandom(5 << 20))
    (run.initial / "step-00000000").mkdir(parents=True)
    (run.initial / "step-00000000" / "rank-00000.safetensors").write_bytes(os.urandom(1000))
    run.key_file.write_text("secret")
    return run


@pytest.fixture
def listener(run: RunFolder) -> Iterator[Listener]:
    with contextlib.closing(Listener(RunFolderServer(run))) as listener:
        yield listener


@pytest.fixture
def remote(tmp_path: Path, listener: Listener) -> RemoteRun:
    here = RunFolder(tmp_path / "here" / "r")
    for folder in (here.events, here.logs, here.faults):
        folder.mkdir(parents=True)
    return RemoteRun(listener.address, KEY, here)


def append(end: SignedStream, name: str, offset: int, content: bytes) -> dict:
    request = {"kind": "append", "name": name, "offset": offset, "size": len(content)}
    end.sendall(json.dumps(request).encode() + b"\n" + content)
    return json.loads(end.readline())


def test_bundle_is_complete_and_only_changed_files_are_fetched_again(run: RunFolder, remote: RemoteRun) -> None:
    remote.refresh()
    names = bundle_names(run)
    assert "key" not in names
    assert {name: (remote.run.path / name).read_bytes() for name in names} == {
        name: (run.path / name).read_bytes() for name in names
    }
    before = remote.run.tokenizer_file.stat().st_ino
    run.recipe_file.write_text('{"changed": 1}')
    remote.refresh()
    assert remote.run.recipe_file.read_text() == '{"changed": 1}'
    assert remote.run.tokenizer_file.stat().st_ino == before
    assert not remote.run.key_file.exists()


@pytest.mark.parametrize("name", BAD)
def test_no_name_escapes_the_files_meant_for_it(run: RunFolder, listener: Listener, name: str) -> None:
    before = {path: path.read_bytes() for path in run.path.parent.parent.rglob("*") if path.is_file()}
    with contextlib.closing(connect(listener.address, KEY)) as end:
        assert "may read or append to" in peer_request(end, "fetch", name=name, begin=0, size=1)["error"]
        assert "may read or append to" in append(end, name, 0, b"x")["error"]
        end.sendall(json.dumps({"kind": "replace", "name": name, "size": 2}).encode() + b"\n{}")
        assert "may not replace" in json.loads(end.readline())["error"]
        reply = peer_request(end, "read", name=name, step=1, begin=0, size=1)
        assert "is not part of the checkpoint that the run resumes from" in reply["error"]
        assert "error" in peer_request(end, "format-the-disk")
    for path_of in (bundle_path, growing_path):
        with pytest.raises(RunError):
            path_of(run, name)
    (run.path / "id").unlink(missing_ok=True)
    assert {path: path.read_bytes() for path in run.path.parent.parent.rglob("*") if path.is_file()} == before


def test_symlink_is_not_followed(run: RunFolder, listener: Listener, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("as it was")
    (run.events / "0001-rank-0.jsonl").symlink_to(tmp_path / "outside")
    with contextlib.closing(connect(listener.address, KEY)) as end, contextlib.suppress(OSError):
        append(end, "events/0001-rank-0.jsonl", 9, b"more")
    assert (tmp_path / "outside").read_text() == "as it was"


def test_oversized_request_closes_the_connection(listener: Listener) -> None:
    with contextlib.closing(connect(listener.address, KEY)) as end:
        request = {"kind": "append", "name": "events/0001-rank-0.jsonl", "offset": 0, "size": PIECE_BYTES + 1}
        end.sendall(json.dumps(request).encode() + b"\n")
        with pytest.raises(ConnectionError):
            end.readline()


def test_only_bytes_at_the_end_of_the_file_are_appended(run: RunFolder, listener: Listener) -> None:
    name = "events/0001-rank-3.jsonl"
    with contextlib.closing(connect(listener.address, KEY)) as end:
        assert append(end, name, 0, b"one\n") == {"size": 4}
        assert append(end, name, 0, b"one\n") == {"size": 4}  # its reply was lost
        assert append(end, name, 9, b"gap\n") == {"size": 4}
        assert append(end, name, 4, b"two\n") == {"size": 8}
    assert (run.path / name).read_bytes() == b"one\ntwo\n"


def test_growing_files_are_forwarded_over_broken_connections(
    run: RunFolder, listener: Listener, remote: RemoteRun
) -> None:
    forwarder = RecordForwarder(remote.run, lambda: listener.address, KEY)
    files = [remote.run.events / "0001-rank-1.jsonl", remote.run.logs / "0001-rank-1.log"]
    generator = np.random.default_rng(1)
    with contextlib.closing(forwarder):
        for turn in range(6):
            for file in files:
                with file.open("ab") as out:
                    out.write(generator.bytes(int(generator.integers(1, 400_000))))
            if turn % 2:
                listener.cut()
            assert forwarder.flush(20)
            for file in files:
                copy = run.path / file.relative_to(remote.run.path)
                assert copy.read_bytes() == file.read_bytes()
        (remote.run.logs / "0001-rank-2.log").touch()
        (remote.run.events / "0001-agent.jsonl").write_text("only the leader writes this")
        remote.run.environment_file.write_text('{"workers": 2}')
        assert forwarder.flush(20)
    assert (run.logs / "0001-rank-2.log").read_bytes() == b""
    assert not (run.events / "0001-agent.jsonl").exists()
    assert json.loads(run.environment_file.read_text()) == {"workers": 2}


def test_flush_returns_false_if_no_leader_answers(remote: RemoteRun) -> None:
    (remote.run.events / "0001-rank-1.jsonl").write_text("{}\n")
    with contextlib.closing(RecordForwarder(remote.run, lambda: ("127.0.0.1", 1), KEY)) as forwarder:
        assert not forwarder.flush(0.3)


def make_checkpoint(run: RunFolder, step: int) -> Path:
    bits = np.random.default_rng(step).integers(0, 2**32, (64, 5), np.uint32)
    save = begin_checkpoint(run.checkpoints, step)
    piece = Piece("model/w", "float32", (64, 5), (0, 0), (64, 5), bits)
    return commit(save, FACTS, [write_shard(save.partial, "rank-00000.safetensors", [piece])], 1)


def test_checkpoint_on_disk_is_read_and_verified_remotely(run: RunFolder) -> None:
    path, server = make_checkpoint(run, 5), RunFolderServer(run)
    step, manifest, files = server.publish(path)
    with contextlib.closing(Listener(server)) as listener, contextlib.closing(PeerReader(KEY)) as reader:
        remote_files = [PeerFile(*listener.address, name, step, size) for name, size in files]
        assert step == 5
        source = PeerCheckpoint("there", manifest, remote_files, reader)
        assert verify_checkpoint(source).digest == verify_checkpoint(path).digest
        with pytest.raises(DamagedState, match="is not part of the checkpoint that the run resumes from"):
            reader.read(PeerFile(*listener.address, files[0][0], 4, 9), 0, memoryview(bytearray(9)))
        file = path / files[0][0]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(DamagedState, match="the checksum of tensor model/w is wrong"):
            verify_checkpoint(PeerCheckpoint("there", manifest, remote_files, reader))


def test_damaged_bundle_file_is_discarded(run: RunFolder, remote: RemoteRun, monkeypatch) -> None:
    fill = SignedStream.fill

    def damages(end: SignedStream, out: memoryview) -> None:
        fill(end, out)
        out[0] ^= 1

    monkeypatch.setattr(SignedStream, "fill", damages)
    with pytest.raises(StateError, match="arrived damaged"):
        remote.refresh()
    assert not remote.run.recipe_file.exists()


def test_assignment_gets_the_paths_and_clock_of_this_machine(remote: RemoteRun) -> None:
    assignment = Assignment(
        run="/there/r", attempt=2, rank=1, workers=2, device="cpu", threads=1, log="/there/r/logs/0002-rank-1.log",
        rendezvous="tcp://h:1", asked_ns=1, checkpoint="/there/r/checkpoints/step-00000005",
    )  # fmt: skip
    here = remote.localize(assignment)
    assert (here.run, here.log) == (str(remote.run.path), str(remote.run.logs / "0002-rank-1.log"))
    assert (here.checkpoint, here.from_memory, reads_leader_disk(assignment)) == (None, True, True)
    assert here.asked_ns > 1
    stored = assignment.model_copy(update={"checkpoint": "s3://bucket/r/step-00000005"})
    assert remote.localize(stored).checkpoint == stored.checkpoint


def test_join_refuses_a_wrong_key_missing_data_and_a_second_agent(
    run: RunFolder, listener: Listener, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    with pytest.raises(RunError, match="rejected the key"):
        join_run(listener.address, "another key that is long enough", root, "b-1", 0.0)
    with pytest.raises(RunError, match=r"no leader answers at 127\.0\.0\.1:1"):
        join_run(("127.0.0.1", 1), KEY, root, "b-1", 0.0)
    assert not root.exists()
    data = tmp_path / "data"
    run.recipe_file.write_text(parse_recipe({"data": {"path": str(data)}}, {}, "r").model_dump_json())
    with pytest.raises(DataError, match=f"the data of run r is not on this machine: {data}"):
        join_run(listener.address, KEY, root, "b-1", 0.0)
    data.mkdir()
    (data / "manifest.json").write_text("{}")
    joined = join_run(listener.address, KEY, root, "b-1", 0.0)
    assert joined.run.path == root / "visiting" / "b-1" / "r"
    (joined.run.logs / "0001-rank-1.log").write_text("of before")
    with pytest.raises(UsageError, match="agent b-1 already works for run r in"):
        join_run(listener.address, KEY, root, "b-1", 0.0)
    assert (joined.run.logs / "0001-rank-1.log").read_text() == "of before"
    other = root / "visiting" / "b-1" / "another"
    os.close(_lock_folder(other))  # an agent of the same name may work for another run
    _lock_file(other).unlink()
    os.close(joined.lock)  # as when it dies
    joined = join_run(listener.address, KEY, root, "b-1", 0.0)
    assert (joined.run.logs / "0001-rank-1.log").exists()
    os.close(joined.lock)
    run.id_file.write_text("another run of this name")
    joined = join_run(listener.address, KEY, root, "b-1", 0.0)
    assert not (joined.run.logs / "0001-rank-1.log").exists()
    joined.leave()
    assert list(root.rglob("*")) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--join", "127.0.0.1:9"], "--join needs a key in HEADWAY_KEY"),
        (
            ["--run", "file:///nowhere/r", "--nodes", "2", "--rank", "1"],
            "a run without a shared folder needs a key in HEADWAY_KEY",
        ),
        (["--join", "nowhere"], "'nowhere' is not an agent address"),
        ([], "missing --run RUN or --join HOST:PORT"),
        (["--join", "a:1", "--run", "r"], "--run and --join exclude each other"),
    ],
)
def test_agent_verb_names_what_is_missing(words: list[str], message: str, monkeypatch, capsys) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setattr("sys.argv", ["headway", "agent", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_addresses_and_keys(monkeypatch) -> None:
    assert parse_address("a.b:12") == ("a.b", 12)
    assert parse_address("[::1]:12") == ("::1", 12)
    for wrong in ("a.b", ":12", "a:0", "a:70000", "a:x", ""):
        with pytest.raises(UsageError, match="is not an agent address"):
            parse_address(wrong)
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(UsageError, match="too short") as raised:
        key_from_env()
    assert "short" not in raised.value.message.replace("too short", "")
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert key_from_env() is None
