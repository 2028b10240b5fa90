"""Runs on two nodes of a real Slurm, preempted or hit by a lost node, match an uninterrupted run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runs import ONE_CORE, EngineRun, demo, preempt_and_lose_machine, train_uninterrupted
from slurm_cluster import SlurmCluster, slurm_cluster

from conftest import Lived

SETTINGS = {"train__fewest_workers": 2, "train__restarts": 3}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """A Slurm, and a user's settings for it."""
    file = tmp_path / "engines.toml"
    file.write_text(f'[slurm]\ngrace_s = 30\nsetup = ["{ONE_CORE}"]\nenvironment = {{ HEADWAY_HOST = "127.0.0.1" }}\n')
    monkeypatch.setenv("HEADWAY_ENGINES", str(file))
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm") as started:
        yield started


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Lived:
    return train_uninterrupted(demo(dataset, **SETTINGS), tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["leader", "other"])
def test_run_survives_preemption_and_a_lost_node(
    tmp_path: Path, cluster: SlurmCluster, dataset: Path, uninterrupted: Lived, which: int
) -> None:
    """Slurm kills what is left of the job, and starts it on other nodes."""
    run = EngineRun.submitted(demo(dataset, **SETTINGS), tmp_path / "runs", "slurm")
    preempt_and_lose_machine(run, cluster.lose_node, which)
    result = Lived(run.folder, None)
    assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), run.diagnosis()


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["leader", "other"])
def test_run_with_a_spare_continues_after_a_lost_node(
    tmp_path: Path, cluster: SlurmCluster, dataset: Path, uninterrupted: Lived, which: int
) -> None:
    """The job continues under the same start, and counts as finished although one of its commands never ended."""
    run = EngineRun.submitted(demo(dataset, **SETTINGS), tmp_path / "runs", "slurm", spares=1)
    run.reaches(30, starts=1)
    assert len(run.status.machines) == 3
    lost = run.status.machines[which]
    cluster.lose_node(lost)
    status = run.ended()
    assert (status.state, status.starts, status.exit_status) == ("finished", 1, 0), run.diagnosis()
    assert f"{lost} was lost" in status.reason
    assert "resuming from step" in run.line_with("was lost")
    result = Lived(run.folder, None)
    assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), run.diagnosis()
    assert not run.processes()
