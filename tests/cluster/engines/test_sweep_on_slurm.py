"""A sweep on a real Slurm is one array, with code staged once per machine, and each run is known by itself."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster

from headway.cluster.submit.grid import parse_grid
from headway.cluster.submit.sweep_request import request_sweep
from headway.cluster.submit.sweep_results import wait_for_sweep
from headway.cluster.submit.sweep_start import start_sweep
from headway.cluster.submit.sweep_sync import SweepSync
from headway.hardware import parse_on
from headway.recipe import to_toml
from headway.track import RunFolder, summarize
from small_venv import small_venv


@pytest.mark.slow
def test_sweep_is_one_slurm_array(tmp_path: Path, recipe) -> None:
    (tmp_path / "r.toml").write_text(to_toml(recipe({"name": "tiny", "train.steps": 3})))
    (tmp_path / "engines.toml").write_text(f'[slurm]\ncode = "staged"\nstage_to = "{tmp_path}/node"\n')
    for name in ("slurm", "node"):
        (tmp_path / name).mkdir()
    python = str(small_venv(tmp_path / "venv"))
    sweep_command = ["sweep", "r.toml", "--grid", "seed=1,2,3", "--name", "s", "--engine", "slurm", "--on", "cpux1"]

    def run_cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "HEADWAY_ENGINES": str(tmp_path / "engines.toml")}
        environment.pop("PYTHONPATH", None)
        command = [python, "-m", "headway.cli.main", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    with slurm_cluster(tmp_path / "slurm"):
        description = run_cli(*sweep_command, "--at-once", "2", "--dry-run").stdout
        started = run_cli(*sweep_command, "--at-once", "2", "--detach", "--json")
        assert started.returncode == 0, started.stderr
        array = json.loads(started.stdout)["job"]
        (tmp_path / "runs" / "s-seed_3" / "recipe.json").write_text("{}")  # the third still waits
        done = run_cli(*sweep_command, "--at-once", "2", "--json")
        jobs = json.loads(run_cli("jobs", "--json").stdout)
        logs = run_cli("logs", "s-seed_2").stdout
    assert "#SBATCH --array=0-2%2" in description
    assert done.returncode == 1
    states = {point["run"]: point["state"] for point in json.loads(done.stdout)["points"]}
    assert states == {"s-seed_1": "finished", "s-seed_2": "finished", "s-seed_3": "failed"}
    assert {job["job"] for job in jobs} == {f"{array}_{index}" for index in range(3)}
    assert len(list((tmp_path / "runs" / ".sweeps" / "s" / "jobs").glob("slurm-*"))) == 1
    assert "s-seed_2: finished at step 3 of 3" in logs
    assert summarize(RunFolder(tmp_path / "runs" / "s-seed_1")).attempts == 1
    assert len(list((tmp_path / "node").glob("headway-*/*/.whole"))) == 1


@pytest.mark.slow
def test_sweep_through_a_store_needs_no_shared_folder(tmp_path: Path, recipe, monkeypatch) -> None:
    """Each node has its own root, and no script names the folder of runs; the table is complete all the same."""
    for name in ("slurm", "store"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)
    monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "engines.toml"))
    own = [f'export TMPDIR={tmp_path}/$HEADWAY_MACHINES; mkdir -p "$TMPDIR"']
    (tmp_path / "engines.toml").write_text(f"[slurm]\nshared = false\nsetup = {json.dumps(own)}\n")
    store = {"url": f"file://{tmp_path}/store", "every_steps": 10}
    (tmp_path / "r.toml").write_text(to_toml(recipe({"name": "tiny", "checkpoint.store": store})))
    with slurm_cluster(tmp_path / "slurm"):
        axes = parse_grid(["seed=1,2"], [])
        wanted = request_sweep(tmp_path / "r.toml", [], axes, engine="slurm", on=parse_on("cpux1"), name="s")
        sweep, _ = start_sweep(wanted, tmp_path / "submitted")
        (job,) = (tmp_path / "submitted").rglob("jobs/slurm-*")
        script = (job / "job.sh").read_text()
        rows = wait_for_sweep(tmp_path / "submitted", sweep, SweepSync(tmp_path / "submitted", sweep), lambda _: None)
    shutil.rmtree(Path(f"/tmp/headway-{os.getuid()}") / job.name)
    assert {row.state for row in rows} == {"finished"}, rows
    assert str(tmp_path / "submitted") not in script
    assert len({row.loss for row in rows}) == 2
    assert sorted(path.name for path in tmp_path.glob("n*/headway-*/runs/*")) == ["s-seed_1", "s-seed_2"]
