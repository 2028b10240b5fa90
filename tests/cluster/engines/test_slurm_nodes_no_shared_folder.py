"""A run on two nodes of a real Slurm without a shared folder: each agent has its own root, and the store names the
leader."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import slurm_cluster

from conftest import Lab, Lived
from eventually import eventually
from headway.agent.remote.store_mirror import fetch_run
from headway.cluster.engines import OVER
from headway.cluster.engines.slurm.batch_script import slurm_task
from headway.cluster.submit import store_runs
from headway.cluster.submit.runs import provisional_run, request_for, submit_run, submitted_runs
from headway.errors import RunError, StateError, UsageError
from headway.hardware import parse_on
from headway.recipe import Recipe
from headway.track import RunFolder, list_runs

KEY = "a key of the tests, and long enough"


def own_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines with a temporary folder each, as many threads as other tests' workers, and no view of the runs."""
    lines = [
        f'export TMPDIR={tmp_path}/machine-$HEADWAY_MACHINE; mkdir -p "$TMPDIR"; cd "$TMPDIR"',
        "taskset -pc $((HEADWAY_MACHINE % 2)) $$ >/dev/null",
    ]
    settings = f"[slurm]\nshared = false\nsetup = {lines!r}\n[local]\nshared = false\n"
    (tmp_path / "engines.toml").write_text(settings)
    monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "engines.toml"))
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)


def with_store(recipe: Callable[..., Recipe], tmp_path: Path, **more: object) -> Recipe:
    (tmp_path / "store").mkdir()
    store = {"url": f"file://{tmp_path}/store", "every_steps": 20}
    return recipe({"train.steps": 60, "checkpoint.every_steps": 20, "checkpoint.store": store} | more)


def left_in_store(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_request_names_the_store_and_no_folder(recipe, tmp_path: Path, monkeypatch) -> None:
    own_roots(tmp_path, monkeypatch)
    monkeypatch.setenv("HEADWAY_KEY", KEY)
    cluster = parse_on("cpux1x2")
    with provisional_run(with_store(recipe, tmp_path), tmp_path / "runs", cluster, "remote", keep=False) as attempt:
        request = request_for(attempt, cluster, "slurm", dry=True)
    text = slurm_task(request)
    assert f"agent --run file://{tmp_path}/store/remote --nodes 2 --workers 2" in text
    assert "--runs" not in text
    assert request.secrets == ("HEADWAY_KEY",)
    assert KEY not in text
    assert list_runs(tmp_path / "runs") == []
    assert left_in_store(tmp_path) == []


def test_submission_without_a_store_is_refused(recipe, tmp_path: Path, monkeypatch) -> None:
    for shared in (True, False):  # set in engines.toml, and on the command line
        if shared:
            own_roots(tmp_path, monkeypatch)
        else:
            monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "empty.toml"))
            (tmp_path / "empty.toml").write_text("")
        with pytest.raises(RunError, match="run remote needs an object store") as refused:
            submit_run(recipe({}), tmp_path / "runs", parse_on("cpux1x2"), "local", "remote", shared=shared)
        assert "[checkpoint.store]" in str(refused.value.hint)
        assert list_runs(tmp_path / "runs") == []


def test_submission_without_a_key_is_refused(recipe, tmp_path: Path, monkeypatch) -> None:
    own_roots(tmp_path, monkeypatch)
    monkeypatch.delenv("HEADWAY_KEY", raising=False)
    with pytest.raises(UsageError, match="2 machines without a shared folder need a key"):
        submit_run(with_store(recipe, tmp_path), tmp_path / "runs", parse_on("cpux1x2"), "slurm", "remote")
    assert list_runs(tmp_path / "runs") == []
    assert left_in_store(tmp_path) == []


def test_unreachable_store_is_reported_before_anything_is_created(recipe, tmp_path: Path, monkeypatch) -> None:
    own_roots(tmp_path, monkeypatch)
    monkeypatch.setenv("HEADWAY_KEY", KEY)
    with socket.socket() as silent:  # bound, but not listening
        silent.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name, value in {"ENDPOINT": endpoint, "ALLOW_HTTP": "true"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.setenv(f"AWS_{name}", "of-the-tests")
        monkeypatch.setattr(store_runs, "SOON_S", 0.2)
        monkeypatch.setattr("headway.cluster.submit.runs.provisional_run", None)  # not reached
        small = recipe({"checkpoint.store": {"url": "s3://nowhere/runs", "every_steps": 20}})
        with pytest.raises(StateError, match="could not be read: cannot connect") as raised:
            submit_run(small, tmp_path / "runs", parse_on("cpux1x2"), "local", "remote")
    assert "can be reached" in str(raised.value.hint)
    assert list_runs(tmp_path / "runs") == []


@pytest.mark.slow
def test_run_on_nodes_without_a_shared_folder(recipe, tmp_path: Path, lab: Lab, monkeypatch) -> None:
    own_roots(tmp_path, monkeypatch)
    monkeypatch.setenv("HEADWAY_KEY", KEY)
    small, root = with_store(recipe, tmp_path), tmp_path / "submitted"
    uninterrupted = lab.train(small, workers=2)
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm"):
        submit_run(small, root, parse_on("cpux1x2"), "slurm", "apart")
        eventually(lambda: submitted_runs(root)[0].status.state in OVER, lambda: submitted_runs(root), poll_s=0.2)
        status = submitted_runs(root)[0].status
    (job,) = (root / "apart" / "jobs").iterdir()
    folder = Path(f"/tmp/headway-{os.getuid()}") / job.name
    logs = "\n".join(path.read_text() for path in folder.rglob("*.log"))
    shutil.rmtree(folder)
    assert status.state == "finished", logs
    assert not list(job.rglob("*.log"))
    assert KEY not in logs
    assert list((root / "apart" / "events").iterdir()) == []  # nothing was written there
    result = Lived(fetch_run(f"file://{tmp_path}/store/apart", root), None)
    assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), logs
    (led,) = tmp_path.glob("machine-*/headway-*/runs/apart")
    assert RunFolder(led).recipe_file.exists()
