"""Copies of the code that a recipe names tell two versions of one file apart."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from headway.track import RunFolder
from headway.track.differences import Cause, find_causes, read_conditions
from headway.track.differences import RunConditions as Conditions
from headway.track.own_code import code_commits, code_digests, code_file, find_commit, record_code


def test_files_that_a_recipe_names_are_copied_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib" / "ownpack").mkdir(parents=True)
    model, reward = tmp_path / "lib" / "own_model.py", tmp_path / "lib" / "ownpack" / "rewards.py"
    model.write_text("raise SystemExit('imported')\n")
    reward.write_text("def reward(): ...\n")
    (tmp_path / "lib" / "ownpack" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    rewards = [{"name": "ownpack.rewards:reward"}]
    recipe = {"model": {"class": "own_model:Net", "init": "C:\\x"}, "rl": {"rewards": rewards},
              "name": "missing_module:Thing", "data": {"path": "a/b:c"}}  # fmt: skip
    runs = [RunFolder(tmp_path / "runs" / name) for name in "ab"]
    for run in runs:
        run.path.mkdir(parents=True)
        record_code(run, recipe)
        reward.write_text("def reward(): return 2\n")
    first, second = map(code_digests, runs)
    assert first == {
        "own_model": hashlib.sha256(model.read_bytes()).hexdigest()[:12],
        "ownpack.rewards": hashlib.sha256(b"def reward(): ...\n").hexdigest()[:12],
    }
    assert code_file(runs[0], "ownpack.rewards").read_text() == "def reward(): ...\n"
    (cause,) = find_causes(*(Conditions(None, {}, (1,), digests) for digests in (first, second)))
    assert (cause.kind, cause.key) == ("code", "ownpack.rewards")
    assert find_causes(Conditions(None, {}, (1,), first), Conditions(None, {}, (1,), {})) == []
    assert [path.name for path in runs[0].path.iterdir()] == ["code"]


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *settings, "-C", str(folder), *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs Git")
def test_commit_and_changes_of_a_repository_are_recorded_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "mycode"
    code.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(code))
    monkeypatch.syspath_prepend(str(code))
    recipe = {"model": {"class": "net_of_mine:Net"}}
    runs: dict[str, RunFolder] = {}

    def run(name: str) -> None:
        runs[name] = RunFolder(tmp_path / "runs" / name)
        runs[name].events.mkdir(parents=True)
        record_code(runs[name], recipe)

    (code / "net_of_mine.py").write_text("import layers\n")
    (code / "layers.py").write_text("width = 1\n")
    run("outside")
    git(tmp_path, "init", "-q", str(code))
    git(code, "add", ".")
    git(code, "commit", "-qm", "first")
    first = git(code, "rev-parse", "HEAD")[:12]
    run("clean")
    (code / "notes.txt").write_text("no code\n")
    run("noted")
    (code / "layers.py").write_text("width = 2\n")
    run("changed")
    run("changed again")
    (code / "more.py").write_text("")
    run("added")
    git(code, "add", ".")
    git(code, "commit", "-qm", "second")
    run("second")
    commits = {name: code_commits(each).get("mycode") for name, each in runs.items()}
    assert commits["outside"] is None
    assert commits["clean"] == commits["noted"] == first
    assert commits["changed"] == commits["changed again"] != first
    assert str(commits["changed"]).startswith(f"{first}+")
    assert commits["second"] == git(code, "rev-parse", "HEAD")[:12]
    assert len(set(commits.values())) == 5

    def causes(a: str, b: str) -> list[Cause]:
        return find_causes(*(read_conditions(runs[name], []) for name in (a, b)))

    (cause,) = causes("clean", "second")
    assert (cause.kind, cause.key, cause.values) == ("code", "commit of mycode", (first, commits["second"]))
    assert causes("clean", "noted") == causes("outside", "clean") == []
    code_file(runs["second"], "net_of_mine").write_text("other\n")
    assert [cause.key for cause in causes("clean", "second")] == ["net_of_mine"], "which is why the commit differs"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs Git")
def test_repository_starts_no_programs(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "a.py").write_text("x = 1\n")
    for setting in ("core.fsmonitor", "diff.external"):
        git(tmp_path, "config", setting, f"touch {tmp_path / 'started'} #")
    assert find_commit(tmp_path) is not None
    assert not (tmp_path / "started").exists()


def test_without_git_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_commit(tmp_path) is None
