"""Runs whose code gets there by another way than a shared path, on this machine's own queue: real runs, real agents."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway
from eventually import eventually
from headway.cluster.engines import OVER
from headway.cluster.submit.runs import submitted_runs
from headway.recipe import to_toml
from headway.track import RunFolder, summarize
from small_venv import small_venv

OWN_MODELS = Path(__file__).parent.parent / "train" / "custom_models.py"


class Desk:
    """A folder with a recipe, settings of a site, and a way to type commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.environment = {**os.environ, "HEADWAY_ENGINES": str(folder / "engines.toml")}

    def site(self, *lines: str) -> None:
        (self.folder / "engines.toml").write_text("\n".join(["[local]", *lines, ""]))

    def type(self, *words: str, python: str = sys.executable) -> str:
        done = subprocess.run(
            [python, "-m", "headway.cli.main", *words], cwd=self.folder, env=self.environment,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ends(self, name: str) -> RunFolder:
        """The run, once its job is over."""
        run = RunFolder(self.runs / name)
        eventually(lambda: submitted_runs(self.runs, [run])[0].status.state in OVER, poll_s=0.2)
        status = submitted_runs(self.runs, [run])[0].status
        said = "".join(path.read_text() for path in run.path.glob("jobs/*/*.log"))
        assert status.state == "finished", f"{status}\n{said}"
        assert summarize(run).state == "finished"
        return run


@pytest.fixture
def desk(tmp_path: Path, recipe) -> Iterator[Desk]:
    (tmp_path / "r.toml").write_text(to_toml(recipe({"name": "tiny", "train.steps": 3})))
    made = Desk(tmp_path)
    yield made
    for run in (made.runs / ".local" / "jobs").glob("*"):  # only where a test has failed
        subprocess.run([sys.executable, "-m", "headway.cli.main", "cancel", run.name], cwd=tmp_path, check=False)


@pytest.mark.slow
def test_staged_run_does_not_need_the_submitting_environment(desk: Desk, tmp_path: Path) -> None:
    python = small_venv(tmp_path / "venv")
    (tmp_path / "node").mkdir()
    gone = f"until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    desk.site('code = "staged"', f'stage_to = "{tmp_path}/node"', f'setup = ["{gone}"]')
    desk.environment.pop("PYTHONPATH", None)
    told = desk.type("submit", "r.toml", "--on", "cpux1", "--name", "dry", "--dry-run", python=str(python))
    assert "/.code/start-" in told
    assert str(tmp_path / "venv") not in "\n".join(line for line in told.splitlines() if "PATH=" not in line)
    assert not (desk.runs / ".code").exists()
    desk.type("submit", "r.toml", "--on", "cpux1", "--name", "staged", python=str(python))
    (tmp_path / "venv").rename(tmp_path / "moved")
    (tmp_path / "go").touch()
    desk.ends("staged")
    (unpacked,) = (tmp_path / "node").glob("headway-*/*/.whole")
    moved = str(tmp_path / "moved" / "bin" / "python")
    desk.type("submit", "r.toml", "--on", "cpux1", "--name", "again", python=moved)
    desk.ends("again")
    assert len(list((tmp_path / "node").glob("headway-*/*/.whole"))) == 1  # a moved one is the same one
    assert unpacked.exists()


FAKE = """#!/bin/bash
# Stands for apptainer where there is none: says what it was told, and runs it here.
echo "$@" >>{said}
[ "$1" = exec ] && shift
while :; do case "$1" in
  --nv) shift ;;
  --bind) [ -e "${{2%%:*}}" ] || exit 9; shift 2 ;;
  *) break ;;
esac; done
shift  # the image
[ "$1" = python ] && {{ shift; set -- {python} "$@"; }}
exec "$@"
"""


@pytest.mark.slow
def test_a_run_in_a_container_is_started_by_its_runtime(desk: Desk, tmp_path: Path) -> None:
    """With something that stands for apptainer: what is written is tested, and no container."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "apptainer"
    fake.write_text(FAKE.format(said=tmp_path / "said", python=sys.executable))
    fake.chmod(0o755)
    (tmp_path / "image.sif").touch()
    source = Path(headway.__file__).parent.parent
    desk.environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    desk.site(f'container = "{tmp_path}/image.sif"', f'environment = {{ PYTHONPATH = "{source}" }}')
    desk.type("submit", "r.toml", "--on", "cpux1", "--name", "boxed")
    desk.ends("boxed")
    assert f"--bind {desk.runs}:{desk.runs}" in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_a_snapshot_is_what_is_trained(desk: Desk, tmp_path: Path, recipe) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.copy(OWN_MODELS, mine / "my_models.py")
    base = recipe({"name": "own", "train.steps": 3}).model_dump()
    base["model"] = {"class": "my_models:Tiny", "args": {"vocabulary": 320, "width": 16}}
    (tmp_path / "own.toml").write_text(to_toml(type(recipe()).model_validate(base)))
    desk.environment["PYTHONPATH"] = f"{mine}:{os.environ.get('PYTHONPATH', '')}"
    desk.site("snapshot = true", f'setup = ["until [ -e {tmp_path}/go ]; do sleep 0.1; done"]')
    desk.type("submit", "own.toml", "--on", "cpux1", "--name", "own")
    (mine / "my_models.py").write_text("raise RuntimeError('this is not what was submitted')\n")
    (tmp_path / "go").touch()
    run = desk.ends("own")
    facts = json.loads((run.path / "code.json").read_text())
    assert (facts["class"], facts["snapshot"]) == ("my_models:Tiny", True)
