"""A run of this machine's queue that saves and is restarted matches an uninterrupted one."""

import os
import stat
from pathlib import Path

import pytest
from engine_runs import EngineRun, demo, headway, train_uninterrupted

from conftest import Lived
from eventually import eventually
from headway.recipe import to_toml
from headway.track import RunFolder, summarize


@pytest.mark.slow
def test_preempted_local_run_matches_an_uninterrupted_run(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engines.toml"
    file.write_text('[local]\ngrace_s = 30\nsetup = ["taskset -pc 0 $$ >/dev/null"]\n')  # one thread per worker
    monkeypatch.setenv("HEADWAY_ENGINES", str(file))
    short = demo(dataset, parallel__shard=2)
    run = EngineRun.submitted(short, tmp_path / "runs", "local", on="cpux2")
    run.reaches(20, starts=1)
    assert headway("requeue", run.name, "--runs", str(run.root))
    status = run.ended()
    assert (status.state, status.starts) == ("finished", 2), run.diagnosis()
    assert "stopped on request, state saved" in run.line_with("stopped")
    result, uninterrupted = Lived(run.folder, None), train_uninterrupted(short, tmp_path / "uninterrupted")
    assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), run.diagnosis()
    assert "all steps done" in headway("logs", run.name, "--runs", str(run.root))
    assert not run.processes()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "forbidden"), [("0700", 0o077), ("0750", 0o027)])
def test_all_files_of_trained_resumed_and_submitted_runs_follow_runs_mode(
    mode: str, forbidden: int, tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the usual umask, with the folder of runs created by us."""
    settings, engines, root = tmp_path / "settings.toml", tmp_path / "engines.toml", tmp_path / "runs"
    settings.write_text(f'[runs]\nmode = "{mode}"\n')
    engines.write_text("[local]\n")
    monkeypatch.setenv("HEADWAY_SETTINGS", str(settings))
    monkeypatch.setenv("HEADWAY_ENGINES", str(engines))
    recipe = tmp_path / "short.toml"
    recipe.write_text(to_toml(demo(dataset, train__steps=2, train__warmup_steps=0)))
    before = os.umask(0o022)
    try:
        headway("train", str(recipe), "--name", "a", "--runs", str(root))
        headway("resume", "a", "--set", "train.steps=4", "--runs", str(root))
        headway("submit", str(recipe), "--name", "s", "--on", "cpux1", "--runs", str(root))
        run = EngineRun(root, "s")
        assert run.ended().state == "finished", run.diagnosis()
        headway("train", str(recipe), "--name", "d", "--detach", "--runs", str(root))
        eventually(lambda: summarize(RunFolder(root / "d")).state == "finished")
    finally:
        os.umask(before)
    open_files = {
        str(path.relative_to(tmp_path)): oct(stat.S_IMODE(path.lstat().st_mode))
        for path in (root, *root.rglob("*"))
        if path.lstat().st_mode & forbidden
    }
    assert open_files == {}
    assert stat.S_IMODE(root.stat().st_mode) == int(mode, 8)
