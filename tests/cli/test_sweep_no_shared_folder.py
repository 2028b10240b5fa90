"""A sweep whose machines do not see the runs' folder: real copies on this machine's own queue, which have an empty
folder where the runs lie (only root can do that; for others they just do not look there), and a folder as the store."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Lab, Lived
from eventually import eventually
from headway.cluster.engines.settings import open_engine
from headway.recipe import Recipe, to_toml
from headway.track import RunFolder, summarize

HIDES = """\
if [ -z "$HIDDEN" ]; then
  cp -- "$BASH_SOURCE" {own}/task-$HEADWAY_ARRAY_INDEX.sh
  export HIDDEN=1 TMPDIR={own}
  exec unshare --mount sh -c 'mount -t tmpfs nothing "$0" && mkdir -p "$1" && exec bash "$2"' \\
    {runs} "$PWD" {own}/task-$HEADWAY_ARRAY_INDEX.sh
fi
[ ! -e {runs}/.sweeps/*/*.json ] || exit 9"""
"""A machine's view of its disks, in which the runs' folder is empty but for the one that the job is started in."""
SEES = "export TMPDIR={own}"
ONE_CORE = "taskset -pc $((HEADWAY_ARRAY_INDEX % 2)) $$ >/dev/null"
"""As many threads as other workers of the tests have."""
GRID = ("--grid", "train.lr=1e-2,2e-2", "--name", "s", "--no-shared-folder")


class Site:
    """A folder with a recipe in it, machines that do not see its runs, and a way to type commands there."""

    def __init__(self, folder: Path, recipe: Callable[..., Recipe]) -> None:
        self.folder, self.runs, self.store = folder, folder / "runs", folder / "store"
        for name in ("store", "machine"):
            (folder / name).mkdir()
        store = {"url": f"file://{self.store}", "every_steps": 2}
        settings = {"train.steps": 4, "eval.every_steps": 2, "eval.windows": 2, "checkpoint.every_steps": 2}
        self.recipe = recipe({"name": "tiny", "checkpoint.store": store} | settings)
        (folder / "r.toml").write_text(to_toml(self.recipe))
        hides = (HIDES if os.geteuid() == 0 else SEES).format(
            own=shlex.quote(str(folder / "machine")), runs=shlex.quote(str(self.runs))
        )
        (folder / "engines.toml").write_text(f"[local]\nsetup = {json.dumps([hides, ONE_CORE])}\n")

    def type(self, *words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-c", "from headway.cli.main import main; main()", *words], cwd=self.folder,
            text=True, capture_output=True, timeout=400,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {job["run"]: job for job in json.loads(self.type("jobs", "--json")[1])}

    def said(self) -> str:
        return "\n".join(path.read_text() for path in self.runs.rglob("jobs/*/**/*.log"))


@pytest.fixture
def site(tmp_path: Path, recipe, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path, recipe)
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)
    monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "engines.toml"))
    yield made
    engine = open_engine("local", made.runs)
    for folder in (made.runs / ".local" / "jobs").glob("*"):
        engine.cancel(folder.name)
        wait(lambda job=folder.name: engine.status([job])[job].state in ("cancelled", "finished", "failed"))


def wait(there: Callable[[], object]) -> None:
    eventually(there, poll_s=0.2)


@pytest.mark.slow
def test_sweep_without_a_shared_folder(site: Site, lab: Lab) -> None:
    status, out, err = site.type("sweep", "r.toml", *GRID, "--json")
    assert status == 0, err + site.said()
    told = json.loads(out)
    points = {point["run"]: point for point in told["points"]}
    assert {run: point["state"] for run, point in points.items()} == dict.fromkeys(points, "finished")
    assert "old" not in told
    if os.geteuid() == 0:
        assert sorted(path.name for path in site.folder.glob("machine/headway-*/runs/*")) == ["s-lr_1e-2", "s-lr_2e-2"]
    for lr in ("1e-2", "2e-2"):
        train = site.recipe.train.model_copy(update={"lr": float(lr)})
        alone = lab.train(site.recipe.model_copy(update={"train": train, "name": f"alone-{lr}"}))
        there = Lived(RunFolder(site.runs / f"s-lr_{lr}"), None)
        assert (there.chain, there.digest) == (alone.chain, alone.digest)
        assert points[f"s-lr_{lr}"]["loss"] == summarize(alone.run).loss
        assert points[f"s-lr_{lr}"]["eval_loss"] == alone.events("eval")[-1]["loss"]
    assert {job["job"].partition("_")[0] for job in site.jobs().values()} == {told["job"]}  # one job for the engine
    # The store may go: what has finished is here.
    site.store.rename(site.folder / "gone")
    status, out, err = site.type("sweep", "s", "--json")
    assert (status, json.loads(out)["points"], err) == (0, told["points"], "")


@pytest.mark.slow
def test_array_tasks_are_restarted_and_cancelled(site: Site) -> None:
    kept = ("--set", "checkpoint.every_steps=50", "--set", "checkpoint.store.every_steps=50")
    long = ("--set", "train.steps=100000", "--set", "eval.every_steps=0", *kept)
    status, out, err = site.type("sweep", "r.toml", *GRID, *long, "--detach")
    assert (status, out.splitlines()[0].startswith("s: 2 runs, job ")) == (0, True), err

    def steps() -> dict[str, int]:
        return {point["run"]: point["step"] for point in json.loads(site.type("sweep", "s", "--json")[1])["points"]}

    wait(lambda: min(steps().values()) >= 50)
    before = steps()["s-lr_2e-2"]
    assert site.type("requeue", "s-lr_2e-2")[0] == 0  # it saves, and goes on from there
    wait(lambda: site.jobs()["s-lr_2e-2"]["starts"] == 2)
    lived = Lived(RunFolder(site.runs / "s-lr_2e-2"), None)
    wait(lambda: steps() and len(lived.events("resumed")) == 2)
    first, second = (event["step"] for event in lived.events("resumed"))
    assert (first, second >= before) == (0, True)
    assert site.type("cancel", "s")[1].startswith("s: job ")
    wait(lambda: {job["state"] for job in site.jobs().values()} == {"cancelled"})
    status, out, err = site.type("sweep", "s")
    assert (status, [line.split()[-1] for line in out.splitlines()[1:3]], err) == (0, ["cancelled"] * 2, "")
