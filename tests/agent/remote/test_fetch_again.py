"""A run that is fetched from its store again and again: only what is new is read, and nothing stays missing."""

import json
import stat
from pathlib import Path

import pytest

from headway.agent.remote.store_mirror import StoreMirror, fetch_run
from headway.state.object_store import ObjectStore, open_store
from headway.track import RunFolder, create_run, run_id


@pytest.fixture
def remote(tmp_path: Path) -> RunFolder:
    run = create_run(tmp_path / "there", "r", "r")
    run.recipe_file.write_text('{"a": 1}')
    run.tokenizer_file.write_bytes(bytes(1000))
    run_id(run)
    (tmp_path / "store").mkdir()
    return run


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/r"


@pytest.fixture
def keys_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the objects that were read."""
    keys, get, read = list[str](), ObjectStore.get, ObjectStore.read
    monkeypatch.setattr(ObjectStore, "get", lambda self, key: keys.append(key) or get(self, key))
    monkeypatch.setattr(ObjectStore, "read", lambda self, key, *more: keys.append(key) or read(self, key, *more))
    return keys


def grow(run: RunFolder, url: str, text: str, lease: int = 1) -> None:
    with (run.events / "0001-rank-0.jsonl").open("a") as file:
        file.write(text)
    StoreMirror(run, url, lease, lambda: True).close()


def test_only_new_objects_are_read(remote: RunFolder, url: str, tmp_path: Path, keys_read: list[str]) -> None:
    grow(remote, url, "one\n")
    here = fetch_run(url, tmp_path / "here")
    assert "folder/tokenizer.json" in keys_read
    assert stat.S_IMODE((tmp_path / "here").stat().st_mode) == 0o700, "a folder of runs that is new"
    keys_read.clear()
    fetch_run(url, tmp_path / "here")
    assert keys_read == ["folder/id"]
    remote.recipe_file.write_text('{"a": 2}')
    grow(remote, url, "two\n")
    keys_read.clear()
    fetch_run(url, tmp_path / "here")
    # an agent that starts puts its small files again, whatever is there
    assert [key for key in keys_read if key.startswith("records/")] == [open_store(url).list("records")[-1].key]
    assert here.recipe_file.read_text() == '{"a": 2}'
    assert (here.events / "0001-rank-0.jsonl").read_text() == "one\ntwo\n"


def test_lost_or_changed_local_files_are_fetched_again(remote: RunFolder, url: str, tmp_path: Path) -> None:
    grow(remote, url, "one\n")
    here = fetch_run(url, tmp_path / "here")
    here.recipe_file.write_text('{"a": 9}')
    (here.events / "0001-rank-0.jsonl").unlink()
    fetch_run(url, tmp_path / "here")
    assert here.recipe_file.read_text() == '{"a": 1}'
    assert (here.events / "0001-rank-0.jsonl").read_text() == "one\n"


def test_late_piece_does_not_overwrite_its_successors(remote: RunFolder, url: str, tmp_path: Path) -> None:
    """The former leader puts its last piece after the first of the next: the result is as if they were in order."""
    grow(remote, url, "", 1)
    store, name = open_store(url), "events/0001-rank-0.jsonl"

    def piece(lease: int, text: str) -> None:
        head = json.dumps({"files": [[name, 0, len(text)]]})
        store.put(f"records/{lease:06d}-00000000000001", memoryview(f"{head}\n{text}".encode()))

    piece(3, "new!\n")
    here = fetch_run(url, tmp_path / "here")
    assert (here.path / name).read_text() == "new!\n"
    piece(2, "late\n")
    fetch_run(url, tmp_path / "here")
    assert (here.path / name).read_text() == "new!\n" == (fetch_run(url, tmp_path / "anew").path / name).read_text()
