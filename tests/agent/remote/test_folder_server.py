"""What machines without the run's folder ask of the one that has it, and send: by real connections, held to names."""

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
from headway.agent.remote.join import RemoteRun, _lock_file, _only_one, join_run, parse_address, reads_leader_disk
from headway.cli.main import main
from headway.errors import DamagedState, DataError, RunError, StateError, UsageError
from headway.recipe import Assignment
from headway.recipe.load import parse_recipe
from headway.state import CheckpointFacts, Piece, begin_checkpoint, commit, verify_checkpoint, write_shard
from headway.state.handshake import KEY_VARIABLE, call, given_key, server_handshake
from headway.state.peer_read import PeerCheckpoint, PeerFile, PeerReader, fill, peer_request, read_line
from headway.track import RunFolder, create_run

KEY = "a key of the tests, and long enough"
FACTS = CheckpointFacts(cursor=0, chain="", data_version="", recipe={}, mesh={})
BAD = (
    "../outside", "/etc/passwd", "events/../../x", "events/0001-agent.jsonl", "logs/0001-agent.log", "key", "lock",
    "leases/000001.json", "checkpoints/step-00000001/manifest.json", "events/0001-rank-0.jsonl/x", "", "recipe.json\n",
    "faults/../key", "logs/.0001-rank-0.log", "initial/../key", "huggingface/a/b/c/d/e",
)  # fmt: skip


class Door:
    """Lets whoever has the key ask, as the agent that leads does."""

    def __init__(self, desk: RunFolderServer) -> None:
        self._desk, self._listener = desk, socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.ends = list[socket.socket]()
        threading.Thread(target=self._let_in, daemon=True).start()

    def _let_in(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            self.ends.append(end)
            threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        with contextlib.closing(end), contextlib.suppress(Exception):
            server_handshake(end, KEY)
            self._desk.serve(end, json.loads(read_line(end)))

    def cut(self) -> None:
        """Every line that there is."""
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

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
def door(run: RunFolder) -> Iterator[Door]:
    with contextlib.closing(Door(RunFolderServer(run))) as door:
        yield door


@pytest.fixture
def visiting(tmp_path: Path, door: Door) -> RemoteRun:
    here = RunFolder(tmp_path / "here" / "r")
    for folder in (here.events, here.logs, here.faults):
        folder.mkdir(parents=True)
    return RemoteRun(door.address, KEY, here)


def append(end: socket.socket, name: str, offset: int, content: bytes) -> dict:
    asked = {"kind": "append", "name": name, "offset": offset, "size": len(content)}
    end.sendall(json.dumps(asked).encode() + b"\n" + content)
    return json.loads(read_line(end))


def test_the_bundle_comes_whole_and_only_what_changed_comes_again(run: RunFolder, visiting: RemoteRun) -> None:
    visiting.refresh()
    names = bundle_names(run)
    assert "key" not in names
    assert {name: (visiting.run.path / name).read_bytes() for name in names} == {
        name: (run.path / name).read_bytes() for name in names
    }
    before = visiting.run.tokenizer_file.stat().st_ino
    run.recipe_file.write_text('{"changed": 1}')
    visiting.refresh()
    assert visiting.run.recipe_file.read_text() == '{"changed": 1}'
    assert visiting.run.tokenizer_file.stat().st_ino == before
    assert not visiting.run.key_file.exists()


@pytest.mark.parametrize("name", BAD)
def test_no_name_leads_to_what_is_not_meant(run: RunFolder, door: Door, name: str) -> None:
    before = {path: path.read_bytes() for path in run.path.parent.parent.rglob("*") if path.is_file()}
    with contextlib.closing(call(door.address, KEY)) as end:
        assert "may ask for or add to" in peer_request(end, "fetch", name=name, begin=0, size=1)["error"]
        assert "may ask for or add to" in append(end, name, 0, b"x")["error"]
        end.sendall(json.dumps({"kind": "replace", "name": name, "size": 2}).encode() + b"\n{}")
        assert "is not replaced" in json.loads(read_line(end))["error"]
        assert (
            "is not what the run goes on from" in peer_request(end, "read", name=name, step=1, begin=0, size=1)["error"]
        )
        assert "error" in peer_request(end, "format-the-disk")
    for place in (bundle_path, growing_path):
        with pytest.raises(RunError):
            place(run, name)
    (run.path / "id").unlink(missing_ok=True)
    assert {path: path.read_bytes() for path in run.path.parent.parent.rglob("*") if path.is_file()} == before


def test_a_link_is_not_followed(run: RunFolder, door: Door, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("as it was")
    (run.events / "0001-rank-0.jsonl").symlink_to(tmp_path / "outside")
    with contextlib.closing(call(door.address, KEY)) as end, contextlib.suppress(OSError):
        append(end, "events/0001-rank-0.jsonl", 9, b"more")
    assert (tmp_path / "outside").read_text() == "as it was"


def test_more_than_is_taken_at_once_is_hung_up_on(door: Door) -> None:
    with contextlib.closing(call(door.address, KEY)) as end:
        asked = {"kind": "append", "name": "events/0001-rank-0.jsonl", "offset": 0, "size": PIECE_BYTES + 1}
        end.sendall(json.dumps(asked).encode() + b"\n")
        assert end.recv(10) == b""


def test_only_what_begins_where_the_file_ends_is_added(run: RunFolder, door: Door) -> None:
    name = "events/0001-rank-3.jsonl"
    with contextlib.closing(call(door.address, KEY)) as end:
        assert append(end, name, 0, b"one\n") == {"size": 4}
        assert append(end, name, 0, b"one\n") == {"size": 4}  # its answer was lost
        assert append(end, name, 9, b"gap\n") == {"size": 4}
        assert append(end, name, 4, b"two\n") == {"size": 8}
    assert (run.path / name).read_bytes() == b"one\ntwo\n"


def test_what_grows_here_grows_there_over_lines_that_are_cut(run: RunFolder, door: Door, visiting: RemoteRun) -> None:
    forward = RecordForwarder(visiting.run, lambda: door.address, KEY)
    files = [visiting.run.events / "0001-rank-1.jsonl", visiting.run.logs / "0001-rank-1.log"]
    generator = np.random.default_rng(1)
    with contextlib.closing(forward):
        for turn in range(6):
            for file in files:
                with file.open("ab") as out:
                    out.write(generator.bytes(int(generator.integers(1, 400_000))))
            if turn % 2:
                door.cut()
            assert forward.flush(20)
            for file in files:
                there = run.path / file.relative_to(visiting.run.path)
                assert there.read_bytes() == file.read_bytes()
        (visiting.run.logs / "0001-rank-2.log").touch()
        (visiting.run.events / "0001-agent.jsonl").write_text("not ours to say")
        visiting.run.environment_file.write_text('{"workers": 2}')
        assert forward.flush(20)
    assert (run.logs / "0001-rank-2.log").read_bytes() == b""
    assert not (run.events / "0001-agent.jsonl").exists()
    assert json.loads(run.environment_file.read_text()) == {"workers": 2}


def test_flush_tells_when_nobody_takes_it(visiting: RemoteRun) -> None:
    (visiting.run.events / "0001-rank-1.jsonl").write_text("{}\n")
    with contextlib.closing(RecordForwarder(visiting.run, lambda: ("127.0.0.1", 1), KEY)) as forward:
        assert not forward.flush(0.3)


def a_checkpoint(run: RunFolder, step: int) -> Path:
    bits = np.random.default_rng(step).integers(0, 2**32, (64, 5), np.uint32)
    save = begin_checkpoint(run.checkpoints, step)
    piece = Piece("model/w", "float32", (64, 5), (0, 0), (64, 5), bits)
    return commit(save, FACTS, [write_shard(save.partial, "rank-00000.safetensors", [piece])], 1)


def test_a_checkpoint_on_disk_is_read_from_afar_and_checked(run: RunFolder) -> None:
    path, desk = a_checkpoint(run, 5), RunFolderServer(run)
    step, manifest, files = desk.publish(path)
    with contextlib.closing(Door(desk)) as door, contextlib.closing(PeerReader(KEY)) as far:
        there = [PeerFile(*door.address, name, step, size) for name, size in files]
        assert step == 5
        source = PeerCheckpoint("there", manifest, there, far)
        assert verify_checkpoint(source).digest == verify_checkpoint(path).digest
        with pytest.raises(DamagedState, match="is not what the run goes on from"):
            far.read(PeerFile(*door.address, files[0][0], 4, 9), 0, memoryview(bytearray(9)))
        file = path / files[0][0]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(DamagedState, match="the checksum of tensor model/w is wrong"):
            verify_checkpoint(PeerCheckpoint("there", manifest, there, far))


def test_a_bundle_that_comes_damaged_is_not_kept(run: RunFolder, visiting: RemoteRun, monkeypatch) -> None:
    def damages(end: socket.socket, out: memoryview) -> None:
        fill(end, out)
        out[0] ^= 1

    monkeypatch.setattr("headway.agent.remote.join.fill", damages)
    with pytest.raises(StateError, match="came damaged"):
        visiting.refresh()
    assert not visiting.run.recipe_file.exists()


def test_what_a_worker_is_told_is_of_this_machine(visiting: RemoteRun) -> None:
    told = Assignment(
        run="/there/r", attempt=2, rank=1, workers=2, device="cpu", threads=1, log="/there/r/logs/0002-rank-1.log",
        rendezvous="tcp://h:1", asked_ns=1, checkpoint="/there/r/checkpoints/step-00000005",
    )  # fmt: skip
    here = visiting.localize(told)
    assert (here.run, here.log) == (str(visiting.run.path), str(visiting.run.logs / "0002-rank-1.log"))
    assert (here.checkpoint, here.from_memory, reads_leader_disk(told)) == (None, True, True)
    assert here.asked_ns > 1
    stored = told.model_copy(update={"checkpoint": "s3://bucket/r/step-00000005"})
    assert visiting.localize(stored).checkpoint == stored.checkpoint


def test_a_visit_begins_with_what_can_be_told_at_once(run: RunFolder, door: Door, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with pytest.raises(RunError, match="has another key"):
        join_run(door.address, "another key that is long enough", root, "b-1", 0.0)
    with pytest.raises(RunError, match=r"no leader answers at 127\.0\.0\.1:1"):
        join_run(("127.0.0.1", 1), KEY, root, "b-1", 0.0)
    assert not root.exists()
    data = tmp_path / "data"
    run.recipe_file.write_text(parse_recipe({"data": {"path": str(data)}}, {}, "r").model_dump_json())
    with pytest.raises(DataError, match=f"the data of run r is not on this machine: {data}"):
        join_run(door.address, KEY, root, "b-1", 0.0)
    data.mkdir()
    (data / "manifest.json").write_text("{}")
    made = join_run(door.address, KEY, root, "b-1", 0.0)
    assert made.run.path == root / "visiting" / "b-1" / "r"
    (made.run.logs / "0001-rank-1.log").write_text("of before")
    with pytest.raises(UsageError, match="an agent called b-1 is at work for run r in"):
        join_run(door.address, KEY, root, "b-1", 0.0)
    assert (made.run.logs / "0001-rank-1.log").read_text() == "of before"
    other = root / "visiting" / "b-1" / "another"
    os.close(_only_one(other))  # one of the same name may work for another run
    _lock_file(other).unlink()
    os.close(made.lock)  # as when it dies
    made = join_run(door.address, KEY, root, "b-1", 0.0)
    assert (made.run.logs / "0001-rank-1.log").exists()
    os.close(made.lock)
    run.id_file.write_text("another run of this name")
    made = join_run(door.address, KEY, root, "b-1", 0.0)
    assert not (made.run.logs / "0001-rank-1.log").exists()
    made.leave()
    assert list(root.rglob("*")) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--join", "127.0.0.1:9"], "--join, and HEADWAY_KEY has no key"),
        (
            ["--run", "file:///nowhere/r", "--nodes", "2", "--rank", "1"],
            "see no common folder, and HEADWAY_KEY has no key",
        ),
        (["--join", "nowhere"], "'nowhere' is no address of an agent"),
        ([], "an agent needs --run RUN or --join HOST:PORT"),
        (["--join", "a:1", "--run", "r"], "an agent has one of --run RUN or --join HOST:PORT"),
    ],
)
def test_the_verb_says_what_is_missing(words: list[str], said: str, monkeypatch, capsys) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setattr("sys.argv", ["headway", "agent", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_addresses_and_keys(monkeypatch) -> None:
    assert parse_address("a.b:12") == ("a.b", 12)
    assert parse_address("[::1]:12") == ("::1", 12)
    for wrong in ("a.b", ":12", "a:0", "a:70000", "a:x", ""):
        with pytest.raises(UsageError, match="is no address of an agent"):
            parse_address(wrong)
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(UsageError, match="too short") as told:
        given_key()
    assert "short" not in told.value.message.replace("too short", "")
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert given_key() is None
