"""A sweep on a real Slurm is one array, its code staged once on each machine; runs of it are known one by one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster

import headway
from headway.recipe import to_toml
from headway.track import RunFolder, summarize


def staged_venv(folder: Path) -> Path:
    """A virtual environment of its own: headway copied into it, what that needs led to where it is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (real,) = Path(sys.prefix).glob("lib/python*/site-packages")
    for entry in real.iterdir():
        if entry.name not in ("headway", "__pycache__") and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    shutil.copytree(Path(headway.__file__).parent, site / "headway", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "bin" / "python"


@pytest.mark.slow
def test_a_sweep_is_one_array_of_slurms(tmp_path: Path, recipe) -> None:
    (tmp_path / "r.toml").write_text(to_toml(recipe({"name": "tiny", "train.steps": 3})))
    (tmp_path / "engines.toml").write_text(f'[slurm]\ncode = "staged"\nstage_to = "{tmp_path}/node"\n')
    for name in ("slurm", "node"):
        (tmp_path / name).mkdir()
    python = str(staged_venv(tmp_path / "venv"))
    words = ["sweep", "r.toml", "--grid", "seed=1,2,3", "--name", "s", "--engine", "slurm", "--on", "cpux1"]

    def type_(*words: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "HEADWAY_ENGINES": str(tmp_path / "engines.toml")}
        environment.pop("PYTHONPATH", None)
        command = [python, "-m", "headway.cli.main", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    with slurm_cluster(tmp_path / "slurm"):
        shown = type_(*words, "--at-once", "2", "--dry-run").stdout
        begun = type_(*words, "--at-once", "2", "--detach", "--json")
        assert begun.returncode == 0, begun.stderr
        job = json.loads(begun.stdout)["job"]
        (tmp_path / "runs" / "s-seed_3" / "recipe.json").write_text("{}")  # the third waits for its turn
        done = type_(*words, "--at-once", "2", "--json")
        jobs = json.loads(type_("jobs", "--json").stdout)
        said = type_("logs", "s-seed_2").stdout
    assert "#SBATCH --array=0-2%2" in shown
    assert done.returncode == 1
    states = {point["run"]: point["state"] for point in json.loads(done.stdout)["points"]}
    assert states == {"s-seed_1": "finished", "s-seed_2": "finished", "s-seed_3": "failed"}
    assert {one["job"] for one in jobs} == {f"{job}_{index}" for index in range(3)}
    assert len(list((tmp_path / "runs" / ".sweeps" / "s" / "jobs").glob("slurm-*"))) == 1
    assert "s-seed_2: finished at step 3 of 3" in said
    assert summarize(RunFolder(tmp_path / "runs" / "s-seed_1")).attempts == 1
    assert len(list((tmp_path / "node").glob("headway-*/*/.whole"))) == 1
