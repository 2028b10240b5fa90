"""Runs on two nodes of a real Ray cluster, preempted or hit by a lost node, match an uninterrupted run."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runs import ONE_CORE, EngineRun, demo, preempt_and_lose_machine, train_uninterrupted
from ray_cluster import HEAD, RayCluster, ray_cluster

from conftest import Lived

SETTINGS = {"train__fewest_workers": 2, "train__restarts": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as started:
        yield started


@pytest.fixture
def runs(tmp_path: Path, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for runs, and a user's settings for this cluster."""
    file = tmp_path / "engines.toml"
    settings = f'address = "{cluster.address}"\ngrace_s = 30\nsetup = ["{ONE_CORE}"]\n'
    file.write_text(f'[ray]\n{settings}environment = {{ HEADWAY_HOST = "127.0.0.1" }}\n')
    monkeypatch.setenv("HEADWAY_ENGINES", str(file))
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Lived:
    return train_uninterrupted(demo(dataset, **SETTINGS), tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.slow
def test_run_survives_preemption_and_a_lost_node(
    runs: Path, cluster: RayCluster, dataset: Path, uninterrupted: Lived
) -> None:
    """Ray finds another node for the bundle; the other machines save, and all are restarted. Only the user may read."""
    run = EngineRun.submitted(demo(dataset, **SETTINGS), runs, "ray")
    run.reaches(1, starts=1)
    which = 1 if run.status.machines[0] == HEAD else 0
    preempt_and_lose_machine(run, lambda name: cluster.send(f"remove {name}"), which)
    result = Lived(run.folder, None)
    assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), run.diagnosis()
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in (runs, *runs.rglob("*"))}
    assert run.folder.path / "recipe.json" in modes
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


@pytest.mark.slow
def test_run_with_a_spare_continues_after_a_lost_node(
    runs: Path, cluster: RayCluster, dataset: Path, uninterrupted: Lived
) -> None:
    """The others continue under the same start, and the job counts as finished."""
    cluster.send("add spare")
    run = EngineRun.submitted(demo(dataset, **SETTINGS), runs, "ray", spares=1)
    run.reaches(30, starts=1)
    lost = [name for name in run.status.machines[:2] if name != HEAD][-1]
    cluster.send(f"remove {lost}")
    status = run.ended()
    assert (status.state, status.starts, status.exit_status) == ("finished", 1, 0), run.diagnosis()
    assert f"{lost} was lost" in status.reason
    assert "resuming from step" in run.line_with("was lost") or "is the new leader" in run.line_with("was lost")
    result = Lived(run.folder, None)
    assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), run.diagnosis()
    assert not run.processes()
