"""`headway sweep` as a person types it, on this machine's own queue: real runs, real agents, and makers that die."""

import fcntl
import json
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eventually import CEILING_S, eventually
from headway.cli.main import main
from headway.cluster.engines.settings import open_engine
from headway.cluster.submit.unsubmitted_sweeps import exclusive_lock
from headway.recipe import to_toml
from headway.track import RunFolder, read_recipe, summarize

GRID = ("--grid", "train.lr=1e-2,2e-2", "--name", "s")


class Desk:
    """A folder with a recipe in it, and a way to type commands there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def start(self, *words: str, code: str = "from headway.cli.main import main; main()") -> "subprocess.Popen[str]":
        """A command in a process of its own: one that is interrupted, or dies."""
        program = [sys.executable, "-c", code, *words]
        return subprocess.Popen(program, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def type(self, *words: str) -> tuple[int, str, str]:
        """How a command ended, and what it printed."""
        self._monkeypatch.setattr(sys, "argv", ["headway", *words])
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, *self._capsys.readouterr()

    def names(self) -> list[str]:
        """All that lies among the runs but for the queue's own."""
        found = [path.name for path in self.runs.glob("*") if not path.name.startswith(".")]
        return sorted([*found, *(f".sweeps/{path.name}" for path in (self.runs / ".sweeps").glob("*/"))])

    def jobs(self) -> dict[str, dict[str, Any]]:
        return {job["run"]: job for job in json.loads(self.type("jobs", "--json")[1])}


@pytest.fixture
def desk(tmp_path: Path, recipe, monkeypatch: pytest.MonkeyPatch, capsys) -> Iterator[Desk]:
    settings = {"name": "tiny", "train.steps": 4, "eval.every_steps": 2, "eval.windows": 2}
    (tmp_path / "r.toml").write_text(to_toml(recipe(settings)))
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)
    monkeypatch.delenv("HEADWAY_ENGINES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    yield Desk(tmp_path, monkeypatch, capsys)
    engine = open_engine("local", tmp_path / "runs")
    for folder in (tmp_path / "runs" / ".local" / "jobs").glob("*"):
        engine.cancel(folder.name)
        wait(lambda job=folder.name: engine.status([job])[job].state in ("cancelled", "finished", "failed"))


def wait(there: Callable[[], object]) -> None:
    eventually(there, poll_s=0.2)


def test_a_sweep_from_its_start_to_its_table(desk: Desk) -> None:
    status, out, err = desk.type("sweep", "r.toml", *GRID, "--set", "seed=7", "--json")
    assert status == 0, err
    told = json.loads(out)
    assert [point["run"] for point in told["points"]] == sorted(
        ("s-lr_1e-2", "s-lr_2e-2"), key=lambda name: next(p["eval_loss"] for p in told["points"] if p["run"] == name)
    )
    assert told["best"] == told["points"][0]["run"]
    for point in told["points"]:
        run = RunFolder(desk.runs / point["run"])
        made = read_recipe(run)
        assert (made.train.lr, made.seed) == (float(point["settings"]["train.lr"]), 7)
        assert (point["state"], point["step"], point["loss"]) == ("finished", 4, summarize(run).loss)
    jobs = desk.jobs()
    assert {job["job"].partition("_")[0] for job in jobs.values()} == {told["job"]}  # one job for the engine
    assert "finished at step 4 of 4" in desk.type("logs", "s-lr_2e-2")[1]
    status, _, err = desk.type("logs", "s")
    assert (status, "s is a sweep" in err, "its runs: s-lr_1e-2, s-lr_2e-2" in err) == (2, True, True)
    again = desk.type("sweep", "s")[1]
    assert again.splitlines()[1].startswith("* ")
    assert max(map(len, again.splitlines())) <= 80
    assert desk.type("sweep")[1].splitlines()[1].split()[:3] == ["s", "2", "local"]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in desk.folder.glob("runs/**/*")}
    assert desk.runs / ".sweeps/s/sweep.json" in modes
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}, "only the user may read a sweep"
    taken = desk.type("sweep", "r.toml", "--grid", "train.lr=1e-2,3e-2", "--name", "s")
    assert (taken[0], "sweep s already exists with other settings" in taken[2]) == (2, True)
    status, _, err = desk.type("requeue", "s")
    assert (status, "no run of sweep s failed or was cancelled" in err) == (1, True)


@pytest.mark.parametrize(
    "words",
    [
        ("--name", "taken"),
        ("--name", "s", "--set", "data.path=nowhere"),
        ("--name", "s", "--on", "h100x8"),
        ("--name", "s", "--dry-run"),
    ],
)
def test_refused_sweep_leaves_nothing(desk: Desk, words: tuple[str, ...]) -> None:
    (desk.runs / "taken").mkdir(parents=True)
    assert desk.type("sweep", "r.toml", *GRID, *words)[0] == (0 if "--dry-run" in words else 2)
    assert [path.name for path in desk.runs.iterdir()] == ["taken"]


def test_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waited while the holder removed the file must not share the lock with a later one."""
    path, locked, flock = tmp_path / "lock", list[int](), fcntl.flock

    def wait_until_the_holder_removes_it(file: int, operation: int) -> None:
        if not locked:
            path.unlink()
        locked.append(file)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", wait_until_the_holder_removes_it)
    with exclusive_lock(path):
        assert len(locked) == 2
        with path.open() as file, pytest.raises(BlockingIOError):
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_failed_run_does_not_block_the_others(desk: Desk) -> None:
    grid = ("--grid", "seed=1,2,3", "--name", "f", "--at-once", "1")
    status, out, _ = desk.type("sweep", "r.toml", *grid, "--detach")
    assert (status, out.splitlines()[0].startswith("f: 3 runs, job ")) == (0, True)
    (desk.runs / "f-seed_2" / "recipe.json").write_text("{}")
    status, out, err = desk.type("sweep", "r.toml", *grid)
    assert "is already submitted" in err
    assert status == 1
    assert sorted(line.split()[-1] for line in out.splitlines()[1:4]) == ["failed", "finished", "finished"]
    starts = [summarize(RunFolder(desk.runs / f"f-seed_{seed}")) for seed in (1, 3)]
    assert starts[1].started >= starts[0].started + starts[0].seconds - 1  # one at a time


@pytest.mark.slow
def test_interrupted_wait_can_be_resumed_and_cancelled(desk: Desk) -> None:
    long = ("--set", "train.steps=100000", "--set", "checkpoint.memory_every_steps=50")
    with desk.start("sweep", "r.toml", *GRID, *long) as process:
        wait(lambda: (desk.runs / ".sweeps" / "s" / "sweep.json").exists())
        wait(lambda: summarize(RunFolder(desk.runs / "s-lr_1e-2")).step > 5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=CEILING_S)
    assert process.returncode == 130
    assert "next: headway sweep s, headway cancel s" in err
    assert {job["state"] for job in desk.jobs().values()} <= {"running", "waiting"}
    assert desk.type("cancel", "s-lr_2e-2")[0] == 0  # one of them
    wait(lambda: desk.jobs()["s-lr_2e-2"]["state"] == "cancelled")
    assert desk.jobs()["s-lr_1e-2"]["state"] == "running"
    assert desk.type("cancel", "s")[1].startswith("s: job ")  # all of them
    wait(lambda: desk.jobs()["s-lr_1e-2"]["state"] == "cancelled")
    status, out, _ = desk.type("sweep", "s")
    assert (status, [line.split()[-1] for line in out.splitlines()[1:3]]) == (0, ["cancelled", "cancelled"])
    assert "no run has finished" in out
    assert desk.type("requeue", "s")[0] == 0
    wait(lambda: all(job["state"] == "running" for job in desk.jobs().values()))
    assert desk.type("cancel", "s")[0] == 0
    wait(lambda: all(job["state"] == "cancelled" for job in desk.jobs().values()))


KILLED = """
import os, sys
from headway.cluster.submit import sweep_start
real = sweep_start.{what}
def die(*words, **more):
    if {when}:
        os.kill(os.getpid(), 9)
    return real(*words, **more)
sweep_start.{what} = die
from headway.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("what", "when"),
    [
        # one run is made; all are; the engine has it, and one run knows; all know
        pytest.param("provisional_run", "words[3].endswith('2e-2')", marks=pytest.mark.slow),
        pytest.param("request_for", "words[0].run.name.endswith('2e-2')", marks=pytest.mark.slow),
        pytest.param("note_submission", "words[0].name.endswith('2e-2')", marks=pytest.mark.slow),
        pytest.param(
            "write_json", "words[0].parent.name == 's' and words[0].name == 'sweep.json'", marks=pytest.mark.slow
        ),
    ],
)
def test_killed_submitter_leaves_nothing_that_trains(desk: Desk, what: str, when: str) -> None:
    with desk.start("sweep", "r.toml", *GRID, code=KILLED.format(what=what, when=when)) as process:
        _, err = process.communicate(timeout=CEILING_S)
    assert process.returncode == -signal.SIGKILL, err
    assert not list(desk.runs.glob("*/events/*"))
    status, out, err = desk.type("sweep", "r.toml", *GRID, "--json")
    assert status == 0, err
    told = json.loads(out)
    assert [point["state"] for point in told["points"]] == ["finished", "finished"]
    for point in told["points"]:
        assert summarize(RunFolder(desk.runs / point["run"])).attempts == 1
    assert desk.names() == [".sweeps/s", "s-lr_1e-2", "s-lr_2e-2"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--grid", "train.learning_rate=1,2"], '--grid train.learning_rate=1: train has no key "learning_rate"'),
        (["--grid", "trainn.lr=1,2"], '--grid trainn.lr=1: a recipe has no key "trainn"'),
        (["--grid", "train.lr=1e-2,fast"], "--grid train.lr = 'fast'"),
        (["--grid", "train.lr=1e-2,99"], "--grid train.lr = 99"),
        (["--grid", "train.lr=1e-2,0.01"], "are the same run"),
        (["--grid", "train.batch_ramp=4,8"], "has brackets"),
        (["--grid", "train.lr=1e-2", "--set", "train.stepz=1"], '--set train.stepz=1: train has no key "stepz"'),
        (["--grid", "train.lr=1e-2", "--name", "a b"], "invalid sweep name"),
        (["--grid", "train.lr=1e-2", "--name", "taken"], "run taken-lr_1e-2 already exists"),
        (["--grid", "train.lr=1e-2", "--engine", "slurm"], "--engine slurm needs --on"),
        (["--grid", "train.lr=1e-2", "--on", "h100x8"], "8 GPUs"),
        (["--grid", "train.batch=8,7", "--on", "cpux2", "--set", "parallel.shard=2"], "batch"),
        (["--grid", "data.path=/none,/nowhere"], "/none"),
        ([], "nothing to sweep over"),
    ],
)
def test_what_cannot_be_swept_leaves_nothing(desk: Desk, words: list[str], told: str) -> None:
    (desk.runs / "taken-lr_1e-2").mkdir(parents=True)
    status, _, err = desk.type("sweep", "r.toml", *words)
    assert status in (1, 2), err
    assert told in err
    assert "hint:" in err or "batch" in told
    assert "Traceback" not in err
    assert desk.names() == ["taken-lr_1e-2"]


def test_a_dry_run_shows_one_array_and_leaves_nothing(desk: Desk) -> None:
    seeds = ",".join(map(str, range(100)))
    status, out, err = desk.type("sweep", "r.toml", "--grid", f"seed={seeds}", "--name", "d", "--dry-run")
    assert status == 0, err
    assert sum(line.startswith("# ") and ": d-seed_" in line for line in out.splitlines()) == 100
    assert out.count("#!/bin/bash") == 1
    assert desk.names() == []


def test_sweep_without_a_shared_folder_needs_a_store(desk: Desk) -> None:
    (desk.folder / "config" / "headway").mkdir(parents=True)
    (desk.folder / "config" / "headway" / "engines.toml").write_text("[local]\nshared = false\n")
    status, out, err = desk.type("sweep", "r.toml", *GRID, "--detach")
    assert (status, out) == (2, "")
    assert "s-lr_1e-2 needs an object store: no folder is shared" in " ".join(err.split())
    assert "[checkpoint.store]" in err
    assert desk.names() == []
