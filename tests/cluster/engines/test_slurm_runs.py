"""A run on a real Slurm that saves and is restarted, compared with an uninterrupted one."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster

from conftest import Lab
from eventually import eventually
from headway.cluster.engines import OVER
from headway.cluster.engines.slurm.engine import SlurmEngine
from headway.cluster.submit.runs import submit_run, submitted_runs
from headway.hardware import parse_on
from headway.recipe import Recipe
from headway.track import RunFolder, read_run

ONE_CORE = '[slurm]\nsetup = ["taskset -pc 0 $$"]\n'
"""The thread count of other tests' workers: only then do sums have the same bits."""


def events(run: RunFolder, kind: str, process: str = "rank-0") -> list[dict[str, object]]:
    records = [record for record in read_run(run) if record.header.process == process]
    return [event for record in records for event in record.events if event["kind"] == kind]


@pytest.mark.slow
def test_restarted_run_on_slurm_matches_an_uninterrupted_run(
    tmp_path: Path, recipe: Callable[..., Recipe], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = recipe({"train.steps": 60, "checkpoint.every_steps": 30, "checkpoint.memory_every_steps": 10})
    (tmp_path / "engines.toml").write_text(ONE_CORE)
    monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "engines.toml"))
    root, run = tmp_path / "submitted", RunFolder(tmp_path / "submitted" / "requeued")
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm"):
        job = submit_run(small, root, parse_on("cpux1"), "slurm", "requeued").job
        eventually(lambda: len(events(run, "step")) > 20, poll_s=0.1)
        SlurmEngine(root / ".slurm").signal(job, signal.SIGUSR1)
        uninterrupted = lab.train(small)
        eventually(lambda: submitted_runs(root)[0].status.remedy == "requeue", poll_s=0.1)
        assert SlurmEngine(root / ".slurm").release(job)
        eventually(lambda: submitted_runs(root)[0].status.state in OVER, poll_s=0.1)
        status = submitted_runs(root)[0].status
    assert (status.state, status.starts) == ("finished", 2)
    assert "state saved" in next((run.path / "jobs").glob("*/0001-0.log")).read_text()
    assert len(events(run, "attempt", "agent")) == 2
    assert events(run, "step")[-1]["chain"] == uninterrupted.chain
    assert events(run, "checkpoint", "agent")[-1]["digest"] == uninterrupted.digest
