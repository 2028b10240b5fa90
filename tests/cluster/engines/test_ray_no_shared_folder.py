"""A run on two nodes of a real Ray cluster without a shared folder loses one: it resumes from its store, on machines
that never saw it, and matches an uninterrupted run."""

from pathlib import Path

import pytest
from engine_runs import ONE_CORE, EngineRun, demo, train_uninterrupted, wait_for
from ray_cluster import HEAD, ray_cluster

from conftest import Lived
from headway.agent.remote.store_mirror import fetch_run
from headway.state.object_store import open_store
from headway.state.store_checkpoint import list_remote
from headway.track import read_run

KEY = "a key of the tests, and long enough"
OWN = 'export TMPDIR={}/$(echo "$HEADWAY_MACHINES" | cut -d, -f$((HEADWAY_MACHINE + 1))); mkdir -p "$TMPDIR"'


@pytest.mark.slow
def test_run_resumes_from_its_store_after_a_lost_node(tmp_path: Path, dataset: Path, monkeypatch) -> None:
    monkeypatch.setenv("HEADWAY_KEY", KEY)
    monkeypatch.delenv("HEADWAY_RUNS", raising=False)
    monkeypatch.setenv("HEADWAY_ENGINES", str(tmp_path / "engines.toml"))
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store"
    stored = {"checkpoint__store__url": url, "checkpoint__store__every_steps": 40}
    recipe = demo(dataset, train__fewest_workers=2, train__steps=240, **stored)
    uninterrupted = train_uninterrupted(recipe, tmp_path / "alone")
    with ray_cluster() as cluster:
        lines = [OWN.format(tmp_path / "machines"), ONE_CORE]
        settings = f'[ray]\nshared = false\naddress = "{cluster.address}"\ngrace_s = 30\nsetup = {lines!r}\n'
        (tmp_path / "engines.toml").write_text(f'{settings}environment = {{ HEADWAY_HOST = "127.0.0.1" }}\n')
        run = EngineRun.submitted(recipe, tmp_path / "runs", "ray")
        store = open_store(f"{url}/demo")
        wait_for(lambda: any(entry.step >= 80 for entry in list_remote(store)), "step 80 in the store", run.diagnosis)
        first, second = run.status.machines
        lost = second if first == HEAD else first
        cluster.send(f"remove {lost}")
        status = run.ended()
        diagnosis = run.diagnosis()
    assert (status.state, status.exit_status) == ("finished", 0), diagnosis
    assert lost not in status.machines
    assert KEY not in diagnosis
    assert list((run.folder.path / "events").iterdir()) == []
    result = Lived(fetch_run(f"{url}/demo", tmp_path / "fetched"), None)
    assert (result.chain, result.digest) == (uninterrupted.chain, uninterrupted.digest), diagnosis
    assert len({record.header.attempt for record in read_run(result.run)}) >= 2
