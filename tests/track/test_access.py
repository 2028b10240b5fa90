"""Who may read a run: modes of its folder and files."""

import os
import stat
from pathlib import Path

import pytest

from conftest import Lab
from headway.agent import resume_run
from headway.cluster.engines.engine import LaunchRequest
from headway.cluster.engines.submissions import Submission, note_submission
from headway.errors import UsageError
from headway.track.access import adopt_umask, new_run_mode, umask_of
from headway.track.runs import create_run, set_aside


def modes(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*")}


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_run_is_private_to_its_user(lab: Lab, recipe) -> None:
    """Everything that launcher, agent and workers write, under the usual umask."""
    lived = lab.train(recipe({"train.steps": 2, "checkpoint.every_steps": 2}))
    assert lived.outcome.state == "finished", lived.outcome
    assert oct(stat.S_IMODE(lived.run.path.stat().st_mode)) == "0o700"
    wrong = {
        name: mode
        for name, mode in modes(lived.run.path).items()
        if mode != ("0o700" if (lived.run.path / name).is_dir() else "0o600")
    }
    assert wrong == {}
    resume_run(lived.run, ["train.steps=4"])
    assert oct(stat.S_IMODE(lived.run.recipe_file.stat().st_mode)) == "0o600", "written anew when a run is resumed"
    assert os.umask(0o022) == 0o022, "this process has its own again"


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(("mode", "folder", "file"), [("0750", "0o750", "0o640"), ("770", "0o770", "0o660")])
def test_runs_mode_changes_it(mode: str, folder: str, file: str, tmp_path: Path, monkeypatch) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(f'[runs]\nmode = "{mode}"\n')
    monkeypatch.setenv("HEADWAY_SETTINGS", str(settings))
    run = create_run(tmp_path / "runs", "r", "r")
    with umask_of(run.path):
        (run.logs / "log").write_text("")
    assert oct(stat.S_IMODE(run.path.stat().st_mode)) == folder
    assert modes(run.path) == {"events": folder, "checkpoints": folder, "logs": folder, "logs/log": file}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(("mode", "folder"), [("0700", "0o700"), ("0750", "0o750")])
def test_folder_of_runs_is_as_private_as_they_are_if_it_is_new(
    mode: str, folder: str, tmp_path: Path, monkeypatch
) -> None:
    settings, old, new = tmp_path / "settings.toml", tmp_path / "old", tmp_path / "a" / "new"
    settings.write_text(f'[runs]\nmode = "{mode}"\n')
    monkeypatch.setenv("HEADWAY_SETTINGS", str(settings))
    old.mkdir()
    runs = [create_run(root, "r", "r") for root in (old, new)]
    assert [oct(stat.S_IMODE(root.stat().st_mode)) for root in (old, new)] == ["0o755", folder]
    request = LaunchRequest("r", ("true",), runs[0].path)
    note_submission(runs[0].path, Submission("local", "1", "cpux1", request))
    assert stat.S_IMODE((runs[0].path / "jobs.jsonl").stat().st_mode) & ~int(mode, 8) == 0
    set_aside(runs[0])
    assert oct(stat.S_IMODE((old / ".failed").stat().st_mode)) == folder, "beside runs of other users, perhaps"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[runs]\nmode = "0777"', "runs.mode is '0777'"),
        ('[runs]\nmode = "0070"', "runs.mode is '0070'"),
        ("[runs]\nmode = 448", "runs.mode is 448"),
        ('[runs]\nmod = "0700"', "unknown setting runs.mod"),
        ("[other]", "unknown setting .other"),
        ("[runs", "cannot read"),
    ],
)
def test_mistakes_in_the_settings_are_named(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=problem):
        new_run_mode(file)


@pytest.mark.usefixtures("umask")
def test_vanished_folder_changes_nothing(tmp_path: Path) -> None:
    adopt_umask(tmp_path / "gone")
    assert os.umask(0o022) == 0o022
