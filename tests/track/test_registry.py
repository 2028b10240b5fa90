"""Names of models: they are found wherever a model is, survive two writers, and keep their checkpoints."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from headway.cli.model_names import list_names
from headway.errors import RunError, UsageError
from headway.state.write_checkpoint import prune
from headway.track import RunFolder, split_ref
from headway.track.registry import FILE, add_note, read_registry, remove_name, resolve_name, tag
from headway.track.run_folder import run_id


def make_run(root: Path, name: str = "demo-1") -> RunFolder:
    run = RunFolder(root / name)
    run.events.mkdir(parents=True)
    for step in (10, 20, 30):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        (run.checkpoints / f"step-{step:08d}" / "manifest.json").write_text("{}")
    return run


def test_name_moves_and_remembers(tmp_path: Path) -> None:
    run, now = make_run(tmp_path), iter(range(100, 200))
    tag(tmp_path, "prod", run, 10, "aa", now=lambda: next(now))
    add_note(tmp_path, "prod", "good", now=lambda: next(now))
    tag(tmp_path, "prod", run, 20, "bb", now=lambda: next(now))
    entry = read_registry(tmp_path)["prod"]
    assert (entry.run, entry.step, entry.at, [note.text for note in entry.notes]) == ("demo-1", 20, 102, ["good"])
    assert [(old.step, old.digest, old.at) for old in entry.before] == [(10, "aa", 100)]
    assert tag(tmp_path, "prod", run, 20, "bb") == entry
    assert split_ref(tmp_path, "prod") == ("demo-1", 20)
    assert split_ref(tmp_path, "demo-1@30") == ("demo-1", 30)
    assert split_ref(tmp_path, "demo") == ("demo", None)
    assert remove_name(tmp_path, "prod").step == 20
    assert read_registry(tmp_path) == {}


def test_named_checkpoints_are_not_pruned(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    tag(tmp_path, "prod", run, 10, "aa")
    assert prune(run.checkpoints, keep_last=1) == [20]
    tag(tmp_path, "prod", run, 30, "cc")
    assert prune(run.checkpoints, keep_last=1) == [10]


def test_file_is_private_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        tag(tmp_path, "prod", make_run(tmp_path), 10, "aa")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    for content in (b"", b"[]", b'{"format": 2}', b"\xff"):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(RunError, match="is damaged"):
            split_ref(tmp_path, "prod")


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    def write(writer: int) -> None:
        for number in range(12):
            tag(tmp_path, f"m{writer}-{number}", run, 10, "aa")
            add_note(tmp_path, f"m{writer}-{number}", "x")

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = read_registry(tmp_path)
    assert len(names) == 48
    assert all(len(entry.notes) == 1 for entry in names.values())


@pytest.mark.parametrize("name", ["", "last", "base", "a/b", "../x", "-x", "x" * 65, "hf:x"])
def test_invalid_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        tag(tmp_path, name, make_run(tmp_path), 10, "aa")


def test_name_of_a_run_is_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(UsageError, match="is a run"):
        tag(tmp_path, "demo-1", run, 10, "aa")
    tag(tmp_path, "later", run, 10, "aa")
    make_run(tmp_path, "later")
    assert resolve_name(tmp_path, "later") is None


def test_another_run_of_the_same_name_is_not_meant(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    tag(tmp_path, "prod", run, 10, "aa")
    with pytest.raises(UsageError, match="says nothing"):
        split_ref(tmp_path, "prod@20")
    run.id_file.write_text("another")
    with pytest.raises(RunError, match="is another run now"):
        split_ref(tmp_path, "prod")
    run.path.rename(tmp_path / "moved")
    with pytest.raises(RunError, match="is gone"):
        split_ref(tmp_path, "prod")


def test_every_way_to_name_a_model_takes_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.agent.launch.branch import checkpoint_of
    from headway.cli.model_process import adapters_of, model_of
    from headway.cli.named_checkpoints import find_named

    run = make_run(tmp_path)
    tag(tmp_path, "prod", run, 20, "aa")
    path = str(run.checkpoints / "step-00000020")
    assert model_of("prod", tmp_path) == ({"run": str(run.path), "checkpoint": path}, "demo-1@20")
    assert checkpoint_of(tmp_path, "prod") == path
    assert find_named("prod", tmp_path).address == path
    assert adapters_of(["a=prod"], "m", tmp_path) == {"a": path}
    assert run_id(run) == json.loads((tmp_path / FILE).read_bytes())["names"]["prod"]["run_id"]


def test_list_marks_names_whose_checkpoints_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    tag(tmp_path, "here", run, 20, "aa")
    tag(tmp_path, "lost", run, 10, "bb")
    (run.checkpoints / "step-00000010" / "manifest.json").unlink()
    list_names(tmp_path, json=False)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "demo-1@10 gone" in rows["lost"]
    assert "gone" not in rows["here"]
    list_names(tmp_path, json=True)
    assert {row["name"]: row["gone"] for row in json.loads(capsys.readouterr().out)} == {"here": False, "lost": True}
