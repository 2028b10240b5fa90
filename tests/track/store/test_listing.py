"""Rows of runs: through the index, past it, and when it is damaged; labels, renames and deletes."""

import json
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from headway.errors import RunError, UsageError
from headway.recipe import Data, Recipe
from headway.track import RunFolder, create_run, list_runs, lock_run, write_json
from headway.track.store import (
    Labels,
    change_note,
    change_tags,
    known_keys,
    read_labels,
    read_row,
    read_rows,
    select_runs,
    write_labels,
)
from headway.track.store.edits import DELETED, delete_run, match_runs, rename_run
from track_runs import plain_run

STORED = Path(__file__).parents[1] / "run_format_1" / "runs"


@pytest.fixture(autouse=True)
def _own_index(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


def make_runs(root: Path) -> list[RunFolder]:
    """Losses end at 1, 2 and 3; the last one has no recipe."""
    runs = [plain_run(root, [9.0, 0.5 + number, number], f"run-{number}") for number in (1, 2, 3)]
    for number, run in enumerate(runs[:2], 1):
        recipe = Recipe(name="demo", data=Data(path="x"))
        content = recipe.model_dump(mode="json")
        content["train"]["lr"] = number * 1e-3
        write_json(run.recipe_file, content)
    return runs


def names(root: Path, where: str = "", **more) -> list[str]:
    return [row.folder.name for row in select_runs(root, where, **more)]


def test_queries_over_recipes_metrics_and_labels(tmp_path):
    runs = make_runs(tmp_path / "runs")
    root = tmp_path / "runs"
    for _ in range(2):  # the second time from the index
        assert sorted(names(root)) == ["run-1", "run-2", "run-3"]
        assert names(root, "train.lr > 1.5e-3") == ["run-2"]
        assert names(root, "loss < 3 and max(loss) = 9", sort=["-loss"]) == ["run-2", "run-1"]
        assert names(root, "mean(loss) > 4", sort=["name"]) == ["run-2", "run-3"]
        assert names(root, "train.lr != 5", sort=["train.lr"]) == ["run-1", "run-2"]
        assert names(root, sort=["-train.lr"]) == ["run-2", "run-1", "run-3"], "a run without a value comes last"
        assert names(root, "state = finished and name glob '*-[12]'", sort=["run"]) == ["run-1", "run-2"]
    write_labels(runs[2], Labels(("good",), "a note"))
    assert names(root, "tags = good and note contains NOTE") == ["run-3"]
    write_labels(runs[2], Labels(archived=True))
    assert "run-3" not in names(root)
    assert names(root, archived="only") == ["run-3"]
    with pytest.raises(UsageError, match="no run has a key 'los'"):
        names(root, "los < 3")
    with pytest.raises(UsageError, match="no run has a key 'los'"):
        names(root, sort=["los"])
    for query in ("loss < 3x", "train.lr >= abc", "state = finished or took > soon", "started > yesterday", "age < 2x"):
        with pytest.raises(UsageError, match=r"is a number, '.*' is not at column"):
            names(root, query)
    assert names(root, "name > run-1") == ["run-2"]
    assert {"loss", "train.lr", "state"} <= set(known_keys(read_rows(root, metrics=True)))


def test_index_follows_every_change(tmp_path):
    root = tmp_path / "runs"
    run = make_runs(root)[0]
    assert {row.summary.loss for row in read_rows(root)} == {1.0, 2.0, 3.0}
    record = run.events / "0001-rank-0.jsonl"
    record.write_text(record.read_text() + '{"kind":"step","t":1,"step":4,"data":1,"compute":1,"loss":7.0}\n')
    row = next(row for row in read_rows(root, metrics=True) if row.folder == run)
    assert (row.summary.loss, row.summary.step, row.metrics["loss"].last) == (7.0, 4, 7.0)
    assert row == read_row(run, metrics=True)
    with lock_run(run):
        assert names(root, "state = running") == ["run-1"]
    assert names(root, "state = running") == []
    shutil.rmtree(run.path)
    assert sorted(names(root)) == ["run-2", "run-3"]


@pytest.mark.parametrize("damage", ["bytes", "schema", "rows", "folder"])
def test_damaged_index_is_replaced_or_done_without(tmp_path, damage):
    root, file = tmp_path / "runs", tmp_path / "cache" / "runs-2.sqlite"
    make_runs(root)
    expected = read_rows(root, metrics=True)
    if damage == "bytes":
        file.write_bytes(b"not a database" * 100)
    elif damage == "folder":
        shutil.rmtree(file.parent)
        file.parent.write_text("a file where the folder should be")
    else:
        with sqlite3.connect(file) as connection:
            statement = {
                "schema": "DROP TABLE runs",
                "rows": "UPDATE runs SET row = '{', stats = '[]'",
            }[damage]
            connection.execute(statement)
        connection.close()
    for _ in range(2):
        assert read_rows(root, metrics=True) == expected


def test_several_readers_at_once_agree(tmp_path):
    root, found = tmp_path / "runs", []
    make_runs(root)
    threads = [threading.Thread(target=lambda: found.append(read_rows(root, metrics=True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(rows == found[0] for rows in found)


def test_runs_of_other_versions(tmp_path):
    root = tmp_path / "runs"
    shutil.copytree(STORED, root)
    (row,) = select_runs(root, "train.lr > 1e-3 and min(eval_loss) < 6")
    assert (row.summary.state, row.summary.step) == ("finished", 6)
    newer = create_run(root, "demo", "newer")
    (newer.events / "0001-rank-0.jsonl").write_text('{"kind":"open","format":99}\n{"kind":"step","step":1,"loss":1}\n')
    assert names(root) == ["stored"], "a run that this version cannot read is left out"
    assert names(root, "loss < 100") == ["stored"]


def test_labels_survive_damage_and_refuse_what_cannot_be_a_tag(tmp_path):
    run = create_run(tmp_path, "demo")
    assert read_labels(run) == Labels()
    write_labels(run, change_note(change_tags(Labels(), ["b", "a"]), " fine "))
    assert read_labels(run) == Labels(("a", "b"), "fine")
    assert change_tags(read_labels(run), remove=["a", "c"]).tags == ("b",)
    assert change_note(Labels(), "a\x1b[2Jb\n").note == "a [2Jb"
    for wrong in ("a b", "", "x" * 41, "a,b", "a\x1b"):
        with pytest.raises(UsageError, match="invalid tag"):
            change_tags(Labels(), [wrong])
    with pytest.raises(UsageError, match="2,001 characters"):
        change_note(Labels(), "x" * 2001)
    for content in ("{", "[]", '{"tags": [1, "ok", "a b"], "note": 3, "archived": "yes"}'):
        run.labels_file.write_text(content)
        assert read_labels(run) in (Labels(), Labels(("ok",)))


def test_rename_and_delete_refuse_live_and_submitted_runs(tmp_path):
    first, second, third = make_runs(tmp_path)
    with lock_run(first):
        for call in (lambda: rename_run(first, "new"), lambda: delete_run(first)):
            with pytest.raises(RunError, match="in use by process"):
                call()
    for wrong, message in (("run-2", "already exists"), ("last", "invalid run name"), ("../x", "invalid run name")):
        with pytest.raises((RunError, UsageError), match=message):
            rename_run(first, wrong)
    renamed = rename_run(first, "new")
    assert (renamed.name, first.path.exists(), read_row(renamed).summary.loss) == ("new", False, 1.0)
    (second.events / "0001-agent.jsonl").write_text('{"kind":"open","format":1}\n')  # no end: interrupted
    with pytest.raises(RunError, match="an engine may start it"):
        delete_run(second, other_machines=lambda _: True)
    delete_run(third)
    assert sorted(run.name for run in list_runs(tmp_path)) == ["new", "run-2"]
    assert not (tmp_path / DELETED).exists()
    content = json.loads(second.recipe_file.read_bytes())
    content["checkpoint"]["store"] = {"url": "s3://bucket/prefix"}
    write_json(second.recipe_file, content)
    with pytest.raises(RunError, match="object store"):
        rename_run(second, "other")


def test_deleting_a_linked_run_removes_the_link_only(tmp_path):
    (run,) = make_runs(tmp_path / "elsewhere")[:1]
    root = tmp_path / "runs"
    root.mkdir()
    (root / "linked").symlink_to(run.path)
    delete_run(RunFolder(root / "linked"))
    assert (list(root.iterdir()), run.events.is_dir()) == ([], True)


def test_patterns_name_each_run_once(tmp_path):
    make_runs(tmp_path)
    assert [run.name for run in match_runs(tmp_path, ["run-[12]", "run-2", "*3"])] == ["run-1", "run-2", "run-3"]
    with pytest.raises(RunError, match="no run matches"):
        match_runs(tmp_path, ["x*"])
